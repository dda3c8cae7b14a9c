from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workbench.metrics.divergence import (
    Compact,
    Divergence,
    bounded,
    estimate,
    excess,
    flip_bound,
    full,
    tv_bound,
    weighted_excess,
)

Floats = NDArray[np.float64]


def log_softmax(logits: Any) -> Floats:
    logits = np.asarray(logits, np.float64)
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def rows_of(seed: int, scale: float, distance: float, n: int = 4, vocab: int = 120) -> tuple[Floats, Floats]:
    random = np.random.default_rng(seed)
    logits = random.normal(0, scale, (n, vocab))
    return log_softmax(logits), log_softmax(logits + random.normal(0, distance, (n, vocab)))


def compact(log_p: Floats, log_q: Floats, size: int, samples: int, seed: int) -> tuple[Compact, Compact, Any]:
    random = np.random.default_rng(seed)
    n = len(log_p)
    order = np.argsort(-log_p, axis=1, kind="stable")
    head, rest = order[:, :size], order[:, size:]
    tails = [np.logaddexp.reduce(np.take_along_axis(side, rest, 1), axis=1) for side in (log_p, log_q)]
    weights = np.cumsum(np.exp(np.take_along_axis(log_p, rest, 1) - tails[0][:, None]), axis=1)
    aims = random.random((n, samples)) * weights[:, -1:]
    drawn = np.stack([rest[i, np.searchsorted(weights[i], aims[i], side="right")] for i in range(n)])
    sides = [
        Compact(np.take_along_axis(side, head, 1), tail, np.take_along_axis(side, drawn, 1))
        for side, tail in zip((log_p, log_q), tails, strict=True)
    ]
    return sides[0], sides[1], np.full(n, samples)


shapes = {
    "seed": st.integers(0, 2**32 - 1),
    "scale": st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    "distance": st.sampled_from([1e-7, 1e-3, 0.1, 1.0, 5.0]),
}


@given(d=st.floats(-40, 40))
@settings(deadline=None)
def test_excess_is_positive_and_accurate_for_small_and_large_arguments(d: float) -> None:
    value = float(excess(np.array([d]))[0])
    exact = np.longdouble(d)
    if abs(d) < 1:
        term, total = exact, np.longdouble(0)
        for k in range(2, 30):
            term = term * exact / k
            total += term
        assert value == pytest.approx(float(total), rel=1e-13)
    else:
        assert value == pytest.approx(float(np.expm1(exact) - exact), rel=1e-13)
    assert value >= 0


def test_excess_of_zero_is_exactly_zero() -> None:
    assert excess(np.zeros(3)).tolist() == [0, 0, 0]


def test_weighted_excess_handles_zero_mass_on_either_side_and_huge_ratios() -> None:
    zero = -np.inf
    got = weighted_excess(np.array([zero, zero, -1.0, -800.0]), np.array([zero, -2.0, zero, -0.5]))
    assert got[0] == 0
    assert got[1] == pytest.approx(np.exp(-2))
    assert np.isposinf(got[2])
    assert got[3] == pytest.approx(np.exp(-0.5))


@given(**shapes)
@settings(max_examples=60, deadline=None)
def test_invariants_of_exact_values_on_random_and_peaked_rows(seed: int, scale: float, distance: float) -> None:
    log_p, log_q = rows_of(seed, scale, distance)
    found = full(log_p, log_q)
    plain = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    assert found.kl == pytest.approx(plain, abs=1e-12, rel=1e-9)
    assert (found.kl >= 0).all()
    assert (found.tv >= 0).all() and (found.tv <= 1 + 1e-12).all()
    assert (found.tv <= tv_bound(found.kl) + 1e-12).all()
    best = -np.sort(-log_p, axis=1)
    flipped = log_p.argmax(1) != log_q.argmax(1)
    assert (found.kl[flipped] >= flip_bound(best[:, 0], best[:, 1])[flipped] - 1e-12).all()


@given(**shapes)
@settings(max_examples=60, deadline=None)
def test_lower_bound_never_exceeds_the_exact_value_and_tv_stays_a_share(
    seed: int, scale: float, distance: float
) -> None:
    log_p, log_q = rows_of(seed, scale, distance)
    exact = full(log_p, log_q)
    found = estimate(*compact(log_p, log_q, 8, 32, seed))
    assert (found.kl_low <= exact.kl + 1e-12).all()
    assert (found.kl_low >= 0).all()
    far = found.kl_low >= 0.1
    assert (found.kl[~far] >= found.kl_low[~far]).all()
    assert (found.tv >= 0).all()
    assert (found.tv[far] <= 1 + 1e-12).all()


@given(**shapes)
@settings(max_examples=30, deadline=None)
def test_equal_distributions_give_exactly_zero(seed: int, scale: float, distance: float) -> None:
    log_p, _ = rows_of(seed, scale, distance)
    exact = full(log_p, log_p)
    found = estimate(*compact(log_p, log_p, 8, 16, seed))
    for value in (exact.kl, exact.tv, found.kl, found.kl_low, found.tv):
        assert not value.any()


def test_flip_bound_is_attained_by_the_nearest_distribution_that_flips() -> None:
    p = np.array([[0.6, 0.3, 0.1]])
    q = np.array([[0.45, 0.45, 0.1]])
    bound = flip_bound(np.log(p[:, 0]), np.log(p[:, 1]))
    assert full(np.log(p), np.log(q)).kl == pytest.approx(bound)
    assert flip_bound(np.zeros(1), np.full(1, -np.inf)) == pytest.approx(np.log(2))


def many_draws(log_p: Floats, log_q: Floats, size: int, samples: int, repeats: int) -> Divergence:
    wide = [np.repeat(side[None], repeats, 0) for side in (log_p, log_q)]
    return estimate(*compact(wide[0], wide[1], size, samples, seed=5))


@pytest.mark.parametrize(("distance", "low", "high"), [(0.05, 0.0, 0.1), (0.6, 0.05, 0.6), (3.0, 1.0, 20.0)])
def test_estimate_is_unbiased_within_its_standard_error_near_and_far(distance: float, low: float, high: float) -> None:
    random = np.random.default_rng(11)
    logits = random.normal(0, 1, 400)
    log_p, log_q = log_softmax(logits), log_softmax(logits + random.normal(0, distance, 400))
    exact = full(log_p[None], log_q[None])
    assert low < exact.kl[0] < high
    found = many_draws(log_p, log_q, 8, 8, 4000)
    for value, truth in ((found.kl, exact.kl[0]), (found.tv, exact.tv[0])):
        assert abs(value.mean() - truth) < 4 * value.std() / np.sqrt(len(value))
    assert (found.kl_low <= exact.kl[0] + 1e-12).all()


def test_a_far_row_of_three_nats_may_fall_below_its_lower_bound_and_is_not_clipped() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(0, 1, 400)
    log_p, log_q = log_softmax(logits), log_softmax(random.normal(0, 2, 400))
    exact = full(log_p[None], log_q[None]).kl[0]
    assert 2 < exact < 4
    found = many_draws(log_p, log_q, 8, 4, 4000)
    assert (found.kl < found.kl_low).any()
    assert abs(found.kl.mean() - exact) < 4 * found.kl.std() / np.sqrt(4000)


def test_a_tail_of_almost_no_mass_skips_the_samples_and_still_counts_what_the_lane_puts_there() -> None:
    p = Compact(np.log([[0.7, 0.3]]), np.array([-40.0]), np.array([[-45.0]]))
    q = Compact(np.log([[0.6, 0.2]]), np.log([0.2]), np.array([[-np.inf]]))
    found = estimate(p, q, np.array([1]))
    assert not found.excluded[0]
    assert found.kl[0] == found.kl_low[0] == pytest.approx(0.7 * np.log(0.7 / 0.6) + 0.3 * np.log(0.3 / 0.2))
    assert found.tv[0] == pytest.approx(0.2)


def test_an_empty_tail_on_both_sides_adds_nothing() -> None:
    head = np.log([[0.75, 0.25]])
    tail = np.array([-np.inf])
    found = estimate(
        Compact(head, tail, np.zeros((1, 0))), Compact(head[:, ::-1], tail, np.zeros((1, 0))), np.array([0])
    )
    assert found.kl[0] == pytest.approx(full(head, head[:, ::-1]).kl[0])
    assert found.tv[0] == pytest.approx(0.5)


@pytest.mark.parametrize("where", ["head", "tail", "samples"])
def test_a_lane_without_mass_where_the_reference_has_some_is_excluded_not_infinite(where: str) -> None:
    p = Compact(np.log([[0.5, 0.3]]), np.log([0.2]), np.log([[0.01]]))
    values = {"head": np.log([[0.5, 0.3]]), "tail": np.log([0.2]), "samples": np.log([[0.01]])}
    values[where] = values[where].copy()
    values[where][..., -1] = -np.inf
    found = estimate(p, Compact(**values), np.array([1]))
    assert found.excluded[0]
    assert found.kl[0] == found.tv[0] == 0


def test_bounds_of_a_server_that_names_only_its_own_ids_hold_the_exact_values() -> None:
    log_p, log_q = rows_of(1, 2.0, 0.5, n=50)
    p, q, _ = compact(log_p, log_q, 20, 1, 0)
    exact, found = full(log_p, log_q), bounded(p, q)
    assert (found.kl_low <= exact.kl + 1e-12).all()
    assert (found.tv_low <= exact.tv + 1e-12).all()
    assert (exact.tv <= found.tv_high + 1e-12).all()
