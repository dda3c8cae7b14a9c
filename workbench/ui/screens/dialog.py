"""The frame of everything that opens over the lanes and closes with escape."""

from __future__ import annotations

from typing import TypeVar

from textual.screen import ModalScreen

from workbench.ui.actions import bindings

Result = TypeVar("Result")


class DialogScreen(ModalScreen[Result]):
    """A dialog; `dismiss(None)` on escape."""

    BINDINGS = bindings("dialog")
    ALLOW_SELECT = False

    def action_dismiss_dialog(self) -> None:
        self.dismiss(None)
