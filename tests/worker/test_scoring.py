from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import EngineError
from workbench.metrics.divergence import full
from workbench.protocol.columns import ROWS, TRACE, count_rows, cut, dense, join
from workbench.protocol.wire import Arrays
from workbench.worker import passes
from workbench.worker.scoring import lane_rows, lost_mass, record_rows


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logits_of(
    n: int, vocab: int, scale: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def targets_of(n: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(9))


def record(logits: torch.Tensor, first: int = 1, seed: int = 4, vocab: int | None = None) -> Arrays:
    vocab = vocab or logits.shape[1]
    rows = record_rows(logits, targets_of(len(logits), vocab), first, seed, vocab)
    assert count_rows("trace", rows) == len(logits)
    return rows


def measure(logits: torch.Tensor, trace: Arrays, vocab: int | None = None) -> Arrays:
    vocab = vocab or logits.shape[1]
    rows = lane_rows(logits, targets_of(len(logits), vocab), trace, 0.5, vocab)
    assert count_rows("rows", rows) == len(logits)
    return rows


def same(a: Arrays, b: Arrays) -> None:
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert np.array_equal(values, b[name]), name


def exact_logprobs(logits: torch.Tensor) -> np.ndarray[Any, Any]:
    return torch.log_softmax(logits.double(), -1).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 33, 64, 97, 1000, 5000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_a_lane_of_the_same_logits_reads_exactly_zero(dtype: torch.dtype, vocab: int, scale: float) -> None:
    logits = logits_of(20, vocab, scale, dtype=dtype)
    trace = record(logits)
    rows = measure(logits, trace)
    for name in ("kl", "kl_low", "tv"):
        assert not rows[name].any()
    assert (rows["rank"] == 1).all() and rows["valid"].all()
    assert np.array_equal(rows["logprob"], trace["logprob"])
    assert np.array_equal(rows["ties"], trace["ties"])
    assert (rows["seconds"] == 0.5).all()


def test_zero_also_where_trace_and_lane_came_in_different_chunks() -> None:
    logits = logits_of(50, 3000, dtype=torch.bfloat16)
    trace, targets = record(logits), targets_of(50, 3000)
    parts = [
        lane_rows(logits[a:b], targets[a:b], cut("trace", trace, a, b), 0.0, 3000)
        for a, b in ((0, 1), (1, 18), (18, 50))
    ]
    assert not join("rows", parts)["kl"].any()


def test_rows_depend_neither_on_chunking_nor_on_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = logits_of(40, 3000, 1.5), targets_of(40, 3000)
    whole = record(logits, first=101)
    parts = [record_rows(logits[a:b], targets[a:b], 101 + a, 4, 3000) for a, b in ((0, 7), (7, 8), (8, 40))]
    same(whole, join("trace", parts))
    lane = logits + 0.1 * logits_of(40, 3000, seed=2)
    rows = measure(lane, whole)
    monkeypatch.setattr(passes, "CPU_BYTES", 1)
    same(whole, record(logits, first=101))
    same(rows, measure(lane, whole))


def test_samples_change_with_the_seed_and_with_the_position_only() -> None:
    logits = logits_of(1, 3000, 1.0).repeat(3, 1)
    trace = record(logits, first=5)
    ids = dense(trace, "sample_ids", -1)
    assert (ids[0] != ids[1]).any()
    assert np.array_equal(dense(record(logits, first=6), "sample_ids", -1)[0], ids[1])
    assert (dense(record(logits, first=5, seed=5), "sample_ids", -1)[0] != ids[0]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_tail_and_sums_agree_with_plain_float64(dtype: torch.dtype) -> None:
    logits = torch.cat([logits_of(20, 3000, scale, dtype=dtype) for scale in (0.5, 3.0, 8.0, 15.0)])
    trace, exact = record(logits), exact_logprobs(logits)
    ids, head = dense(trace, "head_ids", -1), dense(trace, "head_logprobs", 0)
    order = np.argsort(-exact, axis=1, kind="stable")
    for i, (k, s) in enumerate(zip(trace["k"], trace["s"], strict=True)):
        assert np.array_equal(ids[i, :k], order[i, :k])
        assert head[i, :k] == pytest.approx(exact[i, order[i, :k]], abs=3e-6)
        tail = np.logaddexp.reduce(exact[i, order[i, k:]])
        assert trace["tail"][i] == pytest.approx(tail, abs=1e-5)
        smaller = [size for size in (8, 16, 32) if size < k]
        assert all(np.exp(exact[i, order[i, size:]]).sum() > 1e-3 for size in smaller)
        assert k == 64 or np.exp(tail) <= 1e-3 + 1e-6
        assert s == (0 if tail < np.log(1e-6) else 8 if tail < np.log(1e-3) else 16 if tail < np.log(2e-2) else 32)
    assert set(trace["k"]) == {8, 16, 32, 64} or dtype == torch.bfloat16
    assert trace["lse"] == pytest.approx(torch.logsumexp(logits.double(), -1).numpy(), rel=1e-6)
    assert trace["entropy"] == pytest.approx(-(np.exp(exact) * exact).sum(-1), abs=1e-5)
    assert trace["logprob"] == pytest.approx(exact[np.arange(80), targets_of(80, 3000)], abs=1e-5)


def test_all_is_stored_as_the_columns_say_and_log_probabilities_in_float32() -> None:
    logits = logits_of(3, 500)
    trace = record(logits)
    rows = measure(logits, trace)
    for kind, arrays in ((TRACE, trace), (ROWS, rows)):
        assert {name: array.dtype.str for name, array in arrays.items()} == {n: c.dtype for n, c in kind.items()}
    assert trace["sample_logprobs"].dtype == trace["head_logprobs"].dtype == np.float32


def test_samples_follow_the_tail_of_the_reference() -> None:
    vocab, n = 300, 2000
    row = logits_of(1, vocab, 1.0, seed=3)
    trace = record(row.repeat(n, 1))
    head = trace["head_ids"][:64]
    drawn = np.bincount(trace["sample_ids"], minlength=vocab)
    assert not drawn[head].any()
    exact = np.exp(exact_logprobs(row)[0])
    exact[head] = 0
    expected = exact / exact.sum() * drawn.sum()
    kept = expected > 0
    chi_square = ((drawn - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)
    logprobs = exact_logprobs(row)[0]
    assert trace["sample_logprobs"] == pytest.approx(logprobs[trace["sample_ids"]], abs=1e-5)


def test_the_lowest_id_wins_among_equals_and_ties_are_counted() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [900, 30, 400]] = 5.0
    logits[1, 70] = 20.0
    logits[2] = -0.0
    logits[2, 500:] = 0.0
    trace = record(logits)
    assert trace["ties"].tolist() == [2, 0, 255]
    heads = dense(trace, "head_ids", -1)
    assert heads[0, :5].tolist() == [30, 400, 900, 0, 1]
    assert heads[2].tolist() == list(range(64))
    rows = measure(logits, trace)
    assert rows["ties"].tolist() == [2, 0, 255]
    assert rows["top_ids"][0].tolist() == [30, 400, 900, 0]
    assert rows["top_ids"][2].tolist() == [0, 1, 2, 3]
    assert (rows["rank"] == 1).all()


def test_rank_counts_what_comes_before_and_is_one_exactly_without_a_flip() -> None:
    logits = logits_of(200, 400, 1.0, dtype=torch.bfloat16)
    trace = record(logits)
    lane = (logits.float() + logits_of(200, 400, 1.0, seed=1)).bfloat16()
    rows = measure(lane, trace)
    best = dense(trace, "head_ids", -1)[:, 0]
    order = np.argsort(-lane.double().numpy(), axis=1, kind="stable")
    expected = (order == best[:, None]).argmax(1) + 1
    assert np.array_equal(rows["rank"], expected)
    assert np.array_equal(rows["top_ids"], order[:, :4])
    assert ((rows["rank"] == 1) == (rows["top_ids"][:, 0] == best)).all()
    assert 0 < (rows["rank"] > 1).sum() < 200
    exact = exact_logprobs(lane)
    assert rows["top_logprobs"] == pytest.approx(np.take_along_axis(exact, order[:, :4], 1), abs=1e-5)
    assert rows["logprob"] == pytest.approx(exact[np.arange(200), targets_of(200, 400)], abs=1e-5)


@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.5, 2.0, 8.0]),
    distance=st.sampled_from([1e-3, 0.03, 0.3, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_lower_bound_holds_and_the_mean_agrees_with_the_whole_vocabulary(
    seed: int, scale: float, distance: float, dtype: torch.dtype
) -> None:
    logits = logits_of(64, 700, scale, seed, dtype)
    lane = (logits.float() + logits_of(64, 700, distance, seed + 1)).to(dtype)
    rows = measure(lane, record(logits, seed=seed))
    exact = full(exact_logprobs(logits), exact_logprobs(lane))
    assert (rows["kl_low"] <= exact.kl * (1 + 1e-4) + 1e-8).all()
    assert rows["valid"].all()
    spread = (rows["kl"] - exact.kl).std() / 8
    assert abs(rows["kl"].mean() - exact.kl.mean()) < 6 * spread + 1e-4 * exact.kl.mean() + 1e-8
    far = rows["kl_low"] >= 0.1
    assert (rows["tv"] >= 0).all() and (rows["tv"][far] <= 1).all()
    assert abs(rows["tv"].mean() - exact.tv.mean()) < 6 * (rows["tv"] - exact.tv).std() / 8 + 1e-5


def test_padding_beyond_the_vocabulary_is_cut_before_the_softmax_and_its_mass_reported() -> None:
    logits = logits_of(10, 200, dtype=torch.bfloat16)
    padded = torch.cat([logits, torch.full((10, 56), 2.0, dtype=torch.bfloat16)], 1)
    trace = record(padded, vocab=200)
    same(trace, record(logits))
    rows = measure(padded, trace, vocab=200)
    same(rows, measure(logits, trace))
    expected = torch.softmax(padded.double(), -1)[:, 200:].sum(-1).numpy()
    targets = targets_of(10, 200)
    assert lost_mass(padded, targets, trace, 200) == pytest.approx(expected, rel=1e-5)
    assert lost_mass(padded, targets, rows, 200) == pytest.approx(expected, rel=1e-5)
    assert not lost_mass(logits, targets, trace, 200).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["best", "rare"])
def test_non_finite_rows_are_marked_and_leave_their_neighbours_alone(bad: float, place: str) -> None:
    clean = logits_of(9, 500)
    broken = clean.clone()
    broken[4, int(clean[4].argmax() if place == "best" else clean[4].argmin())] = bad
    trace, reference = record(broken), record(clean)
    assert trace["valid"].tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert trace["k"][4] == trace["s"][4] == 0
    for first, stop in ((0, 4), (5, 9)):
        same(cut("trace", trace, first, stop), cut("trace", reference, first, stop))
    for logits, against in ((broken, reference), (clean, trace), (broken, trace)):
        rows = measure(logits, against)
        assert rows["valid"].tolist() == trace["valid"].tolist()
        assert not rows["kl"].any() and not rows["tv"].any() and (rows["rank"] == 1).all()
        assert all(np.isfinite(values).all() for values in rows.values())
    kept, whole = measure(clean, trace), measure(clean, reference)
    assert np.array_equal(kept["logprob"], whole["logprob"])
    assert np.array_equal(kept["top_ids"], whole["top_ids"])


def test_tokens_and_traces_of_another_vocabulary_are_refused() -> None:
    logits = logits_of(2, 50)
    trace = record(logits_of(2, 5000))
    with pytest.raises(EngineError, match="token 60"):
        record_rows(logits, torch.tensor([1, 60]), 1, 0, 50)
    with pytest.raises(EngineError, match="outside the 50"):
        lane_rows(logits, torch.tensor([1, 2]), trace, 0.0, 50)
    with pytest.raises(EngineError, match="1 rows of logits"):
        lane_rows(logits[:1], torch.tensor([1]), trace, 0.0, 50)


def test_no_rows_give_no_rows() -> None:
    none = torch.zeros(0, 50)
    trace = record_rows(none, torch.zeros(0, dtype=torch.int64), 1, 0, 50)
    assert count_rows("trace", trace) == 0
    assert count_rows("rows", lane_rows(none, torch.zeros(0, dtype=torch.int64), trace, 0.0, 50)) == 0
