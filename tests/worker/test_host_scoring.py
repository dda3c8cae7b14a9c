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
from workbench.worker import host_scoring, scoring

Logits = np.ndarray[Any, np.dtype[np.float32]]


def logits_of(n: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * scale).astype(np.float32)


def targets_of(n: int, vocab: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(9).integers(0, vocab, n).astype("<i4")


def record(logits: Logits, first: int = 1, seed: int = 4, vocab: int | None = None) -> Arrays:
    vocab = vocab or logits.shape[1]
    rows = host_scoring.record_rows(logits, targets_of(len(logits), vocab), first, seed, vocab)
    assert count_rows("trace", rows) == len(logits)
    return rows


def measure(logits: Logits, trace: Arrays, vocab: int | None = None) -> Arrays:
    vocab = vocab or logits.shape[1]
    rows = host_scoring.lane_rows(logits, targets_of(len(logits), vocab), trace, 0.5, vocab)
    assert count_rows("rows", rows) == len(logits)
    return rows


def torch_record(logits: Logits, vocab: int, first: int = 1, seed: int = 4) -> Arrays:
    targets = torch.from_numpy(targets_of(len(logits), vocab)).long()
    return scoring.record_rows(torch.from_numpy(logits), targets, first, seed, vocab)


def torch_measure(logits: Logits, trace: Arrays, vocab: int) -> Arrays:
    targets = torch.from_numpy(targets_of(len(logits), vocab)).long()
    return scoring.lane_rows(torch.from_numpy(logits), targets, trace, 0.5, vocab)


def same(a: Arrays, b: Arrays) -> None:
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert np.array_equal(values, b[name]), name


def exact_logprobs(logits: Logits) -> np.ndarray[Any, Any]:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=1)[:, None]


@pytest.mark.parametrize("vocab", [5, 33, 64, 97, 300, 1000, 5000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 20.0])
def test_a_lane_of_the_same_logits_reads_exactly_zero(vocab: int, scale: float) -> None:
    logits = logits_of(20, vocab, scale)
    trace = record(logits)
    rows = measure(logits, trace)
    for name in ("kl", "kl_low", "tv", "tv_high"):
        assert not rows[name].any()
    assert (rows["rank"] == 1).all() and rows["valid"].all()
    assert np.array_equal(rows["logprob"], trace["logprob"])
    assert np.array_equal(rows["ties"], trace["ties"])


@pytest.mark.parametrize("vocab", [5, 64, 97, 300, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 8.0, 15.0])
def test_traces_and_lanes_are_those_of_the_torch_twin(vocab: int, scale: float) -> None:
    logits = logits_of(60, vocab, scale)
    ours, theirs = record(logits, first=7), torch_record(logits, vocab, first=7)
    for name in ("ties", "valid", "k", "s", "head_ids"):
        assert np.array_equal(ours[name], theirs[name]), name
    for name in ("logprob", "lse", "entropy", "tail", "head_logprobs"):
        assert ours[name] == pytest.approx(theirs[name], abs=3e-6), name
    # A sample differs only where rounding moves it over an edge of the cumulated sums.
    assert (ours["sample_ids"] != theirs["sample_ids"]).sum() <= 1e-3 * len(theirs["sample_ids"])
    lane = logits + logits_of(60, vocab, 0.2, seed=1)
    mine, other = measure(lane, theirs), torch_measure(lane, theirs, vocab)
    for name in ("rank", "top_ids", "ties", "valid"):
        assert np.array_equal(mine[name], other[name]), name
    for name in ("kl", "kl_low", "tv", "tv_high", "logprob", "top_logprobs"):
        assert mine[name] == pytest.approx(other[name], abs=3e-6), name


def test_a_trace_of_torch_against_the_same_logits_in_numpy_is_zero_to_rounding() -> None:
    logits = logits_of(200, 5000)
    rows = measure(logits, torch_record(logits, 5000))
    assert np.abs(rows["kl"]).max() < 1e-9
    assert (rows["rank"] == 1).all()


def test_rows_depend_neither_on_chunking_nor_on_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = logits_of(40, 3000, 1.5), targets_of(40, 3000)
    whole = record(logits, first=101)
    parts = [
        host_scoring.record_rows(logits[a:b], targets[a:b], 101 + a, 4, 3000) for a, b in ((0, 7), (7, 8), (8, 40))
    ]
    same(whole, join("trace", parts))
    lane = logits + logits_of(40, 3000, 0.1, seed=2)
    rows = measure(lane, whole)
    monkeypatch.setattr(host_scoring, "BLOCK_BYTES", 1)
    same(whole, record(logits, first=101))
    same(rows, measure(lane, whole))


def test_logits_are_left_as_they_were_and_may_be_read_only() -> None:
    logits = logits_of(9, 700)
    kept = logits.copy()
    logits.flags.writeable = False
    measure(logits, record(logits))
    assert np.array_equal(logits, kept)


def test_all_is_stored_as_the_columns_say() -> None:
    logits = logits_of(3, 500)
    trace = record(logits)
    for kind, arrays in ((TRACE, trace), (ROWS, measure(logits, trace))):
        assert {name: array.dtype.str for name, array in arrays.items()} == {n: c.dtype for n, c in kind.items()}


def test_samples_follow_the_tail_of_the_reference() -> None:
    row = logits_of(1, 300, 1.0, seed=3)
    trace = record(np.repeat(row, 2000, axis=0))
    head = trace["head_ids"][:64]
    drawn = np.bincount(trace["sample_ids"], minlength=300)
    assert not drawn[head].any()
    exact = np.exp(exact_logprobs(row)[0])
    exact[head] = 0
    expected = exact / exact.sum() * drawn.sum()
    kept = expected > 0
    freedom = kept.sum() - 1
    assert abs(((drawn - expected)[kept] ** 2 / expected[kept]).sum() - freedom) < 4 * np.sqrt(2 * freedom)


def test_the_lowest_id_wins_among_equals_and_ties_are_counted() -> None:
    logits = np.zeros((4, 1000), np.float32)
    logits[0, [900, 30, 400]] = 5.0
    logits[1, 70] = 20.0
    logits[2] = -0.0
    logits[2, 500:] = 0.0
    logits[3, 64:200] = 3.0  # more equals than the head holds, in two neighbouring groups and more
    trace = record(logits)
    assert trace["ties"].tolist() == [2, 0, 255, 135]
    heads = dense(trace, "head_ids", -1)
    assert heads[0, :5].tolist() == [30, 400, 900, 0, 1]
    assert heads[2].tolist() == list(range(64))
    assert heads[3].tolist() == list(range(64, 128))
    rows = measure(logits, trace)
    assert rows["ties"].tolist() == [2, 0, 255, 135]
    assert rows["top_ids"][:, :4].tolist() == [[30, 400, 900, 0], [70, 0, 1, 2], [0, 1, 2, 3], [64, 65, 66, 67]]
    assert (rows["rank"] == 1).all()


def test_rank_counts_what_comes_before_and_is_one_exactly_without_a_flip() -> None:
    logits = np.round(logits_of(200, 400, 1.0), 1)
    trace = record(logits)
    lane = np.round(logits + logits_of(200, 400, 1.0, seed=1), 1)
    rows = measure(lane, trace)
    best = dense(trace, "head_ids", -1)[:, 0]
    order = np.argsort(-lane, axis=1, kind="stable")
    assert np.array_equal(rows["rank"], (order == best[:, None]).argmax(1) + 1)
    assert np.array_equal(rows["top_ids"], order[:, :4])
    assert 0 < (rows["rank"] > 1).sum() < 200


@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.5, 2.0, 8.0]),
    distance=st.sampled_from([1e-3, 0.03, 0.3, 2.0]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_lower_bound_holds_and_the_mean_agrees_with_the_whole_vocabulary(
    seed: int, scale: float, distance: float
) -> None:
    logits = logits_of(64, 700, scale, seed)
    lane = logits + logits_of(64, 700, distance, seed + 1)
    rows = measure(lane, record(logits, seed=seed))
    exact = full(exact_logprobs(logits), exact_logprobs(lane))
    assert (rows["kl_low"] <= exact.kl * (1 + 1e-4) + 1e-8).all()
    assert rows["valid"].all()
    spread = (rows["kl"] - exact.kl).std() / 8
    assert abs(rows["kl"].mean() - exact.kl.mean()) < 6 * spread + 1e-4 * exact.kl.mean() + 1e-8
    assert abs(rows["tv"].mean() - exact.tv.mean()) < 6 * (rows["tv"] - exact.tv).std() / 8 + 1e-5


def test_padding_beyond_the_vocabulary_is_cut_before_the_softmax_and_its_mass_reported() -> None:
    logits = logits_of(10, 200)
    padded = np.concatenate([logits, np.full((10, 56), 2.0, np.float32)], 1)
    trace = record(padded, vocab=200)
    same(trace, record(logits))
    rows = measure(padded, trace, vocab=200)
    same(rows, measure(logits, trace))
    expected = np.exp(exact_logprobs(padded))[:, 200:].sum(1)
    for arrays in (trace, rows):
        lost = host_scoring.lost_mass(padded, targets_of(10, 200), arrays, 200)
        assert lost == pytest.approx(expected, rel=1e-5)
    assert not host_scoring.lost_mass(logits, targets_of(10, 200), trace, 200).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["best", "rare"])
def test_non_finite_rows_are_marked_and_leave_their_neighbours_alone(bad: float, place: str) -> None:
    clean = logits_of(9, 500)
    broken = clean.copy()
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


def test_rows_of_nothing_but_nan_or_infinity_are_invalid_too() -> None:
    logits = logits_of(4, 5000)
    logits[0], logits[1], logits[2] = np.nan, np.inf, -np.inf
    trace = record(logits)
    assert trace["valid"].tolist() == [0, 0, 0, 1]
    assert measure(logits, trace)["valid"].tolist() == [0, 0, 0, 1]


def test_tokens_and_traces_of_another_vocabulary_are_refused() -> None:
    logits = logits_of(2, 50)
    trace = record(logits_of(2, 5000))
    with pytest.raises(EngineError, match="token 60"):
        host_scoring.record_rows(logits, np.array([1, 60]), 1, 0, 50)
    with pytest.raises(EngineError, match="outside the 50"):
        host_scoring.lane_rows(logits, np.array([1, 2]), trace, 0.0, 50)
    with pytest.raises(EngineError, match="1 rows of logits"):
        host_scoring.lane_rows(logits[:1], np.array([1]), trace, 0.0, 50)


def test_no_rows_give_no_rows() -> None:
    none, nothing = np.zeros((0, 50), np.float32), np.zeros(0, "<i4")
    trace = host_scoring.record_rows(none, nothing, 1, 0, 50)
    assert count_rows("trace", trace) == 0
    assert count_rows("rows", host_scoring.lane_rows(none, nothing, trace, 0.0, 50)) == 0
