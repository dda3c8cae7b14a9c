"""Every lane by depth, as text: errors clustered by turn, flips beyond near-ties, and where it leaves the floor."""

from __future__ import annotations

from typing import Any

from workbench.session.text import one_line

_HEADERS = ("depth", "tokens", "turns", "KL mean", "± se", "flips", "beyond near-ties", "entropy", "margin")


def depth_text(comparison: dict[str, Any]) -> str:
    """One block a lane of a `compare` object; entropy and margin, in nats, are the reference's there."""
    blocks: list[str] = []
    for lane in comparison["lanes"]:
        parts: list[dict[str, Any]] = lane["by_depth"] or []
        if not parts:
            continue
        rows = [_HEADERS, *(_cells(part) for part in parts)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADERS))]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        blocks.append("\n".join([one_line(lane["name"]), *lines, _leaves(lane)]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _cells(part: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{part['from'] // 1024}k–{part['to'] // 1024}k",
        f"{part['n']:,}",
        f"{part['turns']:,}",
        _number(part["kl_mean"]),
        _number(part["kl_se"]),
        "–" if part["flip_rate"] is None else f"{100 * part['flip_rate']:.1f} %",
        "–" if part["flips_beyond_floor"] is None else f"{part['flips_beyond_floor']:,}",
        _number(part["entropy_mean"]),
        _number(part["margin_mean"]),
    )


def _leaves(lane: dict[str, Any]) -> str:
    found: dict[str, Any] | None = lane["leaves_floor"]
    if found is None:
        return "leaves the floor: cannot be said (no floor, only bounds, or fewer than five turns)"
    if found["state"] == "never":
        return f"leaves the floor: never ({found['share']:.0%} of the resamples do)"
    ends = [f"{end:,}" if end is not None else "never" for end in (found["low"], found["high"])]
    where = "from the start" if found["state"] == "from the start" else f"from token {found['depth']:,} on"
    return f"leaves the floor: {where} (95 % interval {ends[0]} to {ends[1]})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
