from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from workbench.config.lane import parse_spec
from workbench.protocol import events
from workbench.protocol.columns import count_rows, cut, join
from workbench.protocol.wire import pack, read_frame
from workbench.worker import channel

ROOT = Path(__file__).resolve().parents[2]
SPEC = "transformers:weights=fp32,kv=fp32,chunk=32,threads=1"


class Child:
    """An engine process and the frames to and from it."""

    def __init__(self, log: Path, backend: str = "transformers", **environment: str) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workbench.worker", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=log.parent,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "WORKBENCH_LOG": str(log),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            start_new_session=True,
        )
        self.seen: list[events.Event] = []

    def send(self, request: events.Request) -> None:
        self.raw(pack(*events.encode(request)))

    def raw(self, data: bytes) -> None:
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def until(self, *kinds: type, job: int | None = None) -> events.Event:
        """The next event of one of the kinds, of that job."""
        while True:
            frame = read_frame(self.process.stdout)
            assert frame is not None, self.log.read_text()
            event = events.decode(*frame)
            self.seen.append(event)
            if isinstance(event, kinds) and job in (None, event.job):
                return event

    def start(self, folder: Path, spec: str = SPEC, job: int = 1, context: int = 128) -> events.Event:
        self.send(events.Start(job, parse_spec(spec).to_json(), str(folder), context))
        return self.until(events.Started, events.Failed, job=job)

    def rows(self, job: int) -> dict:
        parts = [e.arrays for e in self.seen if isinstance(e, events.Rows) and e.job == job]
        kind = "trace" if "lse" in parts[0] else "rows"
        for part in parts:
            count_rows(kind, part)
        return join(kind, parts)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    one = Child(tmp_path_factory.mktemp("engine") / "engine.log")
    yield one
    one.close()


@pytest.fixture
def fresh(tmp_path):
    made = []

    def make(**environment):
        made.append(Child(tmp_path / "engine.log", **environment))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_ready_comes_unasked_with_versions_devices_and_values(child):
    ready = child.until(events.Ready)
    assert ready.job == 0
    assert ready.engine["name"] == "transformers"
    assert ready.engine["axes"]["kv"] == ["bf16", "fp32", "int8", "int4", "int2", "fp8"]
    assert ready.engine["devices"][-1] == "cpu"
    child.send(events.Probe(5))
    assert child.until(events.Ready).job == 5


def test_record_compare_and_generate_over_frames(child, tiny_llama, stream):
    started = child.start(tiny_llama, job=10)
    assert isinstance(started, events.Started), started
    child.send(events.Score(11, 1, True, arrays={"ids": stream}))
    scored = child.until(events.Scored, job=11)
    trace = child.rows(11)
    assert len(trace["lse"]) == 99
    assert scored.stats["peak_memory_bytes"] > 50 << 20
    assert scored.stats["kv_positions"] == 100

    started = child.start(tiny_llama, SPEC.replace("kv=fp32", "kv=int4"), job=12)
    assert started.effective["weights_kept"]
    child.send(events.Feed(13, 1, cut("trace", trace, 0, 5)))
    child.send(events.Score(13, 1, False, arrays={"ids": stream}))
    for first, stop in ((6, 41), (41, 42), (42, 100)):
        child.send(events.Feed(13, first, cut("trace", trace, first - 1, stop - 1)))
    child.until(events.Scored, job=13)
    rows = child.rows(13)
    assert len(rows["kl"]) == 99
    assert rows["kl"].mean() > 0

    child.send(events.Generate(14, 12))
    generated = child.until(events.Generated, job=14)
    tokens = join("continuation", [e.arrays for e in child.seen if isinstance(e, events.Tokens) and e.job == 14])
    assert len(tokens["ids"]) == generated.stats["tokens"] == 12


def test_what_cannot_run_is_refused_and_the_process_goes_on(child, tiny_llama, tmp_path):
    refused = child.start(tiny_llama, "transformers:kv=int3", job=20)
    assert (refused.kind, "int4" in refused.next) == ("refused", True)
    too_long = child.start(tiny_llama, job=21, context=4096)
    assert too_long.kind == "refused"
    assert "4096" in too_long.what
    missing = child.start(tmp_path, job=22)
    assert (missing.kind, missing.where) == ("failed", str(tmp_path))
    child.send(events.Start(23, {"colour": 1}, str(tiny_llama), 8))
    assert child.until(events.Failed, job=23).kind == "refused"
    assert isinstance(child.start(tiny_llama, job=24), events.Started)


def test_a_frame_that_is_no_request_is_answered_and_the_process_goes_on(child):
    child.raw(pack({"type": "Ready", "job": 30, "engine": {}}))
    assert "not a request" in child.until(events.Failed).what
    child.raw(pack({"type": "Dance", "job": 31}))
    assert child.until(events.Failed).job == 31
    child.raw(pack({"type": "Score", "job": 32, "colour": 1}))
    assert "no field colour" in child.until(events.Failed).what
    child.send(events.Probe(33))
    assert child.until(events.Ready).job == 33


def test_a_job_that_waits_for_its_trace_can_be_cancelled_and_the_next_one_runs(child, tiny_llama, stream):
    child.start(tiny_llama, job=40)
    child.send(events.Score(41, 1, False, arrays={"ids": stream}))
    child.send(events.Cancel(41))
    assert child.until(events.Failed, job=41).kind == "cancelled"
    child.send(events.Score(42, 1, True, arrays={"ids": stream}))
    assert child.until(events.Scored, events.Failed, job=42).stats["prefill_tokens"] == 100


def test_a_running_generation_can_be_cancelled(child, tiny_llama):
    child.start(tiny_llama, job=50, context=256)
    child.send(events.Generate(51, 250, arrays={"ids": np.zeros(2, "<i4")}))
    child.until(events.Tokens, job=51)
    child.send(events.Cancel(51))
    assert child.until(events.Failed, events.Generated, job=51).kind == "cancelled"


def test_memory_that_cannot_be_had_is_said_so_and_the_process_goes_on(child, tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**13}))
    failed = child.start(folder, job=55, context=10**12)
    assert (failed.kind, failed.what.startswith("out of memory: ")) == ("failed", True)
    assert "KV cache" in failed.next
    assert isinstance(child.start(tiny_llama, job=56), events.Started)


def test_a_damaged_gguf_is_named_over_frames(child, tmp_path):
    source = tmp_path / "cut.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    child.send(events.Convert(60, str(source), str(tmp_path / "out")))
    failed = child.until(events.Failed, events.Converted, job=60)
    assert (failed.kind, failed.where) == ("failed", str(source))
    assert "damaged or cut off" in failed.what
    assert not (tmp_path / "out").exists()


def test_the_log_holds_the_traces_of_failures_and_no_progress_bars(child):
    text = child.log.read_text()
    assert "Traceback" in text
    assert "Loading weights" not in text


def test_stop_ends_the_process_with_code_0(fresh):
    one = fresh()
    one.until(events.Ready)
    one.send(events.Stop())
    one.process.stdin.close()
    assert one.process.wait(10) == 0


def test_bytes_that_are_no_frame_end_the_process_with_a_reason(fresh):
    one = fresh()
    one.until(events.Ready)
    one.raw(b"\xff" * 64)
    assert "request stream is broken" in one.until(events.Failed).what
    assert one.process.wait(10) != 0


def test_an_unknown_backend_is_refused(tmp_path):
    one = Child(tmp_path / "engine.log", "../evil")
    failed = one.until(events.Failed)
    assert "no engine backend" in failed.what
    assert one.process.wait(10) == 1
    one.close()


def test_noise_on_stdout_from_any_level_goes_to_the_log(fresh, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys, threading\n"
        "def noise():\n"
        "    print('python noise'); os.write(1, b'native noise\\n'); os.system('echo shell noise')\n"
        "threading.Timer(0.6, noise).start()\n"
    )
    one = fresh(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    one.until(events.Ready)
    one.send(events.Probe(2))
    assert one.until(events.Ready).job == 2
    one.send(events.Stop())
    one.process.wait(10)
    text = one.log.read_text()
    assert all(f"{level} noise" in text for level in ("python", "native", "shell"))


PARENT = """
import os, subprocess, sys
read, write = os.pipe()
child = subprocess.Popen([sys.executable, "-m", "workbench.worker", "transformers"], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, start_new_session=True, pass_fds={keep})
holder = {holder}
sys.stdout.write(f"{{child.pid}} {{holder.pid if holder else 0}}\\n"); sys.stdout.flush()
data = sys.stdin.buffer.read()
child.stdin.write(data); child.stdin.flush()
print(child.stdout.read1(1 << 16) and "up", flush=True)
child.wait()
"""
HOLDER = "subprocess.Popen(['sleep', '60'], pass_fds=(child.stdin.fileno(),))"


@pytest.mark.parametrize("holder", ["None", HOLDER], ids=["alone", "the pipe held open by another process"])
def test_the_process_is_gone_two_seconds_after_its_parent_was_killed_in_the_middle_of_a_pass(
    tmp_path, tiny_llama, holder
):
    source = PARENT.format(keep="()", holder=holder)
    log = tmp_path / "engine.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WORKBENCH_LOG": str(log), "OMP_NUM_THREADS": "1"},
    )
    pid, held = map(int, parent.stdout.readline().split())
    requests = [
        events.Start(1, parse_spec(SPEC).to_json(), str(tiny_llama), 256),
        events.Generate(2, 250, arrays={"ids": np.zeros(3, "<i4")}),
        events.Score(3, 1, True, arrays={"ids": np.zeros(256, "<i4")}),
    ]
    requests += [events.Score(4 + i, 1, True, arrays={"ids": np.zeros(256, "<i4")}) for i in range(200)]
    parent.stdin.write(b"".join(pack(*events.encode(request)) for request in requests))
    parent.stdin.close()
    assert parent.stdout.readline() == b"up\n"
    engine = psutil.Process(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    gone = has_ended(engine, 10)
    if not gone:
        engine.kill()
    if held:
        os.kill(held, signal.SIGKILL)
    assert gone, "the engine process outlived its parent"
    assert channel.PARENT_POLL_SECONDS <= 1


def has_ended(process, seconds):
    """Whether it ends in time; where nobody collects orphans, as in some containers, a zombie has ended too."""
    for _ in range(int(seconds / 0.1)):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            process.wait(0.1)
            return True
        except psutil.TimeoutExpired:
            continue
        except psutil.NoSuchProcess:
            return True
    return False
