from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.servers.real import Child, RealServer, flips, free_port, session_ids
from workbench.config.lane import parse_spec
from workbench.protocol import events
from workbench.protocol.wire import Arrays
from workbench.worker.backends.transformers import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

N = 96
CONTEXT = 160
SCRIPT = Path(__file__).parents[1] / "servers" / "llama_server.py"
TEXT = "<|im_start|>user\nWhat is 2 + 2, naïvely?<|im_end|>\n"

Serve = Callable[..., tuple[RealServer, str]]


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has xllamacpp."""
    found = os.environ.get("WORKBENCH_LLAMA_SERVER_PYTHON", "")
    if not found:
        if os.environ.get("WORKBENCH_LLAMA_SERVER") == "required":
            pytest.fail("WORKBENCH_LLAMA_SERVER_PYTHON is not set, and a llama-server is required here")
        pytest.skip("needs WORKBENCH_LLAMA_SERVER_PYTHON, an interpreter with the xllamacpp wheel")
    return found


@pytest.fixture(scope="module")
def serve(python: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A function: options to a llama-server that runs, and the lane that speaks to it."""
    running: list[RealServer] = []
    model = smollm2.with_name(f"{smollm2.name}.gguf")
    if not model.is_file():
        pytest.skip(f"needs {model.name} beside the embedded model's folder")

    def start(**options: str) -> tuple[RealServer, str]:
        port = free_port()
        given = {"context": "512", "port": str(port), **options}
        command = [python, str(SCRIPT), str(model), *(f"{key}={value}" for key, value in given.items())]
        log = tmp_path_factory.mktemp("llama-server") / "log"
        running.append(RealServer(command, f"http://127.0.0.1:{port}", log))
        running[-1].start(60)
        return running[-1], f"server:url=http://127.0.0.1:{port},path=decode"

    yield start
    for server in running:
        server.kill()


@pytest.fixture(scope="module")
def plain(serve: Serve) -> tuple[RealServer, str]:
    """A server without speculation."""
    return serve()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    one = Child(tmp_path / "server.log")
    yield one
    one.process.kill()


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> Any:
    return session_ids(smollm2, N)


@pytest.fixture(scope="module")
def traced(smollm2: Path) -> Callable[[Any], Arrays]:
    """A function: ids to the trace of the same weights without rounding, by transformers."""
    from tests.worker.conftest import Recorder

    def trace(ids: Any) -> Arrays:
        backend, job = make(), Recorder()
        backend.start(parse_spec("transformers:weights=fp32,kv=fp32,threads=1"), smollm2, CONTEXT, job)  # type: ignore[arg-type]
        backend.score(events.Score(1, 1, True, arrays={"ids": ids}), job)  # type: ignore[arg-type]
        backend.stop()
        return job.joined("trace")

    return trace


@pytest.fixture(scope="module")
def trace(traced: Callable[[Any], Arrays], ids: Any) -> Arrays:
    return traced(ids)


def test_a_session_is_scored_a_token_a_request_and_again_from_its_middle(plain, child, ids, trace, smollm2):
    _, lane = plain
    effective = child.start(lane, smollm2, CONTEXT)
    assert (effective["engine"], effective["dialect"], effective["weights"]) == ("server", "llama-server", "served")
    assert (effective["vocabulary"], effective["context_limit"], effective["speculation"]) == (49152, 512, "")
    assert effective["server"]["model_ftype"] == "Q4_1"
    scored = child.score(ids, trace, "decode")
    assert isinstance(scored, events.Scored), scored
    rows = child.joined()
    assert scored.stats["decode_tokens"] == len(rows["kl"]) == N - 1
    assert scored.stats["recomputed"] == 0
    assert rows["valid"].all()
    assert 1e-5 < rows["kl"].mean() < 0.02  # Q4_1 in llama.cpp rounds activations to 8 bits, the reference does not
    assert flips(rows) < 0.15
    assert (rows["tv"] <= rows["tv_high"]).all()
    assert np.abs(rows["logprob"] - trace["logprob"]).mean() < 0.15

    again = child.score(ids, trace, "decode", 61)
    assert isinstance(again, events.Scored), again
    rest = child.joined()
    assert len(rest["kl"]) == N - 61
    assert (again.stats["fed"], again.stats["recomputed"]) == (60, 0)
    for name in ("kl", "rank", "logprob", "top_ids"):
        assert np.array_equal(rest[name], rows[name][60:]), name  # the same cache history, the same bits


def test_parts_of_characters_and_control_tokens_are_scored_like_any_token(plain, child, traced, smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoded = tokenizer.encode(
        "<|im_start|>user\nA llama 🦙 and 漢字𝄞 ende<|im_end|>\n<|im_start|>assistant\n🦙🦙<|im_end|>\n"
    )
    ids = np.array(encoded.ids, "<i4")
    parts = [index for index, token in enumerate(encoded.ids) if "\ufffd" in tokenizer.decode([token])]
    assert len(parts) > 8
    _, lane = plain
    child.start(lane, smollm2, CONTEXT)
    trace = traced(ids)
    assert isinstance(child.score(ids, trace, "decode"), events.Scored)
    rows = child.joined()
    assert rows["valid"].all()
    assert np.isfinite(rows["logprob"]).all()
    assert np.abs(rows["logprob"] - trace["logprob"]).max() < 2
    assert rows["kl"].mean() < 0.05


def test_what_llama_server_cannot_do_is_refused(plain, child, ids, trace, smollm2):
    _, lane = plain
    for spec, context, word in (
        (lane.replace("path=decode", "path=prefill"), CONTEXT, "path=decode"),
        (lane, 1000, "-c"),
        (lane + ",served=other", CONTEXT, "served="),
    ):
        refused = child.ask(events.Start, parse_spec(spec).to_json(), str(smollm2), context)
        assert (refused.kind, word in refused.next) == ("refused", True), refused
    child.start(lane, smollm2, CONTEXT)
    assert child.ask(events.Score, 1, True, path="decode", arrays={"ids": ids}).kind == "refused"


def test_its_tokens_and_template_are_those_of_the_folder(plain, child, smollm2):
    _, lane = plain
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    facts, ids = child.inspect(lane, smollm2, text=TEXT)
    assert ids == tokenizer.encode(TEXT).ids
    assert (facts["adds_bos"], facts["vocabulary"], facts["sampling"]["top_k"]) == (False, 49152, 40)
    assert facts["template"] == (smollm2 / "chat_template.jinja").read_text(encoding="utf-8")
    facts, ids = child.inspect(lane, smollm2, messages=[{"role": "user", "content": "hello"}])
    assert facts["rendered"].endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert ids == tokenizer.encode(facts["rendered"]).ids


def test_a_server_that_speculates_is_told_and_scores_as_one_that_does_not(serve, plain, child, ids, trace, smollm2):
    child.start(plain[1], smollm2, CONTEXT)
    child.score(ids[:40], trace, "decode")
    wanted = child.joined()
    repeated = np.array(([*ids[:24].tolist()] * 4)[:N], "<i4")
    stats, tokens = child.generate(repeated, 40)
    assert "acceptance" not in stats
    assert len(tokens["ids"]) == 40
    assert np.isfinite(tokens["logprobs"]).all()
    assert (np.diff(tokens["seconds"]) > 0).all()

    _, lane = serve(speculation="ngram")
    effective = child.start(lane, smollm2, CONTEXT)
    assert effective["speculation"] == "ngram-simple"
    assert effective["runs"] == "divergence without the drafter, acceptance and speed with it"
    child.score(ids[:40], trace, "decode")
    rows = child.joined()
    assert np.abs(rows["logprob"] - wanted["logprob"]).max() < 1e-3
    stats, drafted = child.generate(repeated, 40)
    assert len(drafted["ids"]) == 40
    assert np.isnan(drafted["logprobs"]).all()
    found = stats["acceptance"]
    assert found["source"] == "steps"
    assert sum(found["accepted"]) > 0
    committed = sum(found["accepted"]) + found["steps"]
    assert committed == 39 or (found["truncated"] and committed > 39)


def test_a_server_killed_in_the_middle_and_started_again_loses_no_position(serve, child, ids, trace, smollm2):
    server, lane = serve()
    child.start(lane, smollm2, CONTEXT)
    killed = []

    def kill() -> None:
        if not killed:
            killed.append(len(child.rows))
            server.kill()
            server.start(60)

    child.on_rows = kill
    scored = child.score(ids, trace, "decode")
    assert isinstance(scored, events.Scored), scored
    assert scored.stats["connections_lost"] >= 1
    assert killed == [1]
    rows = child.joined()
    assert len(rows["kl"]) == N - 1
    assert rows["valid"].all()
    assert scored.stats["recomputed"] >= 1
    child.on_rows = lambda: None
    undisturbed = child.score(ids, trace, "decode")
    assert undisturbed.stats["recomputed"] == 0
    for name in ("kl", "rank", "logprob", "top_ids"):
        assert np.array_equal(child.joined()[name], rows[name]), name
