"""Moving through a session: the cursor, the playhead, following. The lanes screen is built on this."""

from __future__ import annotations

from functools import partial

from textual.screen import Screen

from workbench.ui.board import Board, Desk
from workbench.ui.widgets.header import Legend
from workbench.ui.widgets.inspector import Inspector
from workbench.ui.widgets.lines import app_of
from workbench.ui.widgets.scrubber import Scrubber
from workbench.ui.widgets.tokens import TokenPanes

NOTICE_SECONDS = 8.0


class CursorScreen(Screen[None], inherit_bindings=False):
    """A screen with a desk and the lanes' tokens, and every action of the table that moves through them."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk

    @property
    def tokens(self) -> TokenPanes:
        return self.query_one(TokenPanes)

    def wake(self) -> None:
        """Let the clock run where something will change by itself."""

    def read_trace(self) -> None:
        """Fetch the reference's distribution at the cursor where it is not there yet."""

    def goto(self, position: int) -> None:
        """Put the cursor on a position and paint what changed."""
        if self.desk.board is not None:
            self.desk.board.transport.pause()
            self.desk.board.transport.move(position)
            self.moved()

    def moved(self) -> None:
        """Paint the consequences of a moved cursor."""
        if self.desk.notice:
            self.say("")
        self.tokens.sync()
        self.query_one(Inspector).refresh()
        self.query_one(Scrubber).refresh()
        self.read_trace()
        self.wake()

    def say(self, notice: str) -> None:
        """An answer to the last key, in the legend's place until the cursor moves or some seconds have passed."""
        self.desk.notice = notice
        self.query_one(Legend).refresh()
        if notice:
            self.set_timer(NOTICE_SECONDS, partial(self._unsay, notice))

    def _unsay(self, notice: str) -> None:
        if self.desk.notice == notice:
            self.say("")

    @property
    def board(self) -> Board:
        """The session on screen; actions are only enabled where there is one."""
        assert self.desk.board is not None
        return self.desk.board

    def action_step(self, count: int) -> None:
        self.goto(self.board.transport.cursor + count)

    def action_row(self, count: int) -> None:
        self.move_rows(count)

    def action_page(self, count: int) -> None:
        self.move_rows(count * max(1, self.tokens.size.height - 2))

    def move_rows(self, count: int) -> None:
        """Move the cursor down (or up) in the active pane."""
        active = self.board.active
        target = self.tokens.rows.move(active, self.board.transport.cursor, count) if active is not None else None
        if target is not None:
            self.goto(target)

    def action_edge(self, side: int) -> None:
        board = self.board
        if side < 0:
            self.goto(0)
            return
        self.goto(board.transport.total - 1 if not board.running else board.newest())
        board.transport.follow = board.running

    def action_flip(self, step: int) -> None:
        active = self.board.active
        if active is None or active.measures.is_reference:
            self.say("The reference has no flips: choose a lane with a digit or tab.")
            return
        target = active.measures.next_flip(self.board.transport.cursor, step)
        if target is None:
            self.say(f"No {'later' if step > 0 else 'earlier'} flip in lane {active.number}.")
        else:
            self.goto(target)

    def action_turn(self, step: int) -> None:
        target = self.board.next_turn(self.board.transport.cursor, step)
        if target is not None:
            self.goto(target)

    def action_seek(self) -> None:
        from workbench.ui.screens.seek import SeekScreen  # first use: Textual's Input costs 20 ms to import

        def found(position: int | None) -> None:
            if position is not None:
                self.goto(position)

        app_of(self).push_screen(SeekScreen(self.board), found)

    def action_follow(self) -> None:
        transport = self.board.transport
        transport.follow = not transport.follow
        if transport.follow:
            transport.pause()
            transport.playhead = None
            transport.place(self.board.newest())
        self.moved()

    def action_play(self) -> None:
        transport = self.board.transport
        if self.board.running and transport.playhead is None:
            transport.follow = not transport.follow
        elif transport.playing:
            transport.pause()
        else:
            transport.follow = False
            transport.play()
        self.moved()

    def action_speed(self, step: int) -> None:
        self.board.transport.faster(step)
        self.query_one(Scrubber).refresh()
