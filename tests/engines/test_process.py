from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from workbench.engines.process import EngineProcess
from workbench.errors import EngineError
from workbench.protocol import events

CHILD = """
import os, signal, sys
print("a line of noise", file=sys.stderr)
sys.path.insert(0, {root!r})
from workbench.protocol import events, wire
out, inp = sys.stdout.buffer, sys.stdin.buffer
wire.write_frame(out, *events.encode(events.Ready(0, {{"name": "child"}})))
while (frame := wire.read_frame(inp)) is not None:
    match events.decode(*frame):
        case events.Cancel(job=1):
            out.write(b"this is no frame"); out.flush(); break
        case events.Cancel(job=2):
            print("about to die", file=sys.stderr); sys.stderr.flush(); os.kill(os.getpid(), signal.SIGKILL)
        case events.Cancel(job=3):
            signal.signal(signal.SIGTERM, signal.SIG_IGN); import time; time.sleep(600)
        case events.Stop():
            break
        case request:
            wire.write_frame(out, *events.encode(events.Progress(request.job, "seen")))
"""


@pytest.fixture
def child(tmp_path: Path):  # type: ignore[no-untyped-def]
    script = tmp_path / "python"
    root = str(Path(__file__).resolve().parents[2])
    code = tmp_path / "child.py"
    code.write_text(CHILD.format(root=root))
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {code}\n")
    script.chmod(0o755)
    process = EngineProcess(str(script), "transformers", tmp_path / "log")
    yield process
    if process.alive:
        process.kill()


def test_requests_go_down_and_events_come_up(child: EngineProcess) -> None:
    assert child.receive(20) == events.Ready(0, {"name": "child"})
    child.send(events.Probe(7))
    assert child.receive(20) == events.Progress(7, "seen")
    child.stop()
    assert not child.alive


def test_nothing_within_the_timeout_is_none(child: EngineProcess) -> None:
    child.receive(20)
    assert child.receive(0.01) is None


def test_a_killed_child_is_an_error_with_its_signal_and_the_end_of_its_log(child: EngineProcess) -> None:
    child.receive(20)
    child.send(events.Cancel(2))
    with pytest.raises(EngineError, match="SIGKILL") as death:
        child.receive(20)
    assert "about to die" in death.value.log_tail
    with pytest.raises(EngineError):
        child.receive(20)


def test_a_child_that_sends_noise_fails_by_name(child: EngineProcess) -> None:
    child.receive(20)
    child.send(events.Cancel(1))
    failed = child.receive(20)
    assert isinstance(failed, events.Failed)
    assert "not an event" in failed.what
    with pytest.raises(EngineError):
        child.receive(20)


def test_a_child_that_does_not_listen_is_killed_after_its_grace(child: EngineProcess) -> None:
    child.receive(20)
    child.send(events.Cancel(3))
    child.stop(grace=0.3)
    assert not child.alive
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, signal.SIG_DFL)


def test_an_interpreter_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot start"):
        EngineProcess(str(tmp_path / "absent"), "transformers", tmp_path / "log")
