"""vLLM's flat log-probabilities as arrays: one conversion a list, none a token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.errors import EngineError


class Named(NamedTuple):
    """What vLLM names at n positions: the stream's token (`target` ln q, `rank`) and its own best, `ids` (n, k) with
    `logprobs`, most probable first; −1 and −inf where a position names fewer."""

    target: NDArray[np.float32]
    rank: NDArray[np.int32]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def cut(self, start: int, stop: int) -> Named:
        """Positions `start` to `stop`, relative."""
        rows = slice(start, stop)
        return Named(self.target[rows], self.rank[rows], self.ids[rows], self.logprobs[rows])


def named(flat: Any, first: int, stop: int) -> Named:
    """Entries `first` to `stop` of a FlatLogprobs: the token itself comes first in each, then the best of all.

    Raises EngineError where a position names nothing.
    """
    starts = np.asarray(flat.start_indices[first:stop], dtype=np.int64)
    ends = np.asarray(flat.end_indices[first:stop], dtype=np.int64)
    counts = ends - starts
    if len(starts) != stop - first or (counts < 1).any():
        raise EngineError(f"vLLM gave no log-probabilities for some of {stop - first} positions")
    low, high = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
    ids = np.asarray(flat.token_ids[low:high], dtype=np.int32)
    logprobs = np.asarray(flat.logprobs[low:high], dtype=np.float32)
    own = starts - low
    ranks = np.asarray([flat.ranks[start] for start in starts.tolist()], dtype=np.int32)
    width = int(counts.max(initial=1)) - 1
    places = own[:, None] + 1 + np.arange(width)
    missing = np.arange(width) >= (counts - 1)[:, None]
    places[missing] = 0
    return Named(
        logprobs[own] if len(own) else np.zeros(0, np.float32),
        ranks,
        np.where(missing, np.int32(-1), ids[places] if len(ids) else 0),
        np.where(missing, np.float32(-np.inf), logprobs[places] if len(logprobs) else 0),
    )


def joined(parts: list[Named]) -> Named:
    """Consecutive positions as one; narrower ones are filled up with −1 and −inf."""
    width = max(part.ids.shape[1] for part in parts)

    def wide(column: NDArray[Any], fill: float) -> NDArray[Any]:
        return np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=fill)

    return Named(
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.rank for part in parts]),
        np.concatenate([wide(part.ids, -1) for part in parts]),
        np.concatenate([wide(part.logprobs, -np.inf) for part in parts]),
    )
