"""The list of themes; moving through it shows each at once, escape goes back to the one before."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from workbench.session.text import one_line
from workbench.ui.actions import bindings, rebound
from workbench.ui.screens.dialog import DialogScreen
from workbench.ui.widgets.lines import app_of


class ThemeScreen(DialogScreen[str]):
    """Gives the chosen name; the app keeps it."""

    BINDINGS = (*bindings("dialog"), rebound("up", "move(-1)"), rebound("down", "move(1)"))

    def __init__(self, names: list[str], current: str, refused: list[str]) -> None:
        super().__init__()
        self.names = names
        self.before = current
        self.refused = refused

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as frame:
            frame.border_title = "theme"
            frame.border_subtitle = "enter keeps · esc back"
            options = [Option(name, id=name) for name in self.names]
            options += [Option(f"✗ {one_line(name)}", disabled=True) for name in self.refused]
            yield OptionList(*options, markup=False)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.highlighted = self.names.index(self.before)
        options.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option.id:
            app_of(self).theme = event.option.id

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        options.action_cursor_up() if step < 0 else options.action_cursor_down()

    def action_dismiss_dialog(self) -> None:
        app_of(self).theme = self.before
        self.dismiss(None)
