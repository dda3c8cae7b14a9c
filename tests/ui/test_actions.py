from __future__ import annotations

import pytest
from textual.containers import VerticalScroll

from tests.ui.harness import make_app, opened, press, text_of
from tests.ui.states import FakeRunner, make_state, rewind, set_status
from workbench.config.settings import Settings
from workbench.ui.actions import ACTIONS, FOOTER, FOOTER_END, action, keys_of, resolve_keys
from workbench.ui.screens.help import HelpScreen
from workbench.ui.screens.lanes import LanesScreen
from workbench.ui.screens.seek import SeekScreen
from workbench.ui.screens.switcher import SwitcherScreen
from workbench.ui.screens.themes import ThemeScreen
from workbench.ui.widgets.inspector import Inspector


def test_ids_are_unique_and_no_key_means_two_things_in_one_place():
    assert len({item.id for item in ACTIONS}) == len(ACTIONS)
    for places in (("app", "lanes"), ("app", "switcher", "dialog")):
        keys = [key for item in ACTIONS if item.place in places for key in item.keys.split(",")]
        assert sorted(keys) == sorted(set(keys))


def test_no_control_key_is_the_only_way_except_to_interrupt():
    for item in ACTIONS:
        plain = [key for key in item.keys.split(",") if not key.startswith("ctrl+")]
        assert plain or item.id == "interrupt", item.id


def test_every_action_of_the_table_exists_where_it_works():
    owners = {"app": make_app(), "lanes": LanesScreen, "switcher": SwitcherScreen, "dialog": SwitcherScreen}
    for item in ACTIONS:
        assert hasattr(owners[item.place], f"action_{item.call.partition('(')[0]}"), item.id
    assert all(action(id).footer for ids in (*FOOTER, *FOOTER_END) for id in ids[-1:])


def test_unknown_ids_and_clashing_keys_are_reported_and_the_defaults_stay():
    used, problems = resolve_keys({"zoom": "f", "nothing": "x", "seek": "S", "flip-next": "n,]"})
    assert used == {"seek": "S", "flip-next": "n,]"}
    assert "zoom: f already is follow" in " ".join(problems)
    assert "nothing: there is no such action" in " ".join(problems)
    assert keys_of("flip-next", used) == ["n", "]"]


def test_two_actions_may_trade_their_keys():
    assert resolve_keys({"zoom": "f", "follow": "z"}) == ({"zoom": "f", "follow": "z"}, [])


def test_an_action_that_gets_its_default_back_clashes_with_who_took_it():
    used, problems = resolve_keys({"zoom": "f", "follow": "q"})
    assert used == {}
    assert [problem.partition(";")[0] for problem in problems] == [
        "[keys] follow: q already is quit",
        "[keys] zoom: f already is follow",
    ]


@pytest.mark.parametrize("keys", [",", "ctrl+", "nonsense", "ctrl+ctrl", "ab", "\x1b", "f+Z", "Z,what"])
def test_what_is_no_key_is_reported_and_the_default_stays(keys: str):
    used, problems = resolve_keys({"zoom": keys})
    assert used == {}
    assert "is no key" in problems[0]


@pytest.mark.parametrize("keys", ["Z", "ctrl+y", "é", "+", "f5", "shift+f5", "shift+up", "comma,S", "tilde", "alt+z"])
def test_every_way_to_name_a_key_is_taken(keys: str):
    used, problems = resolve_keys({"zoom": keys, "step-back": "o", "lane-prev": "p"})
    assert (used["zoom"], problems) == (keys, [])


async def test_keys_of_the_settings_work_and_are_shown_and_problems_are_said():
    settings = Settings(keys={"zoom": "Z", "flip-next": "n", "gone": "x"})
    async with opened(settings=settings, state=make_state()) as (app, pilot):
        assert "gone: there is no such action" in text_of(app, "legend")
        board = app.lanes.board
        await press(pilot, "z")
        assert not board.zoomed
        await press(pilot, "Z")
        assert board.zoomed
        before = board.transport.cursor
        await press(pilot, "n")
        assert board.transport.cursor > before
        assert "Z zoom" in text_of(app, "footer")
        await press(pilot, "question_mark")
        assert isinstance(app.screen, HelpScreen)
        assert "gone: there is no such action" in text_of(app, "help")


async def test_the_cursor_moves_by_token_row_page_message_flip_and_to_the_ends():
    async with opened(state=make_state()) as (app, pilot):
        board = app.lanes.board
        transport, active = board.transport, board.active
        assert transport.cursor == active.measures.next_flip(-1, 1)
        steps = [("home", 0), ("l", 1), ("right", 2), ("full_stop", 3), ("comma", 2), ("h", 1), ("left", 0)]
        for key, position in steps:
            await press(pilot, key)
            assert transport.cursor == position, key
        rows = app.lanes.tokens.rows
        await press(pilot, "j", "down")
        assert rows.at(active, transport.cursor) == 2
        await press(pilot, "k", "up")
        assert rows.at(active, transport.cursor) == 0
        await press(pilot, "pagedown")
        page = rows.at(active, transport.cursor)
        assert page == app.lanes.tokens.size.height - 2
        await press(pilot, "ctrl+u")
        assert rows.at(active, transport.cursor) == 0
        await press(pilot, "right_curly_bracket")
        assert transport.cursor == board.shared.message_starts[1]
        await press(pilot, "left_curly_bracket")
        assert transport.cursor == 0
        await press(pilot, "right_square_bracket")
        first = transport.cursor
        await press(pilot, "right_square_bracket", "left_square_bracket")
        assert transport.cursor == first
        await press(pilot, "left_square_bracket")
        assert "No earlier flip" in text_of(app, "legend")
        await press(pilot, "G")
        assert transport.cursor == transport.total - 1
        await press(pilot, "g")
        assert transport.cursor == 0


async def test_every_row_can_be_reached_downwards_and_upwards_through_the_continuation():
    async with opened(state=make_state(turns=2, tail=60)) as (app, pilot):
        board, rows = app.lanes.board, app.lanes.tokens.rows
        await press(pilot, "home")
        seen = [0]
        while board.transport.cursor < board.transport.total - 1 and len(seen) < 400:
            app.lanes.action_row(1)
            seen.append(board.transport.cursor)
            if seen[-1] == seen[-2]:
                break
        assert seen[-1] >= board.count
        assert rows.at(board.active, seen[-1]) == rows.count(board.active, board.transport.total) - 1
        while board.transport.cursor > 0:
            before = board.transport.cursor
            app.lanes.action_row(-1)
            assert board.transport.cursor < before


async def test_lanes_are_chosen_by_digit_and_tab_zoomed_hidden_and_shown_again():
    async with opened(state=make_state()) as (app, pilot):
        board = app.lanes.board
        await press(pilot, "4")
        assert board.active.number == 4
        await press(pilot, "tab")
        assert board.active.number == 1
        await press(pilot, "shift+tab", "8")
        assert board.active.number == 4
        await press(pilot, "right_square_bracket", "1", "right_square_bracket")
        assert "reference has no flips" in text_of(app, "legend")
        await press(pilot, "z")
        assert app.lanes.tokens.drawn_lanes == [1]
        await press(pilot, "z", "2", "x")
        assert app.lanes.tokens.drawn_lanes == [1, 3, 4]
        await press(pilot, "X")
        assert app.lanes.tokens.drawn_lanes == [1, 2, 3, 4]


async def test_a_digit_is_the_number_on_screen_where_lanes_are_hidden():
    async with opened(state=make_state()) as (app, pilot):
        board = app.lanes.board
        await press(pilot, "2", "x")
        assert board.active.number == 3  # the neighbour, not the reference
        await press(pilot, "4")
        assert board.active.number == 4
        await press(pilot, "3")
        assert board.active.number == 3
        await press(pilot, "2")
        assert board.active.number == 3
        assert "no lane 2 on screen. X shows hidden lanes" in text_of(app, "legend")
        await press(pilot, "X")
        assert "no lane" not in text_of(app, "legend")


async def test_the_last_lane_cannot_be_hidden():
    async with opened(state=make_state(specs=())) as (app, pilot):
        await press(pilot, "x")
        assert len(app.lanes.board.views) == 1
        assert "The last lane stays" in text_of(app, "legend")


async def test_the_inspector_can_be_put_away_and_its_rows_go_to_the_tokens():
    async with opened(state=make_state()) as (app, pilot):
        height = app.lanes.tokens.size.height
        await press(pilot, "i")
        assert not app.lanes.query_one(Inspector).display
        assert app.lanes.tokens.size.height == height + 6
        await press(pilot, "i")
        assert app.lanes.tokens.size.height == height


async def test_space_plays_and_pauses_and_the_clock_stops_with_it():
    async with opened(state=make_state()) as (app, pilot):
        board = app.lanes.board
        await press(pilot, "home", "equals_sign", "equals_sign", "minus")
        assert board.transport.speed == 160
        await press(pilot, "space")
        assert board.transport.playing
        assert board.transport.shown < 200
        assert app.lanes._timer._active.is_set()
        board.transport.advance(1.0)
        app.lanes.tick()
        assert board.transport.cursor >= 160
        assert "▶ 160/s" in text_of(app, "scrubber")
        await press(pilot, "space")
        app.lanes.tick()
        assert not app.lanes._timer._active.is_set()
        assert "❚❚" in text_of(app, "scrubber")
        await press(pilot, "f")
        assert board.transport.follow and board.transport.playhead is None


async def test_seek_takes_tokens_turns_and_shares_and_says_when_there_is_no_such_place():
    async with opened(state=make_state()) as (app, pilot):
        board = app.lanes.board
        for typed, position in (("120", 120), ("t3", board.shared.turn_starts[2]), ("0%", 0)):
            await press(pilot, "s", *["percent_sign" if symbol == "%" else symbol for symbol in typed], "enter")
            assert board.transport.cursor == position
        await press(pilot, "s", "t", "9", "9", "enter")
        assert isinstance(app.screen, SeekScreen)
        assert "no such place" in text_of(app)
        await press(pilot, "escape")
        assert app.screen is app.lanes


async def test_themes_change_at_once_and_escape_goes_back():
    async with opened(state=make_state()) as (app, pilot):
        await press(pilot, "t")
        assert isinstance(app.screen, ThemeScreen)
        await press(pilot, "down")
        assert app.theme == app.desk.ink.palette.name == "paper"
        await press(pilot, "escape")
        assert app.theme == app.desk.ink.palette.name == "harbour"
        await press(pilot, "t", "down", "enter")
        assert app.theme == "paper"
        assert "paper" in text_of(app, "header")


async def test_the_palette_lists_every_action_of_the_screen_and_runs_them():
    async with opened(state=make_state()) as (app, pilot):
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        usable = [item for item in ACTIONS if item.place in ("app", "lanes") and item.id != "palette"]
        assert commands.keys() == {f"{item.id}: {item.description}" for item in usable}  # found by id and by words
        await commands[f"zoom: {action('zoom').description}"].callback()
        await commands[f"help: {action('help').description}"].callback()
        await pilot.pause()
        assert app.lanes.board.zoomed
        assert isinstance(app.screen, HelpScreen)
        await press(pilot, "question_mark", "ctrl+p")
        assert app.screen is not app.lanes


async def test_help_lists_every_action_and_the_thresholds():
    async with opened(state=make_state()) as (app, pilot):
        await press(pilot, "f1")
        shown = "\n".join("".join(s.text for s in row) for row in app.screen.query_one("#help")._rows(124))
        for item in ACTIONS:
            assert item.description in shown or item.id.startswith("lane-"), item.id
        assert all(f"<{value}" in shown for value in ("0.02", "0.08", "0.2", "0.5"))
        await press(pilot, "escape")
        assert app.screen is app.lanes


@pytest.mark.parametrize("key", ["q", "ctrl+q"])
async def test_quitting(key):
    async with opened(state=make_state()) as (app, pilot):
        await pilot.press(key)
        assert app._exit


async def test_interrupt_stops_a_running_lane_and_quits_when_pressed_again():
    state = make_state()
    rewind(state.lanes[2], 50)
    runner = FakeRunner(state)
    async with opened(state=state, runner=runner) as (app, pilot):
        await press(pilot, "3", "ctrl+c")
        assert runner.asked == [("cancel", 3)]
        assert not app._exit
        await pilot.press("ctrl+c")
        assert app._exit


async def test_run_and_close_ask_the_runner_and_a_replay_says_what_is_missing():
    state = make_state()
    set_status(state.lanes[1], "failed", reason="it died")
    rewind(state.lanes[2], 50)
    runner = FakeRunner(state)
    async with opened(state=state, runner=runner) as (_, pilot):
        await press(pilot, "2", "r", "3", "r", "x")
        assert runner.asked == [("retry", 2), ("cancel", 3)]
    async with opened(state=make_state()) as (app, pilot):
        await press(pilot, "r")
        assert "replay: lanes cannot be run" in text_of(app, "legend")


async def test_the_footer_and_the_scrubber_and_tokens_can_be_clicked():
    async with opened(state=make_state()) as (app, pilot):
        column = text_of(app, "footer").index("zoom")
        await pilot.click("#footer", offset=(column, 0))
        assert app.lanes.board.zoomed
        await press(pilot, "z")
        await pilot.click("#scrubber", offset=(60, 1))
        assert 1000 < app.lanes.board.transport.cursor < 2000
        await pilot.click("#tokens", offset=(125, 3))
        assert app.lanes.board.active.number == 4
        await pilot.click("#footer", offset=(text_of(app, "footer").index("quit"), 0))
        assert app._exit


@pytest.mark.parametrize("key", ["question_mark", "f1", "q", "escape"])
async def test_help_is_closed_by_the_key_that_opened_it_and_the_usual_ones(key: str):
    async with opened(state=make_state()) as (app, pilot):
        await press(pilot, "question_mark")
        assert isinstance(app.screen, HelpScreen)
        await press(pilot, key)
        assert app.screen is app.lanes


async def test_j_and_k_move_in_help_and_in_the_list_of_themes():
    async with opened((80, 24), state=make_state()) as (app, pilot):
        await press(pilot, "question_mark", "j", "j", "k")
        assert app.screen.query_one(VerticalScroll).scroll_y == 1
        await press(pilot, "escape", "t", "j")
        assert app.theme == "paper"
        await press(pilot, "k")
        assert app.theme == "harbour"
