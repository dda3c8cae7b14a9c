"""The frame of everything that opens over the lanes and closes with escape."""

from __future__ import annotations

from typing import TypeVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from workbench.ui.actions import bindings, rebound
from workbench.ui.widgets.lines import Lines

Result = TypeVar("Result")


class DialogScreen(ModalScreen[Result]):
    """A dialog; `dismiss(None)` on escape."""

    BINDINGS = bindings("dialog")
    ALLOW_SELECT = False

    def action_dismiss_dialog(self) -> None:
        self.dismiss(None)


class ScrolledDialog(DialogScreen[None]):
    """A dialog of lines that scrolls where it does not fit. The key that quits closes it too."""

    BINDINGS = (
        *bindings("dialog"),
        rebound("quit", "dismiss_dialog"),
        rebound("up", "scroll(-1)"),
        rebound("down", "scroll(1)"),
        rebound("page-up", "scroll(-12)"),
        rebound("page-down", "scroll(12)"),
    )

    def __init__(self, body: Lines, title: str, subtitle: str) -> None:
        super().__init__()
        self._body, self._words = body, (title, subtitle)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog") as frame:
            frame.border_title, frame.border_subtitle = self._words
            yield self._body

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_scroll(self, rows: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=rows, animate=False)
