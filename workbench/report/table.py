"""The comparison as text, CSV and Markdown; every table says its conditions above its numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

from rich.cells import cell_len

from workbench.session.text import one_line

Comparison = dict[str, Any]

CONDITIONS = ("threads", "device", "processor", "version", "torch")
"""Keys of a manifest in which a lane and its reference should be alike."""


def text(comparison: Comparison) -> str:
    """The table for a terminal, its conditions first."""
    lines = [*conditions(comparison), "", *_aligned(*_cells(comparison)), ""]
    lines += notes(comparison)
    return "\n".join(lines).rstrip() + "\n"


def markdown(comparison: Comparison) -> str:
    """The table for a forum post or a model card."""
    headers, rows = _cells(comparison)
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"{line}  " for line in conditions(comparison)]
    lines += ["", _row(headers), "|" + "|".join([" --- ", *[" ---: "] * (len(headers) - 1)]) + "|"]
    lines += [_row(row) for row in escaped]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(comparison))]).rstrip() + "\n"


def csv_text(comparison: Comparison) -> str:
    """One row a lane with flat column names; nested values keep their dotted path."""
    rows = [_flat({key: value for key, value in lane.items() if key != "manifest"}) for lane in comparison["lanes"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def conditions(comparison: Comparison) -> list[str]:
    """What the numbers stand on, in two or three lines."""
    reference = comparison["reference"]
    positions = reference.get("scored_positions")
    stream = f"{positions:,} scored positions" if positions else "no trace yet"
    headline = reference.get("headline_positions")
    if headline:
        stream += f", {headline:,} of them the assistant's (headline)"
    engine = " ".join(str(reference[key]) for key in ("engine", "version") if reference.get(key))
    lines = [
        f"session    {one_line(str(comparison['session']))} · {stream}",
        f"reference  {reference.get('configuration', 'none')} · {reference.get('model_name', '')} · {engine}"
        f" · {reference.get('device', '')} · {reference.get('threads', '?')} threads"
        f" · chunk {reference.get('chunk', '?')}",
        "KL(p‖q) in nats, p the reference · forced · flips: the lane's top token differs from the reference's",
    ]
    return [one_line(line) for line in lines]


def notes(comparison: Comparison) -> list[str]:
    """What a reader has to know beside the numbers."""
    floor = comparison["floor"]
    lines: list[str] = []
    if floor.get("value") is not None:
        named = ", ".join(f"{row['name']} {_number(row.get('kl_mean'))}" for row in floor["rows"])
        lines.append(f"noise floor {_number(floor['value'])} (the reference against itself: {named})")
        if floor.get("failed"):
            lines.append(f"rows of the floor that did not finish: {', '.join(map(one_line, floor['failed']))}")
        lines.append("~ at the floor: within 2x of it, so not told apart from the reference's own noise")
    else:
        lines.append(
            "noise floor not measured: small differences may be the reference's own noise (workbench floor FILE)"
        )
    if comparison["reference"].get("reused_from"):
        lines.append("the reference was recorded in an earlier run; its speed and memory are of then")
    reference = comparison["reference"]
    if reference.get("headline_positions") == 0:
        lines.append("no token of this session is an assistant's: there is no headline, other roles are in --json")
    for lane in [*([reference] if reference else []), *comparison["lanes"]]:
        if lane.get("reason"):
            first = one_line(str(lane["reason"]).splitlines()[0])
            lines.append(f"{one_line(lane['name'])}: {_status(lane)}: {first}")
        if unlike := _unlike(lane, reference):
            lines.append(f"{one_line(lane['name'])}: not under the reference's conditions: {unlike}")
        if lane.get("excluded"):
            lines.append(f"{one_line(lane['name'])}: {lane['excluded']} positions excluded (non-finite)")
    return lines


def _cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    depths = _depths(comparison)
    headers = ["lane", "KL mean", "± se", "p99", "flips"]
    headers += [f"@{_depth(first)}-{_depth(last)}" for first, last in depths]
    headers += ["prefill tok/s", "decode tok/s", "GiB"]
    reference = comparison["reference"]
    rows: list[list[str]] = []
    if reference:
        blank = ["–"] * len(depths)
        name = one_line(f"{reference['name']} (reference)") + _mark(reference)
        rows.append([name, "–" if _mark(reference) else "0", "–", "–", "–", *blank, *_speed_cells(reference)])
    rows += [_lane_cells(lane, depths) for lane in comparison["lanes"]]
    return headers, rows


def _lane_cells(lane: dict[str, Any], depths: list[tuple[int, int | None]]) -> list[str]:
    kl: dict[str, Any] = lane["kl"] or {}
    bins: dict[tuple[int, int | None], dict[str, Any]] = {}
    for row in _bins(lane):
        bins[row["from"], row["to"]] = row
    floor = " ~" if lane["at_floor"] else ""
    cells = [
        one_line(lane["name"]) + _mark(lane),
        _number(kl.get("mean")) + floor,
        _number(kl.get("se")),
        _number(kl.get("p99")),
    ]
    cells.append(_percent(lane["flip_rate"]))
    cells += [_percent((bins.get(depth) or {}).get("flip_rate")) for depth in depths]
    return cells + _speed_cells(lane)


def _status(lane: dict[str, Any]) -> str:
    """The lane's status; one whose numbers must not be used is invalid, also where it ran to its end."""
    return "invalid" if lane.get("valid") is False else str(lane.get("status", "done"))


def _mark(lane: dict[str, Any]) -> str:
    return "" if _status(lane) == "done" else f" [{_status(lane)}]"


def _unlike(lane: dict[str, Any], reference: dict[str, Any]) -> str:
    """The conditions, beyond the axes, in which a lane and the reference were not the same."""
    mine: dict[str, Any] = lane.get("manifest") or {}
    pairs = ((key, mine.get(key), reference.get(key)) for key in CONDITIONS)
    return ", ".join(one_line(f"{key} {a}, not {b}") for key, a, b in pairs if a and b and a != b)


def _speed_cells(lane: dict[str, Any]) -> list[str]:
    memory = lane.get("peak_memory_bytes")
    speeds = [lane.get("prefill_tps"), lane.get("decode_tps")]
    return [*(f"{speed:.1f}" if speed else "–" for speed in speeds), f"{memory / 2**30:.2f}" if memory else "–"]


def _depths(comparison: Comparison) -> list[tuple[int, int | None]]:
    found: set[tuple[int, int | None]] = set()
    for lane in comparison["lanes"]:
        found.update((row["from"], row["to"]) for row in _bins(lane))
    return sorted(found, key=lambda depth: depth[0])


def _bins(lane: dict[str, Any]) -> list[dict[str, Any]]:
    return lane["by_depth"] or []


def _depth(position: int | None) -> str:
    if position is None:
        return ""
    return f"{position // 1000}k" if position else "0"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-4 else f"{value:.5f}" if value < 0.1 else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _aligned(headers: list[str], rows: list[list[str]]) -> list[str]:
    table = [headers, *rows]
    widths = [max(cell_len(row[column]) for row in table) for column in range(len(headers))]
    pads: list[Callable[[str, int], str]] = [_left, *[_right] * (len(headers) - 1)]
    lines = [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:]]


def _left(cell: str, width: int) -> str:
    return cell + " " * (width - cell_len(cell))


def _right(cell: str, width: int) -> str:
    return " " * (width - cell_len(cell)) + cell


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        flat: dict[str, Any] = {}
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            flat.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))  # pyright: ignore[reportUnknownArgumentType]
        return flat
    if isinstance(value, list):
        flat = {}
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            if isinstance(item, dict) and "from" in item:
                label = f"{prefix}.{item['from']}"  # pyright: ignore[reportUnknownMemberType]
                flat.update(_flat({k: v for k, v in item.items() if k not in ("from", "to")}, label))  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
        return flat
    return {prefix: "" if value is None else value}
