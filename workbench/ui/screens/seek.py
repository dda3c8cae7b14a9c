"""Go to a token, a turn or a share of the session."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input

from workbench.ui.board import Board
from workbench.ui.screens.dialog import DialogScreen
from workbench.ui.transport import parse_seek


class SeekScreen(DialogScreen[int]):
    """One line of input; gives the position, or None."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.place = board

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as frame:
            frame.border_title = "go to"
            frame.border_subtitle = "5120 token · t8 turn · 40% · esc"
            yield Input(placeholder=f"0 to {self.place.transport.total - 1:,}", select_on_focus=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        transport = self.place.transport
        position = parse_seek(event.value, transport.total, self.place.shared.turn_starts)
        if position is None:
            self.query_one(
                ".dialog"
            ).border_subtitle = f"no such place; 0 to {transport.total - 1:,}, t1 to t{self.place.shared.turns}"
        else:
            self.dismiss(position)
