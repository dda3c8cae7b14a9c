from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.servers import truth
from tests.servers.fake import Fake
from tests.servers.lane import IDS, Clock, Lane, N, expected, make_folder
from workbench.errors import Cancelled, ConfigurationError, EngineError, WorkbenchError
from workbench.worker.servers.connection import Gone

KEY = "sk-very-secret"
SCORING = {"vllm": "/v1/completions", "sglang": "/generate", "trtllm": "/v1/completions", "llama-server": "/completion"}
PATHS = {"vllm": "prefill", "sglang": "prefill", "trtllm": "prefill", "llama-server": "decode"}


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    lane = Lane(make_folder(tmp_path / "model"))
    yield lane
    lane.backend.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def at(answer: Any, path: str) -> tuple[Any, Any]:
    """The container and the key of a dotted place in an answer."""
    *parts, last = [int(part) if part.lstrip("-").isdecimal() else part for part in path.split("/")]
    for part in parts:
        answer = answer[part]
    return answer, last


def put(path: str, value: Any) -> Callable[[Any], Any]:
    """A change of one value; DROP takes it out, a function makes it of the old one."""

    def change(answer: Any) -> Any:
        container, key = at(answer, path)
        if value is DROP:
            del container[key]
        else:
            container[key] = value(container[key]) if callable(value) else value
        return answer

    return change


DROP = object()
LOGPROB = "choices/0/prompt_logprobs"
TOP = "completion_probabilities/0/top_logprobs"
FLAT = "meta_info/input_top_logprobs"
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("vllm", put("choices", DROP), "choices is missing"),
    ("vllm", put("choices", []), "choices has 0 entries"),
    ("vllm", put("choices/0", None), "not an object"),
    ("vllm", put("usage", None), "usage is missing"),
    ("vllm", put("usage/prompt_tokens", 2048), r"counts 2,048 tokens, ours are \d+"),
    ("vllm", put("usage/prompt_tokens", "2"), "not a whole number"),
    ("vllm", put("choices/0/prompt_token_ids", lambda ids: [*ids[:-1], (ids[-1] + 1) % 300]), r"token \d+ is"),
    ("vllm", put("choices/0/prompt_token_ids", lambda ids: ids[1:]), "truncated or re-tokenised"),
    ("vllm", put(LOGPROB, lambda rows: rows[:-1]), "prompt_logprobs has"),
    ("vllm", put(f"{LOGPROB}/0", {}), "is not null"),
    ("vllm", put(f"{LOGPROB}/1", None), "not an object"),
    ("vllm", put(f"{LOGPROB}/1", lambda row: dict(list(row.items())[:4])), "names 3 best ids|names 4 best ids"),
    ("vllm", put(f"{LOGPROB}/1", lambda row: {**row, "x": 1}), "not a token id"),
    ("vllm", put(f"{LOGPROB}/1", lambda row: {**row, "300": {"logprob": -1.0, "rank": 4}}), "0 to 299"),
    (
        "vllm",
        put(f"{LOGPROB}/1", lambda row: {k: {**v, "logprob": None} for k, v in row.items()}),
        "logprob is missing",
    ),
    ("vllm", put(f"{LOGPROB}/1", lambda row: {k: {**v, "logprob": 0.7} for k, v in row.items()}), "no log-probability"),
    ("vllm", put(f"{LOGPROB}/1", lambda row: {k: {**v, "logprob": "-1"} for k, v in row.items()}), "finite number"),
    ("sglang", put("meta_info", DROP), "meta_info is missing"),
    ("sglang", put("meta_info/prompt_tokens", 3), r"counts 3 tokens, ours are \d+"),
    ("sglang", put("meta_info/input_token_logprobs", lambda rows: rows[:-1]), "input_token_logprobs has"),
    ("sglang", put("meta_info/input_token_logprobs/1/1", lambda i: (i + 1) % 300), "re-tokenised"),
    ("sglang", put("meta_info/input_token_logprobs/1", [-1.0]), "not 3"),
    ("sglang", put("meta_info/input_token_logprobs/1/0", None), "null, not a finite number"),
    ("sglang", put(f"{FLAT}_shape", lambda shape: [shape[0], 3]), r"not \[\d+, 20\]"),
    ("sglang", put(f"{FLAT}_null_prefix", 0), "after 0"),
    ("sglang", put(f"{FLAT}_val_flat_b64", lambda text: text[:-8]), "bytes, not"),
    ("sglang", put(f"{FLAT}_val_flat_b64", "???"), "not base64"),
    ("sglang", put(f"{FLAT}_val_flat_b64_dtype", "float16"), "float16, not float32"),
    ("sglang", put(f"{FLAT}_idx_flat_b64", lambda text: "////" + text[4:]), "outside the vocabulary"),
    ("trtllm", put("choices/0/context_logits", None), "context_logits is missing"),
    ("trtllm", put("choices/0/context_logits", lambda rows: rows[4:]), "rows, not"),
    ("trtllm", put("choices/0/context_logits/0", lambda row: row[:200]), "200 values, not 300"),
    ("trtllm", put("choices/0/context_logits/0", lambda row: [None, *row[1:]]), "no number"),
    ("trtllm", put("choices/0/context_logits/0", lambda row: ["1", *row[1:]]), "no number"),
    ("trtllm", put("usage/prompt_tokens", 1), r"counts 1 tokens, ours are \d+"),
    ("llama-server", put("tokens_evaluated", lambda n: n + 1), r"counts \d+ tokens, ours are \d+"),
    ("llama-server", put("truncated", True), "truncated the prompt"),
    ("llama-server", put("completion_probabilities", DROP), "completion_probabilities is missing"),
    ("llama-server", put("completion_probabilities", []), "completion_probabilities is missing"),
    ("llama-server", put("completion_probabilities", [{}, {}]), "has 2 entries"),
    ("llama-server", put(TOP, lambda pairs: pairs[:-1]), "ids, not"),
    ("llama-server", put(f"{TOP}/0/id", 300), "0 to 299"),
    ("llama-server", put(f"{TOP}/0/id", 1.5), "not a whole number"),
    ("llama-server", put(f"{TOP}/0/logprob", 1.5), "no log-probability"),
    ("llama-server", put("timings/draft_n", 4), "drafted tokens"),
]


@pytest.mark.parametrize(("dialect", "change", "match"), WRONG)
def test_an_answer_with_a_wrong_field_fails_the_lane_and_names_it(
    dialect: str, change: Callable[[Any], Any], match: str, lane: Lane
) -> None:
    with Fake(dialect) as fake:
        lane.start(fake.url, path=PATHS[dialect])
        fake.change = lambda path, answer: change(answer) if path == SCORING[dialect] else answer
        with pytest.raises(WorkbenchError, match=match):
            lane.score()
    assert not lane.job.sent


def test_an_answer_accepted_unseen_by_speculation_is_no_probability_of_one(lane: Lane) -> None:
    with Fake("llama-server") as fake:
        lane.start(fake.url, path="decode")
        entry = {"id": 3, "token": "x", "bytes": [1], "logprob": 0.0, "top_logprobs": []}
        fake.change = lambda path, answer: (
            {**answer, "completion_probabilities": [entry]} if path == "/completion" else answer
        )
        with pytest.raises(EngineError, match=r"0.0 with nothing beside it.*without speculation"):
            lane.score()


def test_nested_rows_are_checked_like_flat_ones(lane: Lane) -> None:
    with Fake("sglang", nested=True) as fake:
        lane.start(fake.url)
        for change, match in (
            (put(f"{FLAT}/0", [[-1.0, 2, None]]), "is not null"),
            (put(f"{FLAT}/1", lambda row: row[:-1]), "has 19 entries, not 20"),
            (put(f"{FLAT}/1/0", [-1.0]), "no triple"),
            (put(f"{FLAT}/1/0/1", -1), "0 to 299"),
            (put(FLAT, DROP), "input_top_logprobs is missing"),
        ):
            fake.change = lambda path, answer, change=change: change(answer) if path == "/generate" else answer
            with pytest.raises(EngineError, match=match):
                lane.score()


@pytest.mark.parametrize(
    ("dialect", "key", "match"),
    [
        ("vllm", "choices/0/prompt_logprobs", "no prompt log-probabilities"),
        ("sglang", "meta_info/input_token_logprobs", "top_logprobs_num"),
        ("trtllm", "choices/0/context_logits", "return_context_logits"),
        ("llama-server", "completion_probabilities", "n_probs"),
    ],
)
def test_a_server_that_ignores_what_is_asked_for_is_refused_when_it_starts(
    dialect: str, key: str, match: str, lane: Lane
) -> None:
    with Fake(dialect) as fake:
        fake.change = lambda path, answer: put(key, DROP)(answer) if path == SCORING[dialect] else answer
        with pytest.raises(ConfigurationError, match=match):
            lane.start(fake.url, path=PATHS[dialect])


@pytest.mark.parametrize("dialect", PATHS)
def test_stale_log_probabilities_are_refused_with_both_numbers(dialect: str, lane: Lane) -> None:
    with Fake(dialect, stale=True) as fake:
        with pytest.raises(
            ConfigurationError, match=r"contradicts itself.*\(token \d+: -[\d.]+ and -[\d.]+\)"
        ) as caught:
            lane.start(fake.url, path=PATHS[dialect])
        assert "stale cache" in caught.value.next
        fake.dialect.options.stale = False
        lane.start(fake.url, path=PATHS[dialect])
        fake.dialect.options.stale = True
        with pytest.raises(ConfigurationError, match="contradicts itself"):
            lane.score()
    assert not lane.job.sent


@pytest.mark.parametrize("dialect", PATHS)
def test_a_server_unplugged_for_ten_seconds_loses_no_position(dialect: str, lane: Lane, clock: Clock) -> None:
    with Fake(dialect) as fake:
        keys: dict[str, Any] = {} if dialect == "trtllm" else {"logprobs": "20", "step": "25"}
        lane.start(fake.url, path=PATHS[dialect], **keys)
        unplugged = 0

        def unplug(stop: int) -> None:
            nonlocal unplugged
            if stop == 51 or dialect == "trtllm":
                unplugged += 1
                clock.at(clock.now + 10, fake.start)
                fake.stop()

        lane.job.on_rows = unplug
        stats = lane.score()
        assert unplugged == 1
        if dialect == "trtllm":  # all in one answer: nothing is asked for afterwards
            return
        assert 10 <= clock.now < 20 and stats["connections_lost"] > 0
    first, rows = lane.job.joined()
    wanted = expected(20)
    assert first == 1 and len(rows["kl"]) == N - 1
    for name in ("kl", "rank", "logprob", "top_ids"):
        np.testing.assert_array_equal(rows[name], wanted[name])
    assert stats.get("recomputed", 0) == (dialect == "llama-server")


def test_a_server_that_is_gone_for_good_fails_in_bounded_time_and_the_lane_goes_on_later(
    lane: Lane, clock: Clock
) -> None:
    with Fake("vllm") as fake:
        lane.start(fake.url, step="25")
        lane.job.on_rows = lambda stop: fake.stop() if stop == 51 else None
        with pytest.raises(Gone, match="no answer for 60 s"):
            lane.score()
        assert clock.now == pytest.approx(60)
        assert lane.job.joined()[0] == 1 and len(lane.job.joined()[1]["kl"]) == 50
        fake.start()
        lane.start(fake.url, step="25")
        lane.score(first=51)
    np.testing.assert_array_equal(lane.job.joined()[1]["kl"], expected(20)["kl"])


def test_another_model_that_comes_back_in_its_place_ends_the_lane(lane: Lane, clock: Clock) -> None:
    with Fake("vllm") as fake:
        lane.start(fake.url, step="25", served="tiny")

        def swap() -> None:
            fake.dialect.options.version = "9.9.9"
            fake.start()

        def unplug(stop: int) -> None:
            if stop == 51:
                fake.stop()
                clock.at(clock.now + 3, swap)

        lane.job.on_rows = unplug
        with pytest.raises(EngineError, match=r"another server answers now: tiny 9.9.9, before tiny 1.2.3"):
            lane.score()
        assert len(lane.job.joined()[1]["kl"]) == 50


def test_a_cancel_while_the_server_computes_is_obeyed(lane: Lane) -> None:
    with Fake("vllm") as fake:
        lane.start(fake.url)
        fake.fault = lambda path, number: "wait" if path == "/v1/completions" else None
        checked = lane.job.check

        def check() -> None:
            lane.job.cancelled = fake.waiting.is_set()
            checked()

        lane.job.check = check  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            lane.score()
        fake.go.set()


@pytest.mark.parametrize("dialect", PATHS)
def test_a_stream_that_breaks_off_goes_on_behind_its_tokens(dialect: str, lane: Lane, clock: Clock) -> None:
    with Fake(dialect) as fake:
        lane.start(fake.url, path=PATHS[dialect])
        before = fake.counts[SCORING[dialect]]
        fake.fault = lambda path, number: (
            "drop_stream" if path == SCORING[dialect] and number in (before + 1, before + 2) else None
        )
        stats = lane.generate(12)
    assert lane.job.generated()["ids"].tolist() == truth.greedy(IDS[:40], 12)
    assert stats["resumed_after"] == [3, 6] and "acceptance" not in stats
    assert clock.now == pytest.approx(1.0)


def test_a_stream_from_a_server_that_is_gone_keeps_what_came(lane: Lane, clock: Clock) -> None:
    with Fake("vllm") as fake:
        lane.start(fake.url)
        fake.fault = lambda path, number: "drop_stream" if path == "/v1/completions" else None
        taken = lane.backend._dialect.generate  # type: ignore[union-attr]

        def generate(*given: Any) -> Iterator[Any]:
            if lane.backend._connection.losses:  # type: ignore[union-attr]
                fake.stop()
            yield from taken(*given)

        lane.backend._dialect.generate = generate  # type: ignore[union-attr,method-assign]
        with pytest.raises(Gone):
            lane.generate(12)


@pytest.mark.parametrize(
    ("dialect", "change", "match"),
    [
        ("vllm", put("choices/0/token_ids", DROP), "text without token ids"),
        ("vllm", put("choices/0/token_ids", [300]), "0 to 299"),
        ("vllm", put("choices/0/prompt_token_ids", [1, 2]), "re-tokenised"),
        ("sglang", put("output_ids", DROP), "output_ids is missing"),
        ("sglang", put("output_ids", [1, 2, 3, 4, 5]), "5 ids after 0, of 1"),
        ("sglang", put("meta_info/finish_reason", {"type": "abort", "message": "no \x1bmemory"}), "gave up: no memory"),
        ("trtllm", put("choices/0/token_ids", None), "text without token ids|last chunk"),
        ("llama-server", put("tokens", DROP), "text without token ids"),
        ("llama-server", put("tokens_evaluated", 1), "counts 1 tokens, ours are 40"),
    ],
)
def test_a_stream_with_a_wrong_field_fails_and_names_it(
    dialect: str, change: Callable[[Any], Any], match: str, lane: Lane
) -> None:
    def safely(path: str, event: Any) -> Any:
        try:
            event = change(event)
        except (KeyError, IndexError):
            return event
        if dialect == "trtllm":
            event["choices"][0]["text"] = "x"
        return event

    with Fake(dialect) as fake:
        lane.start(fake.url, path=PATHS[dialect])
        fake.change = safely
        with pytest.raises(WorkbenchError, match=match):
            lane.generate(6)


def test_a_usage_that_counts_another_prompt_fails_the_generation(lane: Lane) -> None:
    for dialect in ("vllm", "trtllm"):
        with Fake(dialect) as fake:
            lane.start(fake.url)
            fake.change = lambda path, event: (
                {**event, "usage": {"prompt_tokens": 39}} if not event["choices"] else event
            )
            with pytest.raises(EngineError, match="counts 39 tokens, ours are 40"):
                lane.generate(6)


def test_steps_that_cannot_be_fail_the_generation(lane: Lane) -> None:
    with Fake("vllm", steps=((4, 4),)) as fake:
        lane.start(fake.url)
        fake.change = lambda path, event: (
            put("metrics/speculative_decoding/per_step_accepted", [9])(event) if "metrics" in event else event
        )
        with pytest.raises(EngineError, match="do not fit"):
            lane.generate(6)


@pytest.mark.parametrize("dialect", PATHS)
def test_a_key_is_sent_and_stands_nowhere(dialect: str, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_TEST_KEY", KEY)
    with Fake(dialect) as fake:
        fake.key = KEY
        effective = lane.start(fake.url, path=PATHS[dialect], key_env="WORKBENCH_TEST_KEY")
        assert KEY not in str(effective) and KEY not in str(lane.score())
        fake.key = "changed"
        for work in (lane.score, lane.generate):
            with pytest.raises(ConfigurationError, match="401") as caught:
                work()
            assert KEY not in str(caught.value)


def test_credentials_in_the_address_are_refused_and_not_repeated(lane: Lane) -> None:
    with pytest.raises(ConfigurationError, match="key_env=NAME") as caught:
        lane.start("http://me:hunter2@127.0.0.1:1")
    assert "hunter2" not in str(caught.value)


def test_names_from_a_server_lose_their_escapes(lane: Lane) -> None:
    with Fake("vllm", models=("ti\x1b[31mny",)) as fake:
        effective = lane.start(fake.url)
    assert "\x1b" not in effective["served_model"]


def test_nothing_runs_before_a_start(lane: Lane) -> None:
    for work in (lane.score, lane.generate):
        with pytest.raises(ConfigurationError, match="Send Start first"):
            work()
