"""Rows of logits to compact rows, in numpy: the twin of `scoring` for engines whose logits lie in host memory.

Definitions and columns are `scoring`'s; see there. Only the passes over the vocabulary differ. They run over blocks of
rows that fit the level-2 cache, in scratch memory that is kept, and take about 0.11 ms a row of 49,152 ids on one core.

A block is read as (rows, WIDTH, groups): a group is every `groups`-th id, so that numpy reduces whole contiguous rows
of groups. Groups find the best ids only; what is summed over a group for samples is WIDTH ids in a row, as in `passes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.protocol.columns import join
from workbench.protocol.wire import Arrays
from workbench.worker.compact import (
    BEST,
    HEAD_TAIL,
    HEADS,
    VOID,
    WIDTH,
    K,
    Measured,
    Recorded,
    check_targets,
    lane_columns,
    lost_share,
    trace_columns,
    uniforms,
    wanted,
)

Floats = NDArray[np.float32]

BLOCK_BYTES = 3 << 18  # of float32 in one block
BELOW_ONE = 1 - np.finfo(np.float64).eps  # keeps a rounded product under its total, so an id of mass 0 never comes


class Scratch:
    """Memory for the passes, kept from call to call: fresh memory for each would cost more than the sums."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def blocks(self, logits: Floats, spares: int = 0) -> Iterator[tuple[slice, Floats, Floats]]:
        """Blocks of rows (rows, width) filled up with VOID to a multiple of WIDTH, and `spares` times as much memory
        to write to, (spares, rows, width)."""
        n, vocab = logits.shape
        width = -(-vocab // WIDTH) * WIDTH
        size = min(max(1, BLOCK_BYTES // (4 * width)), n)
        if self._memory.size < (1 + spares) * size * width:
            self._memory = np.empty((1 + spares) * size * width, np.float32)
        for first in range(0, n, size):
            rows = slice(first, min(first + size, n))
            count = rows.stop - first
            memory = self._memory[: (1 + spares) * count * width].reshape(1 + spares, count, width)
            memory[0, :, :vocab] = logits[rows]
            memory[0, :, vocab:] = VOID
            yield rows, memory[0], memory[1:]


_SCRATCH = Scratch()


def record_rows(logits: Floats, targets: NDArray[Any], first_position: int, trace_seed: int, vocab: int) -> Arrays:
    """Trace rows of n consecutive positions; arguments and errors as for `scoring.record_rows`."""
    logits = logits[:, :vocab]
    check_targets(len(logits), targets, logits.shape[1])
    if not len(logits):
        return join("trace", [])
    n, width = logits.shape
    chance = uniforms(first_position, n, trace_seed)
    parts: list[tuple[NDArray[Any], ...]] = []
    with np.errstate(all="ignore"):
        for rows, block, spare in _SCRATCH.blocks(logits, spares=2):
            lowest, peak = block.min(1), block.max(1)
            ids, head = _best(block, min(K, width), width, K)
            mass, entropy = _moments(block, peak, spare)
            k = np.minimum(_head_sizes(head, mass), width)
            missing = np.arange(K) >= k[:, None]
            ids = np.where(missing, ids[:, :1], ids)
            tail_peak, tail_sum = _tail(block, ids)
            drawn = np.minimum(_draw(block, chance[rows]), width - 1)
            parts.append((lowest, entropy, k, ids, np.where(missing, -np.inf, head), tail_peak, tail_sum, drawn))
    return trace_columns(Recorded(*_stacked(parts)), targets, _Reader(logits))


def lane_rows(logits: Floats, targets: NDArray[Any], trace: Arrays, seconds: float, vocab: int) -> Arrays:
    """A lane's rows against the trace of the same n positions; arguments and errors as for `scoring.lane_rows`."""
    logits = logits[:, :vocab]
    check_targets(len(logits), targets, logits.shape[1])
    want = wanted(trace, len(logits), logits.shape[1])
    if not len(logits):
        return join("rows", [])
    width = logits.shape[1]
    parts: list[tuple[NDArray[Any], ...]] = []
    with np.errstate(all="ignore"):
        for rows, block, _ in _SCRATCH.blocks(logits):
            lowest = block.min(1)
            own_ids, own = _best(block, min(BEST, width), width, BEST)
            tail_peak, tail_sum = _tail(block, want.heads[rows])
            parts.append((lowest, own_ids, own, tail_peak, tail_sum))
    return lane_columns(Measured(*_stacked(parts)), want, targets, trace, seconds, _Reader(logits))


def lost_mass(logits: Floats, targets: NDArray[Any], rows: Arrays, vocab: int) -> NDArray[np.float64]:
    """Probability (n,) of the padding from `vocab` on, NaN in invalid rows; as `scoring.lost_mass`."""
    if logits.shape[1] <= vocab:
        return np.zeros(len(logits))
    with np.errstate(all="ignore"):
        padding = np.logaddexp.reduce(logits[:, vocab:].astype(np.float64), axis=1)
    return lost_share(_Reader(logits).at(targets[:, None])[:, 0], padding, rows)


class _Reader:
    """`compact.Reader` of an array."""

    def __init__(self, logits: Floats) -> None:
        self.logits = logits

    def at(self, ids: NDArray[Any]) -> NDArray[np.float64]:
        return self.logits[np.arange(len(ids))[:, None], ids].astype(np.float64)

    def equal(self, ids: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
        rows = np.flatnonzero(chosen)
        return np.array([np.count_nonzero(self.logits[row] == self.logits[row, ids[row]]) for row in rows])

    def before(self, ids: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
        counts: list[int] = []
        for row in np.flatnonzero(chosen):
            values, mine = self.logits[row], int(ids[row])
            lower = values[:mine] >= values[mine]
            counts.append(int(np.count_nonzero(lower) + np.count_nonzero(values[mine + 1 :] > values[mine])))
        return np.array(counts)


def _best(block: Floats, count: int, vocab: int, width: int) -> tuple[NDArray[Any], Floats]:
    """The `count` largest of each row, the lowest id first among equals: ids and logits, both (rows, width).

    The count-th largest of the groups' maxima is a bound that at least `count` ids reach, and few others do; these are
    sorted. Missing columns, and rows of NaN, repeat the first id (0 in such rows) with the logit −inf.
    """
    rows, groups = len(block), block.shape[1] // WIDTH
    bound = np.full((rows, 1), VOID, np.float32)
    if groups >= count:
        maxima = block.reshape(rows, WIDTH, groups).max(1)
        bound = np.partition(maxima, groups - count, axis=1)[:, groups - count, None]
    found = np.flatnonzero(block >= bound)
    row, ids = np.divmod(found, block.shape[1])
    inside = ids < vocab
    row, ids = row[inside], ids[inside]
    values = block[row, ids]
    order = np.lexsort((-values, row))  # stable: ids rise within equal values
    row, ids, values = row[order], ids[order], values[order]
    place = np.arange(len(row)) - np.searchsorted(row, np.arange(rows))[row]
    kept = place < count
    best, logits = np.zeros((rows, width), np.int64), np.full((rows, width), -np.inf, np.float32)
    best[row[kept], place[kept]] = ids[kept]
    logits[row[kept], place[kept]] = values[kept]
    filled = np.isneginf(logits)
    return np.where(filled, best[:, :1], best), logits


def _moments(block: Floats, peak: Floats, spare: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Σ exp(x − peak) and the entropy in nats of each row; `spare` (2, rows, width) is written over."""
    groups = (len(block), WIDTH, -1)
    shifted = np.subtract(block, peak[:, None], out=spare[0])
    weights = np.exp(shifted, out=spare[1])
    mass = weights.reshape(groups).sum(1).sum(1, dtype=np.float64)
    weighted = np.multiply(weights, shifted, out=shifted).reshape(groups).sum(1).sum(1, dtype=np.float64)
    return mass, np.log(mass) - weighted / mass


def _head_sizes(head: Floats, mass: NDArray[np.float64]) -> NDArray[np.int64]:
    """The smallest K of HEADS whose tail mass is at most HEAD_TAIL, else the largest."""
    within = np.exp((head - head[:, :1]).astype(np.float64)).cumsum(1) / mass[:, None]
    sizes = np.array(HEADS)
    enough = 1 - within[:, sizes - 1] <= HEAD_TAIL
    enough[:, -1] = True
    return sizes[enough.argmax(1)]


def _tail(block: Floats, ids: NDArray[Any]) -> tuple[Floats, NDArray[np.float64]]:
    """Mask `ids` (rows, m) and turn the block into exp(x − peak of the rest) in place; the peak and the sum of it."""
    block[np.arange(len(block))[:, None], ids] = VOID
    peak = block.max(1)
    np.exp(np.subtract(block, np.where(peak > VOID / 2, peak, 0)[:, None], out=block), out=block)
    return peak, block.reshape(len(block), WIDTH, -1).sum(1).sum(1, dtype=np.float64)


def _draw(weights: Floats, chance: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ids by inverse CDF, (rows, S): the group of WIDTH ids from the groups' sums, then the id within the group."""
    rows = len(weights)
    sums = weights.reshape(rows, -1, WIDTH).sum(2).astype(np.float64)
    edges = sums.cumsum(1)
    aim = chance * edges[:, -1:] * BELOW_ONE
    group = np.stack([np.searchsorted(edges[row], aim[row], "right") for row in range(rows)])
    group = np.minimum(group, sums.shape[1] - 1)
    before = np.take_along_axis(np.pad(edges, ((0, 0), (1, 0))), group, 1)
    share = np.minimum((aim - before) / np.take_along_axis(sums, group, 1), BELOW_ONE)
    inner = weights.reshape(rows, -1, WIDTH)[np.arange(rows)[:, None], group].astype(np.float64).cumsum(2)
    offset = (inner <= (share[..., None] * inner[..., -1:] * BELOW_ONE)).sum(2)
    return group * WIDTH + np.minimum(offset, WIDTH - 1)


def _stacked(parts: list[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]]:
    return [np.concatenate(column) for column in zip(*parts, strict=True)]
