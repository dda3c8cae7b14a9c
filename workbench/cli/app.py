"""The terminal app: on a live experiment, or on a saved session."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench.cli.parser import build_parser
from workbench.run.live import LiveRunner
from workbench.run.prepare import Ask
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.ui.app import Workbench


def start(_options: argparse.Namespace) -> int:
    """`workbench` alone: the demo on a terminal; without one there is nothing to show."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        build_parser().print_help(sys.stderr)
        return 2
    from workbench.cli.run import demo_ask

    return open_live(demo_ask(None))


def open_live(ask: Ask) -> int:
    """The app on an experiment that starts behind it."""
    runner = LiveRunner(ask)
    try:
        Workbench(runner=runner).run()
    finally:
        runner.close()
    return 0


def open_file(path: Path) -> int:
    """The app on a saved session, without any engine."""
    with SavedSession.open(path) as saved:
        Workbench(state=load_state(saved)).run()
    return 0
