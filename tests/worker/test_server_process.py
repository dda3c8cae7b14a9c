from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.servers import truth
from tests.servers.fake import Fake
from tests.servers.lane import IDS, TRACE, N, expected, make_folder
from tests.servers.real import Child
from workbench.paths import worker_path
from workbench.protocol import events

HEAVY = "torch transformers tokenizers zstandard rich textual huggingface_hub jinja2 platformdirs"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    one = Child(tmp_path / "server.log")
    yield one
    one.process.kill()


def test_it_needs_nothing_but_the_standard_library_and_numpy() -> None:
    code = f"import sys, workbench.worker.backends.server; print(sorted(set({HEAVY.split()!r}) & set(sys.modules)))"
    environment = {"PYTHONPATH": str(worker_path()), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_lane_runs_through_frames_and_a_cancel_reaches_it_while_the_server_computes(
    child: Child, tmp_path: Path
) -> None:
    folder, ids = make_folder(tmp_path / "model"), np.array(IDS, "<i4")
    with Fake("vllm", steps=((4, 2),)) as fake:
        effective = child.start(f"server:url={fake.url}", folder, 128)
        assert effective["dialect"] == "vllm"
        assert isinstance(child.score(ids, TRACE, "prefill"), events.Scored)
        np.testing.assert_array_equal(child.joined()["kl"], expected(20)["kl"])
        stats, tokens = child.generate(ids[:40], 8)
        assert tokens["ids"].tolist() == truth.greedy(IDS[:40], 8) and stats["acceptance"]["accepted"][0] == 2

        fake.fault = lambda path, number: "wait" if path == "/v1/completions" else None
        fake.waiting.clear()
        child.number += 1
        request = events.Score(child.number, 1, False, arrays={"ids": ids})
        child.process.send(request)
        assert fake.waiting.wait(30)
        child.process.send(events.Cancel(request.job))
        answer = child.process.receive(30)
        while not isinstance(answer, events.Failed):
            answer = child.process.receive(30)
        assert (answer.job, answer.kind) == (request.job, "cancelled")
        fake.go.set()
        fake.fault = lambda path, number: None
        assert isinstance(child.score(ids, TRACE, "prefill", N - 10), events.Scored)
