from __future__ import annotations

import csv
import io
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ui.states import make_state, set_status
from workbench.cli import app, main
from workbench.cli.narration import Narrator, can_show_app
from workbench.cli.run import demo_ask
from workbench.config.axes import ENGINES
from workbench.config.settings import keep_engine
from workbench.engines import capabilities, interpreter
from workbench.engines.environments import environment_for, settings_path
from workbench.protocol.events import Ready
from workbench.run.experiment import Experiment
from workbench.store.saved import SavedSession


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    interpreter.forget()
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
    text = capsys.readouterr().out
    assert all(f"engine {name}" in text for name in ENGINES)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engines"][0]["axes"]["kv"] == ["bf16", "fp32", "int8", "int4", "int2", "fp8"]
    for fact in facts["engines"]:
        assert (fact["source"], fact["capability"], fact["checked"]) == ("own", "declared", None)
        assert bool(fact["install"]) != fact["usable"]
        assert fact["install"] is None or fact["install"] in text


def python_that_has(path: Path, **versions: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{json.dumps({'python': '3.12.1', **versions})}'\n")
    path.chmod(0o755)
    return path


def test_engines_lists_where_each_runs_and_json_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    text = capsys.readouterr().out
    assert main(["engines", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {fact["engine"] for fact in listed["engines"]} == {*ENGINES, "llmcompressor"}
    assert all(fact["python"] in text for fact in listed["engines"])
    (server,) = listed["environments"]
    assert (server["environment"], server["state"]) == ("llama-server", "absent")
    assert "llama-server: absent" in text
    assert main(["engines", "list", "vllm", "--json"]) == 0
    assert [fact["engine"] for fact in json.loads(capsys.readouterr().out)["engines"]] == ["vllm"]


def test_an_interpreter_is_added_used_and_taken_back(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python_that_has(tmp_path / "bin" / "python", vllm="9.9", numpy="2.0")
    assert main(["engines", "add", "vllm", "--python", "bin/python", "--json"]) == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert (fact["python"], fact["source"], fact["versions"]["vllm"]) == (
        str(tmp_path / "bin" / "python"),
        "settings",
        "9.9",
    )
    found = environment_for("vllm")
    assert found is not None and found.python == fact["python"]
    assert main(["engines"]) == 0
    assert "named in the settings" in capsys.readouterr().out
    assert main(["engines", "remove", "vllm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["no_longer_named"] == fact["python"]
    assert (home / "config" / "settings.toml").read_text() == "[engines]\n"


def test_what_is_wrong_in_the_settings_is_said_and_stops_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config").mkdir(parents=True)
    (home / "config" / "settings.toml").write_text('[engines]\nvllm = 3\n"non\\u001bsuch" = "x"\n')
    for command in (["engines", "--json"], ["doctor", "--json"]):
        assert main(command) == 0
        captured = capsys.readouterr()
        assert "[engines] vllm must be the path of a Python" in captured.err
        assert "\x1b" not in captured.err
        assert json.loads(captured.out)["engines"]


def test_an_interpreter_that_lacks_the_engine_is_not_added(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = python_that_has(tmp_path / "python", numpy="2.0")
    for path, says in ((python, "lacks vllm"), (tmp_path, "it is a folder"), (tmp_path / "none", "cannot be run")):
        assert main(["engines", "add", "vllm", "--python", str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert says in captured.err
    assert not (home / "config" / "settings.toml").exists()


def test_a_check_of_what_is_missing_fails_with_the_command_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_engine(settings_path(), "vllm", str(tmp_path / "gone"))
    assert main(["engines", "check", "vllm"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot be run" in captured.err
    assert main(["engines", "check", "vllm", "--json"]) == 1
    (fact,) = json.loads(capsys.readouterr().out)
    assert "cannot be run" in fact["error"]


def test_an_engine_that_answers_is_verified_and_doctor_shows_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_that_has(tmp_path / "python", vllm="9.9", numpy="2.0")  # also "loads" the engine, by exit code 0
    facts = {"name": "vllm", "version": "9.9", "build": "b\x1b[2J7", "devices": ["cpu"], "axes": {"kv": ["fp8"]}}
    engine = SimpleNamespace(receive=lambda _timeout: Ready(0, facts), stop=lambda: None)
    monkeypatch.setattr(capabilities, "EngineProcess", lambda _python, _engine: engine)
    assert main(["engines", "add", "vllm", "--python", str(python)]) == 0
    assert "declared" in capsys.readouterr().out
    assert main(["engines", "check", "vllm"]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "b␛[2J7" in text and "  kv       fp8\n  verified" in text


def test_a_created_environment_is_removed_with_its_bytes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = python_that_has(home / "data" / "environments" / "vllm" / "bin" / "python", vllm="9.9", numpy="2.0")
    assert main(["engines", "remove", "vllm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > 0
    assert not python.exists()
    assert main(["engines", "remove", "vllm"]) == 2


def test_an_interrupted_installation_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return False

    monkeypatch.setattr("workbench.engines.install.install", interrupted)
    assert main(["engines", "install", "vllm"]) == 1
    assert "workbench engines install vllm" in capsys.readouterr().err


def test_an_installation_shows_its_phases_and_names_the_interpreter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(_name: str, tell: Callable[[str, str], None], _python: str) -> bool:
        tell("installing", "")
        tell("installing", "Collecting \x1b[2Jthings")
        return True

    monkeypatch.setattr("workbench.engines.install.install", install)
    assert main(["engines", "install", "llama-server"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("llama-server: installed (")
    assert captured.err == "llama-server: installing\ninstalling: Collecting ␛[2Jthings\n"


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
        (["run", "demo", "--parallel", "0"], 2, "--parallel 0"),
        (["run", "absent.json"], 1, "absent.json"),
        (["compare", "absent.wbs"], 1, "absent.wbs"),
        (["replay", "absent.wbs", "--text"], 1, "absent.wbs"),
        (["floor", "absent.wbs"], 1, "absent.wbs"),
        (["models", "add"], 2, "needs a name"),
        (["models", "remove", "absent"], 1, "absent"),
        (["engines", "install"], 2, "needs an engine"),
        (["engines", "install", "nonesuch"], 2, "llamacpp"),
        (["engines", "install", "server"], 2, "url="),
        (["engines", "install", "vllm", "--json"], 2, "--json"),
        (["engines", "install", "llama-server", "--python", "/nonesuch"], 2, "cannot be run"),
        (["engines", "check", "nonesuch"], 2, "Engines: transformers"),
        (["engines", "check", "server", "--python", "x"], 2, "--python"),
        (["engines", "add", "vllm"], 2, "--python PATH"),
        (["engines", "add", "server", "--python", "x"], 2, "url="),
        (["engines", "remove", "vllm"], 2, "no environment of vllm"),
        (["engines", "remove", "transformers"], 2, "pip uninstall transformers"),
        (["engines", "list", "nonesuch"], 2, "Engines: transformers"),
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


def test_export_refuses_a_lane_that_is_not_there_and_names_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(Path(__file__).parents[2] / "sessions" / "dice.wbs")
    assert main(["export", saved, "--lane", "nope"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Its lanes: " in captured.err and "kv int4" in captured.err
    assert main(["export", saved, "--lane", "kv int4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 800


def test_progress_on_a_terminal_stays_on_one_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    state = make_state()
    for lane in state.lanes[1:]:
        set_status(lane, "running")
    Narrator().show(state)
    drawn = capsys.readouterr().err.rpartition("\x1b[2K")[2]
    assert "decode 128 tokens" in drawn
    assert len(drawn) <= 39


def test_a_dumb_terminal_is_none_to_draw_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm-256color")
    assert can_show_app()
    monkeypatch.setenv("TERM", "dumb")
    assert not can_show_app()


def test_what_kept_the_app_from_starting_is_said_again_when_it_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(state=None, busy=False, message="no \x1b[2Jnetwork", close=lambda: None)
    monkeypatch.setattr(app, "LiveRunner", lambda _ask: runner)
    monkeypatch.setattr(app, "_app", lambda **_: SimpleNamespace(run=lambda: None))
    assert app.open_live(demo_ask(None)) == 1
    assert capsys.readouterr().err == "workbench: no ␛[2Jnetwork\n"
    runner.busy = True  # left while it was loading
    assert app.open_live(demo_ask(None)) == 0


def test_usage_errors_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert "name a session" in capsys.readouterr().err
    for arguments in (["compare"], ["nonesuch"], ["compare", "a.wbs", "--json", "--csv"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_file_that_is_no_saved_session_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "noise.wbs"
    path.write_bytes(b"noise" * 1000)
    assert main(["compare", str(path)]) == 1
    assert "noise.wbs" in capsys.readouterr().err


def test_several_files_as_csv_have_one_header_and_say_which_file_a_row_is_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Path(__file__).parents[2] / "sessions" / "dice.wbs", tmp_path / "copy.wbs"
    second.write_bytes(first.read_bytes())
    assert main(["compare", str(first), str(second), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [Path(row["file"]).name for row in rows] == ["dice.wbs"] * 3 + ["copy.wbs"] * 3
    assert [row["name"] for row in rows[:3]] == [row["name"] for row in rows[3:]]
    assert all(float(row["kl.mean"]) > 0 for row in rows)


def test_a_lane_that_ran_when_its_run_was_killed_is_shown_as_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "killed.wbs"
    path.write_bytes((Path(__file__).parents[2] / "sessions" / "dice.wbs").read_bytes())
    with SavedSession.open(path, write=True) as saved:
        lane = next(lane for lane in saved.lanes() if lane.name == "kv int4")
        saved.update_lane(replace(lane, status="running"))
        assert main(["compare", str(path)]) == 0
        assert "kv int4 [running]" in capsys.readouterr().out
    assert main(["compare", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "kv int4 [interrupted]" in shown and "interrupted: the run ended before the lane did" in shown


def test_damage_that_is_met_only_when_rows_are_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parents[2] / "sessions" / "dice.wbs"
    with SavedSession.open(source) as saved:
        lane = next(lane for lane in saved.lanes() if lane.kind == "lane")
        chunk = saved.raw(lane.id, "rows", saved.chunks(lane.id, "rows")[0])
    data = bytearray(source.read_bytes())
    data[data.index(chunk[:64]) + 40] ^= 4
    path = tmp_path / "flipped.wbs"
    path.write_bytes(data)
    for command in (["compare", str(path)], ["export", str(path)], ["replay", "--text", str(path)]):
        assert main(command) == 0
        assert "are damaged and left out" in capsys.readouterr().err


def test_a_locale_without_the_tables_characters_still_gets_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["compare", str(Path(__file__).parents[2] / "sessions" / "dice.wbs")]) == 0
    out.flush()
    assert b"KL mean" in out.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_home_of_an_unknown_user_is_a_path_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", "~nobody-of-that-name/x")
    assert main(["paths"]) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_headless_run_that_is_told_to_end_closes_its_experiment(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []

    def prepare(_self: Experiment) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)

    before = signal.getsignal(number)
    monkeypatch.setattr(Experiment, "prepare", prepare)
    monkeypatch.setattr(Experiment, "close", lambda _self: closed.append(True))
    assert main(["run", "demo"]) == 1
    assert closed == [True]
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(number) is before
