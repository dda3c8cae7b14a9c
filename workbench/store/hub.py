"""The hub: the only writer of a live session's state and of its file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import SavedSessionError
from workbench.protocol.columns import KINDS, count_rows, cut
from workbench.protocol.events import Progress, Rows, Tokens
from workbench.protocol.wire import Arrays
from workbench.store.playback import extend, load_lane, load_state, starts_late
from workbench.store.saved import SavedSession
from workbench.store.state import Columns, LaneRecord, LaneState, SessionState
from workbench.store.trace import rows_of_trace

ID_COLUMNS = ("ids", "head_ids", "sample_ids", "top_ids")
Span = tuple[int, int]


class Hub:
    """Takes the engines' events from any thread, updates `state` and appends to the file.

    `token_bytes(ids)` gives the bytes of token ids; each id that occurs is asked for once and stored. The stream must
    be set, and a cached reference copied, before. Resuming: what the file holds is loaded, `missing` says what is not
    there, and rows of positions that are there are dropped. Raises SavedSessionError where the file cannot be written.
    """

    def __init__(self, saved: SavedSession, token_bytes: Callable[[Sequence[int]], list[bytes]]) -> None:
        self._saved = saved
        self._ask = token_bytes
        self._lock = threading.RLock()
        self._tokens = saved.tokens()
        self._known = np.zeros(0, bool)
        known = np.fromiter(self._tokens, np.int64, len(self._tokens))
        self._make_known_reach(known)
        self._known[known] = True
        self.state: SessionState = load_state(saved)
        self.state.token_bytes = lambda token: self._tokens.get(token, b"")
        self._entropy = Columns("trace", 1, ("entropy",))
        if (reference := self.state.reference) is not None and reference.entropy is not None:
            self._entropy.append(1, {"entropy": reference.entropy})
        self._holes: dict[int, list[Span]] = {lane.record.id: self._find_holes(lane) for lane in self.state.lanes}
        self._learn({"ids": self.state.stream["ids"]})

    def lane(self, lane_id: int) -> LaneState:
        """The lane with this id. Raises SavedSessionError where there is none."""
        for lane in self.state.lanes:
            if lane.record.id == lane_id:
                return lane
        raise SavedSessionError(f"has no lane {lane_id}", where=str(self._saved.path))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of any token id of the session's tokenizer, whether it occurred yet or not."""
        return self._ask([token])[0]

    def add_lane(self, record: LaneRecord) -> LaneState:
        """Add a lane; its id is given by the file. The reference comes first."""
        with self._lock:
            lane = load_lane(self._saved, self._saved.add_lane(record))
            self._holes[lane.record.id] = []
            first = record.kind == "reference"
            # A new list: a screen may be going through the old one.
            self.state.lanes = [lane, *self.state.lanes] if first else [*self.state.lanes, lane]
            self.state.version += 1
            return lane

    def update(self, lane_id: int, **values: Any) -> LaneRecord:
        """Change fields of a lane's record (status, reason, manifest, stats, ...).

        The state has them also where the file cannot be written: screens and exit codes go by it.
        """
        with self._lock:
            lane = self.lane(lane_id)
            lane.record = record = replace(lane.record, **values)
            self.state.version += 1
            self._saved.update_lane(record)
            return record

    def receive(self, lane_id: int, event: Rows | Tokens | Progress) -> None:
        """Take one event of a lane's engine. Raises WireError where its arrays are not whole rows."""
        with self._lock:
            lane = self.lane(lane_id)
            if isinstance(event, Progress):
                lane.phase, lane.done, lane.total = event.phase, event.done, event.total
            elif isinstance(event, Tokens):
                self._take_tokens(lane, event.first, event.arrays)
            else:
                self._take_rows(lane, event.first, event.arrays)
            self.state.version += 1

    def missing(self, lane_id: int, first: int = 1, stop: int | None = None) -> list[Span]:
        """(first, stop) of each run of positions not measured yet, up to the stream's end where `stop` is None."""
        with self._lock:
            lane = self.lane(lane_id)
            end = len(self.state.stream["ids"]) if stop is None else stop
            return self._fresh(lane, first, end)

    def clear(self, lane_id: int) -> None:
        """Forget a lane's rows and continuation, to measure it anew."""
        with self._lock:
            lane = self.lane(lane_id)
            self._saved.delete_rows(lane_id)
            self._holes[lane_id] = []
            lane.rows, lane.continuation = Columns("rows", 1), Columns("continuation", 0)
            if lane.record.kind == "reference":
                self._entropy = Columns("trace", 1, ("entropy",))
                lane.entropy = self._entropy.column("entropy")
            lane.phase, lane.done, lane.total = "", 0, 0
            self.state.version += 1

    def set_floor(self, floor: dict[str, Any]) -> None:
        """Store the noise floor: {"value": float, "rows": [...]}."""
        self.set_fact("floor", floor)
        self.state.floor = floor

    def set_fact(self, key: str, value: Any) -> None:
        """Store one fact of the session."""
        with self._lock:
            self._saved.set_fact(key, value)
            self.state.facts = self._saved.facts
            self.state.version += 1

    def close(self) -> None:
        """Close the file. Raises what an append failed with."""
        with self._lock:
            self._saved.close()

    def _take_rows(self, lane: LaneState, first: int, arrays: Arrays) -> None:
        kind = "trace" if lane.record.kind == "reference" else "rows"
        rows = count_rows(kind, arrays)
        if rows == 0:
            return
        if len(lane.rows) == 0 and starts_late(lane.record):
            lane.rows.first = first
        elif first < lane.rows.first:
            self._begin_earlier(lane, first)
        for low, high in self._fresh(lane, first, first + rows):
            piece = cut(kind, arrays, low - first, high - first)
            self._learn(piece)
            self._saved.append(lane.record.id, kind, low, piece)
            self._place(lane, low, high, piece)

    def _place(self, lane: LaneState, low: int, high: int, piece: Arrays) -> None:
        reference = lane.record.kind == "reference"
        rows = rows_of_trace(piece) if reference else piece
        holes = self._holes[lane.record.id]
        if low < lane.rows.stop:
            lane.rows.overwrite(low, rows)
            if reference:
                self._entropy.overwrite(low, piece)
                lane.entropy = self._entropy.column("entropy")
            self._holes[lane.record.id] = [rest for hole in holes for rest in _without(hole, (low, high))]
            return
        if low > lane.rows.stop:
            holes.append((lane.rows.stop, low))
        extend(lane.rows, low, rows)
        if reference:
            extend(self._entropy, low, piece)
            lane.entropy = self._entropy.column("entropy")

    def _take_tokens(self, lane: LaneState, first: int, arrays: Arrays) -> None:
        count_rows("continuation", arrays)
        if first == 0 and len(lane.continuation):
            # A continuation is one run of the engine: what an interrupted one left is not mixed with a new one.
            self._saved.delete_rows(lane.record.id, "continuation")
            lane.continuation = Columns("continuation", 0)
        if first != lane.continuation.stop:
            raise SavedSessionError(
                f"lane {lane.record.id} cannot take tokens from {first} on after {lane.continuation.stop}",
                where=str(self._saved.path),
            )
        self._learn(arrays)
        self._saved.append(lane.record.id, "continuation", first, arrays)
        lane.continuation.append(first, arrays)

    def _find_holes(self, lane: LaneState) -> list[Span]:
        kind = "trace" if lane.record.kind == "reference" else "rows"
        holes: list[Span] = []
        position = lane.rows.first
        for first, rows in self._saved.spans(lane.record.id, kind):
            if first > position:
                holes.append((position, first))
            position = first + rows
        return holes

    def _fresh(self, lane: LaneState, first: int, stop: int) -> list[Span]:
        """The parts of `first` to `stop` that the lane does not have."""
        lacking = [(first, stop)]
        if rows := len(lane.rows):
            begin = lane.rows.first
            lacking = [(0, begin), *self._holes[lane.record.id], (begin + rows, stop)]
        clipped = [(max(low, first), min(high, stop)) for low, high in lacking]
        return [(low, high) for low, high in clipped if low < high]

    def _begin_earlier(self, lane: LaneState, first: int) -> None:
        """Rows from before a lane's first one, which was lost: its columns are laid out anew from there on."""
        earlier = Columns("rows", first)
        earlier.reserve(lane.rows.stop - first)
        extend(earlier, lane.rows.first, {name: lane.rows.column(name) for name in KINDS["rows"]})
        self._holes[lane.record.id].insert(0, (first, lane.rows.first))
        lane.rows = earlier

    def _learn(self, arrays: Arrays) -> None:
        """Store the bytes of token ids that occur for the first time."""
        for name in ID_COLUMNS:
            if name not in arrays:
                continue
            ids = arrays[name][arrays[name] >= 0]
            self._make_known_reach(ids)
            new: list[int] = np.unique(ids[~self._known[ids]]).tolist()
            if new:
                tokens = dict(zip(new, self._ask(new), strict=True))
                self._saved.add_tokens(tokens)
                self._tokens.update(tokens)
                self._known[new] = True

    def _make_known_reach(self, ids: NDArray[Any]) -> None:
        if (size := int(ids.max(initial=-1)) + 1) > len(self._known):
            self._known = np.concatenate([self._known, np.zeros(size - len(self._known), bool)])


def _without(span: Span, taken: Span) -> list[Span]:
    low, high = span
    parts = [(low, min(high, taken[0])), (max(low, taken[1]), high)]
    return [(begin, end) for begin, end in parts if begin < end]
