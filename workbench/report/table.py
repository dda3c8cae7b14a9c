"""The comparison as text, CSV and Markdown; every table says its conditions above its numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any, cast

from rich.cells import cell_len

from workbench.report.conditions import bounded, notes, number, ran_table, reference_lines, status
from workbench.session.text import one_line

Comparison = dict[str, Any]
Pad = Callable[[str, int], str]


def text(comparison: Comparison) -> str:
    """The table for a terminal, its conditions first."""
    lines = [*reference_lines(comparison), "", *_aligned(*_cells(comparison)), ""]
    if (ran := ran_table(comparison)) is not None:
        lines += [*_aligned(*ran, pads=_left), ""]
    lines += notes(comparison)
    return "\n".join(lines).rstrip() + "\n"


def markdown(comparison: Comparison) -> str:
    """The table for a forum post or a model card."""
    lines = [f"{line}  " for line in reference_lines(comparison)]
    lines += ["", *_piped(*_cells(comparison), " ---: "), ""]
    if (ran := ran_table(comparison)) is not None:
        lines += [*_piped(*ran, " --- "), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(comparison))]).rstrip() + "\n"


def csv_text(*comparisons: Comparison) -> str:
    """One row a lane with flat column names, those of all files under one header; nested values keep their dotted path.

    The first columns name the file and the session.
    """
    rows = [
        {"file": comparison["file"] or "", "session": comparison["session"]}
        | _flat({key: value for key, value in lane.items() if key != "manifest"})
        for comparison in comparisons
        for lane in comparison["lanes"]
    ]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["file", "session"]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    depths = _depths(comparison)
    accepts = any(_acceptance(lane) for lane in comparison["lanes"])
    headers = ["lane", "KL mean", "± se", "p99", "flips"]
    headers += [f"@{_depth(first)}-{_depth(last)}" for first, last in depths]
    headers += [*(["accept"] if accepts else []), "prefill tok/s", "decode tok/s", "GiB"]
    reference = comparison["reference"]
    rows: list[list[str]] = []
    if reference:
        blank = ["–"] * (len(depths) + accepts)
        mark = _mark(reference)
        name = one_line(f"{reference['name']} (reference)") + mark
        rows.append([name, "–" if mark else "0", "–", "–", "–", *blank, *_speed_cells(reference)])
    rows += [_lane_cells(lane, depths, accepts) for lane in comparison["lanes"]]
    return headers, rows


def _lane_cells(lane: dict[str, Any], depths: list[tuple[int, int | None]], accepts: bool) -> list[str]:
    kl: dict[str, Any] = lane["kl"] or {}
    bins: dict[tuple[int, int | None], dict[str, Any]] = {}
    for row in _bins(lane):
        bins[row["from"], row["to"]] = row
    wrong = " !" if status(lane) == "invalid" else ""
    if bounded(lane):  # each is a lower bound; an error of the bound would read as one of KL
        figures = [_at_least(kl.get("lower_bound_mean")) + wrong, "–", _at_least(kl.get("lower_bound_p99"))]
    else:
        floor = " ~" if lane["at_floor"] and not wrong else ""
        mean = number(kl.get("mean"))
        figures = [mean + (wrong if mean != "–" else "") + floor, number(kl.get("se")), number(kl.get("p99"))]
    cells = [one_line(lane["name"]) + _mark(lane), *figures, _percent(lane["flip_rate"])]
    cells += [_percent((bins.get(depth) or {}).get("flip_rate")) for depth in depths]
    return [*cells, *([_acceptance(lane) or "–"] if accepts else []), *_speed_cells(lane)]


def _at_least(value: float | None) -> str:
    return "–" if value is None else f"≥{number(value)}"


def _acceptance(lane: dict[str, Any]) -> str:
    accepted: dict[str, float | None] = lane.get("acceptance") or {}
    pooled = accepted.get("pooled")
    return "" if pooled is None else f"{pooled:.2f}"


def _mark(lane: dict[str, Any]) -> str:
    """What keeps a lane's figures from being read as they stand, in brackets."""
    marks = [
        "" if status(lane) == "done" else status(lane),
        "severe" if lane.get("severe") else "",
        "no effect" if lane.get("no_effect") else "",
    ]
    said = ", ".join(mark for mark in marks if mark)
    return f" [{said}]" if said else ""


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


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _aligned(headers: list[str], rows: list[list[str]], pads: Pad | None = None) -> list[str]:
    table = [headers, *rows]
    widths = [max(cell_len(row[column]) for row in table) for column in range(len(headers))]
    each: list[Pad] = [_left, *[pads or _right] * (len(headers) - 1)]
    lines = [
        "  ".join(pad(cell, width) for pad, cell, width in zip(each, row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:]]


def _left(cell: str, width: int) -> str:
    return cell + " " * (width - cell_len(cell))


def _right(cell: str, width: int) -> str:
    return " " * (width - cell_len(cell)) + cell


def _piped(headers: list[str], rows: list[list[str]], rule: str) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [_row(headers), "|" + "|".join([" --- ", *[rule] * (len(headers) - 1)]) + "|", *map(_row, escaped)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Bins by the position they begin at, other lists by number from 1; sentences stay together."""
    if isinstance(value, dict):
        flat: dict[str, Any] = {}
        for key, item in cast("dict[str, Any]", value).items():
            flat.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
        return flat
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if all(isinstance(item, str) for item in items):
            return {prefix: "; ".join(items)}
        flat = {}
        for place, item in enumerate(items, 1):
            bin_ = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
            label = f"{prefix}.{bin_.get('from', place)}"
            flat.update(_flat({k: v for k, v in bin_.items() if k not in ("from", "to")} if bin_ else item, label))
        return flat
    return {prefix: "" if value is None else value}
