"""Rows from log-probabilities at the trace's own ids: all that the estimator needs, without whole distributions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.metrics.divergence import Compact, estimate
from workbench.protocol.columns import ROWS, dense
from workbench.protocol.wire import Arrays
from workbench.worker.vllm.flat import Named

BEST = 4
RESOLUTION = 1e-7
"""The least mass that is left of 1 after a sum of probabilities in float32: a smaller tail reads as this."""


def trace_ids(trace: Arrays) -> NDArray[np.int32]:
    """The ids to ask for, (n, K + S): each position's head, then its samples; −1 fills up both."""
    return np.concatenate((dense(trace, "head_ids", -1), dense(trace, "sample_ids", -1)), axis=1)


def named_rows(trace: Arrays, at_ids: NDArray[np.float32], best: Named, seconds: float) -> Arrays:
    """Rows (`protocol.columns.ROWS`) of n positions, from the lane's log-probabilities at `trace_ids` (n, K + S).

    Its tail is what its head leaves of 1. `best` has its own best ids: the rank of the reference's first choice is
    exact among them, else one more than there are. valid is 0 where either side's is, or a head sums to more than 1.
    """
    n = len(trace["k"])
    p_head = dense(trace, "head_logprobs", -np.inf)
    width = p_head.shape[1]
    missing = np.arange(width) >= trace["k"].astype(np.int64)[:, None]
    head = np.where(missing, -np.inf, at_ids[:, :width].astype(np.float64))
    samples = at_ids[:, width:]
    with np.errstate(all="ignore"):
        mass = np.exp(head).sum(-1)
        tail = np.log(np.maximum(1 - mass, RESOLUTION))
    p = Compact(p_head, trace["tail"], dense(trace, "sample_logprobs", -np.inf))
    distance = estimate(p, Compact(head, tail, samples), trace["s"].astype(np.int64))
    finite = np.isfinite(best.target) & np.isfinite(mass) & (mass <= 1 + 1e-3)
    valid = finite & (trace["valid"] == 1) & ~distance.excluded
    kept = min(BEST, best.ids.shape[1])
    top_ids, top = np.full((n, BEST), -1), np.full((n, BEST), -np.inf)
    top_ids[:, :kept], top[:, :kept] = best.ids[:, :kept], best.logprobs[:, :kept]
    with np.errstate(all="ignore"):
        values = {
            "kl": np.where(valid, distance.kl, 0),
            "kl_low": np.where(valid, distance.kl_low, 0),
            "tv": np.where(valid, distance.tv, 0),
            "tv_high": np.where(valid, distance.tv, 0),
            "rank": np.where(valid, _rank(trace, best), 1),
            "logprob": np.where(finite, best.target, 0),
            "top_ids": top_ids,
            "top_logprobs": top,
            "ties": np.zeros(n),
            "valid": valid,
            "seconds": np.full(n, seconds),
        }
        return {name: np.asarray(values[name]).astype(ROWS[name].dtype) for name in ROWS}


def _rank(trace: Arrays, best: Named) -> NDArray[np.int64]:
    heads = dense(trace, "head_ids", -1)
    found = best.ids == heads[:, :1] if heads.shape[1] else np.zeros(best.ids.shape, bool)
    return np.where(found.any(-1), found.argmax(-1) + 1, best.ids.shape[1] + 1)
