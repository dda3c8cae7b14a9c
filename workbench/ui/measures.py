"""What the lanes screen shows of a lane, kept up with its growing columns: every update costs only the new rows.

A position's code says how to draw its token: bits 0 to 2 the KL level (0 to 4), or UNMEASURED or EXCLUDED; then the
kind of its message; then whether the lane's own choice differs (flip, only where the model itself would write it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.metrics.summary import is_severe
from workbench.store.effective import bounded
from workbench.store.state import LaneState
from workbench.ui.pieces import ASSISTANT, SYSTEM

KL_LEVELS: tuple[float, ...] = (0.02, 0.08, 0.2, 0.5)
"""Nats. A token's level is the number of thresholds its KL reaches."""

LEVEL_NAMES: tuple[str, ...] = ("plain", "light", "mid", "strong", "solid")

UNMEASURED, EXCLUDED = 5, 6
KIND_SHIFT, FLIP = 3, 32

DEPTH_EDGES: tuple[int, ...] = (0, 2048, 4096, 8192, 16384, 32768, 65536)
"""Depth bins of the metrics page; from the last edge on they are 32,768 wide."""

BINS = 1024  # equal slices of the stream behind sparklines and the heat strip


@dataclass(frozen=True, slots=True)
class Deepest:
    """Flips in the deepest depth bin that holds anything measured."""

    start: int
    stop: int
    rate: float


class Shared:
    """What is true of the stream for every lane: headline positions, kinds of message, turns, and where they begin."""

    def __init__(self, stream: dict[str, NDArray[Any]], kinds: NDArray[np.uint8]) -> None:
        self.count = len(stream["ids"])
        self.generated = stream["generated"].astype(bool)
        self.kinds = kinds
        self.turn = stream["turn"]
        self.role = stream["role"]
        message = stream["message"]
        new = np.ones(self.count, bool)
        new[1:] = message[1:] != message[:-1]
        self.breaks: bytes = new.astype(np.uint8).tobytes()
        self.message_starts = np.flatnonzero(new)
        # A turn begins, for a person, where its own writing begins.
        written = np.flatnonzero(self.generated)
        self.turns = int(self.turn[written].max()) + 1 if len(written) else 0
        first: dict[int, int] = {}
        for position in written[np.flatnonzero(np.diff(self.turn[written], prepend=-1))].tolist():
            first.setdefault(int(self.turn[position]), position)
        self.turn_starts: list[int] = [first[turn] for turn in sorted(first)]
        # What frames an assistant message was not written by the model: it is drawn as context.
        drawn = np.where((kinds == ASSISTANT) & ~self.generated, SYSTEM, kinds).astype(np.uint8)
        self.kind_codes = (drawn << KIND_SHIFT).astype(np.uint8)
        self.base_codes = (np.uint8(UNMEASURED) | self.kind_codes).astype(np.uint8)
        self.bin_of: NDArray[np.int32] = (np.arange(self.count, dtype=np.int64) * BINS // max(1, self.count)).astype(
            np.int32
        )


class Measures:
    """Sums, bins and codes of one lane, over the headline positions unless said otherwise."""

    def __init__(self, lane: LaneState, shared: Shared) -> None:
        self.lane = lane
        self.shared = shared
        self.resets = 0  # how often the lane was measured anew: what was drawn before is void
        self._reset()

    def _reset(self) -> None:
        self._rows = self.lane.rows
        self.seen = 0
        self._absent = 0  # rows not valid, or not there yet
        self.codes = self.shared.base_codes.copy()
        self.n = self.flips = self.excluded = 0
        self.kl_sum = 0.0
        self._nll_sum = 0.0
        self._tv_sums = [0.0, 0.0]
        self.bin_n = np.zeros(BINS, np.int64)
        self.bin_kl = np.zeros(BINS)
        self.bin_max = np.zeros(BINS, np.float32)
        self.bin_flips = np.zeros(BINS, np.int64)
        self._depth_n: dict[int, int] = {}
        self._depth_flips: dict[int, int] = {}

    @property
    def is_reference(self) -> bool:
        return self.lane.record.kind == "reference"

    @property
    def edge(self) -> int:
        """The number of stream positions this lane has got to; position 0 needs no measuring."""
        return min(self.shared.count, self.lane.rows.first + self.seen) if self.seen else 0

    @property
    def kl_mean(self) -> float | None:
        return self.kl_sum / self.n if self.n and not self.is_reference else None

    @property
    def bounded(self) -> bool:
        """Whether every KL of the lane is a lower bound only."""
        return bounded(self.lane.record)

    @property
    def tv(self) -> tuple[float, float] | None:
        """The mean ends of the interval that total variation lies in; equal where it is measured."""
        return (self._tv_sums[0] / self.n, self._tv_sums[1] / self.n) if self.n and not self.is_reference else None

    @property
    def severe(self) -> bool:
        """Whether the mean KL, or of a bounded lane its lower bound, is above what `metrics.summary.SEVERE` allows."""
        return bool(is_severe(self.kl_mean, bounded=self.bounded))

    @property
    def nll(self) -> float | None:
        """Mean NLL of the written tokens, nats; None where an engine did not give all of them."""
        return self._nll_sum / self.n if self.n and not self.is_reference and not np.isnan(self._nll_sum) else None

    @property
    def flip_rate(self) -> float | None:
        return self.flips / self.n if self.n and not self.is_reference else None

    @property
    def deepest(self) -> Deepest | None:
        """The deepest bin with measured headline positions."""
        if not self._depth_n or self.is_reference:
            return None
        start = max(self._depth_n)
        return Deepest(start, depth_stop(start), self._depth_flips[start] / self._depth_n[start])

    def update(self) -> bool:
        """Take in the rows that came; True where something changed."""
        rows, began = self.lane.rows, self.resets
        if rows is not self._rows or len(rows) < self.seen or self._filled():
            self.resets += 1
            self._reset()
        start, stop = self.seen, min(len(rows), self.shared.count - rows.first)
        if stop > start:
            self.seen = stop
            if not self.is_reference:
                self._measure(start, stop)
        return stop > start or self.resets != began

    def _filled(self) -> bool:
        """Whether a resumed lane brought rows that were not there before."""
        return self._absent > 0 and int((self.lane.rows.column("valid")[: self.seen] == 0).sum()) != self._absent

    def _measure(self, start: int, stop: int) -> None:
        rows, shared = self.lane.rows, self.shared
        first, last = rows.first + start, rows.first + stop
        kl = rows.column("kl")[start:stop]
        valid = rows.column("valid")[start:stop].astype(bool)
        headline = shared.generated[first:last]
        flip = (rows.column("rank")[start:stop] != 1) & valid & headline
        level = np.searchsorted(np.asarray(KL_LEVELS, np.float32), kl, side="right").astype(np.uint8)
        level[~valid] = EXCLUDED
        self._absent += int((~valid).sum())
        self.codes[first:last] = level | shared.kind_codes[first:last] | np.where(flip, FLIP, 0).astype(np.uint8)
        used = headline & valid
        self.excluded += int((headline & ~valid).sum())
        if not used.any():
            return
        kl_used, flip_used = kl[used].astype(np.float64), flip[used]
        self.n += len(kl_used)
        self.flips += int(flip_used.sum())
        self.kl_sum += float(kl_used.sum())
        self._nll_sum -= float(rows.column("logprob")[start:stop][used].sum(dtype=np.float64))
        for end, name in enumerate(("tv", "tv_high")):
            self._tv_sums[end] += float(rows.column(name)[start:stop][used].sum(dtype=np.float64))
        bins = shared.bin_of[first:last][used]
        self.bin_n += np.bincount(bins, minlength=BINS)
        self.bin_kl += np.bincount(bins, kl_used, minlength=BINS)
        self.bin_flips += np.bincount(bins[flip_used], minlength=BINS)
        np.maximum.at(self.bin_max, bins, kl[used])
        starts = depth_start(np.flatnonzero(used) + first)
        for edge in np.unique(starts).tolist():
            inside = starts == edge
            self._depth_n[edge] = self._depth_n.get(edge, 0) + int(inside.sum())
            self._depth_flips[edge] = self._depth_flips.get(edge, 0) + int((inside & flip_used).sum())

    def next_flip(self, cursor: int, step: int) -> int | None:
        """The nearest flip after (`step` 1) or before (−1) a position."""
        flips = (self.codes & FLIP).astype(bool)
        if step > 0:
            after = flips[cursor + 1 :]
            return cursor + 1 + int(after.argmax()) if after.any() else None
        before = flips[: max(0, cursor)][::-1]
        return cursor - 1 - int(before.argmax()) if before.any() else None

    def curve(self, cells: int) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.int64]]:
        """Per slice of the stream: mean KL (NaN where nothing is measured), largest KL, flips."""
        cells = max(1, min(cells, BINS))
        edges = np.arange(cells) * BINS // cells
        counts = np.add.reduceat(self.bin_n, edges)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.add.reduceat(self.bin_kl, edges) / counts
        return means, np.maximum.reduceat(self.bin_max, edges), np.add.reduceat(self.bin_flips, edges)


def densest(flips: list[int]) -> list[bool]:
    """Which slices to mark as holding flips: all that do; where they are over a sixth, those with the most."""
    counts = sorted((count for count in flips if count), reverse=True)
    most = max(1, len(flips) // 6)
    bar = counts[most] + 1 if len(counts) > most else 1
    return [count >= bar for count in flips]


def depth_start(positions: NDArray[Any]) -> NDArray[np.int64]:
    """The first position of the depth bin of each position."""
    edges = np.asarray(DEPTH_EDGES)
    starts = edges[np.searchsorted(edges, positions, side="right") - 1]
    deep = positions >= DEPTH_EDGES[-1]
    return np.where(deep, positions // 32768 * 32768, starts)


def depth_stop(start: int) -> int:
    """The position after a depth bin."""
    later = [edge for edge in DEPTH_EDGES if edge > start]
    return later[0] if later else start + 32768


def speeds(lane: LaneState) -> tuple[float | None, float | None]:
    """Decode and prefill tokens per second: what the lane's statistics say, else what its columns show so far."""
    stats = lane.record.stats
    sample: dict[str, Any] = stats.get("decode") or {}
    decode: float | None = sample.get("median_tps")
    tokens, seconds = stats.get("prefill_tokens"), stats.get("prefill_seconds")
    prefill: float | None = tokens / seconds if tokens and seconds else None
    if decode is None and len(lane.continuation) > 8:
        gaps = np.diff(lane.continuation.column("seconds"))
        middle = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0
        decode = 1 / middle if middle else None
    if prefill is None and len(lane.rows) and lane.record.kind != "reference":
        last = float(lane.rows.column("seconds")[-1])
        prefill = len(lane.rows) / last if last > 0 else None
    return decode, prefill
