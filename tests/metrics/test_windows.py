from __future__ import annotations

import math

import numpy as np
import pytest

from workbench.metrics.stats import clustered_mean
from workbench.metrics.windows import perplexity, statistics

EACH = 25


def make(n: int = 8 * EACH, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = rng.exponential(2, n)
    return {
        "kl": rng.exponential(0.1, n),
        "kl_whole": rng.exponential(0.1, n),
        "mass": 1 + rng.exponential(0.001, n),
        "nll": base + rng.normal(0.05, 0.2, n).clip(-base),
        "nll_base": base,
        "same": (rng.random(n) < 0.8).astype("u1"),
    }


def by_sums(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """The same from running sums, as llama-perplexity keeps them."""
    n = len(rows["kl"])

    def mean(values: np.ndarray) -> tuple[float, float]:
        first, second = math.fsum(values) / n, math.fsum(values**2) / n
        return first, math.sqrt((second - first**2) / (n - 1))

    (nll, nll_error), (base, base_error) = mean(rows["nll"]), mean(rows["nll_base"])
    covariance = (math.fsum(rows["nll"] * rows["nll_base"]) / n - nll * base) / (n - 1)
    change = np.exp(-rows["nll"]) - np.exp(-rows["nll_base"])
    square, square_error = mean(change**2)
    same = float(rows["same"].sum()) / n
    ppl, ppl_base = math.exp(nll), math.exp(base)
    ratio_error = math.sqrt(nll_error**2 + base_error**2 - 2 * covariance)
    both = 2 * ppl * ppl_base * covariance
    return {
        "ppl": ppl,
        "ppl_error": ppl * nll_error,
        "correlation": covariance / (nll_error * base_error),
        "ln_ratio": nll - base,
        "ln_ratio_error": ratio_error,
        "ratio_error": math.exp(nll - base) * ratio_error,
        "difference_error": math.sqrt((ppl * nll_error) ** 2 + (ppl_base * base_error) ** 2 - both),
        "kl": mean(rows["kl"])[0],
        "kl_error": mean(rows["kl"])[1],
        "dp": mean(change)[0],
        "dp_error": mean(change)[1],
        "rms": math.sqrt(square),
        "rms_error": 0.5 / math.sqrt(square) * square_error,
        "same": same,
        "same_error": math.sqrt(same * (1 - same) / (n - 1)),
    }


def percentile(values: np.ndarray, fraction: float) -> float:
    ordered = np.sort(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    return float((1 - place + low) * ordered[low] + (place - low) * ordered[min(low + 1, len(ordered) - 1)])


def test_every_statistic_is_what_running_sums_give() -> None:
    rows = make()
    found, truth = statistics(rows, EACH), by_sums(rows)
    got = {
        "ppl": found["ppl"]["lane"]["value"],
        "ppl_error": found["ppl"]["lane"]["error"],
        "correlation": found["ppl"]["correlation"],
        "ln_ratio": found["ppl"]["ln_ratio"]["value"],
        "ln_ratio_error": found["ppl"]["ln_ratio"]["error"],
        "ratio_error": found["ppl"]["ratio"]["error"],
        "difference_error": found["ppl"]["difference"]["error"],
        "kl": found["kl"]["mean"],
        "kl_error": found["kl"]["error"],
        "dp": found["dp"]["mean"],
        "dp_error": found["dp"]["error"],
        "rms": found["dp"]["rms"],
        "rms_error": found["dp"]["rms_error"],
        "same": found["same_top"]["rate"],
        "same_error": found["same_top"]["error"],
    }
    assert got == pytest.approx(truth, rel=1e-9)
    assert found["ppl"]["base"] == perplexity(rows["nll_base"])
    assert (found["rows"], found["invalid"]) == (200, 0)


def test_percentiles_interpolate_and_the_ends_are_the_extremes() -> None:
    rows = make()
    found = statistics(rows, EACH)
    assert list(found["kl"]["percentiles"]) == ["99.9", "99", "95", "90", "50", "10", "5", "1", "0.1"]
    for at, value in found["kl"]["percentiles"].items():
        assert value == pytest.approx(percentile(rows["kl"], float(at) / 100), rel=1e-9)
    assert (found["kl"]["max"], found["kl"]["min"]) == (rows["kl"].max(), rows["kl"].min())
    assert "75" in found["dp"]["percentiles"]
    assert found["mass"]["min"] <= found["mass"]["mean"] <= found["mass"]["max"]


def test_the_error_over_windows_is_clustered_by_them() -> None:
    rows = make()
    found = statistics(rows, EACH)["kl"]["by_window"]
    mean = clustered_mean(rows["kl"], np.repeat(np.arange(8), EACH))
    assert mean is not None
    assert (found["se"], found["clusters"], found["method"]) == (mean.se, 8, "CR1")
    assert (
        statistics({name: values[: 2 * EACH] for name, values in rows.items()}, EACH)["kl"]["by_window"]["se"] is None
    )


def test_rows_without_numbers_are_left_out_and_counted() -> None:
    rows = make()
    whole = statistics({name: np.delete(values, [3, 70]) for name, values in rows.items()}, EACH)
    for name in ("kl", "kl_whole", "nll"):
        rows[name][[3, 70]] = np.nan
    found = statistics(rows, EACH)
    assert (found["rows"], found["invalid"]) == (200, 2)
    assert found["dp"] == whole["dp"]
    assert found["kl"]["mean"] == whole["kl"]["mean"]
    rows["kl"][:] = np.nan
    assert statistics(rows, EACH) == {"rows": 200, "invalid": 200} | dict.fromkeys(
        ("ppl", "kl", "kl_whole", "mass", "dp", "same_top")
    )


def test_a_lane_that_equals_the_base_differs_by_nothing() -> None:
    rows = make()
    rows["nll"] = rows["nll_base"].copy()
    rows["kl"][:] = rows["kl_whole"][:] = 0
    rows["same"][:] = 1
    found = statistics(rows, EACH)
    assert found["ppl"]["ln_ratio"] == {"value": 0.0, "error": 0.0}
    assert found["ppl"]["correlation"] == pytest.approx(1)
    assert (found["dp"]["rms"], found["dp"]["rms_error"], found["same_top"]["rate"]) == (0, 0, 1)
