from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from tests.ui.harness import SMALL, opened, press, rows_of, text_of
from tests.ui.states import FakeRunner, make_state
from workbench.config import axes
from workbench.config.lane import Configuration, parse_spec, with_engine
from workbench.config.settings import Settings
from workbench.ui.screens.switcher import Choice, SwitcherScreen, window

VLLM = with_engine(Configuration(), "vllm")


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    monkeypatch.setattr(axes, "accelerator", lambda: "cpu")


def test_an_axis_shows_its_engine_s_values_those_of_other_machines_refused_with_the_reason():
    choice = Choice(VLLM, VLLM, axis=axes.AXIS_NAMES.index("kv"))
    shown = choice.values("kv")
    assert shown[:4] == ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    assert set(shown) == set(axes.ENGINES["vllm"].axes["kv"])
    assert "q8_0" not in shown and "int8" not in shown
    assert "computes nonsense" in choice.refused("kv", "int4_per_token_head").what
    assert choice.refused("kv", "fp8") is None
    for _ in range(40):
        choice.turn(1)
    assert choice.chosen.kv == shown[-1]


def test_another_engine_brings_its_own_defaults_and_the_first_one_what_it_began_with():
    base = parse_spec("transformers:weights=int8,kv=int4,kv_group=64")
    choice = Choice(base, base, axis=0)
    choice.turn(1)
    assert choice.chosen == with_engine(base, "llamacpp") and choice.chosen.kv == "f16"
    choice.chosen = replace(choice.chosen, kv="q8_0", path="decode")
    choice.turn(1)
    assert (choice.chosen.engine, choice.chosen.kv, choice.chosen.path) == ("vllm", "auto", "decode")
    choice.turn(-1)
    choice.turn(-1)
    assert choice.chosen == replace(base, path="decode")


def test_only_the_axis_to_blame_is_crossed():
    chosen = replace(VLLM, kv="turboquant_4bit_nc", attn="auto")
    choice = Choice(VLLM, chosen)
    bad = [axis for axis in axes.AXIS_NAMES if choice.refused(axis, str(getattr(chosen, axis)))]
    assert bad == ["kv"]
    assert choice.refused("attn", "FLASHINFER") and not choice.refused("attn", "CPU_ATTN")
    lanes = parse_spec("llamacpp:kv=q8_0,fa=off")
    choice = Choice(lanes, lanes)
    assert choice.refused("kv", "q8_0") and not choice.refused("kv", "f16") and not choice.refused("attn", "on")
    server = with_engine(VLLM, "server")
    choice = Choice(VLLM, server)
    assert choice.refused("engine", "server") and not choice.refused("kv", "served")


@pytest.mark.parametrize("room", [10, 24, 33, 34, 60, 200])
def test_the_chosen_value_is_always_in_the_window_and_the_window_as_full_as_can_be(room):
    widths = [13, 9, 20, 7, 31, 9, 9, 13, 9]
    for chosen in range(len(widths)):
        first, stop = window(widths, chosen, room, 4)
        assert first <= chosen < stop

        def cells(low, high):
            return sum(widths[low:high]) + 4 * ((low > 0) + (high < len(widths)))

        assert cells(first, stop) <= room or (first, stop) == (chosen, chosen + 1)
        assert first == 0 or cells(first - 1, stop) > room
        assert stop == len(widths) or cells(first, stop + 1) > room


@pytest.mark.parametrize("size", [(160, 45), (100, 34), SMALL])
async def test_long_lists_scroll_around_the_chosen_value_and_say_what_they_leave_out(size):
    state = make_state()
    async with opened(size, state=state, runner=FakeRunner(state)) as (app, pilot):
        await press(pilot, "2", "c", "up", "right", "right", "down", "down")
        axis = axes.ENGINES["vllm"].axes["kv"]
        seen = set()
        for _ in range(len(axis)):
            body = app.screen.query_one("#switcher")
            rows = rows_of(app, "switcher")
            line = rows[3 + body.narrow]
            chosen = body.choice.chosen.kv
            assert f"‹{chosen}" in line
            before, after = re.search("◂([0-9]+)", line), re.search("([0-9]+)▸", line)
            shown = {word.strip("‹›[]✗ ") for word in line.split()} & set(axis)
            hidden = sum(int(match[1]) for match in (before, after) if match)
            assert len(shown) + hidden == len(axis)
            assert {cell_len(row) for row in rows} == {body.size.width}
            seen.update(shown)
            body.choice.turn(1)
        assert seen == set(axis)


async def test_a_server_s_address_is_not_typed_here_and_the_screen_says_where():
    state = make_state()
    async with opened(SMALL, state=state, runner=FakeRunner(state)) as (app, pilot):
        await press(pilot, "2", "c", "up", *["right"] * 3)
        shown = " ".join(text_of(app, "switcher").split())
        assert "a server lane needs its address" in shown and "with --lane" in shown
        await press(pilot, "enter")
        assert isinstance(app.screen, SwitcherScreen)


@pytest.mark.parametrize("size", [(160, 45), SMALL])
async def test_an_answer_of_several_lines_is_shown_whole_and_goes_with_the_next_key(size):
    state = make_state()
    message = "engine vllm: python lacks vllm.\nInstall it: workbench engines install vllm\n" + "or point at one " * 9

    class Refusing(FakeRunner):
        def open_lane(self, configuration):
            self.message = message

    async with opened(size, state=state, runner=Refusing(state)) as (app, pilot):
        await press(pilot, "2", "c", "up", "right", "right", "enter")
        rows = [row.strip() for row in rows_of(app, "switcher")]
        assert "engine vllm: python lacks vllm." in rows
        assert "Install it: workbench engines install vllm" in rows
        assert " ".join(" ".join(rows).split()).count("or point at one") == 9
        frame = [row for row in rows_of(app) if "esc close" in row]
        assert len(frame) == 1
        await press(pilot, "left")
        assert "Install it" not in text_of(app)


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


async def test_a_refused_value_shows_a_cross_and_its_reason_and_enter_does_nothing():
    state = make_state()
    state.lanes[1].record = replace(state.lanes[1].record, configuration=VLLM.to_json())
    runner = FakeRunner(state)
    for size in ((160, 45), SMALL):
        async with opened(size, state=state, runner=runner) as (app, pilot):
            await press(pilot, "2", "c", "down", *["right"] * 4)
            shown = text_of(app)
            assert "float16✗" in shown
            assert "✗ vllm cannot do kv=float16" in shown
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
