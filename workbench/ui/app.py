"""The terminal app: wires a session or a runner to the lanes screen, themes and keys to Textual."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.message import Message
from textual.screen import Screen

from workbench.config.settings import Settings
from workbench.config.theme import DEFAULT_THEME, Palette
from workbench.errors import WorkbenchError
from workbench.store.state import SessionState
from workbench.ui.actions import ACTIONS, bindings, keys_of, resolve_keys
from workbench.ui.board import Board, Desk
from workbench.ui.runner import Runner
from workbench.ui.screens.lanes import LanesScreen
from workbench.ui.styles import ink, textual_theme

QUIT_SECONDS = 2.0


class WorkbenchApp(App[None]):
    """Give it a `state` (replay), a `runner` (live), or both.

    `themes` must hold at least one palette; `problems` are sentences about themes and settings that could not be used.
    `keep_theme` stores the theme that the user chose.
    """

    CSS_PATH = Path(__file__).with_name("style.tcss")
    TITLE = "workbench"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]
    ENABLE_COMMAND_PALETTE = True
    PAUSE_GC_ON_SCROLL = True
    ALLOW_SELECT = False

    class Ready(Message):
        """A session is ready to draw."""

        def __init__(self, board: Board) -> None:
            super().__init__()
            self.board = board

    def __init__(
        self,
        themes: dict[str, Palette],
        settings: Settings | None = None,
        *,
        state: SessionState | None = None,
        runner: Runner | None = None,
        problems: Iterable[WorkbenchError] = (),
        playing: bool = False,
        keep_theme: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._keep = keep_theme
        settings = settings or Settings()
        self.palettes = themes
        refused = list(problems)
        self.refused = [f"{Path(problem.where).name}: {problem.what}" for problem in refused]
        self.problems = [str(problem) for problem in (*refused, *settings.problems)]
        self.keys, clashes = resolve_keys(settings.keys)
        self.problems += clashes
        self.state = state
        self.playing = playing
        self.runner = runner
        wanted = (
            settings.theme
            if settings.theme in themes
            else DEFAULT_THEME
            if DEFAULT_THEME in themes
            else next(iter(themes))
        )
        if settings.theme not in themes:
            self.problems.append(f"theme {settings.theme!r} is not there; themes: {', '.join(sorted(themes))}")
        self.desk = Desk(
            ink(themes[wanted], plain=self.no_color),
            message=runner.message if runner is not None else "",
            live=runner is not None,
            missing=runner.missing if runner is not None else "This is a replay: lanes cannot be run here.",
        )
        self.desk.keys = self.keys
        self._preparing = False
        self._last_interrupt = -QUIT_SECONDS
        for name in list(self.available_themes):
            self.unregister_theme(name) if name not in (
                "textual-dark",
                "textual-light",
                "ansi-dark",
                "ansi-light",
            ) else None
        for palette in themes.values():
            self.register_theme(textual_theme(palette))
        self.theme = wanted

    def get_default_screen(self) -> Screen[None]:
        screen = LanesScreen(self.desk, self.runner)
        screen.play_when_ready = self.playing
        self.lanes = screen
        return screen

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, self._theme_changed)
        self.set_keymap(self.keys)
        if self.problems:
            self.desk.notice = self.problems[0] + (
                f"  (and {len(self.problems) - 1} more: ?)" if len(self.problems) > 1 else ""
            )
        if self.state is not None:
            self.prepare(self.state)
        elif self.runner is not None:
            self._waiting = self.set_interval(0.05, self._look)

    # ---- the session

    def _look(self) -> None:
        """While a runner is loading: is its session there?"""
        runner = self.runner
        if runner is not None and runner.state is not None and not self._preparing:
            self._waiting.stop()
            self.prepare(runner.state)
        elif runner is not None and not runner.busy:
            self._waiting.stop()  # it gave up; its message says why

    def prepare(self, state: SessionState) -> None:
        """Make a session ready to draw, off the screen's thread."""
        self._preparing = True
        self.desk.message = self.desk.message or "reading the session"
        self._build(state)

    @work(thread=True, exclusive=True, group="board")
    def _build(self, state: SessionState) -> None:
        self.post_message(self.Ready(Board(state)))

    def on_workbench_app_ready(self, message: Ready) -> None:
        self.show(message.board)

    def show(self, board: Board) -> None:
        """Put a session on screen."""
        self._preparing = False
        self.desk.message = self.runner.message if self.runner is not None else ""
        self.lanes.attach(board)
        # What is there by now stays: collections need not look at it again (pauses fall from 200 ms to under 50).
        gc.collect()
        gc.freeze()

    # ---- themes and keys

    def _theme_changed(self, theme: object) -> None:
        palette = self.palettes.get(self.theme)
        if palette is not None:
            self.desk.ink = ink(palette, plain=self.no_color)
            self.lanes.redraw()

    def handle_bindings_clash(self, clashed_bindings: set[Binding], node: DOMNode) -> None:
        """Clashes are found and named before the keymap is set (`resolve_keys`); nothing is left to say here."""

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: every action of the table that works on this screen."""
        places = ("app", "lanes") if screen is self.lanes and self.desk.board is not None else ("app",)
        for item in ACTIONS:
            if item.place in places and item.id != "palette":
                call = f"app.{item.call}" if item.place == "app" else item.call
                keys = " ".join(keys_of(item.id, self.keys))
                title = f"{item.id}: {item.description}"  # the title is what is searched, so the id is part of it
                yield SystemCommand(title, f"{item.group} · {keys}", partial(self._command, call, screen))

    async def _command(self, call: str, screen: Screen[object]) -> None:
        await screen.run_action(call)

    # ---- actions

    def action_leave(self) -> None:
        self.exit()

    def action_interrupt(self) -> None:
        """Stop the active lane; quit when pressed twice, or at once where there is nothing to stop yet."""
        now = time.monotonic()
        board = self.desk.board
        if board is None or now - self._last_interrupt < QUIT_SECONDS:
            self.exit()
            return
        self._last_interrupt = now
        active = board.active
        if self.runner is not None and active is not None and active.lane.record.status in ("queued", "running"):
            self.runner.cancel(active.lane.record.id)
            self.lanes.wake()
            self.lanes.say(f"Stopping lane {active.number}. ctrl+c again quits.")
        else:
            self.lanes.say("ctrl+c again quits.")

    def action_palette(self) -> None:
        self.action_command_palette()

    def action_help(self) -> None:
        from workbench.ui.screens.help import HelpScreen

        notes = [*self.problems, *(self.desk.board.state.damage if self.desk.board is not None else [])]
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.desk, self.keys, notes))

    def action_theme(self) -> None:
        from workbench.ui.screens.themes import ThemeScreen

        if not isinstance(self.screen, ThemeScreen):
            self.push_screen(ThemeScreen(sorted(self.palettes), self.theme, self.refused), self._keep_theme)

    def _keep_theme(self, name: str | None) -> None:
        """Let the chosen theme stay for the next start; where it cannot, say so."""
        if name is None or self._keep is None:
            return
        try:
            self._keep(name)
        except WorkbenchError as error:
            self.desk.notice = str(error)
            self.lanes.redraw()
