"""From which depth on does a lane stay above the noise floor? One change point over its turns, with an interval.

A turn's value is the mean KL of its tokens. With the level c = ln of what counts as the floor, the change point is the
turn k that maximises S(k) = Σ_{t<k} (c − ln KL_t) + Σ_{t≥k} (ln KL_t − c): below before, above from there on; a
cumulative-sum estimator with a known level (Page 1954), so that a single turn on the wrong side does not move it. The
interval is the percentile interval over turns drawn with replacement and put back in order; a draw's change lies right
behind the last turn below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 20261
MIN_TURNS = 5
"""Fewer turns say nothing about a change."""
_LEAST_KL = 1e-12
METHOD = "one change point over turns against twice the floor; 95 % by resampling turns"


@dataclass(frozen=True, slots=True)
class Leaves:
    """`depth` is the position from which a lane stays above the floor; None where it never does, and 0 turns are before
    it where it was above from the start. `low` and `high` bound it, None where it never leaves within the resamples.
    """

    depth: int | None
    low: int | None
    high: int | None
    state: str
    share: float

    def to_json(self) -> dict[str, Any]:
        """As `compare --json` shows it: `share` of the resamples leaves the floor at all."""
        return {
            "depth": self.depth, "low": self.low, "high": self.high, "state": self.state, "share": self.share,
            "method": METHOD,
        }  # fmt: skip


def leaves_floor(
    kl: NDArray[np.floating[Any]], turns: NDArray[np.integer[Any]], positions: NDArray[np.integer[Any]], level: float
) -> Leaves | None:
    """The change point of KL (n,) of tokens at `positions` (n,) in `turns` (n,) against `level`, in nats.

    None with fewer than MIN_TURNS turns, or without a level.
    """
    labels, index = np.unique(turns, return_inverse=True)
    if len(labels) < MIN_TURNS or not level > 0:
        return None
    count = np.bincount(index)
    mean = np.bincount(index, kl.astype(np.float64)) / count
    starts = np.full(len(labels), np.iinfo(np.int64).max)
    np.minimum.at(starts, index, positions.astype(np.int64))
    order = np.argsort(starts)
    starts, excess = starts[order], np.log(np.maximum(mean[order], _LEAST_KL)) - np.log(level)
    found = _change(excess[None])[0]
    draws = np.sort(np.random.default_rng(SEED).integers(0, len(excess), (RESAMPLES, len(excess))), axis=1)
    changes = _change(excess[draws])
    never = changes == len(excess)
    below = np.take_along_axis(draws, np.maximum(changes - 1, 0)[:, None], 1)[:, 0]
    left = np.where(changes > 0, np.minimum(below + 1, len(excess) - 1), 0)
    depths = np.where(never, np.iinfo(np.int64).max, starts[left])
    low, high = (int(value) for value in np.sort(depths)[[int(0.025 * RESAMPLES), int(0.975 * RESAMPLES)]])
    limit = np.iinfo(np.int64).max
    return Leaves(
        None if found == len(excess) else int(starts[found]),
        None if low == limit else low,
        None if high == limit else high,
        "never" if found == len(excess) else "from the start" if found == 0 else "leaves",
        float(1 - never.mean()),
    )


def _change(excess: NDArray[np.float64]) -> NDArray[np.intp]:
    """The best k of each row (m, turns): 0 is above from the start, `turns` is never."""
    above = np.cumsum(excess[:, ::-1], axis=1)[:, ::-1]  # Σ_{t≥k}
    total = above[:, :1]
    score = np.concatenate((2 * above - total, -total), axis=1)
    return score.argmax(axis=1)
