"""What a pane or the whole screen says in words: a lane that failed, a session that is still loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from rich.cells import cell_len
from rich.segment import Segment

from workbench.session.text import one_line
from workbench.store.state import LaneRecord
from workbench.ui.actions import keys_of
from workbench.ui.board import MARGIN, Board, Desk, LaneView
from workbench.ui.marks import marks_of, status_of
from workbench.ui.styles import Ink
from workbench.ui.widgets.lines import Row

LOG_LINES = 6


def failure(view: LaneView, board: Board, width: int, height: int, ink: Ink) -> list[list[Segment]]:
    """The lines at the foot of the pane of a lane that failed, is invalid or had no effect: why, and what to do.

    Of a failed one the end of its engine's log too.
    """
    record = view.lane.record
    status, why = status_of(view, board)
    if status not in ("failed", "invalid"):
        return _without_effect(view, board, width, height, ink)
    reason, log = reason_and_log(replace(record, reason=why))
    room = max(1, height // 2)
    lines = [Row(width, ink.rule).add("─" * width, ink.error).segments()]
    glyph = "✗" if status == "failed" else "!"
    for index, text in enumerate(wrapped(reason or status, width - 4)[: max(1, room - 3)]):
        lines.append(
            Row(width, ink.text).add(f" {glyph} " if not index else "   ", ink.error).add(text, ink.text).segments()
        )
    said = wrapped("its figures say nothing about quality", width - 4) if status == "invalid" else []
    lines += [Row(width, ink.text).add(f"   {text}", ink.muted).segments() for text in said[: room - len(lines) - 1]]
    tail = log[-max(0, min(LOG_LINES, room - len(lines) - 1)) :] if room - len(lines) > 1 else []
    lines += [Row(width, ink.text).add(" ┆ ", ink.error).add(text, ink.muted).segments() for text in tail]
    lines.append(Row(width, ink.text).add("   r ", ink.active).add("runs it again", ink.muted).segments())
    return lines


def _without_effect(view: LaneView, board: Board, width: int, height: int, ink: Ink) -> list[list[Segment]]:
    if not view.lane.record.stats.get("no_effect"):
        return []
    said = next((mark.why for mark in marks_of(view, board) if mark.word == "no effect"), "")
    texts = wrapped(said, width - 4)[: max(1, height // 2 - 1)]
    lines = [Row(width, ink.rule).add("─" * width, ink.warning)]
    lines += [
        Row(width, ink.text).add("   " if i else " = ", ink.warning).add(t, ink.text) for i, t in enumerate(texts)
    ]
    return [row.segments() for row in lines]


def waiting_lane(desk: Desk, view: LaneView, y: int, width: int) -> list[Segment]:
    """A pane with nothing measured yet says what it waits for, calmly, at the top."""
    record, ink = view.lane.record, desk.ink
    words = {
        "queued": "queued behind the other lanes",
        "running": view.lane.phase or "loading",
        "cancelled": "stopped, nothing measured",
        "interrupted": "interrupted, nothing measured",
    }
    row = Row(width, ink.text)
    if y == 1:
        row.to(MARGIN).add(words.get(record.status, "nothing measured"), ink.muted)
    return row.segments()


def reason_and_log(record: LaneRecord) -> tuple[str, list[str]]:
    """A lane's reason in one line, and the last lines of its engine's log."""
    first, _, rest = record.reason.partition("\n")
    log: Any = record.manifest.get("log_tail") or rest.splitlines()
    lines = [str(line) for line in cast("list[Any]", log)] if isinstance(log, list | tuple) else []
    return first, [line for line in lines if line.strip()]


def wrapped(text: str, width: int) -> list[str]:
    """Words of a text in lines of at most `width` cells; longer words are cut into pieces."""
    lines: list[str] = []
    line = ""
    for word in one_line(text).split():
        while cell_len(word) > width > 0:
            if line:
                lines.append(line)
                line = ""
            head = word[:width]
            while len(head) > 1 and cell_len(head) > width:
                head = head[:-1]
            lines.append(head)
            word = word[len(head) :]
        if line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines


def waiting(desk: Desk, y: int, width: int, height: int) -> list[Segment]:
    """The screen before a session is there: one calm block in the middle: what is being done, or went wrong."""
    ink, ready = desk.ink, desk.board is not None
    message = desk.message or ("" if ready else "loading")
    lines = [
        ("no lanes yet" if ready else "inference workbench", ink.strong),
        ("", ink.text),
        *((text, ink.text) for text in wrapped(message, min(width - 8, 100))),
        ("", ink.text),
        (_hint(desk, "config", "opens one") if ready else _hint(desk, "quit", "quits"), ink.muted),
    ]
    row, index = Row(width, ink.text), y - max(0, (height - len(lines)) // 2)
    if 0 <= index < len(lines):
        text, style = lines[index]
        row.to(max(1, (width - cell_len(one_line(text))) // 2)).add(text, style)
    return row.segments()


def _hint(desk: Desk, id: str, words: str) -> str:
    return f"{keys_of(id, desk.keys)[0]} {words}"
