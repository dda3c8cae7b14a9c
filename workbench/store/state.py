"""What screens, tables and reports read: one session and its lanes in memory, live or loaded from a file.

The hub (live) or playback (from a file) is the only writer; readers look at `version` to see that something changed.
Columns grow in place, so a view of a slice stays valid and cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from workbench.protocol.columns import KINDS
from workbench.protocol.wire import Arrays

LaneKind = Literal["reference", "lane", "floor"]
Status = Literal["queued", "running", "done", "failed", "invalid", "cancelled", "interrupted"]
"""`interrupted` is never stored: so stands a lane that was queued or running when its file's writer ended."""


class Columns:
    """Growing arrays of one kind without ragged columns (`rows`, `continuation`), or of some of its columns.

    `first` is the position of row 0. Appending is amortised; `column(name)` is a view of what is there.
    """

    def __init__(self, kind: str, first: int, names: tuple[str, ...] | None = None) -> None:
        self.first = first
        self._n = self._capacity = 0
        chosen = {name: item for name, item in KINDS[kind].items() if names is None or name in names}
        self._arrays: Arrays = {
            name: np.zeros((0, item.width) if item.width else (0,), item.dtype) for name, item in chosen.items()
        }

    def __len__(self) -> int:
        return self._n

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.first + self._n

    def column(self, name: str) -> NDArray[Any]:
        """A view of the rows of one column, row 0 being position `first`."""
        return self._arrays[name][: self._n]

    def append(self, first: int, arrays: Arrays) -> None:
        """Append rows that begin at position `first`, which must be `stop`; columns that are not kept are ignored."""
        if first != self.stop:
            raise ValueError(f"rows from {first} on cannot follow {self.stop}")
        rows = len(next(arrays[name] for name in self._arrays))
        if self._n + rows > self._capacity:
            # By half and not to the double: a lane of 100,000 positions (58 bytes each) stays below 10 MB.
            self.reserve(max(1024, self._n + rows, self._capacity + self._capacity // 2))
        for name, array in self._arrays.items():
            array[self._n : self._n + rows] = arrays[name]
        self._n += rows

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all, where how many will come is known."""
        for name, array in self._arrays.items():
            if rows > len(array):
                grown = np.zeros((rows, *array.shape[1:]), array.dtype)
                grown[: self._n] = array[: self._n]
                self._arrays[name] = grown
        self._capacity = max(rows, self._capacity)

    def overwrite(self, first: int, arrays: Arrays) -> None:
        """Replace rows from position `first` on, all of which must be there."""
        start = first - self.first
        rows = len(next(arrays[name] for name in self._arrays))
        if start < 0 or start + rows > self._n:
            raise ValueError(f"rows {first} to {first + rows} are not all within {self.first} to {self.stop}")
        for name, array in self._arrays.items():
            array[start : start + rows] = arrays[name]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the columns take, room for growth included."""
        return sum(array.nbytes for array in self._arrays.values())


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """One row of the file's `lanes` table; JSON values are plain objects."""

    id: int
    name: str
    kind: LaneKind
    configuration: dict[str, Any]
    mode: Literal["forced", "free"] = "forced"
    path: Literal["prefill", "decode"] = "prefill"
    estimator: str = "head+tail samples"
    status: Status = "queued"
    reason: str = ""
    manifest: dict[str, Any] = field(default_factory=dict[str, Any])
    stats: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class LaneState:
    """A lane in memory. `rows` of the reference hold what its trace gives: logprob, its own best ids, ties, valid; kl 0
    and rank 1 everywhere.

    A position within `rows` that was never measured, or was lost with a damaged file, stands as valid 0, NaN, rank 0.
    `rows.first` is 1, or the first scored position of a lane that scores only from there on (path decode, floor).
    """

    record: LaneRecord
    rows: Columns
    continuation: Columns
    phase: str = ""
    done: int = 0
    total: int = 0
    entropy: NDArray[np.float32] | None = None  # reference only, row 0 = position 1


@dataclass(slots=True)
class SessionState:
    """One session and its lanes. `lanes[0]` is the reference once it is known; floor rows are lanes of kind `floor`.

    `token_bytes(id)` gives the bytes of a token (b"" where unknown). `trace(first, stop)` reads trace rows (columns of
    `protocol.columns.TRACE`) for the inspector while the file is open, as many from `first` on as are there without a
    gap, which may be none; a read touches one or two chunks. `damage` lists what a damaged file lost, a sentence each.
    """

    title: str
    session: dict[str, Any]
    facts: dict[str, Any]
    stream: Arrays
    lanes: list[LaneState]
    token_bytes: Callable[[int], bytes]
    trace: Callable[[int, int], Arrays]
    path: str = ""
    floor: dict[str, Any] | None = None  # {"value": float, "rows": [...]} as in compare --json
    damage: list[str] = field(default_factory=list[str])
    version: int = 0

    @property
    def reference(self) -> LaneState | None:
        """The lane whose distributions are the trace."""
        return next((lane for lane in self.lanes if lane.record.kind == "reference"), None)

    @property
    def shown(self) -> list[LaneState]:
        """The reference and the lanes, without the floor's rows: what the lanes screen shows."""
        return [lane for lane in self.lanes if lane.record.kind != "floor"]
