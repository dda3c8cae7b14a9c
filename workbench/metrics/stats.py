"""Aggregates of per-token values: means with clustered errors, flip rates, quantiles, paired differences.

Neighbouring tokens depend on each other, so an error bar is taken over clusters (sessions or turns), never over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating]
Labels = NDArray[np.integer]

MIN_CLUSTERS = 5
"""Fewer clusters than this give no interval."""

BOOTSTRAP_DRAWS = 2000
P999_FROM = 1000
"""Values from which a 99.9th percentile is more than the maximum under another name."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its clustered standard error and 95 % interval, None with fewer than MIN_CLUSTERS clusters."""

    mean: float
    se: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    method: str


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of tokens with its 95 % interval, None with fewer than MIN_CLUSTERS clusters."""

    count: int
    n: int
    rate: float
    low: float | None
    high: float | None
    clusters: int
    method: str


def clustered_mean(values: Values, clusters: Labels) -> Mean | None:
    """The mean and its CR1 cluster-robust error; None without values.

    Var = G/(G − 1) · Σ_g (Σ_{i in g} (x_i − x̄))² / n² (Cameron and Miller 2015, for a mean: one regressor); the
    interval is Student's with G − 1 degrees of freedom.
    """
    if not len(values):
        return None
    values = values.astype(np.float64)
    mean = float(values.mean())
    sums, _ = _by_cluster(values - mean, clusters)
    groups = len(sums)
    if groups < MIN_CLUSTERS:
        return Mean(mean, None, None, None, len(values), groups, _too_few(groups))
    se = math.sqrt(groups / (groups - 1) * float(np.square(sums).sum())) / len(values)
    half = student_975(groups - 1) * se
    return Mean(mean, se, mean - half, mean + half, len(values), groups, "CR1")


def paired_difference(a: Values, b: Values, clusters: Labels) -> Mean | None:
    """Mean of a − b over the same positions, with its own clustered error: how two lanes are compared."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    return clustered_mean(a.astype(np.float64) - b.astype(np.float64), clusters)


def rate(
    events: NDArray[np.bool_], clusters: Labels, *, effective_n: float | None = None, seed: int = 0
) -> Rate | None:
    """A share of tokens with a cluster bootstrap percentile interval; None without tokens.

    Where nothing happened the bootstrap knows nothing: the upper end is then 3/n_eff (rule of three), with
    `effective_n` independent tokens (see `effective_count`), or the number of clusters where it is not given.
    """
    n = len(events)
    if not n:
        return None
    counts, sizes = _by_cluster(events.astype(np.float64), clusters)
    count, groups = int(events.sum()), len(counts)
    if groups < MIN_CLUSTERS:
        return Rate(count, n, count / n, None, None, groups, _too_few(groups))
    if not count:
        high = min(1.0, 3 / (effective_n if effective_n else groups))
        return Rate(0, n, 0.0, 0.0, high, groups, "3/n_eff")
    chosen = np.random.default_rng(seed).integers(0, groups, (BOOTSTRAP_DRAWS, groups))
    rates = counts[chosen].sum(1) / sizes[chosen].sum(1)
    low, high = np.quantile(rates, (0.025, 0.975))
    return Rate(count, n, count / n, float(low), float(high), groups, "cluster bootstrap")


def effective_count(values: Values, clusters: Labels) -> float | None:
    """How many independent values carry as much about the mean as these: variance over squared clustered error.

    Kept between the number of clusters and n; None with fewer than MIN_CLUSTERS clusters.
    """
    mean = clustered_mean(values, clusters)
    if mean is None or mean.se is None:
        return None
    if mean.se == 0:
        return float(mean.clusters)
    return float(np.clip(values.astype(np.float64).var() / mean.se**2, mean.clusters, mean.n))


def quantiles(values: Values) -> dict[str, float | None]:
    """median, p90, p99, p999 (None below P999_FROM values) and max; all None without values."""
    names = {"median": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    if not len(values):
        return dict.fromkeys(names)
    found = np.quantile(values.astype(np.float64), list(names.values()))
    out: dict[str, float | None] = {name: float(value) for name, value in zip(names, found, strict=True)}
    if len(values) < P999_FROM:
        out["p999"] = None
    return out


def top_share(values: Values, share: float = 0.01) -> float | None:
    """The part of the sum that the largest `share` of the values (at least one) holds; None for a sum not above 0."""
    total = float(values.sum(dtype=np.float64))
    if not len(values) or total <= 0:
        return None
    count = math.ceil(share * len(values))
    return float(np.partition(values.astype(np.float64), len(values) - count)[-count:].sum()) / total


def student_975(freedom: int) -> float:
    """Student's 97.5 % quantile, within 0.1 % from 4 degrees of freedom on (Abramowitz and Stegun 26.7.5)."""
    x = NormalDist().inv_cdf(0.975)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def _by_cluster(values: NDArray[np.float64], clusters: Labels) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and size of each cluster."""
    _, index = np.unique(clusters, return_inverse=True)
    return np.bincount(index, weights=values).astype(np.float64), np.bincount(index).astype(np.float64)


def _too_few(groups: int) -> str:
    return f"none: {groups} cluster{'' if groups == 1 else 's'}, fewer than {MIN_CLUSTERS}"
