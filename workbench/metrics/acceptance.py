"""Acceptance of drafted tokens: from ordered verification steps, from a histogram, or from an average alone.

A step commits what it accepted and one token more, the bonus. `pooled` is committed tokens over steps, `per_request`
the mean of the requests' own; of one request both are the same. `by_slot[k]` is the share of the steps which reached
slot k that accepted it (conditional). What a source does not tell is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


def acceptance(drafted: Sequence[int], accepted: Sequence[int]) -> dict[str, Any]:
    """From each step's drafted and accepted tokens, in order. Raises ValueError where they cannot be steps."""
    if len(drafted) != len(accepted) or any(not 0 <= a <= d for a, d in zip(accepted, drafted, strict=False)):
        raise ValueError(f"{len(accepted)} accepted counts do not fit {len(drafted)} drafted ones")
    steps = len(accepted)
    width = max(drafted, default=0)
    reached = [sum(a >= k and d > k for a, d in zip(accepted, drafted, strict=True)) for k in range(width)]
    taken = [sum(a > k for a in accepted) for k in range(width)]
    length = (sum(accepted) + steps) / steps if steps else None
    return {
        "source": "steps",
        "steps": steps,
        "drafted": [int(value) for value in drafted],
        "accepted": [int(value) for value in accepted],
        "pooled": length,
        "per_request": length,
        "rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "by_slot": [a / b if b else None for a, b in zip(taken, reached, strict=True)],
        "histogram": np.bincount(np.asarray(accepted, np.int64), minlength=width + 1).tolist() if steps else [],
    }


def from_histogram(counts: Sequence[int], drafted: int | None = None) -> dict[str, Any]:
    """From how many steps accepted 0, 1, 2, ... tokens; `drafted` is the total, where it is known.

    Slots are conditional on the width that the histogram has, since steps that drafted fewer cannot be told apart.
    """
    if any(count < 0 for count in counts):
        raise ValueError(f"a histogram of {list(counts)}")
    values = np.asarray(counts, np.int64)
    steps, accepted = int(values.sum()), int((values * np.arange(len(values))).sum())
    beyond = values[::-1].cumsum()[::-1]  # steps that accepted at least k
    length = (accepted + steps) / steps if steps else None
    return {
        "source": "histogram",
        "steps": steps,
        "drafted": None,
        "accepted": None,
        "pooled": length,
        "per_request": length,
        "rate": accepted / drafted if drafted else None,
        "by_slot": [int(b) / int(a) if a else None for a, b in pairwise(beyond)],
        "histogram": values.tolist(),
    }


def from_average(length: float) -> dict[str, Any]:
    """From the mean number of tokens that a step committed, the bonus included. Raises ValueError below 1."""
    if not 1 <= length < float("inf"):
        raise ValueError(f"an acceptance length of {length}: a step commits one token at least")
    empty = dict.fromkeys(("steps", "drafted", "accepted", "rate", "by_slot", "histogram"))
    return {"source": "average", **empty, "pooled": length, "per_request": length}
