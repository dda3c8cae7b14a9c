from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.errors import EngineError
from workbench.metrics.divergence import full
from workbench.protocol.columns import count_rows
from workbench.worker.bounded import Top, bounded_rows
from workbench.worker.scoring import record_rows

N, V = 64, 500


def distributions(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    p = random.normal(0, 3, (N, V))
    q = p + random.normal(0, noise, (N, V)) if noise else p
    return tuple(x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (p, q))  # type: ignore[return-value]


def top_of(log_q: np.ndarray, k: int, targets: np.ndarray) -> Top:
    ids = np.argsort(-log_q, axis=1, kind="stable")[:, :k].astype("<i4")
    at = np.arange(N)
    rank = (log_q > log_q[at, targets][:, None]).sum(1) + 1
    shown = np.take_along_axis(log_q, ids, 1).astype("<f4")
    return Top(ids, shown, log_q[at, targets].astype("<f4"), rank.astype("<i4"))


def trace_of(log_p: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    return record_rows(torch.from_numpy(log_p).float(), torch.from_numpy(targets), 1, 7, V)


@pytest.fixture
def targets() -> np.ndarray:
    return np.random.default_rng(5).integers(0, V, N)


@pytest.mark.parametrize("noise", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("k", [1, 5, 20, 256, V])
def test_the_bounds_hold_the_truth_and_close_in_as_more_is_named(noise: float, k: int, targets: np.ndarray) -> None:
    log_p, log_q = distributions(noise)
    rows = bounded_rows(trace_of(log_p, targets), top_of(log_q, k, targets), 1.0, V, targets)
    exact = full(log_p, log_q)
    assert count_rows("rows", rows) == N
    assert rows["valid"].all()
    assert (rows["kl"] <= exact.kl + 1e-5).all()
    assert (rows["tv"] <= exact.tv + 1e-5).all() and (exact.tv <= rows["tv_high"] + 1e-5).all()
    fewer = bounded_rows(trace_of(log_p, targets), top_of(log_q, max(1, k // 2), targets), 1.0, V, targets)
    assert rows["kl"].mean() >= fewer["kl"].mean() - 1e-6
    assert (rows["tv_high"] - rows["tv"]).mean() <= (fewer["tv_high"] - fewer["tv"]).mean() + 1e-6


def test_equal_distributions_have_no_divergence_and_no_flips(targets: np.ndarray) -> None:
    log_p, log_q = distributions(0)
    rows = bounded_rows(trace_of(log_p, targets), top_of(log_q, 40, targets), 0.0, V, targets)
    assert rows["kl"].max() < 1e-9 and rows["tv"].max() < 1e-5 and (rows["rank"] == 1).all()
    assert np.allclose(rows["logprob"], log_q[np.arange(N), targets], atol=1e-5)


def test_the_rank_of_a_best_id_that_is_not_named_is_one_beyond_what_is(targets: np.ndarray) -> None:
    log_p, log_q = distributions(3.0)
    k = 3
    rows = bounded_rows(trace_of(log_p, targets), top_of(log_q, k, targets), 0.0, V)
    true = (log_q > log_q[np.arange(N), log_p.argmax(1)][:, None]).sum(1) + 1
    assert (rows["rank"] == np.minimum(true, k + 1)).all() and (true > k).any()


def test_order_does_not_matter_and_the_lowest_id_wins_among_equals(targets: np.ndarray) -> None:
    log_p, log_q = distributions(0.5)
    top = top_of(log_q, 20, targets)
    trace = trace_of(log_p, targets)
    shuffled = np.random.default_rng(1).permutation(20)
    other = Top(top.ids[:, shuffled], top.logprobs[:, shuffled], top.target, top.rank)
    for name, column in bounded_rows(trace, top, 0.0, V, targets).items():
        assert np.array_equal(column, bounded_rows(trace, other, 0.0, V, targets)[name], equal_nan=True), name
    flat = Top(np.array([[9, 4, 7]] * N, "<i4"), np.full((N, 3), -2, "<f4"), top.target, top.rank)
    rows = bounded_rows(trace, flat, 0.0, V)
    assert (rows["top_ids"] == [4, 7, 9, -1]).all() and (rows["ties"] == 2).all()


def test_what_is_no_distribution_is_excluded_row_by_row(targets: np.ndarray) -> None:
    log_p, log_q = distributions(0.5)
    top = top_of(log_q, 8, targets)
    top.logprobs[0, 3] = np.nan
    top.logprobs[1, 0] = 0.5
    top.logprobs[2] = -0.1
    top.ids[3] = -1
    top.ids[4, 1] = top.ids[4, 0]
    top.logprobs[5, 2] = -np.inf
    rows = bounded_rows(trace_of(log_p, targets), top, 0.0, V, targets)
    assert not rows["valid"][:6].any() and rows["valid"][6:].all()
    assert np.isfinite(rows["kl"]).all() and (rows["kl"][:6] == 0).all() and (rows["rank"][:6] == 1).all()


def test_a_token_that_the_engine_does_not_name_has_no_log_probability(targets: np.ndarray) -> None:
    log_p, log_q = distributions(0.5)
    targets = np.where(np.arange(N) % 2, log_q.argmax(1), targets)
    full_top = top_of(log_q, 5, targets)
    top = Top(full_top.ids, full_top.logprobs, np.full(N, np.nan, "<f4"), np.zeros(N, "<i4"))
    rows = bounded_rows(trace_of(log_p, targets), top, 0.0, V, targets)
    named = (top.ids == targets[:, None]).any(1)
    assert named.any() and not named.all() and rows["valid"].all()
    assert np.isnan(rows["logprob"][~named]).all()
    assert np.allclose(rows["logprob"][named], log_q[np.arange(N), targets][named], atol=1e-5)


def test_ids_that_cannot_be_are_refused(targets: np.ndarray) -> None:
    log_p, log_q = distributions(0.5)
    top = top_of(log_q, 8, targets)
    top.ids[0, 0] = V
    with pytest.raises(EngineError, match="names token 500"):
        bounded_rows(trace_of(log_p, targets), top, 0.0, V)
