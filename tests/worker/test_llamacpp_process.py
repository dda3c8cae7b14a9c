from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from workbench.config.lane import parse_spec
from workbench.engines.process import EngineProcess
from workbench.errors import EngineError
from workbench.protocol import events
from workbench.protocol.columns import cut, join

pytest.importorskip("llama_cpp")

ROOT = Path(__file__).resolve().parents[2]
SPEC = "llamacpp:weights=F32,kv=f32,fa=off,chunk=32,threads=1"


class Engine:
    """An engine process of the real kind, and what it has said."""

    def __init__(self, log):
        self.process = EngineProcess(sys.executable, "llamacpp", log)
        self.seen = []

    def send(self, request):
        self.process.send(request)

    def until(self, *kinds, job=None):
        while True:
            event = self.process.receive(timeout=60)
            assert event is not None, self.seen[-5:]
            self.seen.append(event)
            if isinstance(event, kinds) and job in (None, event.job):
                return event

    def start(self, path, spec=SPEC, job=1, context=128):
        self.send(events.Start(job, parse_spec(spec).to_json(), str(path), context))
        return self.until(events.Started, events.Failed, job=job)

    def rows(self, kind, job):
        return join(kind, [event.arrays for event in self.seen if isinstance(event, events.Rows) and event.job == job])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    one = Engine(tmp_path_factory.mktemp("engine") / "engine.log")
    yield one
    one.process.kill()


@pytest.fixture(scope="module")
def file(engine, tmp_path_factory, tiny_llama):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    engine.send(events.Convert(6, str(tiny_llama), str(path), "F32"))
    made = engine.until(events.Converted, events.Failed, job=6)
    assert isinstance(made, events.Converted), made
    return path


def test_ready_names_version_build_and_what_it_can_do(engine):
    engine.send(events.Probe(5))
    ready = engine.until(events.Ready, job=5).engine
    assert ready["name"] == "llamacpp"
    assert "ggml" in ready["build"]
    assert ready["devices"][-1] == "cpu"
    assert ready["axes"]["weights"][0] == "BF16"
    assert "llama_cpp" not in ready["cpu"] and ready["cpu"]


def test_record_compare_and_generate_over_frames(engine, file, stream):
    started = engine.start(file, job=10)
    assert isinstance(started, events.Started), started
    engine.send(events.Score(11, 1, True, arrays={"ids": stream}))
    scored = engine.until(events.Scored, job=11)
    trace = engine.rows("trace", 11)
    assert len(trace["lse"]) == 99
    assert scored.stats["peak_memory_bytes"] > 10 << 20
    assert scored.stats["kv_positions"] == 100

    started = engine.start(file, SPEC.replace("kv=f32,fa=off", "kv=q4_0"), job=12)
    assert started.effective["weights_kept"]
    engine.send(events.Feed(13, 1, cut("trace", trace, 0, 5)))
    engine.send(events.Score(13, 1, False, arrays={"ids": stream}))
    engine.send(events.Feed(13, 6, cut("trace", trace, 5, 99)))
    engine.until(events.Scored, job=13)
    assert engine.rows("rows", 13)["kl"].mean() > 0

    engine.send(events.Generate(14, 12))
    generated = engine.until(events.Generated, job=14)
    tokens = [event.arrays for event in engine.seen if isinstance(event, events.Tokens) and event.job == 14]
    assert len(join("continuation", tokens)["ids"]) == generated.stats["tokens"] == 12


def test_a_running_generation_can_be_cancelled_and_the_process_goes_on(engine, file):
    engine.start(file, SPEC.replace("chunk=32", "chunk=1"), job=20, context=256)
    engine.send(events.Score(21, 1, False, arrays={"ids": np.zeros(256, "<i4")}))
    engine.send(events.Cancel(21))
    assert engine.until(events.Failed, events.Scored, job=21).kind == "cancelled"
    assert isinstance(engine.start(file, job=22), events.Started)


def test_what_cannot_run_is_refused_and_the_process_goes_on(engine, file, tiny_llama, tmp_path):
    for job, (path, spec, kind, words) in enumerate(
        (
            (file, SPEC.replace("kv=f32", "kv=q8_0"), "refused", "without flash attention"),
            (file, SPEC.replace("kv=f32", "kv=q3"), "refused", "kv=q3"),
            (tiny_llama, SPEC, "refused", "this is a folder"),
            (tmp_path / "none.gguf", SPEC, "failed", "cannot be read"),
        ),
        30,
    ):
        failed = engine.start(path, spec, job=job)
        assert (failed.kind, words in failed.what) == (kind, True), failed
    engine.start(file, job=40)
    engine.send(events.Score(41, 1, True, arrays={"ids": np.full(5, 300, "<i4")}))
    failed = engine.until(events.Failed, events.Scored, job=41)
    assert (failed.kind, "another model's stream" in failed.what) == ("refused", True)


def test_a_damaged_file_is_named(engine, file, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:-1])
    failed = engine.start(path, job=50)
    assert (failed.kind, failed.where) == ("failed", str(path))
    assert "its tensors need" in failed.what
    engine.send(events.Convert(51, str(path), str(tmp_path / "made.gguf"), "Q8_0"))
    assert engine.until(events.Failed, events.Converted, job=51).where == str(path)


def test_what_llama_cpp_says_is_in_the_log(engine, file):
    engine.start(file, job=60)
    text = engine.process.log_path.read_text()
    assert "llama_context: n_ctx" in text
    assert "Exception ignored" not in text


def test_a_killed_engine_is_an_error_with_its_log(file, stream, tmp_path):
    one = Engine(tmp_path / "engine.log")
    one.start(file)
    one.send(events.Score(2, 1, False, arrays={"ids": stream}))
    one.process.kill()
    with pytest.raises(EngineError, match="SIGKILL") as error:
        one.until(events.Scored)
    assert error.value.log_tail


WITHOUT = """
import sys
absent = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "zstandard", "rich", "textual", "psutil")
sys.modules.update(dict.fromkeys(absent))  # an import of any of them raises ImportError
import workbench.worker.serve
from workbench.worker.serve import _load
print(_load("llamacpp").probe()["name"])
"""


def test_the_engine_needs_nothing_but_numpy_and_llama_cpp():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, "llamacpp\n"), done.stderr[-800:]
