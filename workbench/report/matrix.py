"""Every lane of a session against every other: where do two backends first choose another token, and how often?"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from workbench.metrics.pairs import Side, pair_summary
from workbench.session.text import one_line
from workbench.store.state import LaneState, SessionState


def matrix(state: SessionState) -> dict[str, Any]:
    """The object under `matrix` of `compare --matrix --json`: `lanes` by name, the reference first, and `pairs`."""
    lanes = [lane for lane in state.lanes if lane.record.kind in ("reference", "lane") and len(lane.rows)]
    generated = state.stream["generated"]
    pairs: list[dict[str, Any]] = []
    for (i, a), (j, b) in combinations(enumerate(lanes), 2):
        pairs.append({"a": i, "b": j, **pair_summary(_side(a), _side(b), generated)})
    return {"lanes": [lane.record.name for lane in lanes], "pairs": pairs}


def matrix_text(facts: dict[str, Any]) -> str:
    """Above the diagonal the share of flips, below it the position where the two best tokens first differ."""
    names: list[str] = facts["lanes"]
    cells = [["·" if i == j else "" for j in range(len(names))] for i in range(len(names))]
    for pair in facts["pairs"]:
        rate, at = pair["flip_rate"], pair["first_difference"]
        cells[pair["a"]][pair["b"]] = "–" if rate is None else f"{100 * rate:.1f} %"
        cells[pair["b"]][pair["a"]] = "never" if at is None else f"{at:,}"
    labels = [f"{number} {one_line(name)}" for number, name in enumerate(names, 1)]
    width = max((len(label) for label in labels), default=0)
    column = max((len(cell) for row in cells for cell in row), default=0) + 2
    lines = [
        "between lanes: flips of the assistant's tokens (above), the first position whose best token differs (below)",
        " " * width + "".join(f"{number:>{column}}" for number in range(1, len(names) + 1)),
    ]
    for label, row in zip(labels, cells, strict=True):
        lines.append(f"{label:<{width}}" + "".join(f"{cell:>{column}}" for cell in row))
    return "\n".join(lines) + "\n"


def _side(lane: LaneState) -> Side:
    rows = lane.rows
    return Side(rows.first, rows.column("top_ids")[:, 0], rows.column("logprob"), rows.column("valid") == 1)
