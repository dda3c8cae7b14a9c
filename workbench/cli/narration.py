"""Narration on stderr: one line a step, and one progress line that is redrawn on a terminal only."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time

from rich.cells import chop_cells

from workbench.session.text import one_line
from workbench.store.state import LaneState, SessionState

_REPORT_SECONDS = 5.0
_REPORT_CELLS = 240


def can_show_app() -> bool:
    """Whether there is a terminal that the app can draw on. A dumb one has no size: drawing on it never ends."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Narrator:
    """Says lines and shows how far the running lanes are. Without a terminal a lane reports every five seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._drawn = False
        self._reported = 0.0
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Print one line of narration."""
        with self._lock:
            self._erase()
            print(one_line(line), file=sys.stderr, flush=True)

    def show(self, state: SessionState) -> None:
        """Draw the running lanes' progress; a lane that has ended is said once."""
        for lane in list(state.lanes):
            record = lane.record
            if record.status in ("done", "failed", "invalid", "cancelled") and record.id not in self._ended:
                self._ended.add(record.id)
                self.say(
                    f"{record.name}: {record.status}" + (f": {record.reason.splitlines()[0]}" if record.reason else "")
                )
        parts = [f"{lane.record.name}: {_phase(lane)}" for lane in list(state.lanes) if lane.record.status == "running"]
        if parts:
            self.draw(" · ".join(parts))

    def draw(self, text: str) -> None:
        """Show how far something is, in the place of what was drawn before; without a terminal every five seconds."""
        now = time.monotonic()
        if not self._terminal and now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        line = one_line(text)
        with self._lock:
            if self._terminal:
                line = chop_cells(line, max(8, shutil.get_terminal_size().columns - 1))[0]  # one row, or it piles up
                print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
                self._drawn = True
            else:
                print(chop_cells(line, _REPORT_CELLS)[0], file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take away what was drawn."""
        with self._lock:
            self._erase()

    def _erase(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=sys.stderr)
            self._drawn = False


def _phase(lane: LaneState) -> str:
    if written := len(lane.continuation):
        return f"decode {written} tokens"  # the sample after the context reports its tokens alone
    return f"{lane.phase} {lane.done:,}/{lane.total:,}" if lane.total else lane.phase or "starting"
