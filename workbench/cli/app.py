"""The terminal app: on a live experiment, or on a saved session."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench import paths
from workbench.cli.narration import can_show_app
from workbench.cli.parser import build_parser
from workbench.config.settings import keep_theme, read_settings
from workbench.config.theme import load_themes
from workbench.errors import ConfigurationError
from workbench.run.live import LiveRunner
from workbench.run.prepare import Ask
from workbench.session.text import one_line
from workbench.store.playback import read_state
from workbench.store.saved import SavedSession
from workbench.store.state import SessionState
from workbench.ui.app import WorkbenchApp


def start(_options: argparse.Namespace) -> int:
    """`workbench` alone: the demo on a terminal; without one there is nothing to show."""
    if not can_show_app():
        build_parser().print_help(sys.stderr)
        return 2
    from workbench.cli.run import demo_ask

    return open_live(demo_ask(None))


def open_live(ask: Ask) -> int:
    """The app on an experiment that starts behind it."""
    runner = LiveRunner(ask)
    try:
        _app(runner=runner).run()
        failed = runner.state is None and not runner.busy
    finally:
        runner.close()
    if runner.state is not None:
        print(f"saved: {one_line(str(runner.state.path))}")
    if failed:  # what the screen said is gone with the screen
        print(f"workbench: {one_line(runner.message)}", file=sys.stderr)
    return 1 if failed else 0


def open_file(path: Path) -> int:
    """The app on a saved session, playing, without any engine."""
    with SavedSession.open(path) as saved:
        if not can_show_app():
            raise ConfigurationError(
                "the app needs a terminal", where=str(path), next="Without one: replay --text, compare, export."
            )
        _app(state=read_state(saved), playing=True).run()
    return 0


def _app(*, state: SessionState | None = None, runner: LiveRunner | None = None, playing: bool = False) -> WorkbenchApp:
    themes, problems = load_themes([paths.themes_dir(), paths.config_dir() / "themes"])
    file = paths.config_dir() / "settings.toml"
    settings = read_settings(file)
    return WorkbenchApp(
        themes,
        settings,
        state=state,
        runner=runner,
        problems=problems,
        playing=playing,
        keep_theme=lambda name: keep_theme(file, name),
    )
