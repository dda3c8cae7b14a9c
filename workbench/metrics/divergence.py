"""How far a lane's distribution q is from the reference's p at one position: definitions, estimates and bounds.

KL is KL(p||q) in nats, p being the reference. A compact trace holds p at a head of its most probable ids, the log-mass
of the tail, and ids drawn from the tail; `estimate` turns these and the lane's log-probabilities at the same ids into
numbers. Everything is computed in float64, row by row, and is exactly 0 where both sides are bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Stored = NDArray[np.floating[Any]]

FULL = "full"
HEAD_AND_SAMPLES = "head+tail samples"
BOUNDED = "bounded"
"""The estimators; every number names the one it comes from."""

NEGLIGIBLE_TAIL = -30.0
"""ln t_p below which the tail's samples are skipped: what they could add is under 1e-13 nats times their mean."""

FAR = 0.1
"""KL_low from which the plain mean of −ln x replaces its control-variate form, whose noise grows with the distance."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per row: KL(p||q) and its lower bound (nats), total variation, and whether q = 0 somewhere p > 0.

    An excluded row has an infinite KL (or an unusable input) and holds zeros.
    """

    kl: Floats
    kl_low: Floats
    tv: Floats
    excluded: NDArray[np.bool_]


def excess(d: Floats) -> Floats:
    """φ(d) = expm1(d) − d ≥ 0, to within a few ulp for every d; a series where the difference would cancel."""
    series = np.ones_like(d)
    for k in range(10, 2, -1):
        series = 1 + d / k * series
    return np.where(np.abs(d) < 0.1, d * d / 2 * series, np.expm1(d) - d)


def weighted_excess(log_p: Floats, log_q: Floats) -> Floats:
    """p φ(ln q − ln p) = q − p − p (ln q − ln p) elementwise: q where p is 0, infinite where only q is 0."""
    with np.errstate(all="ignore"):
        d = log_q - log_p
        p = np.exp(log_p)
        value = np.where(d > 30, np.exp(log_q) - p * (1 + d), p * excess(np.minimum(d, 30)))
    return np.where(np.isneginf(log_p), np.exp(log_q), np.where(np.isneginf(log_q), np.inf, value))


def full(log_p: Stored, log_q: Stored) -> Divergence:
    """The exact values from whole distributions of shape (n, V)."""
    log_p, log_q = log_p.astype(np.float64), log_q.astype(np.float64)
    kl = weighted_excess(log_p, log_q).sum(-1)
    tv = 0.5 * np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1)
    return _divergence(kl, kl, tv)


@dataclass(frozen=True, slots=True)
class Compact:
    """One side's log-probabilities at a trace's ids: `head` (n, K) and `samples` (n, S), filled up with −inf; the
    log-mass outside the head, `tail` (n,)."""

    head: Stored
    tail: Stored
    samples: Stored


def estimate(p: Compact, q: Compact, counts: NDArray[np.int64]) -> Divergence:
    """The unbiased estimate from a head and `counts` (n,) samples a row, drawn from p restricted to the tail.

    KL_low = Σ_head p φ(ln q/p) + t_p φ(ln t_q/t_p), and KL = KL_low + t_p · mean_s φ(ln x_s) where KL_low < 0.1, else
    KL_low + t_p · mean_s(−ln x_s), with x_s = (q_s/t_q)/(p_s/t_p). The switch does not look at the samples, so neither
    form biases the mean. The second may fall below KL_low for a row, and it is not clipped.
    """
    p_head, q_head = p.head.astype(np.float64), q.head.astype(np.float64)
    p_tail, q_tail = p.tail.astype(np.float64), q.tail.astype(np.float64)
    drawn = counts * (p_tail >= NEGLIGIBLE_TAIL)
    used = np.less(np.arange(int(p.samples.shape[1])), drawn[:, None])
    # Where nothing is drawn both sides read 0, so that no −inf − −inf arises.
    p_samples = np.where(used, p.samples, 0).astype(np.float64)
    q_samples = np.where(used, q.samples, 0).astype(np.float64)
    p_mass = np.exp(p_tail)

    kl_low = weighted_excess(p_head, q_head).sum(-1) + weighted_excess(p_tail, q_tail)
    near: NDArray[np.bool_] = kl_low < FAR
    with np.errstate(all="ignore"):
        ratio = q_samples - p_samples
        log_x = np.where(used, ratio - (q_tail - p_tail)[:, None], 0)
        near_term = np.where(used, weighted_excess(p_tail[:, None], p_tail[:, None] + log_x), 0)
        terms = np.where(near[:, None], near_term, np.where(used, -p_mass[:, None] * log_x, 0))
        kl = kl_low + _mean(terms, drawn)

        loss = np.where(used, -np.expm1(ratio), 0)
        difference = np.exp(p_head) - np.exp(q_head)
        lump = p_mass - np.exp(q_tail)
        tail_near = np.where(drawn > 0, p_mass * _mean(np.abs(loss), drawn), np.abs(lump))
        tail_far = np.where(drawn > 0, p_mass * _mean(np.maximum(loss, 0), drawn), np.maximum(lump, 0))
        tv_near: Floats = 0.5 * (np.abs(difference).sum(-1) + tail_near)
        tv_far: Floats = np.maximum(difference, 0).sum(-1) + tail_far
    return _divergence(kl, kl_low, np.where(near, tv_near, tv_far))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a server's own top-k allows: KL is at least `kl_low` (no upper bound exists), TV lies in an interval."""

    kl_low: Floats
    tv_low: Floats
    tv_high: Floats


def bounded(p: Compact, q: Compact) -> Bounds:
    """Bounds from the ids that both sides name (`head`, (n, K)) and each side's log-mass outside them (`tail`).

    With D = Σ|p − q| over those ids, TV lies in [½(D + |t_p − t_q|), ½(D + t_p + t_q)].
    """
    p_head, q_head = p.head.astype(np.float64), q.head.astype(np.float64)
    p_tail, q_tail = p.tail.astype(np.float64), q.tail.astype(np.float64)
    p_mass, q_mass = np.exp(p_tail), np.exp(q_tail)
    distance = np.abs(np.exp(p_head) - np.exp(q_head)).sum(-1)
    return Bounds(
        weighted_excess(p_head, q_head).sum(-1) + weighted_excess(p_tail, q_tail),
        0.5 * (distance + np.abs(p_mass - q_mass)),
        0.5 * (distance + p_mass + q_mass),
    )


def tv_bound(kl: Floats) -> Floats:
    """The most total variation that a KL allows: min(√(KL/2), √(1 − e^−KL)) (Pinsker; Bretagnolle and Huber)."""
    return np.minimum(np.sqrt(kl / 2), np.sqrt(-np.expm1(-kl)))


def flip_bound(log_p1: Floats, log_p2: Floats) -> Floats:
    """The least KL(p||q) at which q can prefer another id, given the reference's two best log-probabilities.

    (p1 + p2)(ln 2 − h(p1/(p1 + p2))), h the binary entropy in nats: q spends p1 + p2 evenly on both and keeps the rest.
    """
    with np.errstate(all="ignore"):
        total = np.logaddexp(log_p1, log_p2)
        a, b = log_p1 - total, log_p2 - total
        entropy = -(np.exp(a) * a + np.where(np.isneginf(b), 0, np.exp(b) * b))
    return np.exp(total) * np.maximum(np.log(2) - entropy, 0)


def _mean(values: Floats, counts: NDArray[np.int64]) -> Floats:
    return values.sum(-1) / np.maximum(counts, 1)


def _divergence(kl: Floats, kl_low: Floats, tv: Floats) -> Divergence:
    excluded = ~(np.isfinite(kl) & np.isfinite(kl_low) & np.isfinite(tv))
    return Divergence(np.where(excluded, 0, kl), np.where(excluded, 0, kl_low), np.where(excluded, 0, tv), excluded)
