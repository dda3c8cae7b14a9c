"""The lanes screen: sizes, growth, failures, emptiness, hostile text."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.ui.harness import SMALL, WIDE, opened, press, rows_of, settle, text_of
from tests.ui.states import FakeRunner, engine_state, grow, make_state, rewind, set_status
from workbench.errors import SavedSessionError
from workbench.store.state import Columns
from workbench.ui.marks import near_floor
from workbench.ui.widgets.inspector import Inspector
from workbench.ui.widgets.notices import wrapped

HOSTILE = (
    b"\x1b[2J\x1b[31mred",
    b"[bold red]markup[/]",
    b"\x1b]0;title\x07",
    b"\x00",
    "\u202eevil\u202c".encode(),
    "\u200b\u200d\ufe0f".encode(),
    "👩‍👩‍👧‍👦".encode(),
    b"\xff\xfe",
    b"\x9b31m",
    b"\r\x08\x7f",
    "ﷺ".encode(),
    b"\xf0\x9f\x98",
)


def hostile_state():
    """A session whose every token, title, reason and log line attacks the terminal."""
    state = make_state(turns=2)
    state.token_bytes = lambda token: HOSTILE[token % len(HOSTILE)]
    state.title = "\x1b[2J[red]title\u202e"
    set_status(state.lanes[0], "done", manifest={"model_name": "\x1b]0;x\x07model"})
    state.damage = ["lost \x1b[31mchunk"]
    evil = "\x1b[2J[red]evil\u202e\n\x9b31m"
    manifest = {
        "engine": evil, "version": evil, "attn": evil, "engine_notes": [evil], "differs": evil, "runs": evil,
        "logits": evil,
        "build": evil, "kv": {"scheme": evil}, "argv": [evil],
    }  # fmt: skip
    state.lanes[1].record = replace(state.lanes[1].record, manifest=manifest, stats={"no_effect": evil})
    set_status(state.lanes[1], "failed", reason="\x1b[2J[red]reason\nlog \x1b[0m line\u202e", name="\x1b[1mname")
    return state


@pytest.mark.parametrize("size", [WIDE, SMALL, (60, 20), (120, 34), (200, 60), (71, 24)])
async def test_every_line_is_exactly_as_wide_as_the_terminal(size):
    async with opened(size, state=make_state()) as (app, pilot):
        for keys in ((), ("end",), ("4",), ("z",), ("i",)):
            await press(pilot, *keys)
            rows = rows_of(app)
            assert len(rows) == size[1]
            assert {cell_len(row) for row in rows} == {size[0]}


@pytest.mark.parametrize(
    ("size", "lanes"),
    [((200, 60), 4), (WIDE, 4), ((120, 34), 3), (SMALL, 2), ((72, 24), 2), ((71, 24), 1), ((60, 20), 1)],
)
async def test_as_many_lanes_stand_side_by_side_as_fit(size, lanes):
    async with opened(size, state=make_state()) as (app, pilot):
        assert len(app.lanes.tokens.drawn_lanes) == lanes
        await press(pilot, "4")
        assert 4 in app.lanes.tokens.drawn_lanes


async def test_the_scrubber_is_the_third_line_from_the_bottom_and_the_footer_the_last():
    for size in (WIDE, SMALL):
        async with opened(size, state=make_state()) as (app, _):
            rows = rows_of(app)
            assert "❚❚" in rows[-3]
            assert "flip" in rows[-2]
            assert "quit" in rows[-1]


async def test_resizing_down_below_the_least_size_and_back_keeps_the_place():
    async with opened(WIDE, state=make_state()) as (app, pilot):
        await press(pilot, "3", "right_square_bracket", "right_square_bracket")
        cursor = app.lanes.board.transport.cursor
        before = rows_of(app)
        for size in (SMALL, (50, 10), (60, 20), WIDE):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            assert app.lanes.board.transport.cursor == cursor
            assert {cell_len(row) for row in rows_of(app)} == {size[0]}
            if size == (50, 10):
                assert "needs 60×20, has 50×10" in rows_of(app)[0]
                assert "".join(rows_of(app)[1:]).strip() == ""
        after = rows_of(app)
        assert after[:6] == before[:6]
        assert f"token {cursor:,}" in text_of(app, "inspector")


async def test_compact_screens_have_two_lines_of_figures_and_two_of_inspection():
    async with opened(SMALL, state=make_state()) as (app, pilot):
        await press(pilot, "4")
        assert [app.lanes.query_one(f"#{id}").size.height for id in ("gauges", "inspector", "scrubber")] == [3, 3, 1]
        assert "KL 0.0" in text_of(app, "gauges")
        inspector = rows_of(app, "inspector")
        assert inspector[1].strip().startswith("ref")
        assert inspector[2].strip().startswith("4")
        assert rows_of(app)[1].startswith(" 1 ref") and rows_of(app)[1].endswith("2 of 4 tab ")


async def test_gauges_show_the_lanes_figures():
    state = make_state()
    async with opened(state=state) as (app, pilot):
        gauges = text_of(app, "gauges")
        for view in app.lanes.board.views[1:]:
            assert f"{view.measures.kl_mean:.4f}" in gauges
            assert f"{100 * view.measures.flip_rate:.2f}%" in gauges
        assert "63.4/s" in gauges
        assert gauges.count("≈ floor") == 1
        await press(pilot, "z")
        assert "no drafter" in text_of(app, "gauges")


async def test_a_figure_that_does_not_fit_goes_with_its_label():
    state = make_state()
    for lane in state.lanes:
        decode = {"acceptance": {"source": "average", "pooled": 2.25}}
        stats = {"prefill_tokens": 123_456, "prefill_seconds": 1.0, "decode": decode}
        set_status(lane, "done", stats=stats)
    async with opened(state=state) as (app, pilot):
        speeds = rows_of(app, "gauges")[4]
        assert speeds.count("acc 2.25") == 4  # a drafting lane's acceptance goes before its prefill
        assert speeds.count("prefill") == speeds.count("123,456/s")
        await press(pilot, "z")
        assert "prefill 123,456/s" in text_of(app, "gauges") and "acc 2.25 average" in text_of(app, "gauges")


async def test_a_cached_reference_s_speeds_are_said_to_be_of_then_and_the_free_tokens_are_counted_apart():
    state = make_state()
    set_status(state.lanes[0], "done", stats={**state.lanes[0].record.stats, "reused": True})
    async with opened(state=state) as (app, _):
        assert "cached, earlier speeds" in text_of(app, "gauges")
        assert f"{len(state.stream['ids']):,} tok + 128 free" in text_of(app, "header")


@pytest.mark.parametrize("size", [WIDE, SMALL, (120, 34), (60, 20)])
async def test_lanes_of_every_engine_are_drawn_exactly(size):
    async with opened(size, state=engine_state(turns=4)) as (app, pilot):
        for keys in (("2",), ("4",), ("7",), ("z",), ("m",)):
            await press(pilot, *keys)
            assert {cell_len(row) for row in rows_of(app)} == {size[0]}


async def test_a_bounded_lane_says_at_least_everywhere():
    state = engine_state()
    async with opened(state=state) as (app, pilot):
        await press(pilot, "2", "right_square_bracket")
        view, gauges = app.lanes.board.active, text_of(app, "gauges")
        low, high = view.measures.tv
        assert f"≥{view.measures.kl_mean:.4f}" in gauges and "· bounded" in gauges
        assert f"TV {low:.3f}–{high:.3f}".replace("0.", ".") in gauges
        assert "plain ≥0" in text_of(app, "legend") and "its own top 256 only" in text_of(app, "legend")
        rows, index = state.lanes[1].rows, app.lanes.board.transport.cursor - 1
        assert f"KL ≥{rows.column('kl')[index]:.4f} TV ." in text_of(app, "inspector")
        missing = np.flatnonzero((rows.column("rank") == 257) & state.stream["generated"][1:].astype(bool))[0] + 1
        app.lanes.goto(int(missing))
        await settle(pilot)
        assert "rank >256" in text_of(app, "inspector")
        assert "-1" not in text_of(app, "inspector")
        await press(pilot, "3")
        assert "plain <.02" in text_of(app, "legend") and "≥0" not in text_of(app, "legend")
    async with opened(SMALL, state=state) as (app, pilot):
        await press(pilot, "2", "right_square_bracket")
        assert "KL ≥0.00" in text_of(app, "gauges") and " TV ." in text_of(app, "gauges")
        assert "plain≥0" in text_of(app, "legend")
        assert "KL ≥0." in text_of(app, "inspector") and " TV ." in text_of(app, "inspector")


async def test_a_bounded_lane_is_never_at_the_floor_and_neither_is_an_invalid_one():
    state = engine_state()
    state.floor = {"value": 10.0, "rows": []}
    async with opened((240, 45), state=state) as (app, pilot):
        await press(pilot, "2")
        board = app.lanes.board
        assert [near_floor(view, board) for view in board.views] == [False, False, True, False, True, True, False]
        assert "≈ floor" in text_of(app, "gauges")


async def test_marks_stand_in_the_gauges_and_their_reasons_at_the_foot():
    async with opened(state=engine_state()) as (app, pilot):
        await press(pilot, "7")
        gauges, tokens = text_of(app, "gauges"), text_of(app, "tokens")
        assert "! invalid: attn: asked for" in gauges and " !" in rows_of(app, "gauges")[2]
        assert "done · no effect" in gauges and "done · severe" in gauges and "two runs" in gauges
        assert "acc 3.50" in gauges
        assert "bit-identical to the reference" in tokens
        assert "runs it again" in tokens and "its figures say nothing about" in tokens
        strips = [app.lanes.query_one("#gauges").render_line(y) for y in range(4)]
        error = app.desk.ink.error.color
        marked = {s.text.strip() for strip in strips for s in strip if s.style and s.style.color == error}
        view = app.lanes.board.views[3]
        assert {"!", f"{view.measures.kl_mean:.4f} !"} == marked


async def test_a_lane_that_ended_worse_than_uniform_is_shown_as_invalid():
    state = make_state()
    set_status(state.lanes[0], "done", manifest={"vocabulary": 64})
    state.lanes[1].rows.column("logprob")[:] = -9
    async with opened(state=state) as (app, _):
        assert "! invalid: the lane's mean NLL" in text_of(app, "gauges")
        assert "worse than uniform" in text_of(app, "tokens")


async def test_an_interrupted_lane_stands_still_and_says_so():
    state = make_state()
    rewind(state.lanes[2], 800)
    rewind(state.lanes[3], 0)
    for lane in state.lanes[2:]:
        set_status(lane, "interrupted", reason="the run ended before the lane did")
    async with opened(state=state) as (app, _):
        assert text_of(app, "gauges").count("■ interrupted") == 2
        assert "interrupted, nothing measured" in text_of(app, "tokens")
        assert not app.lanes._timer._active.is_set()


async def test_a_lane_that_is_scored_and_writes_its_sample_says_so():
    state = make_state()
    set_status(state.lanes[1], "running")
    state.lanes[1].phase = "prefill"
    async with opened(state=state, runner=FakeRunner(state)) as (app, _):
        assert "decode, 128 tok" in text_of(app, "gauges")


async def test_figures_that_change_between_two_slow_beats_are_painted_at_the_next():
    state = make_state(turns=3)
    everything = rewind(state.lanes[1], 100)
    set_status(state.lanes[1], "running")
    async with opened(state=state, runner=FakeRunner(state)) as (app, _):
        app.lanes._timer.pause()
        painted = []
        app.lanes.query_one(Inspector).refresh = lambda *_, **__: painted.append(1)
        app.lanes._beat = 0
        grow(state.lanes[1], everything, 50)
        state.version += 1
        for _ in range(5):
            app.lanes.tick()
        assert painted


def test_a_long_word_is_cut_by_cells_not_by_characters():
    lines = wrapped("ab " + "字" * 20, 11)
    assert all(cell_len(line) <= 11 for line in lines)
    assert "".join(lines) == "ab" + "字" * 20


async def test_the_inspector_names_what_reference_and_lanes_would_have_said():
    state = make_state()
    async with opened(state=state) as (app, pilot):
        await press(pilot, "4", "right_square_bracket")
        cursor, rows = app.lanes.board.transport.cursor, state.lanes[3].rows
        text = text_of(app, "inspector")
        own = state.token_bytes(int(rows.column("top_ids")[cursor - 1][0])).decode(errors="replace").strip()
        assert "◆ 1" in text
        assert own in text
        assert f"KL {rows.column('kl')[cursor - 1]:.4f}" in text
        assert f"rank {rows.column('rank')[cursor - 1]}" in text
        assert "0.710" in text and "entropy" in text


async def test_a_trace_that_cannot_be_read_is_said_and_the_lanes_stay():
    state = make_state()

    def unreadable(first, stop):
        raise SavedSessionError("chunk 3 is damaged", where="x.wbs")

    state.trace = unreadable
    async with opened(state=state) as (app, _):
        assert "chunk 3 is damaged" in text_of(app, "legend")
        assert "rank" in text_of(app, "inspector")


async def test_lanes_of_different_progress_each_show_what_they_have():
    state = make_state()
    everything = rewind(state.lanes[2], 900)
    rewind(state.lanes[3], 0)
    set_status(state.lanes[3], "queued")
    runner = FakeRunner(state)
    async with opened(state=state, runner=runner) as (app, pilot):
        board = app.lanes.board
        assert board.transport.follow
        assert board.transport.cursor == 900
        assert "queued behind the other lanes" in text_of(app, "tokens")
        assert "24%" in text_of(app, "gauges")
        grow(state.lanes[2], everything, 500)
        state.version += 1
        app.lanes.tick()
        await settle(pilot)
        assert board.transport.cursor == 1400
        await press(pilot, "up")
        assert not board.transport.follow
        place = board.transport.cursor
        grow(state.lanes[2], everything, 10_000)
        set_status(state.lanes[2], "done")
        set_status(state.lanes[3], "cancelled")
        state.version += 1
        app.lanes.tick()
        await settle(pilot)
        assert board.transport.cursor == place
        assert not app.lanes._timer._active.is_set()
        assert "stopped, nothing measured" in text_of(app, "tokens")
        assert text_of(app, "gauges").count("✓") == 3


async def test_a_continuation_grows_below_its_rule():
    state = make_state(turns=3)
    lane = state.lanes[1]
    ids = state.lanes[2].continuation
    lane.continuation = Columns("continuation", 0)
    set_status(lane, "running")
    async with opened(state=state, runner=FakeRunner(state)) as (app, pilot):
        for start in range(0, 60, 20):
            names = ("ids", "logprobs", "seconds")
            lane.continuation.append(start, {name: ids.column(name)[start : start + 20] for name in names})
            state.version += 1
            app.lanes.tick()
            await settle(pilot)
        assert app.lanes.board.transport.cursor == len(state.stream["ids"]) + 59
        assert "… continues freely" in text_of(app, "tokens")
        assert "token 59 of the free continuation" in text_of(app, "inspector")


async def test_a_failed_lane_shows_reason_and_log_and_the_others_go_on():
    state = make_state()
    rewind(state.lanes[3], 700)
    log = ["loading weights", "RuntimeError: out of memory"]
    set_status(state.lanes[3], "failed", reason="the engine process was killed (signal 9)", manifest={"log_tail": log})
    everything = rewind(state.lanes[2], 300)
    for size in (WIDE, SMALL):
        async with opened(size, state=state, runner=FakeRunner(state)) as (app, pilot):
            await press(pilot, "4")
            shown = text_of(app, "tokens")
            assert "✗ the engine process was killed" in shown
            assert "RuntimeError: out of memory" in shown
            assert "runs it again" in shown
            grow(state.lanes[2], everything, 100)
            state.version += 1
            app.lanes.tick()
            assert app.lanes.board.views[2].measures.edge == len(state.lanes[2].rows) + 1


async def test_a_lane_that_runs_again_is_drawn_from_its_new_rows():
    state = make_state()
    lane = state.lanes[3]
    async with opened(state=state, runner=FakeRunner(state)) as (app, pilot):
        await press(pilot, "4")
        old = [app.lanes.tokens.render_line(y) for y in range(app.lanes.tokens.size.height)]
        everything = rewind(lane, 0)
        state.version += 1
        app.lanes.tick()
        await settle(pilot)
        assert "prefill" not in text_of(app, "tokens")
        assert "loading" in text_of(app, "tokens")
        everything["kl"][:] = 0
        everything["rank"][:] = 1
        grow(lane, everything, 10_000)
        state.version += 1
        app.lanes.tick()
        await settle(pilot)
        new = [app.lanes.tokens.render_line(y) for y in range(app.lanes.tokens.size.height)]
        left = [segment for strip in new for segment in strip.crop(120, 159) if segment.style.reverse]
        assert any(segment.style.reverse for strip in old for segment in strip.crop(120, 159))
        assert left == []


async def test_excluded_positions_are_struck_through_and_said():
    state = make_state()
    position = int(np.flatnonzero(state.stream["generated"])[5])
    state.lanes[1].rows.column("valid")[position - 1] = 0
    async with opened(state=state) as (app, pilot):
        app.lanes.goto(position)
        await settle(pilot)
        assert "excluded" in text_of(app, "inspector")
        await press(pilot, "home")
        app.lanes.goto(position + 1)
        await settle(pilot)
        strips = [app.lanes.tokens.render_line(y) for y in range(app.lanes.tokens.size.height)]
        assert any(segment.style.strike for strip in strips for segment in strip)


async def test_hostile_text_reaches_the_terminal_neither_as_escapes_nor_as_markup():
    for size in (WIDE, SMALL):
        async with opened(size, state=hostile_state()) as (app, pilot):
            for keys in ((), ("2",), ("end",), ("4", "z"), ("2", "m"), ("escape", "question_mark")):
                await press(pilot, *keys)
                rows = rows_of(app)
                text = "\n".join(rows)
                assert not re.search(
                    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufe0f]", text
                )
                assert "\ufffd" not in text
                assert {cell_len(row) for row in rows} == {size[0]}
            await press(pilot, "escape", "z", "home")
            assert "[bold red]markup[/]" in text_of(app, "tokens")


async def test_what_is_written_to_the_terminal_holds_only_the_escapes_of_styles():
    async with opened(state=hostile_state()) as (app, _):
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=WIDE[0])
        for strip in app.screen._compositor.render_strips():
            console.file.write(strip.render(console))
        written = console.file.getvalue()
        assert set(re.findall(r"\x1b(?!\[[\d;]*m)", written)) == set()


async def test_a_session_without_lanes_says_how_to_open_one():
    state = make_state()
    state.lanes.clear()
    async with opened(state=state, runner=FakeRunner(state)) as (app, pilot):
        assert "no lanes yet" in text_of(app)
        await press(pilot, "down", "right_square_bracket", "z", "i", "tab", "x", "r", "end")
        await press(pilot, "c")
        assert "configuration" in text_of(app)


async def test_an_empty_stream_is_drawn():
    state = make_state(specs=())
    state.stream = {name: values[:0] for name, values in state.stream.items()}
    state.lanes[0].rows = Columns("rows", 1, ("logprob", "top_ids", "ties", "valid"))
    async with opened(state=state) as (app, pilot):
        await press(pilot, "down", "end", "home", "space", "f")
        assert "reference" in text_of(app)


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_loading_shows_what_is_done_and_can_be_left(key):
    runner = FakeRunner(None, busy=True, message="fetching smollm2-135m 42%")
    async with opened(runner=runner) as (app, pilot):
        assert "fetching smollm2-135m 42%" in text_of(app)
        runner.message = "converting 7 of 272"
        app.lanes.tick()
        await pilot.pause()
        assert "converting 7 of 272" in text_of(app)
        await press(pilot, "down", "space", "z", "c", "right_square_bracket")
        await pilot.press(key)
        assert app._exit


async def test_a_start_that_fails_says_all_of_why_and_the_clock_stops():
    reason = "The model cannot be fetched: " + "the index answered with an error, " * 6 + "try again later."
    runner = FakeRunner(None, busy=True, message="preparing")
    async with opened(SMALL, runner=runner) as (app, pilot):
        runner.message, runner.busy = reason, False
        app.lanes.tick()
        app._look()
        await settle(pilot)
        words = " ".join(text_of(app, "tokens").split())
        assert reason in words
        assert not app.lanes._timer._active.is_set()
        await pilot.press("q")
        assert app._exit


async def test_the_session_appears_when_the_runner_has_it():
    runner = FakeRunner(None, busy=True, message="loading")
    async with opened(runner=runner) as (app, pilot):
        runner.state = make_state()
        runner.message, runner.busy = "", False
        app._look()
        await settle(pilot)
        assert "repo-fix-07" in text_of(app, "header")
        assert "live" in text_of(app, "header")


async def test_a_replay_can_open_playing():
    async with opened(state=make_state(), playing=True) as (app, _):
        transport = app.lanes.board.transport
        assert transport.playing or transport.cursor > 0
        assert transport.playhead is not None


async def test_damage_is_shown_in_the_header_and_named_in_help():
    state = make_state()
    state.damage = ["lane 3 lost positions 1,024 to 2,047"]
    async with opened(state=state) as (app, pilot):
        assert "! 1 damaged" in text_of(app, "header")
        await press(pilot, "question_mark")
        assert "lane 3 lost positions" in text_of(app, "help")


async def test_a_lane_of_an_unknown_configuration_is_shown_by_its_name():
    state = make_state()
    state.lanes[1].record = replace(state.lanes[1].record, configuration={"engine": "other", "colour": 3})
    async with opened(state=state) as (app, pilot):
        assert "2 weights=int8,kv=bf16" in text_of(app, "gauges")
        await press(pilot, "2", "c", "escape")


async def test_floor_rows_are_not_lanes():
    state = make_state()
    state.lanes.append(replace_kind(state.lanes[1], 9))
    async with opened(state=state) as (app, _):
        assert len(app.lanes.board.views) == 4


async def test_the_header_says_which_row_of_the_floor_is_being_measured():
    state = make_state()
    state.lanes.append(replace_kind(state.lanes[1], 9))
    set_status(state.lanes[-1], "running", name="chunk 256")
    async with opened(state=state, runner=FakeRunner(state)) as (app, _):
        assert "noise floor, chunk 256: 100%" in text_of(app, "header")


def replace_kind(lane, id):
    from workbench.store.state import LaneState

    return LaneState(replace(lane.record, kind="floor", id=id), lane.rows, lane.continuation)
