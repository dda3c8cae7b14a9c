"""benchmarks/gpu_check.py on the CPU: the script itself, and that what it would have to catch is caught."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from workbench.worker.loaded import Loaded
from workbench.worker.scoring import lane_rows

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
SMALL = ["--device", "cpu", "--tokens", "160", "--new", "16", "--layers", "2"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_every_row_that_a_cpu_can_do_is_as_it_should_be(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "13 of 13 rows as they should be" in printed
    assert "| bf16 sdpa-math | sdpa-math (sdpa-math) |" in printed


def test_without_cuda_it_says_so_and_ends_with_2(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_rows_that_time_does_not_reach_are_failures(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*SMALL, "--minutes", "0"]) == 1
    assert "0 of 13 rows" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_that_computes_something_else_on_the_device_fails_its_rows(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(logits, *rest):  # as a kernel that reads a neighbour's row
        return lane_rows(torch.roll(logits, 1, 0), *rest)

    forward = Loaded.forward

    def forgets(self: Loaded, ids: np.ndarray, keep: int) -> torch.Tensor:
        output = forward(self, ids, keep)
        return torch.roll(output, 1, -1) if 1 < len(ids) < 6 else output  # in batches as a verification's

    monkeypatch.setattr("workbench.worker.loaded.lane_rows", wrong)
    monkeypatch.setattr(Loaded, "forward", forgets)
    assert script.main(SMALL) == 1
    lines = {row.split(" | ")[0].strip("| "): row for row in capsys.readouterr().out.splitlines() if row[:1] == "|"}
    assert "KL out of bounds" in lines["fp32 eager"]
    assert "FAILED" in lines["fp32 kv=fp32, drafter verified"]
