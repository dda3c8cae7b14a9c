"""How a stream is cut into requests: one for all of it, or on `path=decode` one for each run of served tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Segment(NamedTuple):
    """Context up to `stop`, of which tokens before `held` were run by the segment before; then tokens up to `end` one
    at a time. `stop` = `end` where nothing is forced."""

    held: int
    stop: int
    end: int


def segments(single: NDArray[np.uint8] | None, n: int) -> list[Segment]:
    """How a stream of n tokens is run; `single` marks the tokens that are fed one at a time, None: none."""
    if single is None:
        return [Segment(0, n, n)]
    found: list[Segment] = []
    held = 0
    while held < n:
        alone = np.flatnonzero(single[max(held, 1) :]) + max(held, 1)
        if not len(alone):
            found += [Segment(held, n, n)] if held < n - 1 else []
            break
        stop = int(alone[0])
        rest = np.flatnonzero(single[stop:] == 0)
        end = stop + int(rest[0]) if len(rest) else n
        found.append(Segment(held, stop, end))
        held = end
    return found
