from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "llama_cpp", "vllm", "workbench.worker")
LATE = ("tokenizers", "jinja2", "huggingface_hub")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["workbench.cli", "workbench.cli.run", "workbench.cli.files", "workbench.cli.machine", "workbench.ui.app"]
)
def test_no_part_of_the_users_process_loads_an_engine_or_a_late_library(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert not loaded.intersection(HEAVY)
    assert not loaded.intersection(LATE)


@pytest.mark.parametrize("module", ["workbench.cli", "workbench.run.experiment", "workbench.report.table"])
def test_textual_is_loaded_by_the_interface_alone(module: str) -> None:
    assert "textual" not in loaded_after(f"import {module}")


def test_the_worker_starts_without_anything_of_the_users_process() -> None:
    loaded = loaded_after("import workbench.worker.serve")
    assert not {name for name in loaded if name.startswith(("workbench.ui", "workbench.run", "workbench.store"))}
    assert not loaded.intersection(("textual", "rich", "platformdirs", "zstandard"))
