"""A saved session as plain text: every assistant turn with the tokens where lanes would have gone another way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.session.regions import Role
from workbench.session.text import harmless, one_line, pieces, plain
from workbench.store.effective import bounded, without_effect
from workbench.store.state import LaneState, SessionState

CONTEXT_ROLES = (Role.SYSTEM, Role.USER, Role.TOOL_RESULT)
CONTEXT_LINES = 3


def transcript(state: SessionState) -> Iterator[str]:
    """Lines of text: context shortened to its first lines, assistant turns whole, then their flips by lane."""
    stream = state.stream
    ids, message, generated = stream["ids"], stream["message"], stream["generated"]
    lanes = [lane for lane in state.lanes if lane.record.kind == "lane" and len(lane.rows)]
    yield one_line(f"{state.title} · {len(ids):,} tokens · {state.path}")
    yield from _marks(state)
    if not len(ids):
        return
    starts = np.flatnonzero(np.diff(message, prepend=message[0] - 1))
    stops = np.append(starts[1:], len(ids))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        text = harmless(plain(ids[start:stop].tolist(), state.token_bytes))
        lines = text.split("\n")
        if not generated[start:stop].any():
            shown = lines[:CONTEXT_LINES]
            if len(lines) > CONTEXT_LINES:
                shown.append(f"… {len(lines) - CONTEXT_LINES} more lines")
            yield from (f"  {line}" for line in shown)
            continue
        yield f"── token {start:,} · turn {int(stream['turn'][start]) + 1}"
        yield from lines
        for lane in lanes:
            yield from _flips(state, lane, start, stop)


def _marks(state: SessionState) -> Iterator[str]:
    """What keeps a lane's figures from being read as they stand, a line each."""
    records = [lane.record for lane in state.shown]
    for lane in state.shown:
        record = lane.record
        said: list[str] = []
        if record.status != "done":
            said.append(f"{record.status}: {record.reason.partition(chr(10))[0]}".removesuffix(": "))
        if bounded(record):
            said.append("bounded: KL is at least what stands here")
        said += filter(None, [without_effect(record, records)])
        yield from (one_line(f"! {record.name}: {text}") for text in said)


def _flips(state: SessionState, lane: LaneState, start: int, stop: int) -> Iterator[str]:
    reference = state.reference
    if reference is None:
        return
    first = max(start, lane.rows.first) - lane.rows.first
    last = min(stop, lane.rows.stop, reference.rows.stop) - lane.rows.first
    rank = lane.rows.column("rank")[first:last]
    written = state.stream["generated"][first + lane.rows.first : last + lane.rows.first]
    for offset in np.flatnonzero((rank > 1) & (written == 1)).tolist():
        row = first + offset
        theirs = _quoted(state, int(reference.rows.column("top_ids")[row, 0]))
        mine = _quoted(state, int(lane.rows.column("top_ids")[row, 0]))
        kl = float(lane.rows.column("kl")[row])
        least = "≥" if bounded(lane.record) else ""
        name = one_line(lane.record.name)
        yield f"   ◆ {name} at {row + lane.rows.first:,}: {theirs} → {mine}  KL {least}{kl:.3f}"


def _quoted(state: SessionState, identity: int) -> str:
    return f"'{one_line(''.join(pieces([identity], state.token_bytes)))}'"
