from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.servers import truth
from tests.servers.fake import Fake
from tests.servers.lane import IDS, TRACE, Lane, N, expected, make_folder
from workbench.config.lane import from_json
from workbench.errors import ConfigurationError
from workbench.protocol.columns import ROWS, count_rows
from workbench.protocol.events import Inspect
from workbench.worker.host_scoring import lane_rows

PATHS = {"vllm": "prefill", "sglang": "prefill", "trtllm": "prefill", "llama-server": "decode"}
STEPS = ((4, 0), (4, 3), (4, 4), (4, 1))


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    lane = Lane(make_folder(tmp_path / "model"))
    yield lane
    lane.backend.stop()


def same(rows: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert count_rows("rows", rows) == count_rows("rows", wanted)
    for name in ROWS:
        if name != "seconds":
            np.testing.assert_array_equal(rows[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("dialect", PATHS)
def test_a_server_is_recognised_and_says_what_it_is(dialect: str, lane: Lane) -> None:
    with Fake(dialect) as fake:
        effective = lane.start(fake.url, path=PATHS[dialect])
    assert effective["dialect"] == dialect and effective["served_model"] == "tiny" and effective["url"] == fake.url
    assert effective["weights"] == effective["kv"] == effective["attn"] == "served"
    assert effective["threads"] is None and effective["chunk"] is None
    assert effective["vocabulary"] == truth.VOCABULARY
    assert effective["checks"]["again_mean"] == 0 and effective["checks"]["longer_mean"] == 0
    assert effective["estimator"] == ("head+tail samples" if dialect == "trtllm" else "bounded")


def test_what_each_server_tells_stands_under_its_own_names(lane: Lane) -> None:
    with Fake("sglang") as fake:
        assert lane.start(fake.url)["server"]["kv_cache_dtype"] == "fp8_e5m2"
    with Fake("llama-server") as fake:
        effective = lane.start(fake.url, path="decode")
    assert effective["server"]["model_ftype"] == "Q8_0" and effective["build"] == "b11434-abcdef"
    with Fake("vllm") as fake:
        effective = lane.start(fake.url)
    assert effective["version"] == "1.2.3" and effective["context_limit"] == 200


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("k", [1, 8, 20])
def test_rows_of_prompt_log_probabilities_are_the_bounds_of_the_truth(dialect: str, k: int, lane: Lane) -> None:
    with Fake(dialect) as fake:
        assert lane.start(fake.url, logprobs=str(k))["logits"] == f"top-{k}"
        stats = lane.score()
    first, rows = lane.job.joined()
    assert first == 1
    same(rows, expected(k))
    assert stats["prefill_tokens"] == N and stats["decode_tokens"] == 0


def test_a_token_that_equals_the_last_of_the_best_stands_beside_them(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(prefix: list[int]) -> Any:
        return np.where(np.arange(truth.VOCABULARY) < 10, 3.0, 0.0)  # what is no best id is all alike

    monkeypatch.setattr(truth, "logits", flat)
    with Fake("vllm") as fake:
        lane.start(fake.url)
        lane.score()
    rows = lane.job.joined()[1]
    same(rows, expected(20))
    assert (rows["ties"] == 9).all() and np.isfinite(rows["logprob"]).all()


def test_nested_lists_say_the_same_as_flat_arrays(lane: Lane) -> None:
    with Fake("sglang", nested=True) as fake:
        lane.start(fake.url)
        lane.score()
    same(lane.job.joined()[1], expected(20))


def test_whole_logits_give_exact_rows(lane: Lane) -> None:
    with Fake("trtllm") as fake:
        assert lane.start(fake.url)["logits"] == "full"
        lane.score()
    logits = np.array([truth.logits(IDS[:end]) for end in range(1, N)], np.float32)
    same(lane.job.joined()[1], lane_rows(logits, np.array(IDS[1:]), TRACE, 0.0, truth.VOCABULARY))


def test_llama_server_is_asked_once_a_token_and_made_to_generate_the_streams_own(lane: Lane) -> None:
    with Fake("llama-server") as fake:
        lane.start(fake.url, path="decode", logprobs="20")
        stats = lane.score()
        bodies = fake.bodies("/completion")[-(N - 1) :]
    same(lane.job.joined()[1], expected(20))
    assert [len(body["prompt"]) for body in bodies] == list(range(1, N))
    assert [body["cache_prompt"] for body in bodies] == [False] + [True] * (N - 2)
    assert [body["logit_bias"][0][0] for body in bodies] == IDS[1:]
    assert {body["id_slot"] for body in bodies} == {0} and {body["n_predict"] for body in bodies} == {1}
    assert stats["decode_tokens"] == N - 1 and stats["recomputed"] == 0


@pytest.mark.parametrize("options", [{"halves": tuple(set(IDS[40:60]) - {99})}, {"bias": False}])
def test_a_token_that_llama_server_tells_nothing_of_is_found_among_all(options: Any, lane: Lane) -> None:
    with Fake("llama-server", **options) as fake:
        lane.start(fake.url, path="decode", logprobs="20")
        before = len(fake.seen)
        lane.score()
        whole = [body for _, body, _ in fake.seen[before:] if body.get("n_probs") == truth.VOCABULARY]
    same(lane.job.joined()[1], expected(20))
    named = (np.array([truth.best(row, 20) for row in truth.rows(IDS)]) == np.array(IDS[1:])[:, None]).any(1)
    assert len(whole) > 0 and (~named).any()


@pytest.mark.parametrize("dialect", PATHS)
def test_scoring_goes_on_at_any_position(dialect: str, lane: Lane) -> None:
    with Fake(dialect) as fake:
        keys: dict[str, Any] = {} if dialect == "trtllm" else {"logprobs": "20"}
        lane.start(fake.url, path=PATHS[dialect], **keys)
        lane.score(first=61)
    first, rows = lane.job.joined()
    assert first == 61 and len(rows["kl"]) == N - 61
    if dialect != "trtllm":
        same(rows, expected(20, 61))


def test_pieces_grow_where_a_request_runs_its_whole_prefix_and_are_equal_where_it_does_not(lane: Lane) -> None:
    for dialect, name in (("vllm", "prompt"), ("sglang", "input_ids")):
        with Fake(dialect) as fake:
            lane.start(fake.url, step="30")
            fake.seen.clear()
            lane.job.sent.clear()
            lane.score()
            lengths = [len(body[name]) for _, body, _ in fake.seen][3:]
        assert lengths == [31, 61, 91, 100]
        same(lane.job.joined()[1], expected(20))
    from workbench.worker.servers.base import growing

    assert list(growing(1, 20000, 0, 2048)) == [(1, 2049), (2049, 4098), (4098, 8196), (8196, 16392), (16392, 20000)]


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("steps", [(), STEPS])
def test_generation_gives_ids_as_they_come_and_what_was_accepted(dialect: str, steps: Any, lane: Lane) -> None:
    with Fake(dialect, steps=steps) as fake:
        effective = lane.start(fake.url, path=PATHS[dialect])
        stats = lane.generate(14)
    new = lane.job.generated()
    wanted = truth.greedy(IDS[:40], 14)
    assert new["ids"].tolist() == wanted and stats["tokens"] == 14 and stats["stop_reason"] == "length"
    assert (np.diff(new["seconds"]) >= 0).all() and stats["first_token_seconds"] == pytest.approx(new["seconds"][0])
    assert bool(effective["speculation"]) == bool(steps) == ("runs" in effective)
    if not steps:
        own = [truth.logprobs(IDS[:40] + wanted[:i])[token] for i, token in enumerate(wanted)]
        np.testing.assert_allclose(new["logprobs"], own, rtol=1e-5)
        assert "acceptance" not in stats
        return
    assert np.isnan(new["logprobs"]).all()
    found = stats["acceptance"]
    pooled = {"trtllm": 14 / 6}.get(dialect, (8 + 5) / 5 if dialect != "sglang" else (8 + 4) / 4)
    assert found["pooled"] == pytest.approx(pooled)
    if dialect in ("vllm", "llama-server"):
        assert found["accepted"] == [0, 3, 4, 1, 0] and found["drafted"] == [4, 4, 4, 4, 0]
        assert found["source"] == "steps" and not found["truncated"]
    else:
        assert found["source"] == {"sglang": "histogram", "trtllm": "average"}[dialect]


def test_tokens_of_one_step_have_one_time(lane: Lane) -> None:
    with Fake("vllm", steps=((4, 4),)) as fake:
        lane.start(fake.url)
        lane.generate(6)
    seconds = lane.job.generated()["seconds"]
    assert (seconds[1:] == seconds[1]).all() and seconds[0] <= seconds[1]


def test_vllm_gives_a_histogram_or_its_counters_where_it_gives_no_steps(lane: Lane) -> None:
    with Fake("vllm", steps=STEPS, histogram_only=True) as fake:
        lane.start(fake.url)
        found = lane.generate(14)["acceptance"]
        assert found["source"] == "histogram" and found["histogram"] == [1, 1, 0, 1, 1] and "detailed" in found["note"]
        fake.change = lambda path, answer: _without(answer, "metrics") if path == "/v1/completions" else answer
        found = lane.generate(14)["acceptance"]
    assert found["source"] == "average" and found["pooled"] == 1 + 8 / 4


def test_sglang_may_stream_all_ids_or_only_the_new_ones(lane: Lane) -> None:
    for incremental in (False, True):
        lane.job.batches.clear()
        with Fake("sglang", steps=STEPS, incremental=incremental) as fake:
            lane.start(fake.url)
            lane.generate(14)
        assert lane.job.generated()["ids"].tolist() == truth.greedy(IDS[:40], 14)


@pytest.mark.parametrize("dialect", PATHS)
def test_generation_ends_behind_a_token_of_stop(dialect: str, lane: Lane) -> None:
    wanted = truth.greedy(IDS[:40], 12)
    with Fake(dialect) as fake:
        lane.start(fake.url, path=PATHS[dialect])
        stats = lane.generate(12, stop=(wanted[5],))
    assert lane.job.generated()["ids"].tolist() == wanted[:6] and stats["stop_reason"] == "stop"


def inspect(lane: Lane, url: str, **given: Any) -> tuple[dict[str, Any], list[int]]:
    configuration = from_json({"engine": "server", "extra": {"url": url}})
    facts, arrays = lane.backend.inspect(Inspect(1, configuration.to_json(), str(lane.folder), **given), lane.job)  # type: ignore[arg-type]
    return facts, arrays["ids"].tolist()


@pytest.mark.parametrize("dialect", PATHS)
def test_a_text_is_tokenised_with_nothing_put_in_front(dialect: str, lane: Lane) -> None:
    with Fake(dialect) as fake:
        facts, ids = inspect(lane, fake.url, text="<tool>é")
    assert ids == [byte + 2 for byte in "<tool>é".encode()]
    assert facts["adds_bos"] is True and facts["rendered"] is None


@pytest.mark.parametrize("dialect", ["vllm", "llama-server"])
def test_messages_go_through_the_servers_own_template(dialect: str, lane: Lane) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    with Fake(dialect) as fake:
        facts, ids = inspect(lane, fake.url, messages=messages)
    front = [0] if dialect == "llama-server" else []
    assert facts["rendered"] == "<user>hi<assistant>yo" and ids == front + [b + 2 for b in facts["rendered"].encode()]
    assert facts["template_from"].endswith(fake.url)
    if dialect == "llama-server":
        assert facts["template"] == "{{ messages }}" and facts["sampling"] == {"temperature": 0.8, "top_k": 40}


def test_a_server_that_cannot_say_gives_no_ids(lane: Lane) -> None:
    with Fake("trtllm") as fake:
        facts, ids = inspect(lane, fake.url, messages=[{"role": "user", "content": "hi"}])
        assert ids == [] and facts["says"] is False
        fake.fault = lambda path, number: 404 if "tokenize" in path else None
        facts, ids = inspect(lane, fake.url, text="hi")
    assert ids == [] and facts["says"] is False and facts["adds_bos"] is None


def test_a_path_that_a_server_has_not_is_refused_with_the_one_it_has(lane: Lane) -> None:
    for dialect, path in PATHS.items():
        other = {"prefill": "decode", "decode": "prefill"}[path]
        with Fake(dialect) as fake, pytest.raises(ConfigurationError, match=f"use path={path}"):
            lane.start(fake.url, path=other)
        assert not [p for p in fake.paths() if p in ("/v1/completions", "/generate", "/completion")]


def test_the_dialect_and_the_model_can_be_named(lane: Lane) -> None:
    with Fake("vllm", models=("a", "b")) as fake:
        with pytest.raises(ConfigurationError, match=r"serves 2 models.*Name one of a, b as served="):
            lane.start(fake.url)
        with pytest.raises(ConfigurationError, match=r"does not serve 'c'.*a, b"):
            lane.start(fake.url, served="c")
        assert lane.start(fake.url, served="b")["served_model"] == "b"
        assert fake.bodies("/v1/completions")[-1]["model"] == "b"
        fake.change = lambda path, answer: {"data": [{"id": "b"}]} if path == "/v1/models" else answer
        with pytest.raises(ConfigurationError, match=r"not clear which server.*dialect=vllm\|sglang"):
            lane.start(fake.url)
        assert lane.start(fake.url + "/v1", dialect="vllm")["dialect"] == "vllm"


def test_an_unnamed_owner_is_told_by_its_properties(lane: Lane) -> None:
    for dialect, path in (("llama-server", "decode"), ("sglang", "prefill")):
        with Fake(dialect) as fake:
            fake.change = lambda path, answer: _without_owner(answer) if path == "/v1/models" else answer
            assert lane.start(fake.url, path=path)["dialect"] == dialect


def _without(answer: Any, name: str) -> Any:
    return {key: value for key, value in answer.items() if key != name}


def _without_owner(answer: Any) -> Any:
    return {"data": [{**card, "owned_by": "somebody"} for card in answer["data"]]}


def test_a_context_that_is_too_small_is_refused_with_both_numbers(lane: Lane) -> None:
    for dialect, option in (("vllm", "--max-model-len"), ("sglang", "--context-length"), ("llama-server", "-c")):
        with Fake(dialect, context=64) as fake, pytest.raises(ConfigurationError, match=r"64 tokens.*128") as caught:
            lane.start(fake.url, path=PATHS[dialect])
        assert option in caught.value.next
    with Fake("vllm", context=N) as fake:
        lane.start(fake.url, context=N)
        with pytest.raises(ConfigurationError, match="the one that a request must generate"):
            lane.score()
        with pytest.raises(ConfigurationError, match="do not fit"):
            lane.generate(80)


def test_more_log_probabilities_than_the_server_gives_are_refused_with_its_option(lane: Lane) -> None:
    with Fake("vllm", max_logprobs=5) as fake:
        with pytest.raises(ConfigurationError, match="--max-logprobs 20"):
            lane.start(fake.url)
        with pytest.raises(ConfigurationError, match="--max-logprobs 10"):
            lane.start(fake.url, logprobs="10")
        assert lane.start(fake.url, logprobs="5")["logits"] == "top-5"
    with Fake("llama-server", steps=STEPS) as fake:
        assert lane.start(fake.url, path="decode")["speculation"] == "ngram-simple"
    with Fake("trtllm") as fake, pytest.raises(ConfigurationError, match="no effect"):
        lane.start(fake.url, logprobs="5")


def test_a_session_too_long_for_whole_logits_is_refused_with_the_numbers(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.worker.servers.trtllm.MOST_VALUES", 50 * truth.VOCABULARY)
    with Fake("trtllm") as fake:
        lane.start(fake.url)
        asked = len(fake.seen)
        with pytest.raises(ConfigurationError, match=r"100 tokens times 300 ids are 30,000.*at most 50 tokens"):
            lane.score()
        assert len(fake.seen) == asked


def test_another_vocabulary_is_another_model(lane: Lane) -> None:
    with Fake("llama-server") as fake:
        fake.change = lambda path, answer: (
            {"data": [{**answer["data"][0], "meta": {"n_vocab": 32000}}]} if path == "/v1/models" else answer
        )
        with pytest.raises(ConfigurationError, match="32,000 ids, ours 300"):
            lane.start(fake.url, path="decode")


def test_no_reference_is_recorded(lane: Lane) -> None:
    with Fake("vllm") as fake:
        lane.start(fake.url)
        with pytest.raises(ConfigurationError, match="no whole distributions"):
            lane.score(record=True)
