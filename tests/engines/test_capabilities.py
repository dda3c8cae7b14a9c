from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.config.axes import ENGINES
from workbench.engines import capabilities
from workbench.engines.capabilities import Capability, capability, verify
from workbench.engines.environments import Environment, environment_for
from workbench.errors import EngineError
from workbench.paths import data_dir

ROOT = Path(__file__).resolve().parents[2]
ANSWER = """
import sys
sys.path.insert(0, {root!r})
from workbench.protocol import events, wire
wire.write_frame(sys.stdout.buffer, *events.encode({event}))
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def environment(folder: Path, event: str, load: str = "exit 0") -> Environment:
    """An interpreter whose engine answers with this event, whatever it is started with."""
    folder.mkdir(exist_ok=True)
    code, python = folder / "child.py", folder / "python"
    # asked to load the engine it is told `-I -c ...`, and as an engine process `-P -m ...`
    code.write_text(ANSWER.format(root=str(ROOT), event=event))
    python.write_text(f"#!/bin/sh\n[ $1 = -I ] && {load}\nexec {sys.executable} {code}\n")
    python.chmod(0o755)
    return Environment(str(python), "vllm", "settings", {"python": "3.12.1", "vllm": "9.9"})


READY = (
    'events.Ready(0, {"name": "vllm", "version": "9.9", "build": "b1", "devices": ["cpu"], "axes": {"kv": ["fp8"]}})'
)


def test_what_was_not_checked_is_declared_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Environment("/p", "vllm", "own")
    monkeypatch.setattr(capabilities, "accelerator", lambda: "cpu")
    assert capability(here).source == "declared"
    assert capability(here).axes["attn"] == ENGINES["vllm"].on["cpu"]["attn"]
    monkeypatch.setattr(capabilities, "accelerator", lambda: "cuda")
    assert capability(here).axes["attn"] == ENGINES["vllm"].axes["attn"]


def test_a_check_keeps_what_the_engine_said_for_this_interpreter_and_these_versions(tmp_path: Path) -> None:
    here = environment(tmp_path / "a", READY)
    found = verify(here)
    assert (found.source, found.version, found.build, found.devices) == ("verified", "9.9", "b1", ["cpu"])
    assert found.axes == {"kv": ("fp8",)}
    assert found.when
    assert capability(here) == found
    assert capability(replace(here, python=str(tmp_path / "a" / "python3"))) == found
    assert capability(replace(here, versions={**here.versions, "vllm": "10"})).source == "declared"
    assert capability(replace(here, python=str(tmp_path / "b" / "python"))).source == "declared"
    assert capability(replace(here, engine="llamacpp")).source == "declared"


def test_a_second_check_replaces_the_first_and_leaves_other_interpreters_alone(tmp_path: Path) -> None:
    one, two = environment(tmp_path / "a", READY), environment(tmp_path / "b", READY)
    verify(one)
    verify(two)
    newer = replace(one, versions={**one.versions, "vllm": "10"})
    verify(newer)
    assert [capability(each).source for each in (one, two, newer)] == ["declared", "verified", "verified"]
    assert len(json.loads((data_dir() / "engines.json").read_text())) == 2


def test_an_engine_that_fails_is_an_error_with_its_words_and_nothing_is_kept(tmp_path: Path) -> None:
    here = environment(tmp_path / "a", 'events.Failed(0, "failed", "no libomp", "engine process", "Install it.")')
    with pytest.raises(EngineError, match="no libomp") as failed:
        verify(here)
    assert failed.value.next == "Install it."
    assert capability(here).source == "declared"


def test_libraries_that_are_there_but_do_not_load_are_an_error_with_what_they_printed(tmp_path: Path) -> None:
    here = environment(tmp_path / "a", READY, "{ echo 'ImportError: libomp.so' >&2; exit 1; }")
    with pytest.raises(EngineError, match="from vllm import LLM ends with exit code 1") as failed:
        verify(here)
    assert failed.value.log_tail == ("ImportError: libomp.so",)
    assert capability(here).source == "declared"


def test_an_engine_that_dies_or_says_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="ended with exit code"):
        verify(environment(tmp_path / "a", 'sys.exit("gone")'))
    monkeypatch.setattr(capabilities, "CHECK_SECONDS", 0.2)
    with pytest.raises(EngineError, match="did not say that it is there"):
        verify(environment(tmp_path / "b", "sys.stdin.buffer.read()"))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"3", b"[3, {}]", b'[{"engine": "vllm", "ready": 3}]', b"[" * 99_999]
)
def test_a_damaged_file_verifies_nothing_and_the_next_check_writes_it_anew(tmp_path: Path, data: bytes) -> None:
    data_dir().mkdir(parents=True)
    (data_dir() / "engines.json").write_bytes(data)
    here = environment(tmp_path / "a", READY)
    assert capability(here).source == "declared"
    assert verify(here).source == "verified"


def test_axes_that_are_none_leave_the_declared_ones(tmp_path: Path) -> None:
    here = environment(tmp_path / "a", 'events.Ready(0, {"axes": "many", "devices": "cpu"})')
    found = verify(here)
    assert (found.source, found.devices, found.version) == ("verified", [], "")
    assert found.axes == capability(replace(here, versions={})).axes


def verified_here(engine: str, settings: dict[str, str]) -> Capability:
    here = environment_for(engine, settings)
    assert here is not None
    assert here.usable, here.install
    found = verify(here)
    assert (found.source, found.version) == ("verified", here.versions[MODULES[engine]])
    assert "cpu" in found.devices
    for axis, values in found.axes.items():
        assert set(values) <= set(ENGINES[engine].axes[axis])
    return found


MODULES = {"transformers": "transformers", "llamacpp": "llama_cpp", "vllm": "vllm"}


def test_llama_cpp_of_our_own_interpreter_loads_and_says_what_it_can_do() -> None:
    assert "q8_0" in verified_here("llamacpp", {}).axes["kv"]


@pytest.mark.slow
def test_transformers_of_our_own_interpreter_loads_and_says_what_it_can_do() -> None:
    assert "bf16" in verified_here("transformers", {}).axes["weights"]


@pytest.mark.slow
def test_vllm_of_its_own_environment_loads_and_says_what_it_can_do() -> None:
    python = os.environ.get("WORKBENCH_VLLM_PYTHON")
    if not python:
        assert os.environ.get("WORKBENCH_VLLM") != "required", "WORKBENCH_VLLM_PYTHON is not set"
        pytest.skip("needs WORKBENCH_VLLM_PYTHON: a Python that has vLLM")
    assert "auto" in verified_here("vllm", {"vllm": python}).axes["kv"]
