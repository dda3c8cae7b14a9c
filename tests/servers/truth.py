"""A tiny language model that anybody can compute: what comes next depends on the last three ids and the length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 300


def logits(prefix: list[int]) -> NDArray[np.float64]:
    """Logits (VOCABULARY,) of what follows `prefix`."""
    chance = np.random.default_rng([len(prefix), *prefix[-3:]])
    return np.round(chance.normal(0, 3, VOCABULARY), 3)


def logprobs(prefix: list[int]) -> NDArray[np.float64]:
    """Natural log-probabilities of the same."""
    values = logits(prefix)
    return values - np.logaddexp.reduce(values)


def best(values: NDArray[np.float64], count: int) -> list[int]:
    """The most probable ids, the lowest first among equals."""
    return [int(i) for i in np.argsort(-values, kind="stable")[:count]]


def rows(ids: list[int], first: int = 1) -> NDArray[np.float64]:
    """Log-probabilities (n − first, VOCABULARY) of what predicts the positions `first` to n − 1."""
    return np.stack([logprobs(ids[:position]) for position in range(first, len(ids))])


def greedy(ids: list[int], count: int) -> list[int]:
    """The continuation that every server must give."""
    out = list(ids)
    for _ in range(count):
        out.append(best(logits(out), 1)[0])
    return out[len(ids) :]
