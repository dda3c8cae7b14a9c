"""Per-position rows as CSV or JSON lines, one position at a time; absent and non-finite values are empty or null.

Token text comes as a JSON string, quotes included: no control character, and no spreadsheet takes it for a formula.
`estimator` says what `kl` and `tv` are: of a `bounded` lane the lower bounds, of the reference nothing.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np

from workbench.session.regions import ROLE_NAMES
from workbench.store.state import LaneState, SessionState

BLOCK_ROWS = 4096
MEASURES = ("kl", "kl_low", "tv", "tv_high", "rank", "logprob", "ties", "valid", "seconds")
FIELDS = (
    "lane", "name", "position", "id", "token", "role", "generated", "turn", *MEASURES, "top_id", "top_logprob",
    "reference_logprob", "reference_entropy", "estimator",
)  # fmt: skip


def write_csv(state: SessionState, out: TextIO, lane: str | None = None) -> int:
    """Write a header and the rows of every lane, or of the one of that name or id; return how many rows."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    count = 0
    for record in export_rows(state, lane):
        token = json.dumps(record["token"])
        writer.writerow(["" if value is None else value for value in {**record, "token": token}.values()])
        count += 1
    return count


def write_jsonl(state: SessionState, out: TextIO, lane: str | None = None) -> int:
    """Write one JSON object a line, as `write_csv` does rows; return how many."""
    count = 0
    for record in export_rows(state, lane):
        out.write(json.dumps(record) + "\n")
        count += 1
    return count


def export_rows(state: SessionState, lane: str | None = None) -> Iterator[dict[str, Any]]:
    """The fields of every measured position, lane by lane. Nothing where no lane has that name or id."""
    for item in state.lanes:
        if lane is None or lane in (item.record.name, str(item.record.id)):
            for first in range(item.rows.first, min(item.rows.stop, len(state.stream["ids"])), BLOCK_ROWS):
                yield from _block(state, item, first)


def _block(state: SessionState, lane: LaneState, first: int) -> Iterator[dict[str, Any]]:
    stop = min(first + BLOCK_ROWS, lane.rows.stop, len(state.stream["ids"]))
    here = slice(first - lane.rows.first, stop - lane.rows.first)
    measures: list[list[Any]] = [lane.rows.column(name)[here].tolist() for name in MEASURES]
    top_ids: list[Any] = lane.rows.column("top_ids")[here, 0].tolist()
    top_logprobs: list[Any] = lane.rows.column("top_logprobs")[here, 0].tolist()
    reference = _reference(state, first, stop)
    stream: list[list[Any]] = [state.stream[name][first:stop].tolist() for name in ("ids", "role", "generated", "turn")]
    for offset, (token, role, generated, turn) in enumerate(zip(*stream, strict=True)):
        values: list[Any] = [
            lane.record.id,
            lane.record.name,
            first + offset,
            token,
            state.token_bytes(token).decode("utf-8", "backslashreplace"),
            ROLE_NAMES[role] if role < len(ROLE_NAMES) else str(role),
            generated,
            turn,
            *(measure[offset] for measure in measures),
            top_ids[offset],
            top_logprobs[offset],
            *(column[offset] for column in reference),
            None if lane.record.kind == "reference" else lane.record.estimator,
        ]
        yield {name: _plain(value) for name, value in zip(FIELDS, values, strict=True)}


def _reference(state: SessionState, first: int, stop: int) -> tuple[list[Any], list[Any]]:
    """ln p of the stream's token and the entropy of the reference at these positions; NaN where it has none."""
    logprob, entropy = np.full(stop - first, np.nan), np.full(stop - first, np.nan)
    if (lane := state.reference) is not None:
        end = min(stop, lane.rows.stop)
        if end > first:
            logprob[: end - first] = lane.rows.column("logprob")[first - 1 : end - 1]
            if lane.entropy is not None:
                entropy[: end - first] = lane.entropy[first - 1 : end - 1]
    return logprob.tolist(), entropy.tolist()


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
