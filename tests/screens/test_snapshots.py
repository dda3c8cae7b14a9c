"""A few pictures of whole screens; `pytest --snapshot-update` renews them after a wanted change."""

from __future__ import annotations

from tests.ui.harness import SMALL, WIDE, make_app, press, settle
from tests.ui.states import FakeRunner, engine_state, make_state, rewind, set_status
from workbench.config import axes
from workbench.config.settings import Settings


def keys(*names: str):
    """Wait for the session, then press."""

    async def run(pilot) -> None:
        await settle(pilot)
        await press(pilot, *names)

    return run


def failed_state():
    state = make_state()
    rewind(state.lanes[2], 2000)
    set_status(state.lanes[2], "done")
    rewind(state.lanes[3], 1200)
    set_status(
        state.lanes[3], "failed", reason="the engine process was killed (signal 9)\nloading weights\nout of memory"
    )
    return state


def test_lanes(snap_compare):
    assert snap_compare(make_app(state=make_state()), terminal_size=WIDE, run_before=keys("4", "right_square_bracket"))


def test_lanes_on_paper(snap_compare):
    app = make_app(Settings(theme="paper"), state=make_state())
    assert snap_compare(app, terminal_size=WIDE, run_before=keys("3", "end"))


def test_lanes_at_80_by_24(snap_compare):
    assert snap_compare(make_app(state=make_state()), terminal_size=SMALL, run_before=keys("4"))


def test_a_failed_lane(snap_compare):
    state = failed_state()
    app = make_app(state=state, runner=FakeRunner(state))
    assert snap_compare(app, terminal_size=WIDE, run_before=keys("4"))


def test_switcher(snap_compare, monkeypatch):
    monkeypatch.setattr(axes, "accelerator", lambda: "cpu")
    state = make_state()
    app = make_app(state=state, runner=FakeRunner(state))
    assert snap_compare(app, terminal_size=(120, 34), run_before=keys("2", "c", "down", "right"))


def test_lanes_of_other_engines(snap_compare):
    app = make_app(state=engine_state())
    assert snap_compare(app, terminal_size=WIDE, run_before=keys("7", "right_square_bracket"))


def test_a_bounded_lane_at_80_by_24(snap_compare):
    app = make_app(state=engine_state())
    assert snap_compare(app, terminal_size=SMALL, run_before=keys("2", "right_square_bracket"))


def test_what_ran(snap_compare):
    assert snap_compare(make_app(state=engine_state()), terminal_size=WIDE, run_before=keys("7", "m"))


def test_switcher_of_another_engine(snap_compare, monkeypatch):
    monkeypatch.setattr(axes, "accelerator", lambda: "cpu")
    state = make_state()
    app = make_app(state=state, runner=FakeRunner(state))
    chosen = ("2", "c", "up", "right", "right", "down", "down", *["right"] * 6)
    assert snap_compare(app, terminal_size=SMALL, run_before=keys(*chosen))


def test_help(snap_compare):
    assert snap_compare(make_app(state=make_state()), terminal_size=WIDE, run_before=keys("question_mark"))
