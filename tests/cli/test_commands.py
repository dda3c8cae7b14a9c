from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ui.states import make_state, set_status
from workbench.cli import app, main
from workbench.cli.narration import Narrator, can_show_app
from workbench.cli.run import demo_ask
from workbench.run.experiment import Experiment
from workbench.store.saved import SavedSession


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
        (["run", "demo", "--parallel", "0"], 2, "--parallel 0"),
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
