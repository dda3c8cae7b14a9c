from __future__ import annotations

from dataclasses import replace

from tests.ui.harness import SMALL, opened, press, text_of
from tests.ui.states import FakeRunner, make_state
from workbench.config import axes
from workbench.config.lane import Configuration
from workbench.config.settings import Settings
from workbench.ui.screens import switcher
from workbench.ui.screens.switcher import Choice, SwitcherScreen


def second_engine(monkeypatch):
    """Another engine, with values that the first one cannot do."""
    usual = axes.ENGINES["transformers"]
    other = replace(usual, name="other", axes={**usual.axes, "kv": ("bf16", "fp8"), "attn": ("fa3",)})
    engines = {"transformers": usual, "other": other}
    monkeypatch.setattr(axes, "ENGINES", engines)
    monkeypatch.setattr(switcher, "ENGINES", engines)


def test_values_of_other_engines_stay_visible_and_are_refused_with_the_reason(monkeypatch):
    second_engine(monkeypatch)
    choice = Choice(Configuration(), Configuration(), axis=axes.AXIS_NAMES.index("kv"))
    assert choice.values("kv") == ["bf16", "fp32", "int8", "int4", "fp8"]
    assert choice.refused("kv", "fp8") is not None
    assert choice.refused("kv", "int4") is None
    for _ in range(9):
        choice.turn(1)
    assert choice.chosen.kv == "fp8"


def test_a_value_of_a_newer_version_is_not_lost():
    base = replace(Configuration(), kv="kivi2")
    assert Choice(base, base).values("kv")[0] == "kivi2"


async def test_arrows_choose_enter_opens_the_lane_and_the_screen_goes_there():
    state = make_state()
    runner = FakeRunner(state)
    async with opened(state=state, runner=runner) as (app, pilot):
        await press(pilot, "2", "c", "down", "right", "right")
        shown = text_of(app)
        assert "transformers:weights=int8,kv=int8" in shown
        assert "kv cache bf16 → int8 · keeps the loaded weights" in shown
        await press(pilot, "enter")
        assert runner.asked == [("open", replace(Configuration(), weights="int8", kv="int8"))]
        assert app.screen is app.lanes
        assert app.lanes.board.active.lane.record.id == 5
        assert len(app.lanes.board.views) == 5
        assert "queued" in text_of(app, "gauges")


async def test_a_configuration_that_is_open_already_is_gone_to_instead():
    state = make_state()
    runner = FakeRunner(state)
    async with opened(state=state, runner=runner) as (app, pilot):
        await press(pilot, "2", "c", "j", "l", "l", "l")
        assert "goes to lane 4" in text_of(app)
        await press(pilot, "enter")
        assert runner.asked == []
        assert app.lanes.board.active.number == 4


async def test_reset_and_escape_change_nothing():
    state = make_state()
    runner = FakeRunner(state)
    async with opened(state=state, runner=runner) as (app, pilot):
        await press(pilot, "c", "down", "right", "up", "right", "backspace")
        assert "nothing yet" in text_of(app)
        await press(pilot, "escape")
        assert runner.asked == []
        assert app.screen is app.lanes


async def test_a_refused_value_shows_a_cross_and_its_reason_and_enter_does_nothing(monkeypatch):
    second_engine(monkeypatch)
    state = make_state()
    runner = FakeRunner(state)
    for size in ((160, 45), SMALL):
        async with opened(size, state=state, runner=runner) as (app, pilot):
            await press(pilot, "2", "c", "down", *["right"] * 6)
            shown = text_of(app)
            assert "fp8✗" in shown
            assert "✗ transformers cannot do kv=fp8" in shown
            assert "this lane cannot be run" in shown
            await press(pilot, "enter")
            assert isinstance(app.screen, SwitcherScreen)
    assert runner.asked == []


async def test_a_runner_that_refuses_says_why_and_a_replay_says_what_is_missing():
    state = make_state()

    class Refusing(FakeRunner):
        def open_lane(self, configuration):
            self.message = "needs 9.1 GiB, 4.0 GiB are free"

    async with opened(state=state, runner=Refusing(state)) as (app, pilot):
        await press(pilot, "2", "c", "down", "right", "right", "enter")
        assert "needs 9.1 GiB" in text_of(app)
    missing = FakeRunner(state, missing="torch is missing: pip install inference-workbench[transformers]")
    for runner, words in ((missing, "torch is missing"), (None, "replay: lanes cannot be run")):
        async with opened(state=state, runner=runner) as (app, pilot):
            await press(pilot, "2", "c", "down", "right", "right")
            assert words in text_of(app)
            await press(pilot, "enter")
            assert isinstance(app.screen, SwitcherScreen)
    assert missing.asked == []


async def test_the_switcher_names_the_user_s_own_keys():
    state = make_state()
    settings = Settings(keys={"apply": "o", "reset": "["})
    async with opened(settings=settings, state=state, runner=FakeRunner(state)) as (app, pilot):
        await press(pilot, "2", "c", "down", "right", "right")
        assert "o opens it as a new lane" in text_of(app)
        assert "[ reset" in text_of(app) and "o run" in text_of(app)
