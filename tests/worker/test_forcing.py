from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.errors import Cancelled, ConfigurationError
from workbench.protocol.events import Score
from workbench.worker.forcing import Scoring, check_request, passes, tokens_kept


def score(model, job, ids, **fields):
    chunk = fields.pop("chunk", 32)
    single = fields.pop("single", None)
    arrays = {"ids": ids} if single is None else {"ids": ids, "single": single}
    request = Score(**{"job": 1, "first": 1, "record": True, "arrays": arrays, **fields})
    check_request(request, model.cache.context, 300, model.tokens)
    model.truncate(tokens_kept(request))
    with torch.inference_mode():
        stats = Scoring(model, request, job, chunk).run()
    model.tokens = ids.tolist()
    return stats


def test_rows_cover_every_position_but_the_first_once_and_in_order(tiny, loaded, stream, recorder):
    job = recorder()
    stats = score(loaded(tiny), job, stream)
    rows = job.joined("trace")
    assert job.sent[0][0] == 1
    assert len(rows["logprob"]) == 99
    assert (stats["prefill_tokens"], stats["decode_tokens"], stats["chunk"]) == (100, 0, 32)


def test_a_row_is_about_the_distribution_that_predicts_its_token(tiny, loaded, stream, recorder):
    job = recorder()
    model = loaded(tiny)
    score(model, job, stream)
    ids = torch.from_numpy(stream).long()
    with torch.inference_mode():
        logits = model.model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, ids[1:, None])[:, 0]
    assert np.allclose(job.joined("trace")["logprob"], expected, atol=1e-4)


@pytest.mark.parametrize("first", [2, 32, 33, 34, 70, 99])
def test_scoring_again_from_the_middle_sends_only_what_is_missing_bit_for_bit(
    tiny_llama, loaded, stream, recorder, first
):
    whole, rest = recorder(), recorder()
    score(loaded(tiny_llama), whole, stream)
    score(loaded(tiny_llama), rest, stream, first=first)
    assert rest.sent[0][0] == first
    assert np.array_equal(rest.joined("trace")["logprob"], whole.joined("trace")["logprob"][first - 1 :])


def test_a_lane_that_is_the_reference_differs_nowhere(tiny, loaded, stream, recorder):
    reference = recorder()
    score(loaded(tiny), reference, stream)
    lane = recorder(trace=reference.joined("trace"))
    score(loaded(tiny), lane, stream, record=False)
    rows = lane.joined("rows")
    assert not rows["kl"].any()
    assert (rows["rank"] == 1).all()
    assert (np.diff(rows["seconds"]) >= 0).all()


def test_tokens_on_their_own_give_nearly_the_rows_of_chunks(tiny, loaded, stream, recorder):
    reference = recorder()
    score(loaded(tiny), reference, stream)
    single = np.zeros(100, dtype=np.uint8)
    single[20:30] = single[60:] = 1
    lane = recorder(trace=reference.joined("trace"))
    stats = score(loaded(tiny), lane, stream, record=False, path="decode", single=single)
    rows = lane.joined("rows")
    assert len(rows["kl"]) == 99
    assert rows["kl"].max() < 1e-8
    assert (stats["prefill_tokens"], stats["decode_tokens"]) == (50, 50)
    assert lane.phases[-1] == "decode"


def test_the_decode_path_without_marks_runs_every_token_on_its_own(tiny_llama, loaded, stream, recorder):
    job = recorder()
    stats = score(loaded(tiny_llama), job, stream[:20], path="decode")
    assert stats["decode_tokens"] == 20
    assert len(job.joined("trace")["logprob"]) == 19


def test_reused_positions_are_not_run_again(tiny_llama, loaded, stream, recorder):
    whole, rest = recorder(), recorder()
    model = loaded(tiny_llama)
    score(model, whole, stream)
    stats = score(model, rest, stream, reuse=45, first=46)
    assert stats["prefill_tokens"] == 55
    assert np.allclose(rest.joined("trace")["logprob"], whole.joined("trace")["logprob"][45:], atol=1e-4)


def test_passes_begin_where_a_run_of_tokens_begins():
    single = np.zeros(12, dtype=np.uint8)
    single[[5, 6]] = 1
    expected = [(0, 4, False), (4, 5, False), (5, 6, True), (6, 7, True), (7, 11, False), (11, 12, False)]
    assert list(passes(single, 0, 12, 4)) == expected
    assert list(passes(None, 3, 12, 4)) == [(3, 7, False), (7, 11, False), (11, 12, False)]


def test_cancelling_stops_between_chunks_and_the_model_can_be_used_again(tiny_llama, loaded, stream, recorder):
    model = loaded(tiny_llama)
    cancelled, again = recorder(checks=2), recorder()
    with pytest.raises(Cancelled):
        score(model, cancelled, stream)
    assert len(cancelled.sent) == 2
    score(model, again, stream)
    assert len(again.joined("trace")["logprob"]) == 99


def test_ids_beyond_the_tokenizer_are_padding_and_carry_no_rows(tiny_llama, loaded, stream, recorder):
    model = loaded(tiny_llama)
    model.vocabulary = 290
    job = recorder()
    stats = score(model, job, stream % 290)
    assert job.joined("trace")["head_ids"].max() < 290
    ids = torch.from_numpy(stream % 290).long()
    with torch.inference_mode():
        p = model.model(input_ids=ids[None], use_cache=False).logits[0, :-1].softmax(-1)
    assert stats["padding_mass_mean"] == pytest.approx(p[:, 290:].sum(1).mean().item(), rel=1e-3)
    assert stats["padding_mass_max"] == pytest.approx(p[:, 290:].sum(1).max().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "sideways"}, "path is prefill or decode"),
        ({"first": 0}, "the first is 1"),
        ({"reuse": 5, "first": 6}, "does not hold the 5 tokens"),
        ({"ids": np.zeros(200, "<i4")}, "200 tokens do not fit a context of 128"),
        ({"ids": np.full(5, 300, "<i4")}, "ids must lie in 0 to 299"),
        ({"ids": np.zeros(1, "<i4")}, "at least two ids"),
        ({"single": np.zeros(3, "u1"), "path": "decode"}, "one value a token"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_runs(tiny_llama, loaded, stream, recorder, fields, words):
    job = recorder()
    with pytest.raises(ConfigurationError, match=words):
        score(loaded(tiny_llama), job, fields.pop("ids", stream), **fields)
    assert not job.sent


def test_rows_of_reused_positions_are_run_again_and_all_rows_are_those_of_a_kept_cache(
    tiny_llama, loaded, stream, recorder
):
    kept, again = recorder(), recorder()
    model = loaded(tiny_llama)
    score(model, recorder(), stream[:45])
    stats = score(model, kept, stream, reuse=45, first=46)
    assert stats["prefill_tokens"] == 55
    model = loaded(tiny_llama)
    score(model, recorder(), stream[:45])
    stats = score(model, again, stream, reuse=45, first=1)
    assert (stats["prefill_tokens"], again.sent[0][0]) == (100, 1)
    rows = again.joined("trace")["logprob"]
    assert len(rows) == 99
    assert np.array_equal(rows[45:], kept.joined("trace")["logprob"])
