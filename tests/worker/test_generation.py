from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workbench.config.lane import parse_spec
from workbench.errors import Cancelled, ConfigurationError
from workbench.protocol.columns import count_rows, join
from workbench.protocol.events import Generate, Score
from workbench.worker.sampler import Sampler

CPU = torch.device("cpu")


@pytest.fixture
def started(backend, tiny, recorder):
    backend.start(parse_spec("transformers:weights=fp32,kv=fp32,chunk=32"), tiny, 128, recorder())
    return backend


def generated(backend, job, **fields):
    stats = backend.generate(Generate(job=1, **fields), job)
    arrays = join("continuation", [arrays for _, arrays in job.batches])
    assert count_rows("continuation", arrays) == stats["tokens"]
    assert [first for first, _ in job.batches] == list(
        np.cumsum([0, *(len(arrays["ids"]) for _, arrays in job.batches)])[:-1]
    )
    return arrays, stats


def test_greedy_tokens_are_those_of_transformers_own_generate(started, stream, recorder):
    arrays, stats = generated(started, recorder(), count=24, arrays={"ids": stream})
    network = started.loaded.model
    prompt = torch.from_numpy(stream).long()[None]
    expected = network.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, pad_token_id=0
    )[0, 100:]
    assert arrays["ids"].tolist() == expected.tolist()
    assert (stats["stop_reason"], stats["kv_positions"]) == ("length", 123)
    assert (arrays["logprobs"] <= 0).all()
    assert stats["peak_memory_bytes"] > 0


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(started, stream, recorder):
    def sample(seed):
        fields = {"count": 20, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": seed}
        return generated(started, recorder(), arrays={"ids": stream[:50]}, **fields)[0]["ids"].tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_generation_goes_on_after_scoring_and_from_any_earlier_token(started, stream, recorder):
    started.score(Score(1, 1, True, arrays={"ids": stream}), recorder())
    after, _ = generated(started, recorder(), count=8)
    fresh, _ = generated(started, recorder(), count=8, arrays={"ids": stream})
    assert after["ids"].tolist() == fresh["ids"].tolist()
    kept, _ = generated(started, recorder(), count=8, keep=40)
    short, _ = generated(started, recorder(), count=8, arrays={"ids": stream[:40]})
    assert kept["ids"].tolist() == short["ids"].tolist()


def test_a_stop_token_ends_it_and_is_the_last_token(started, stream, recorder):
    arrays, _ = generated(started, recorder(), count=20, arrays={"ids": stream})
    third = int(arrays["ids"][2])
    cut, stats = generated(started, recorder(), count=20, stop=(third,), arrays={"ids": stream})
    assert cut["ids"].tolist() == arrays["ids"].tolist()[: arrays["ids"].tolist().index(third) + 1]
    assert stats["stop_reason"] == "stop"


def test_cancelling_leaves_a_context_that_can_be_used(started, stream, recorder):
    fresh, _ = generated(started, recorder(), count=4, arrays={"ids": stream})
    with pytest.raises(Cancelled):
        started.generate(Generate(1, 20, arrays={"ids": stream}), recorder(checks=8))
    again, _ = generated(started, recorder(), count=4, keep=99)
    assert len(again["ids"]) == 4
    again, _ = generated(started, recorder(), count=4, arrays={"ids": stream})
    assert again["ids"].tolist() == fresh["ids"].tolist()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"count": 5}, "cannot keep 0 of 0"),
        ({"count": 0, "arrays": {"ids": np.zeros(5, "<i4")}}, "generate 0"),
        ({"count": 5, "keep": 9, "arrays": {"ids": np.zeros(5, "<i4")}}, "cannot keep 9 of 5"),
        ({"count": 125, "arrays": {"ids": np.zeros(5, "<i4")}}, "do not fit a context of 128"),
        ({"count": 5, "temperature": -1.0, "arrays": {"ids": np.zeros(5, "<i4")}}, "out of range"),
        ({"count": 5, "arrays": {"ids": np.full(5, 300, "<i4")}}, "outside the vocabulary"),
    ],
)
def test_what_cannot_be_generated_is_refused(started, recorder, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        started.generate(Generate(job=1, **fields), recorder())


def test_the_lowest_id_wins_among_equals_and_padding_is_never_chosen():
    sampler = Sampler(Generate(1, 1), vocabulary=4, device=CPU)
    token, logprob = sampler.choose(torch.tensor([0.0, 2.0, 2.0, 0.0, 9.0], dtype=torch.bfloat16))
    assert int(token) == 1
    assert math.isclose(float(logprob), 2 - math.log(2 + 2 * math.exp(2)), rel_tol=1e-5)


def test_top_k_and_top_p_leave_only_the_most_probable_tokens():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    top_k = Sampler(Generate(1, 1, temperature=1.0, top_k=2), 4, CPU)
    assert {int(top_k.choose(logits)[0]) for _ in range(60)} == {1, 3}
    top_p = Sampler(Generate(1, 1, temperature=1.0, top_p=0.55), 4, CPU)
    assert {int(top_p.choose(logits)[0]) for _ in range(60)} == {1, 3}
    first = Sampler(Generate(1, 1, temperature=1.0, top_p=0.01), 4, CPU)
    assert {int(first.choose(logits)[0]) for _ in range(20)} == {1}


def test_sampled_frequencies_follow_the_temperature():
    sampler = Sampler(Generate(1, 1, temperature=2.0), 2, CPU)
    logits = torch.tensor([0.0, 2.0])
    share = np.mean([int(sampler.choose(logits)[0]) for _ in range(2000)])
    assert abs(share - 1 / (1 + math.exp(-1))) < 0.04
