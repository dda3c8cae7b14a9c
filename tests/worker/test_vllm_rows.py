from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from workbench.errors import EngineError
from workbench.protocol.columns import count_rows
from workbench.worker.scoring import lane_rows, record_rows
from workbench.worker.vllm.flat import Named, joined, named
from workbench.worker.vllm.named import named_rows, trace_ids
from workbench.worker.vllm.segments import segments

V = 400


@dataclass
class Flat:
    """The fields of vLLM's FlatLogprobs, filled as it fills them."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def add(self, ids, logprobs, rank) -> None:
        self.start_indices.append(len(self.token_ids))
        self.token_ids += ids
        self.logprobs += logprobs
        self.ranks += [rank, *range(1, len(ids))][: len(ids)]
        self.end_indices.append(len(self.token_ids))


def flat_of(logits, targets, k) -> Flat:
    flat = Flat()
    flat.add([], [], 0)
    for row, target in zip(logits.log_softmax(-1), targets.tolist(), strict=True):
        top = row.topk(k)
        rank = int((row >= row[target]).sum())
        flat.add([target, *top.indices.tolist()], [float(row[target]), *top.values.tolist()], rank)
    return flat


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(5)
    reference = torch.randn(40, V, generator=generator) * 3
    lane = reference + torch.randn(40, V, generator=generator) * 0.3
    return reference, lane, torch.randint(0, V, (40,), generator=generator)


def test_flat_lists_become_arrays_with_the_token_itself_apart(rows):
    _, lane, targets = rows
    flat = flat_of(lane, targets, 7)
    found = named(flat, 1, 41)
    expected = lane.log_softmax(-1)
    assert np.allclose(found.target, expected[torch.arange(40), targets].numpy())
    assert np.array_equal(found.ids, expected.topk(7).indices.numpy())
    assert np.allclose(found.logprobs, expected.topk(7).values.numpy())
    assert found.rank[3] == int((expected[3] >= expected[3, targets[3]]).sum())
    part = named(flat, 11, 14)
    assert np.array_equal(part.ids, found.ids[10:13])
    assert np.array_equal(found.cut(10, 13).target, part.target)
    assert len(named(flat, 5, 5).target) == 0


def test_positions_of_several_widths_are_filled_up_and_missing_ones_are_an_error():
    flat = Flat()
    flat.add([5], [-1.0], 9)
    flat.add([6, 1, 2], [-2.0, -0.1, -3.0], 4)
    found = named(flat, 0, 2)
    assert found.ids.tolist() == [[-1, -1], [1, 2]]
    assert found.logprobs[0].tolist() == [-np.inf, -np.inf]
    assert joined([named(flat, 0, 1), named(flat, 1, 2)]).ids.tolist() == found.ids.tolist()
    flat.add([], [], 0)
    with pytest.raises(EngineError, match="no log-probabilities"):
        named(flat, 1, 3)
    with pytest.raises(EngineError):
        named(flat, 2, 6)


def test_rows_at_the_traces_ids_are_those_of_whole_distributions(rows):
    reference, lane, targets = rows
    trace = record_rows(reference, targets, 1, 0, V)
    whole = lane_rows(lane, targets, trace, 1.5, V)
    log_q = lane.log_softmax(-1).numpy()
    ids = trace_ids(trace)
    at = np.where(ids >= 0, np.take_along_axis(log_q, np.maximum(ids, 0), 1), -np.inf).astype(np.float32)
    best = named(flat_of(lane, targets, 16), 1, 41)
    made = named_rows(trace, at, best, 1.5)
    assert count_rows("rows", made) == 40
    for column in ("kl", "kl_low", "tv", "tv_high", "logprob", "top_logprobs", "seconds"):
        assert np.allclose(made[column], whole[column], atol=2e-6), column
    assert np.array_equal(made["top_ids"], whole["top_ids"])
    assert np.array_equal(made["valid"], whole["valid"])
    assert np.array_equal(made["rank"], np.minimum(whole["rank"], 17))


def test_rows_at_the_traces_ids_are_invalid_where_they_are_no_distribution(rows):
    reference, lane, targets = rows
    trace = record_rows(reference, targets, 1, 0, V)
    best = named(flat_of(lane, targets, 4), 1, 41)
    at = np.full((40, trace_ids(trace).shape[1]), -1.0, np.float32)
    at[0] = np.nan
    made = named_rows(trace, at, best._replace(target=np.where(np.arange(40) == 1, np.nan, best.target)), 0.0)
    assert not made["valid"].any()
    assert not made["kl"].any()
    assert np.isfinite(made["logprob"]).all()


def test_a_stream_is_one_request_unless_tokens_are_served():
    assert segments(None, 50) == [(0, 50, 50)]
    assert segments(np.zeros(50, np.uint8), 50) == [(0, 50, 50)]


def test_every_position_is_in_one_request_whatever_is_served():
    generator = np.random.default_rng(2)
    for _ in range(200):
        n = int(generator.integers(2, 40))
        single = (generator.random(n) < generator.random()).astype(np.uint8)
        rows = []
        for held, stop, end in segments(single, n):
            assert 1 <= stop <= end <= n
            assert single[max(held, 1) : stop].sum() == 0
            assert single[stop:end].all()
            rows += list(range(held + 1, stop))
            rows += list(range(stop, min(end, n - 1) + 1)) if end > stop else []
        assert rows == list(range(1, n))


def test_named_is_cut_by_rows():
    found = Named(np.arange(3.0), np.arange(3), np.zeros((3, 2)), np.zeros((3, 2)))
    assert found.cut(1, 2).target.tolist() == [1.0]
