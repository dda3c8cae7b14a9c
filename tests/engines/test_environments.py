from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.engines import environments
from workbench.engines.environments import environment_for, find_environments


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
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
    monkeypatch.setitem(environments.NEEDED, "transformers", {"numpy": "numpy", "no_such_module": "no-such-dist"})
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
    monkeypatch.setitem(environments.NEEDED, "transformers", {"no_such_module": "no-such-dist"})
    python = home / "data" / "environments" / "transformers" / "bin" / "python"
    fake_python(python, """echo '{"python": "3.12.1", "no_such_module": "1.0"}'""")
    created, own = find_environments()
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
