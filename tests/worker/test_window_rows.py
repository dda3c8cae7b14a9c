from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from workbench.protocol.logits_file import CLAMP, LEAD, Row, Shape, encode_rows
from workbench.worker import window_rows
from workbench.worker.window_rows import compared, recorded

VOCABULARY = 1001
N = 37


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


def rows_of(logits: np.ndarray, clamp: float = CLAMP) -> tuple[np.ndarray, Row]:
    codes = np.empty((len(logits), Shape(4, logits.shape[1], 1).row_codes), "<u2")
    encode_rows(logits, codes, clamp)
    lead = np.ascontiguousarray(codes[:, :LEAD]).view("<f4")
    return codes, Row(lead[:, 0], lead[:, 1], codes[:, LEAD : LEAD + logits.shape[1]])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype("f8")
    return wide - np.logaddexp.reduce(wide, axis=1)[:, None]


@pytest.fixture
def pair():
    rng = np.random.default_rng(4)
    base = (rng.normal(size=(N, VOCABULARY)) * 5).astype("f4")
    lane = base + rng.normal(size=base.shape).astype("f4") * 0.3
    return base, lane, rng.integers(0, VOCABULARY, N)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("block", [1 << 10, 1 << 18])
def test_rows_hold_what_their_definitions_say(pair, pool, monkeypatch, threads, block):
    monkeypatch.setattr(window_rows, "BLOCK_IDS", block)
    base, lane, targets = pair
    _, row = rows_of(base)
    found = compared(lane, row, targets, pool, threads)
    p, q = row.logprobs.astype("f8"), log_softmax(lane)
    here = np.arange(N)
    terms = np.exp(p) * (p - q)
    mass = np.exp(p).sum(1)
    assert np.allclose(found["kl"], np.where(p > -16, terms, 0).sum(1), rtol=1e-5, atol=2e-6)
    assert np.allclose(found["kl_whole"], terms.sum(1) / mass - np.log(mass), rtol=1e-5, atol=2e-6)
    assert np.allclose(found["mass"], mass, rtol=2e-6)
    assert np.allclose(found["nll"], -q[here, targets], atol=1e-5)
    assert np.allclose(found["nll_base"], -p[here, targets], atol=1e-5)
    assert np.array_equal(found["same"], base.argmax(1) == lane.argmax(1))
    assert 0 < found["same"].sum() < N


def test_a_row_against_itself_diverges_by_its_quantisation_at_most(pair, pool):
    base, _, targets = pair
    _, row = rows_of(base)
    found = compared(base, row, targets, pool, 2)
    assert np.abs(found["kl"]).max() < row.scale.max() / 2 + 1e-5
    assert np.abs(found["nll"] - found["nll_base"])[found["nll"] < 10].max() <= row.scale.max() / 2 + 1e-5
    assert found["same"].all()
    assert (found["kl_whole"] > -1e-6).all()


def test_the_lowest_of_equal_best_ids_counts_and_padding_beyond_the_file_does_not(pool):
    base = np.zeros((2, 50), "f4")
    base[:, [7, 30]] = 4
    lane = np.zeros((2, 64), "f4")
    lane[0, [7, 30]] = 4
    lane[1, [30, 31]] = 4
    lane[:, 60] = 9
    found = compared(lane, rows_of(base)[1], np.array([7, 7]), pool, 1)
    assert found["same"].tolist() == [1, 0]
    assert np.allclose(found["nll"][0], -log_softmax(lane[:1, :50])[0, 7], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_numbers_are_nan_and_alone(pair, pool, bad):
    base, lane, targets = pair
    _, row = rows_of(base)
    plain = compared(lane, row, targets, pool, 2)
    lane[11, base[11].argmax()] = bad
    found = compared(lane, row, targets, pool, 2)
    assert np.flatnonzero(~np.isfinite(found["kl"])).tolist() == [11]
    for name in ("kl", "kl_whole", "nll"):
        assert np.isnan(found[name][11])
        assert np.array_equal(np.delete(found[name], 11), np.delete(plain[name], 11))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_recording_on_threads_writes_the_same_rows(pair, pool, threads):
    base, _, targets = pair
    codes, _ = rows_of(base)
    found = np.empty_like(codes)
    rows = recorded(base, targets, found, pool, threads)
    assert np.array_equal(found, codes)
    assert np.allclose(rows["nll"], -log_softmax(base)[np.arange(N), targets], atol=1e-5)


def test_an_error_on_one_thread_is_raised_after_all_have_ended(pair, pool, monkeypatch):
    base, lane, targets = pair
    ended = []

    def fail(*_):
        ended.append(1)
        raise RuntimeError("broken")

    monkeypatch.setattr(window_rows, "_compare", fail)
    with pytest.raises(RuntimeError, match="broken"):
        compared(lane, rows_of(base)[1], targets, pool, 3)
    assert len(ended) == 3
