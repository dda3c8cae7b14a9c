"""What llama-perplexity prints of a lane against a base file, from a few numbers a row, and what we add to it.

Definitions are those of llama.cpp's tools/perplexity: natural logarithms; means with the standard error of independent
values, sd / √(n − 1); percentiles by linear interpolation; Δp is the lane's probability of the token that followed less
the base's. Rows of a window depend on each other, so an error over windows stands beside that of the mean divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.metrics.stats import clustered_mean

Values = NDArray[np.floating[Any]]

KL_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)
DP_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)
INVALID_SHARE = 0.001
"""Rows without numbers beyond this share make the lane invalid."""


def statistics(rows: Mapping[str, Values], rows_each: int) -> dict[str, Any]:
    """The statistics of a file's rows, `rows_each` of each window: columns kl, kl_whole, mass, nll, nll_base, same.

    Rows where `kl` or `nll` are NaN are left out and counted in `invalid`; without any valid row the rest is None.
    kl: nats, over ids with ln p > −16, as llama-perplexity has it; kl_whole: over all ids, of the base's distribution
    made to add up to 1 (`mass` is what it adds up to). dp and same_top are shares, not percent.
    """
    valid = np.isfinite(rows["kl"]) & np.isfinite(rows["nll"])
    out: dict[str, Any] = {"rows": len(valid), "invalid": int((~valid).sum())}
    if not valid.any():
        return {**out, "ppl": None, "kl": None, "kl_whole": None, "mass": None, "dp": None, "same_top": None}
    windows = (np.arange(len(valid)) // rows_each)[valid]
    kl, whole, mass = (rows[name][valid].astype(np.float64) for name in ("kl", "kl_whole", "mass"))
    nll, base = (rows[name][valid].astype(np.float64) for name in ("nll", "nll_base"))
    change = np.exp(-nll) - np.exp(-base)
    same = float(rows["same"][valid].astype(np.float64).mean())
    square, square_error = _mean(np.square(change))
    root = math.sqrt(square)
    return {
        **out,
        "ppl": _perplexity(nll, base),
        "kl": {**_spread(kl, KL_PERCENTILES), "by_window": _clustered(kl, windows)},
        "kl_whole": {**_spread(whole, KL_PERCENTILES), "by_window": _clustered(whole, windows)},
        "mass": {"mean": float(mass.mean()), "min": float(mass.min()), "max": float(mass.max())},
        "dp": {
            **_spread(change, DP_PERCENTILES),
            "rms": root,
            "rms_error": 0.5 / root * square_error if root else 0.0,
        },
        "same_top": {"rate": same, "error": math.sqrt(same * (1 - same) / max(1, len(kl) - 1))},
    }


def perplexity(nll: Values) -> dict[str, float]:
    """exp of the mean and its error, to first order."""
    mean, error = _mean(nll.astype(np.float64))
    return {"value": math.exp(mean), "error": math.exp(mean) * error}


def _perplexity(nll: NDArray[np.float64], base: NDArray[np.float64]) -> dict[str, Any]:
    mine, theirs = perplexity(nll), perplexity(base)
    ratio, ratio_error = float(nll.mean() - base.mean()), _mean(nll - base)[1]
    covariance = float(((nll - nll.mean()) * (base - base.mean())).mean()) / max(1, len(nll) - 1)
    product = _mean(nll)[1] * _mean(base)[1]
    variance = mine["error"] ** 2 + theirs["error"] ** 2 - 2 * mine["value"] * theirs["value"] * covariance
    return {
        "lane": mine,
        "base": theirs,
        "correlation": covariance / product if product else None,
        "ln_ratio": {"value": ratio, "error": ratio_error},
        "ratio": {"value": math.exp(ratio), "error": math.exp(ratio) * ratio_error},
        "difference": {"value": mine["value"] - theirs["value"], "error": math.sqrt(max(0.0, variance))},
    }


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean, and standard error of independent values; 0 where there are too few, as llama-perplexity has it."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values) - 1) if len(values) > 10 else 0.0


def _spread(values: NDArray[np.float64], percentiles: tuple[float, ...]) -> dict[str, Any]:
    mean, error = _mean(values)
    found = np.percentile(values, percentiles)
    return {
        "mean": mean,
        "error": error,
        "max": float(values.max()),
        "percentiles": {f"{at:g}": float(value) for at, value in zip(percentiles, found, strict=True)},
        "min": float(values.min()),
    }


def _clustered(values: NDArray[np.float64], windows: NDArray[np.int64]) -> dict[str, Any] | None:
    mean = clustered_mean(values, windows)
    return None if mean is None else asdict(mean)
