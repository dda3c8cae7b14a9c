from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.servers.real import Child, RealServer, flips, free_port, session_ids
from workbench.config.lane import parse_spec
from workbench.engines.environments import environment_for
from workbench.protocol import events
from workbench.protocol.columns import join
from workbench.protocol.wire import Arrays
from workbench.worker.backends.transformers import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N = 300
CONTEXT = 400
DRAFTER = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}'
TEXT = "<|im_start|>user\nWhat is 2 + 2, naïvely?<|im_end|>\n"
KEY = "a-key-for-this-test"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_API_KEY": KEY,
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has vLLM."""
    asked = os.environ.get("WORKBENCH_VLLM_PYTHON")
    found = None if asked else environment_for("vllm")
    path = asked or (found.python if found is not None and found.usable else "")
    if not path:
        if os.environ.get("WORKBENCH_VLLM") == "required":
            pytest.fail("vLLM is required here and in no environment")
        pytest.skip("needs an environment with vLLM: `workbench engines install vllm`")
    return path


@pytest.fixture(scope="module")
def server(python: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One vLLM server for the file: a minute and a half to start."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--served-model-name", "smol", "--host", "127.0.0.1", "--port", str(free_port())]
    command += ["--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"]
    command += ["--speculative-config", DRAFTER, "--per-request-spec-decode-metrics", "detailed"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with RealServer(command, "Application startup complete", log, ENVIRONMENT) as one:
        yield one


@pytest.fixture
def lane(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The lane that speaks to it."""
    monkeypatch.setenv("WORKBENCH_TEST_KEY", KEY)
    port = server.command[server.command.index("--port") + 1]
    return f"server:url=http://127.0.0.1:{port},key_env=WORKBENCH_TEST_KEY"


@pytest.fixture
def child(lane: str, tmp_path: Path) -> Iterator[Child]:
    one = Child(tmp_path / "server.log")
    yield one
    one.process.kill()
    assert KEY not in one.process.log_path.read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> Any:
    return session_ids(smollm2, N)


@pytest.fixture(scope="module")
def trace(smollm2: Path, ids: Any) -> Arrays:
    """bf16 by transformers."""
    from tests.worker.conftest import Recorder

    backend, job = make(), Recorder()
    backend.start(parse_spec("transformers:weights=bf16,kv=bf16,threads=1"), smollm2, CONTEXT, job)  # type: ignore[arg-type]
    backend.score(events.Score(1, 1, True, arrays={"ids": ids}), job)  # type: ignore[arg-type]
    backend.stop()
    return job.joined("trace")


def test_a_session_is_scored_by_prompt_log_probabilities(lane, child, ids, trace, smollm2):
    effective = child.start(lane, smollm2, CONTEXT)
    assert (effective["dialect"], effective["served_model"], effective["context_limit"]) == ("vllm", "smol", 512)
    assert (effective["estimator"], effective["logits"]) == ("bounded", "top-20")
    assert effective["version"].startswith("0.")
    assert effective["checks"]["again_max"] < 0.1
    assert KEY not in str(effective)
    scored = child.score(ids, trace, "prefill")
    assert isinstance(scored, events.Scored), scored
    rows = child.joined()
    assert (len(rows["kl"]), scored.stats["prefill_tokens"], scored.stats["requests"]) == (N - 1, N, 1)
    assert rows["valid"].all()
    assert 1e-5 < rows["kl"].mean() < 5e-3  # bf16 against bf16 of another engine, at the noise floor
    assert flips(rows) < 0.08
    assert (rows["tv"] <= rows["tv_high"]).all()
    assert np.abs(rows["logprob"] - trace["logprob"]).mean() < 0.1

    pieces = child.start(lane + ",step=100,logprobs=5", smollm2, CONTEXT)
    assert pieces["logits"] == "top-5"
    scored = child.score(ids, trace, "prefill", 51)
    assert (scored.stats["requests"], len(child.joined()["kl"])) == (3, N - 51)
    fewer = child.joined()
    # Fewer ids bound less, but other prefix lengths round otherwise, which moves single positions either way.
    assert (fewer["kl"] <= rows["kl"][50:] + 0.01).mean() > 0.95
    assert 1e-5 < fewer["kl"].mean() < 5e-3
    assert np.abs(fewer["logprob"] - rows["logprob"][50:]).mean() < 0.05


def test_what_the_server_does_not_allow_is_refused_with_its_option(lane, child, smollm2):
    for spec, context, word in (
        (lane + ",logprobs=21", CONTEXT, "--max-logprobs 21"),
        (lane + ",path=decode", CONTEXT, "path=prefill"),
        (lane + ",served=other", CONTEXT, "served="),
        (lane, 600, "--max-model-len"),
        (lane.replace(",key_env=WORKBENCH_TEST_KEY", ""), CONTEXT, "key_env="),
    ):
        refused = child.ask(events.Start, parse_spec(spec).to_json(), str(smollm2), context)
        assert (refused.kind, word in refused.next) == ("refused", True), refused


def test_its_tokens_and_template_are_those_of_the_folder(lane, child, smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    facts, ids = child.inspect(lane, smollm2, text=TEXT)
    assert ids == tokenizer.encode(TEXT).ids
    assert facts["adds_bos"] is False
    facts, ids = child.inspect(lane, smollm2, messages=[{"role": "user", "content": "hello"}])
    assert facts["rendered"].endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert ids == tokenizer.encode(facts["rendered"]).ids


def test_speculation_is_told_with_its_steps_and_its_log_probabilities_are_left_out(lane, child, ids, smollm2):
    effective = child.start(lane, smollm2, CONTEXT)
    assert effective["speculation"]
    assert effective["runs"] == "divergence without the drafter, acceptance and speed with it"
    repeated = np.array((ids[:24].tolist() * 4), "<i4")
    stats, tokens = child.generate(repeated, 40)
    assert len(tokens["ids"]) == stats["tokens"] == 40
    assert np.isnan(tokens["logprobs"]).all()
    found = stats["acceptance"]
    assert found["source"] == "steps"
    assert len(found["drafted"]) == len(found["accepted"]) == found["steps"]
    assert sum(found["accepted"]) > 0
    committed = sum(found["accepted"]) + found["steps"]
    assert committed == 39 or (found["truncated"] and 39 < committed <= 43)


def test_a_server_killed_in_the_middle_ends_the_lane_which_goes_on_when_it_is_back(
    server, lane, child, ids, trace, smollm2
):
    child.start(lane + ",step=20", smollm2, CONTEXT)
    child.on_rows = server.kill
    failed = child.score(ids, trace, "prefill")
    assert (failed.kind, "no answer for 60 s" in failed.what) == ("failed", True), failed
    before = child.rows
    stop = before[-1][0] + len(before[-1][1]["kl"])
    assert 1 < stop < N
    child.on_rows = lambda: None
    server.start()
    child.start(lane + ",step=20", smollm2, CONTEXT)
    assert isinstance(child.score(ids, trace, "prefill", stop), events.Scored)
    child.rows = before + child.rows
    rows = child.joined()
    assert len(rows["kl"]) == N - 1
    assert rows["valid"].all()
    assert rows["kl"].mean() < 5e-3
    assert join("rows", [rows])["rank"].shape == (N - 1,)
