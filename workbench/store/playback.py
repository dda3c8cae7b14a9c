"""A saved session as state in memory: what screens and reports read, without an engine or a tokenizer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.protocol.columns import KINDS
from workbench.protocol.wire import Arrays
from workbench.store.columns import absent
from workbench.store.lock import held
from workbench.store.saved import SavedSession
from workbench.store.state import Columns, LaneRecord, LaneState, SessionState
from workbench.store.trace import read_trace, rows_of_trace


def load_state(saved: SavedSession) -> SessionState:
    """Everything but the trace's heads and samples, which `state.trace` reads while `saved` is open.

    What is damaged is left out, or stands as absent rows, and is named in `state.damage`.
    """
    tokens = saved.tokens()
    session = saved.session
    return SessionState(
        title=str(session.get("title") or session.get("id") or saved.path.stem),
        session=session,
        facts=saved.facts,
        stream=saved.stream(),
        lanes=[load_lane(saved, record) for record in saved.lanes()],
        token_bytes=lambda token: tokens.get(token, b""),
        trace=lambda first, stop: read_trace(saved, first, stop),
        path=str(saved.path),
        floor=saved.facts.get("floor"),
        damage=saved.damage,
    )


def read_state(saved: SavedSession) -> SessionState:
    """`load_state` for a reader: where nobody is writing the file, what stands as queued or running is interrupted."""
    state = load_state(saved)
    if not held(saved.path):
        for lane in state.lanes:
            if lane.record.status in ("queued", "running"):
                reason = lane.record.reason or "the run ended before the lane did"
                lane.record = replace(lane.record, status="interrupted", reason=reason)
    return state


def load_lane(saved: SavedSession, record: LaneRecord) -> LaneState:
    """One lane with its columns filled from the file."""
    kind = "trace" if record.kind == "reference" else "rows"
    rows = Columns("rows", 1)
    entropy = Columns("trace", 1, ("entropy",)) if kind == "trace" else None
    spans = saved.spans(record.id, kind)
    if spans:
        if starts_late(record):
            rows.first = spans[0][0]
        for columns in (rows, entropy):
            if columns is not None:
                columns.reserve(sum(spans[-1]) - rows.first)
    for first, arrays in saved.pieces(record.id, kind):
        extend(rows, first, rows_of_trace(arrays) if kind == "trace" else arrays)
        if entropy is not None:
            extend(entropy, first, arrays)
    continuation = Columns("continuation", 0)
    for first, arrays in saved.pieces(record.id, "continuation"):
        if first == continuation.stop:
            continuation.append(first, arrays)
    return LaneState(record, rows, continuation, entropy=entropy.column("entropy") if entropy is not None else None)


def starts_late(record: LaneRecord) -> bool:
    """Whether the lane may score from a later position than the first on: its columns then begin there."""
    return record.kind == "floor" or record.path == "decode"


def extend(columns: Columns, first: int, arrays: Arrays) -> None:
    """Append rows; positions between the last one and `first` become absent rows."""
    if gap := first - columns.stop:
        kind = "rows" if "kl" in arrays else "trace"
        filler = (
            absent("rows", gap) if kind == "rows" else {"entropy": np.full(gap, np.nan, KINDS[kind]["entropy"].dtype)}
        )
        columns.append(columns.stop, filler)
    columns.append(first, arrays)
