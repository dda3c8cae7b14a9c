from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from workbench.config.lane import parse_spec
from workbench.engines.environments import environment_for
from workbench.engines.process import EngineProcess
from workbench.errors import EngineError, InvalidLaneError
from workbench.paths import worker_path
from workbench.protocol import events
from workbench.protocol.columns import cut, join
from workbench.protocol.wire import pack, read_frame
from workbench.run.checks import check_effective, check_predictions
from workbench.store.state import Columns, LaneRecord, LaneState
from workbench.worker.backends.transformers import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

N = 500
CONTEXT = N + 64

FORCED_PAST = """
import sys
import workbench.worker.backends.vllm as backend
backend.check = lambda configuration: configuration
sys.argv = ["workbench.worker", "vllm"]
from workbench.worker.__main__ import main
sys.exit(main())
"""


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


class Child:
    """A vLLM engine process: requests down, what comes back sorted."""

    def __init__(self, python: str, log: Path) -> None:
        self.process = EngineProcess(python, "vllm", log)
        self.job = 0
        self.rows: list[Any] = []
        self.tokens: list[Any] = []
        assert isinstance(self.process.receive(60), events.Ready)

    def ask(self, kind: type, *values: Any, trace: Any = None, cancel: bool = False, **named: Any) -> Any:
        """Send a request and take its answer; `cancel` gives it up at its first progress."""
        self.job += 1
        self.rows, self.tokens = [], []
        self.process.send(kind(self.job, *values, **named))
        if trace is not None:
            self.process.send(events.Feed(self.job, 1, trace))
        while True:
            event = self.process.receive(300)
            assert event is not None, self.process.log_tail(30)
            if event.job != self.job:
                continue
            match event:
                case events.Rows():
                    self.rows.append(event.arrays)
                case events.Tokens():
                    self.tokens.append(event.arrays)
                case events.Progress():
                    if cancel:
                        self.process.send(events.Cancel(self.job))
                case _:
                    return event

    def start(self, spec: str, folder: Path) -> dict[str, Any]:
        started = self.ask(events.Start, parse_spec(f"vllm:{spec},threads=1").to_json(), str(folder), CONTEXT)
        assert isinstance(started, events.Started), (started, self.process.log_tail(30))
        return started.effective

    def score(self, ids: Any, trace: Any = None, single: Any = None) -> Any:
        arrays = {"ids": ids} if single is None else {"ids": ids, "single": single}
        path = "prefill" if single is None else "decode"
        scored = self.ask(events.Score, 1, trace is None, path=path, arrays=arrays, trace=trace)
        assert isinstance(scored, events.Scored), (scored, self.process.log_tail(30))
        return join("trace" if trace is None else "rows", self.rows)


@pytest.fixture
def vllm(python, tmp_path):
    one = Child(python, tmp_path / "vllm.log")
    yield one
    one.process.kill()


@pytest.fixture(scope="module")
def ids(smollm2):
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    return np.array(Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids[:N], dtype="<i4")


@pytest.fixture
def traced(recorder, smollm2, ids):
    """A function: weights of transformers to its trace of the stream."""
    backend = make()

    def trace(weights: str) -> Any:
        job = recorder()
        spec = f"transformers:weights={weights},kv={weights},threads=1"
        backend.start(parse_spec(spec), smollm2, CONTEXT, job)
        backend.score(events.Score(1, 1, True, arrays={"ids": ids}), job)
        return job.joined("trace")

    yield trace
    backend.stop()


def flips(rows: Any) -> float:
    return float((rows["rank"] > 1).mean())


def test_fp32_equals_transformers_by_whole_vocabulary_prefilled_forced_and_drafted(vllm, traced, smollm2, ids):
    trace = traced("fp32")
    effective = vllm.start("weights=fp32,path=decode,logprobs=full,chunk=128", smollm2)
    assert effective["weights"]["scheme"] == "fp32"
    assert (effective["attn"], effective["kv"], effective["chunk"]) == ("CPU_ATTN", "float32", 128)
    assert (effective["threads"], effective["logits"], effective["vocabulary"]) == (1, "full", 49152)
    single = np.zeros(N, np.uint8)
    single[140:160] = single[300:330] = single[490:] = 1
    for rows in (vllm.score(ids, trace), vllm.score(ids, trace, single)):
        assert len(rows["kl"]) == N - 1
        assert rows["valid"].all()
        assert rows["kl"].mean() < 1e-6
        assert flips(rows) == 0

    cancelled = vllm.ask(events.Score, 1, True, path="decode", arrays={"ids": ids, "single": single}, cancel=True)
    assert cancelled.kind == "cancelled"
    itself = vllm.score(ids, vllm.score(ids))
    assert not itself["kl"].any()
    for expected in (300 + N - 256, N - 256):  # whole blocks of the KV cache are taken over
        reused = vllm.ask(events.Score, 301, False, reuse=300, arrays={"ids": ids}, trace=trace)
        assert reused.stats["prefill_tokens"] == expected
        rows = join("rows", vllm.rows)
        assert (len(rows["kl"]), flips(rows)) == (N - 301, 0)
        assert rows["kl"].mean() < 1e-6
        assert isinstance(vllm.ask(events.Score, 1, True, arrays={"ids": ids[:300]}), events.Scored)

    generated = vllm.ask(events.Generate, 40, arrays={"ids": ids})
    plain = join("continuation", vllm.tokens)
    assert generated.stats["tokens"] == len(plain["ids"]) == 40
    assert (np.diff(plain["seconds"]) > 0).all()
    stop = int(plain["ids"][4])
    generated = vllm.ask(events.Generate, 40, stop=(stop,), arrays={"ids": ids})
    kept = plain["ids"][: plain["ids"].tolist().index(stop) + 1]
    assert generated.stats["stop_reason"] == "stop"
    assert join("continuation", vllm.tokens)["ids"].tolist() == kept.tolist()

    effective = vllm.start("weights=fp32,draft=ngram,width=3", smollm2)
    assert (effective["draft"], effective["width"], effective["drafter"]) == ("ngram", 3, "NgramProposer")
    refused = vllm.ask(events.Score, 1, True, arrays={"ids": ids})
    assert (refused.kind, "unchecked" in refused.what) == ("refused", True)
    drafted = vllm.ask(events.Generate, 40, arrays={"ids": ids}).stats["acceptance"]
    tokens = join("continuation", vllm.tokens)
    assert tokens["ids"].tolist() == plain["ids"].tolist()
    assert np.abs(tokens["logprobs"] - plain["logprobs"]).max() < 1e-3
    assert drafted["source"] == "steps"
    assert drafted["checked"]
    assert len(drafted["drafted"]) == len(drafted["accepted"]) < 39
    committed = sum(drafted["accepted"]) + len(drafted["accepted"])
    assert committed == 39 or (drafted["truncated"] and 39 < committed <= 42)
    again = vllm.start("weights=fp32,draft=ngram,width=3", smollm2)
    assert again["weights_kept"]
    assert not vllm.start("weights=fp32", smollm2)["weights_kept"]  # a new engine in the same process, after numba


def test_bf16_is_bounded_by_its_best_ids_and_fp8_keys_and_values_are_read_back(vllm, traced, smollm2, ids):
    trace = traced("bf16")
    effective = vllm.start("weights=bf16", smollm2)
    assert (effective["weights"]["scheme"], effective["estimator"]) == ("bf16", "head+tail samples")
    exact = vllm.score(ids, trace)
    assert 1e-4 < exact["kl"].mean() < 1e-2

    effective = vllm.start("weights=bf16,logprobs=256", smollm2)
    assert (effective["estimator"], effective["logits"]) == ("bounded", "top-256")
    bounds = vllm.score(ids, trace)
    assert bounds["valid"].all()
    # Samples of the tail that are among the 256 are told apart too: a finer grouping than the head alone of kl_low.
    assert bounds["kl"].mean() <= exact["kl"].mean()
    assert (bounds["kl"] <= np.maximum(exact["kl"], exact["kl_low"]) * 1.1 + 1e-3).all()
    assert bounds["kl"].mean() > 0
    assert np.array_equal(bounds["rank"], np.minimum(exact["rank"], 257))
    assert np.allclose(bounds["logprob"], exact["logprob"], atol=1e-4)
    refused = vllm.ask(events.Score, 1, True, arrays={"ids": ids})
    assert (refused.kind, "logprobs=full" in refused.next) == ("refused", True)

    effective = vllm.start("weights=bf16,kv=fp8", smollm2)
    assert (effective["kv"], effective["kv_tensors"]) == ("fp8", "uint8")
    assert exact["kl"].mean() * 2 < vllm.score(ids, trace)["kl"].mean() < 1


def test_what_is_forced_past_the_table_is_caught_by_what_runs_and_by_nonsense(python, traced, smollm2, ids, tmp_path):
    trace = traced("bf16")
    environment = {**os.environ, "PYTHONPATH": str(worker_path()), "WORKBENCH_LOG": str(tmp_path / "vllm.log")}
    with subprocess.Popen(
        [python, "-P", "-c", FORCED_PAST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:

        def until(job: int) -> Any:
            rows = []
            while (frame := read_frame(child.stdout)) is not None:
                event = events.decode(*frame)
                rows += [event.arrays] if isinstance(event, events.Rows) else []
                if event.job == job and isinstance(event, (events.Started, events.Scored, events.Failed)):
                    return event, rows
            raise AssertionError((tmp_path / "vllm.log").read_text()[-3000:])

        def send(request: events.Request) -> None:
            child.stdin.write(pack(*events.encode(request)))
            child.stdin.flush()

        spec = parse_spec("vllm:weights=bf16,kv=int4_per_token_head,attn=FLASHINFER,threads=1")
        send(events.Start(1, spec.to_json(), str(smollm2), CONTEXT))
        started, _ = until(1)
        assert isinstance(started, events.Started), started
        assert started.effective["attn"] == "CPU_ATTN"
        assert started.effective["kv"] is None
        assert len([note for note in started.effective["notes"] if "FLASHINFER" in note or "int4" in note]) == 2
        send(events.Feed(2, 1, cut("trace", trace, 0, 299)))
        send(events.Score(2, 1, False, arrays={"ids": ids[:300]}))
        scored, rows = until(2)
        assert isinstance(scored, events.Scored), scored
        measured = join("rows", rows)
        assert flips(measured) > 0.9
        send(events.Stop())
    with pytest.raises(InvalidLaneError, match="asked for FLASHINFER, runs CPU_ATTN"):
        check_effective(spec, started.effective)
    lane = LaneState(LaneRecord(1, "forced", "lane", spec.to_json()), Columns("rows", 1), Columns("continuation", 0))
    lane.rows.append(1, measured)
    with pytest.raises(InvalidLaneError, match="are nonsense"):
        check_predictions(lane, None, started.effective["vocabulary"])


def test_what_cannot_be_done_is_refused_before_anything_loads(vllm, smollm2, tmp_path):
    for spec, word in (
        ("kv=int4_per_token_head", "nonsense"),
        ("attn=FLASHINFER", "CPU_ATTN"),
        ("draft=mtp", "GPU"),
        ("logprobs=trace", "V2"),
    ):
        refused = vllm.ask(events.Start, parse_spec(f"vllm:{spec}").to_json(), str(smollm2), CONTEXT)
        assert (refused.kind, word in f"{refused.what} {refused.next}") == ("refused", True), refused
    missing = vllm.ask(events.Start, parse_spec("vllm:weights=bf16").to_json(), str(tmp_path), CONTEXT)
    assert (missing.kind, missing.where) == ("failed", str(tmp_path))
    convert = vllm.ask(events.Convert, str(smollm2), str(tmp_path / "out"))
    assert convert.kind == "refused"
    seen = vllm.ask(events.Inspect, {}, str(smollm2), text="<|im_start|>user\nhello<|im_end|>")
    assert seen.arrays["ids"][0] == 1
    assert seen.facts["sampling"]["temperature"] == 1.0
    assert "vllm.v1" not in vllm.process.log_path.read_text()


def test_memory_that_cannot_be_had_is_said_and_the_next_start_works(vllm, traced, smollm2, ids):
    spec = parse_spec("vllm:weights=bf16,kv_space=100000").to_json()
    failed = vllm.ask(events.Start, spec, str(smollm2), CONTEXT)
    assert (failed.kind, failed.what.startswith("out of memory")) == ("failed", True)
    vllm.start("weights=bf16", smollm2)


def test_processes_of_its_own_give_whole_distributions_and_die_with_it(vllm, traced, smollm2, ids):
    trace = cut("trace", traced("fp32"), 0, 99)
    effective = vllm.start("weights=fp32,executor=mp,logprobs=full", smollm2)
    assert (effective["logits"], effective["weights"]["scheme"]) == ("full", "fp32")
    rows = vllm.score(ids[:100], trace)
    assert rows["kl"].mean() < 1e-6
    assert flips(rows) == 0
    helpers = psutil.Process(vllm.process.pid).children(recursive=True)
    worker = next(each for each in helpers if "Worker" in each.name())
    worker.kill()
    failed = vllm.ask(events.Generate, 8, arrays={"ids": ids[:20]})
    assert failed.kind == "failed"
    vllm.start("weights=bf16,executor=mp,logprobs=256", smollm2)
    helpers = psutil.Process(vllm.process.pid).children(recursive=True)
    assert len(helpers) >= 2
    os.kill(vllm.process.pid, signal.SIGKILL)  # this process alone, as the system does when memory runs out
    _, alive = psutil.wait_procs(helpers, timeout=20)
    assert not alive
    with pytest.raises(EngineError):
        vllm.ask(events.Probe)


def test_an_interpreter_without_vllm_says_so(tmp_path):
    process = EngineProcess(sys.executable, "vllm", tmp_path / "vllm.log")
    failed = process.receive(60)
    process.kill()
    assert isinstance(failed, events.Failed)
    assert "engines install vllm" in failed.next
