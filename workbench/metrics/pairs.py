"""Two lanes of one session beside each other, exactly, from what is stored of each position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Side:
    """One lane's rows (n,): its best ids `top`, ln of its probability of the session's token, whether a row counts."""

    first: int
    top: NDArray[np.int32]
    logprob: NDArray[np.float32]
    valid: NDArray[np.bool_]


def pair_summary(a: Side, b: Side, generated: NDArray[np.uint8]) -> dict[str, Any]:
    """Flips between two lanes over the positions that both measured; None where there are none.

    n and flips count the assistant's tokens (`generated`, by absolute position), flip_rate is their ratio;
    first_difference is the first position of any role where the two best ids differ, first_flip the first of the
    assistant's; logprob_difference is the mean |ln a − ln b| of the session's own token there, in nats.
    """
    first, stop = max(a.first, b.first), min(a.first + len(a.top), b.first + len(b.top), len(generated))
    if stop <= first:
        return {"n": 0, "flips": None, "flip_rate": None, "first_difference": None, "first_flip": None,
                "logprob_difference": None}  # fmt: skip
    mine, theirs = (slice(first - side.first, stop - side.first) for side in (a, b))
    valid = a.valid[mine] & b.valid[theirs]
    counted = valid & (generated[first:stop] == 1)
    differ = a.top[mine] != b.top[theirs]
    apart = np.abs(a.logprob[mine].astype(np.float64) - b.logprob[theirs])[counted]
    apart = apart[np.isfinite(apart)]
    n, flips = int(counted.sum()), int((differ & counted).sum())
    return {
        "n": n,
        "flips": flips,
        "flip_rate": flips / n if n else None,
        "first_difference": _first(differ & valid, first),
        "first_flip": _first(differ & counted, first),
        "logprob_difference": float(apart.mean()) if len(apart) else None,
    }


def _first(where: NDArray[np.bool_], first: int) -> int | None:
    found = np.flatnonzero(where)
    return first + int(found[0]) if len(found) else None
