from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cli import main
from workbench.cli.narration import can_show_app


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_paths_prints_every_place_and_json_the_same(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["paths"]) == 0
    text = capsys.readouterr().out
    assert main(["paths", "--json"]) == 0
    places = json.loads(capsys.readouterr().out)
    assert all(name in text and path in text for name, path in places.items())
    assert places["models"] == str(home / "data" / "models")


def test_doctor_names_every_engine_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "engine transformers" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engines"][0]["axes"]["kv"] == ["bf16", "fp32", "int8", "int4"]


def test_models_lists_the_embedded_one_before_it_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "not fetched"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "demo", "--lane", "transformers:kv=q8_0"], 2, "bf16|fp32|int8|int4"),
        (["run", "demo", "--lane", "nonesuch:"], 2, "Engines: transformers"),
        (["run", "demo", "--lane", "transformers"], 1, ""),
        (["run", "absent.json"], 1, "absent.json"),
        (["compare", "absent.wbs"], 1, "absent.wbs"),
        (["replay", "absent.wbs", "--text"], 1, "absent.wbs"),
        (["floor", "absent.wbs"], 1, "absent.wbs"),
        (["models", "add"], 2, "needs a name"),
        (["models", "remove", "absent"], 1, "absent"),
    ],
)
def test_what_cannot_be_done_is_one_line_on_stderr_and_an_exit_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_arguments: object, **_named: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("workbench.run.prepare.find_model", offline)
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_the_app_without_a_terminal_says_what_to_use_instead(capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(Path(__file__).parents[2] / "sessions" / "dice.wbs")
    assert main([saved]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs a terminal" in captured.err and "--text" in captured.err


def test_a_dumb_terminal_is_none_to_draw_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm-256color")
    assert can_show_app()
    monkeypatch.setenv("TERM", "dumb")
    assert not can_show_app()


def test_usage_errors_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run"], ["nonesuch"], ["compare", "a.wbs", "--json", "--csv"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_file_that_is_no_saved_session_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "noise.wbs"
    path.write_bytes(b"noise" * 1000)
    assert main(["compare", str(path)]) == 1
    assert "noise.wbs" in capsys.readouterr().err
