"""Bins of depth, the absolute token position: finer near the start, 32k wide from 64k on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_K = 1024
EDGES: tuple[int, ...] = (0, 2 * _K, 4 * _K, 8 * _K, 16 * _K, 32 * _K, 64 * _K)
STEP = 32 * _K


def edges(stop: int) -> list[int]:
    """Bin edges, up to at least `stop`; bin i holds the positions edges[i] <= position < edges[i + 1]."""
    out = list(EDGES)
    while out[-1] < stop:
        out.append(out[-1] + STEP)
    return out


def bins(positions: NDArray[np.integer]) -> list[tuple[int, int, NDArray[np.intp]]]:
    """(from, to, indices into `positions`) of each bin that holds any, in order of depth."""
    if not len(positions):
        return []
    found = edges(int(positions.max()) + 1)
    index = np.searchsorted(found, positions, side="right") - 1
    return [(found[i], found[i + 1], np.flatnonzero(index == i)) for i in np.unique(index).tolist()]
