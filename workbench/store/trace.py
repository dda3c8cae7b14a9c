"""The reference's trace: read by chunk, fed to lanes by chunk, and what a lane in memory keeps of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from workbench.errors import SavedSessionError
from workbench.protocol.columns import KINDS, join
from workbench.protocol.wire import Arrays
from workbench.store.columns import DamagedChunkError
from workbench.store.saved import SavedSession
from workbench.store.state import Columns


def read_trace(saved: SavedSession, first: int, stop: int) -> Arrays:
    """Trace rows from position `first` on, at most to `stop`: as many as are there without a gap, which may be none."""
    lane = _reference(saved)
    while lane is not None:
        span = next((begin + rows for begin, rows in saved.spans(lane, "trace") if begin <= first < begin + rows), None)
        if span is None:
            break
        try:
            return saved.read(lane, "trace", first, min(stop, span))
        except DamagedChunkError:
            # It is now named in `damage` and gone from the spans.
            continue
    return join("trace", [])


def feed(saved: SavedSession, lane_id: int, first: int, stop: int | None = None) -> Iterator[tuple[int, Arrays]]:
    """(first position, trace rows) from position `first` to `stop`, or to the trace's end, a chunk at a time.

    Raises SavedSessionError where a position is missing: a lane cannot be measured against a trace with holes.
    """
    end = max((begin + rows for begin, rows in saved.spans(lane_id, "trace")), default=first) if stop is None else stop
    position = first
    for begin, arrays in saved.pieces(lane_id, "trace", first, end):
        if begin != position:
            break
        position += len(arrays["k"])
        yield begin, arrays
    if position < end:
        raise SavedSessionError(
            f"the reference's trace has no row at {position}", where=str(saved.path), next="Record the reference anew."
        )


def rows_of_trace(trace: Arrays) -> Arrays:
    """The columns of `protocol.columns.ROWS` that trace rows give: the reference compared with itself."""
    counts = trace["k"].astype(np.int64)
    rank = np.arange(KINDS["rows"]["top_ids"].width)
    there = rank < counts[:, None]
    places = ((np.cumsum(counts) - counts)[:, None] + rank)[there]
    top_ids = np.full(there.shape, -1, "<i4")
    top_logprobs = np.full(there.shape, -np.inf, "<f4")
    top_ids[there] = trace["head_ids"][places]
    top_logprobs[there] = trace["head_logprobs"][places]
    zeros = np.zeros(len(counts), "<f4")
    return {
        "kl": zeros,
        "kl_low": zeros,
        "tv": zeros,
        "tv_high": zeros,
        "rank": np.ones(len(counts), "<i4"),
        "logprob": trace["logprob"],
        "top_ids": top_ids,
        "top_logprobs": top_logprobs,
        "ties": trace["ties"],
        "valid": trace["valid"],
        "seconds": zeros,
    }


def margins(rows: Columns) -> NDArray[np.float32]:
    """ln p of the most probable token less that of the second, of each row; NaN where the row is absent."""
    best = rows.column("top_logprobs")
    return best[:, 0] - best[:, 1]


def _reference(saved: SavedSession) -> int | None:
    return next((lane.id for lane in saved.lanes() if lane.kind == "reference"), None)
