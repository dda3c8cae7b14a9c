"""The main screen: lanes side by side, live and in replay, over one Board."""

from __future__ import annotations

import time

from textual import events, work
from textual.app import ComposeResult
from textual.message import Message
from textual.timer import Timer

from workbench.errors import WorkbenchError
from workbench.protocol.columns import cut
from workbench.ui.actions import ACTIONS, action, bindings
from workbench.ui.board import Board, Desk, TraceRow
from workbench.ui.runner import Runner
from workbench.ui.screens.cursor import CursorScreen
from workbench.ui.widgets import gauges, inspector, scrubber
from workbench.ui.widgets.footer import Footer
from workbench.ui.widgets.gauges import Gauges
from workbench.ui.widgets.header import Header, Legend
from workbench.ui.widgets.inspector import Inspector
from workbench.ui.widgets.lines import Lines, app_of
from workbench.ui.widgets.scrubber import Scrubber
from workbench.ui.widgets.small import MIN_HEIGHT, MIN_WIDTH, TooSmall
from workbench.ui.widgets.tokens import TokenPanes

HZ = 20
SLOW_EVERY = 5  # gauges and scrubber follow at a quarter of a second: faster cannot be read, and costs frames
TALL = 32  # rows from which gauges, inspector and scrubber take their full height
TRACE_WINDOW = 64  # positions of trace read at once around the cursor
TRACE_KEPT = 4096


class LanesScreen(CursorScreen, inherit_bindings=False):
    """Draws the desk's board; every key of the table's place `lanes` is an action here."""

    BINDINGS = bindings("lanes")
    ALLOW_SELECT = False

    class TraceRead(Message):
        """Rows of the reference came from the file."""

        def __init__(self, board: Board, rows: dict[int, TraceRow], problem: str) -> None:
            super().__init__()
            self.board = board
            self.rows = rows
            self.problem = problem

    def __init__(self, desk: Desk, runner: Runner | None) -> None:
        super().__init__(desk)
        self.runner = runner
        self.inspecting = True
        self.play_when_ready = False
        self._timer: Timer | None = None
        self._then = 0.0
        self._beat = 0
        self._fresh = self._moved = False  # what changed since figures were painted
        self._version = -1
        self._reading = -1

    def compose(self) -> ComposeResult:
        yield Header(self.desk, id="header")
        yield Gauges(self.desk, id="gauges")
        yield TokenPanes(self.desk, id="tokens")
        yield Inspector(self.desk, id="inspector")
        yield Scrubber(self.desk, id="scrubber")
        yield Legend(self.desk, id="legend")
        yield Footer(self.desk, id="footer")
        yield TooSmall(self.desk, id="small")

    def on_mount(self) -> None:
        self._timer = self.set_interval(1 / HZ, self.tick, pause=True)
        self.fit()
        self.wake()

    def on_resize(self, event: events.Resize) -> None:
        self.fit()

    # ---- arrangement

    def fit(self) -> None:
        """Heights for the size at hand; nothing else ever changes the layout."""
        width, height = app_of(self).size
        small = width < MIN_WIDTH or height < MIN_HEIGHT
        ready = self.desk.board is not None and bool(self.desk.board.views)
        self.desk.compact = height < TALL
        for widget in self.query(Lines):
            widget.display = (widget.id == "small") == small
        if small:
            return
        compact, board = self.desk.compact, self.desk.board
        crowded = board is not None and len(board.views) > len(board.panes(width)) and not board.zoomed
        heights = {
            "header": 2 if crowded else 1,
            "gauges": (gauges.COMPACT_HEIGHT if compact else gauges.HEIGHT) if ready else 0,
            "inspector": (inspector.COMPACT_HEIGHT if compact else inspector.HEIGHT)
            if ready and self.inspecting
            else 0,
            "scrubber": (scrubber.COMPACT_HEIGHT if compact else scrubber.HEIGHT) if ready else 0,
        }
        for id, rows in heights.items():
            widget = self.query_one(f"#{id}", Lines)
            widget.display = rows > 0
            widget.styles.height = rows
        self.call_after_refresh(self.redraw)

    def redraw(self) -> None:
        """Everything anew: another size, theme, lane order or session."""
        for widget in self.query(Lines):
            if isinstance(widget, TokenPanes):
                widget.reset()
            else:
                widget.refresh()
        self.read_trace()

    # ---- time

    def attach(self, board: Board) -> None:
        """Show a session."""
        self.desk.board = board
        self.desk.trace.clear()
        self._version = board.state.version
        if board.running:
            board.transport.follow = True
            board.transport.place(board.newest())
        elif self.play_when_ready:
            board.transport.play()
        else:
            board.transport.place(self._opening(board))
        self.fit()
        self.wake()

    @staticmethod
    def _opening(board: Board) -> int:
        """Where a saved session opens: at the active lane's first flip, which is what people look for."""
        active = board.active
        first = active.measures.next_flip(-1, 1) if active is not None else None
        return first if first is not None else (board.shared.turn_starts or [0])[0]

    def wake(self) -> None:
        """Let the clock run while something can change by itself; `tick` stops it."""
        if self._timer is not None and self._wanted():
            self._then = time.monotonic()
            self._timer.resume()

    def _wanted(self) -> bool:
        board = self.desk.board
        busy = self.runner is not None and self.runner.busy
        return busy or (board is not None and (board.transport.playing or board.running))

    def tick(self) -> None:
        """One beat of the clock: take in what changed and paint only that."""
        now = time.monotonic()
        elapsed, self._then = now - self._then, now
        self._beat += 1
        board = self.desk.board
        if self.runner is not None:
            self._hear(self.runner)
        if board is not None:
            fresh = board.state.version != self._version
            changed = board.update() if fresh else set[int]()
            self._version = board.state.version
            moved = board.transport.advance(elapsed)
            if board.transport.follow and changed:
                board.transport.place(board.newest())
                moved = True
            if changed or moved or fresh:
                self.tokens.sync()
            self._fresh, self._moved = self._fresh or fresh, self._moved or moved
            self._beat_slow()
        if not self._wanted() and self._timer is not None:
            self._timer.pause()
            self.refresh_figures()
            self.read_trace()

    def _beat_slow(self) -> None:
        """Figures, every fifth beat, where something changed since the last time."""
        if self._beat % SLOW_EVERY or not (self._fresh or self._moved):
            return
        board = self.desk.board
        if self._fresh:
            self.query_one(Gauges).refresh()
            self.query_one(Header).refresh()
            if board is not None and len(board.views) != len(self.tokens.drawn_lanes) and not board.zoomed:
                self.fit()
        if self._moved:
            self.query_one(Inspector).refresh()
            self.read_trace()
        self.query_one(Scrubber).refresh()
        self._fresh = self._moved = False

    def _hear(self, runner: Runner) -> None:
        if runner.message != self.desk.message:
            self.desk.message = runner.message
            self.query_one(Header).refresh()
            if self.desk.board is None:
                self.tokens.refresh()

    def refresh_figures(self) -> None:
        """Gauges, scrubber, inspector and header at once."""
        for widget in self.query(Lines):
            if not isinstance(widget, TokenPanes):
                widget.refresh()

    # ---- the reference's distribution at the cursor

    def read_trace(self) -> None:
        board = self.desk.board
        reference = board.state.reference if board is not None else None
        if board is None or reference is None or not self.inspecting:
            return
        position = board.transport.cursor
        if not 1 <= position < min(board.count, reference.rows.stop) or position in self.desk.trace:
            return
        window = position // TRACE_WINDOW
        if window != self._reading:
            self._reading = window
            self._load_trace(
                board, max(1, window * TRACE_WINDOW), min(reference.rows.stop, (window + 1) * TRACE_WINDOW)
            )

    @work(thread=True, exclusive=True, group="trace")
    def _load_trace(self, board: Board, first: int, stop: int) -> None:
        rows: dict[int, TraceRow] = {}
        problem = ""
        try:
            arrays = board.state.trace(first, stop)
        except WorkbenchError as error:
            problem = str(error)
        else:
            for index in range(len(arrays["k"])):
                row = cut("trace", arrays, index, index + 1)
                pairs = zip(row["head_ids"].tolist(), row["head_logprobs"].tolist(), strict=True)
                rows[first + index] = TraceRow(tuple(pairs), float(row["entropy"][0]))
        self.post_message(self.TraceRead(board, rows, problem))

    def on_lanes_screen_trace_read(self, message: TraceRead) -> None:
        self._reading = -1
        if message.problem:
            self.say(message.problem)
        if message.board is not self.desk.board:
            return
        if len(self.desk.trace) > TRACE_KEPT:
            self.desk.trace.clear()
        self.desk.trace.update(message.rows)
        self.query_one(Inspector).refresh()
        if message.rows and message.board.transport.cursor not in self.desk.trace:
            self.read_trace()

    # ---- lanes

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing can be moved or run before there is a session."""
        return self.desk.board is not None or action not in _CALLS

    def action_lane(self, number: int) -> None:
        numbers = [view.number for view in self.board.views]
        if number in numbers:
            self._activate(numbers.index(number))
        else:
            self.say(f"There is no lane {number} on screen." + (" X shows hidden lanes." if self.board.hidden else ""))

    def action_next_lane(self, step: int) -> None:
        views, active = self.board.views, self.board.active
        if active is not None:
            self._activate((views.index(active) + step) % len(views))

    def _activate(self, index: int) -> None:
        self.board.focus = self.board.views[index].lane.record.id
        self.tokens.sync()
        self.tokens.refresh()
        self.refresh_figures()

    def action_zoom(self) -> None:
        self.board.zoomed = not self.board.zoomed
        self.fit()

    def action_inspect(self) -> None:
        self.inspecting = not self.inspecting
        self.fit()

    def action_manifest(self) -> None:
        from workbench.ui.screens.manifest import ManifestScreen

        if (active := self.board.active) is not None:
            app_of(self).push_screen(ManifestScreen(self.desk, active))

    def action_config(self) -> None:
        from workbench.ui.screens.switcher import SwitcherScreen

        app_of(self).push_screen(SwitcherScreen(self.desk, self.runner), self._opened)

    def _opened(self, lane: int | None) -> None:
        if lane is not None:
            self.board.focus = lane
            self.board.hidden.discard(lane)
            self.board.update()
            if self.board.running:
                self.board.transport.playhead = None
                self.board.transport.follow = True
            self.fit()
            self.wake()

    def action_run(self) -> None:
        active = self.board.active
        if active is None:
            return
        if self.runner is None or self.desk.missing:
            self.say(self.desk.missing or "This is a replay: lanes cannot be run here.")
        elif active.lane.record.status in ("queued", "running"):
            self.say(f"Lane {active.number} is {active.lane.record.status} already.")
        else:
            self.runner.retry(active.lane.record.id)
            self.say(f"Lane {active.number} is run again.")
            self.board.update()
            self.redraw()
            self.wake()

    def action_close_lane(self) -> None:
        active = self.board.active
        if active is None:
            return
        if active.lane.record.status in ("queued", "running") and self.runner is not None:
            self.runner.cancel(active.lane.record.id)
            self.say(f"Lane {active.number} is being stopped; x again hides it.")
            self.wake()
        elif len(self.board.views) > 1:
            index = self.board.views.index(active)
            self.board.hidden.add(active.lane.record.id)
            self.board.focus = self.board.views[min(index, len(self.board.views) - 1)].lane.record.id
            self.fit()
            self.refresh_figures()
            self.say(f"Hidden: lane {active.number}, {active.lane.record.name}. X shows hidden lanes again.")
        else:
            self.say("The last lane stays.")

    def action_show_lanes(self) -> None:
        self.say("" if self.board.hidden else "No lane is hidden.")
        self.board.hidden.clear()
        self.fit()

    # ---- what widgets report

    def on_token_panes_clicked(self, message: TokenPanes.Clicked) -> None:
        self.board.focus = message.lane
        self.tokens.refresh()
        self.refresh_figures()
        if message.position is not None:
            self.goto(message.position)

    def on_token_panes_wheel(self, message: TokenPanes.Wheel) -> None:
        if self.desk.board is not None:
            self.move_rows(message.rows)

    def on_scrubber_sought(self, message: Scrubber.Sought) -> None:
        self.goto(int(message.share * self.board.transport.total))

    async def on_footer_chosen(self, message: Footer.Chosen) -> None:
        chosen = action(message.id)
        await self.run_action(f"app.{chosen.call}" if chosen.place == "app" else chosen.call)


_CALLS = {item.call.partition("(")[0] for item in ACTIONS if item.place == "lanes"}
