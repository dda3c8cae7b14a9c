"""Widgets that draw themselves line by line: no children, no markup, exact columns."""

from __future__ import annotations

from typing import cast

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.dom import DOMNode
from textual.strip import Strip
from textual.widget import Widget

from workbench.session.text import one_line
from workbench.ui.board import Desk

BLOCKS = "▁▂▃▄▅▆▇█"


class Row:
    """One line under construction, exactly `width` cells wide at the end; what does not fit ends in `…`."""

    def __init__(self, width: int, ground: Style) -> None:
        self.width = width
        self.used = 0
        self._ground = ground
        self._segments: list[Segment] = []

    @property
    def left(self) -> int:
        return self.width - self.used

    def add(self, text: str, style: Style, limit: int | None = None) -> Row:
        """Append text, made harmless, cut to what is left or to `limit` cells."""
        room = self.left if limit is None else min(self.left, limit)
        if not text or room <= 0:
            return self
        safe = one_line(text)
        if cell_len(safe) > room:
            safe = set_cell_size(safe, room - 1) + "…"
        self._segments.append(Segment(safe, style))
        self.used += cell_len(safe)
        return self

    def to(self, column: int) -> Row:
        """Pad with blanks up to a column."""
        gap = min(column, self.width) - self.used
        if gap > 0:
            self._segments.append(Segment(" " * gap, self._ground))
            self.used += gap
        return self

    def right(self, *parts: tuple[str, Style]) -> Row:
        """Put parts at the end of the line; dropped from the front where they do not fit."""
        chosen = list(parts)
        while chosen and sum(cell_len(text) for text, _ in chosen) > self.left:
            chosen.pop(0)
        self.to(self.width - sum(cell_len(text) for text, _ in chosen))
        for text, style in chosen:
            self.add(text, style)
        return self

    def segments(self) -> list[Segment]:
        """The finished line."""
        return self.to(self.width)._segments


class Lines(Widget, can_focus=False):
    """A widget whose line y is `line(y, width)`."""

    ALLOW_SELECT = False

    def __init__(self, desk: Desk, *, id: str) -> None:
        super().__init__(id=id)
        self.desk = desk

    def line(self, y: int, width: int) -> list[Segment]:
        """The segments of a line, exactly `width` cells."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        return Strip(self.line(y, width), width)


def app_of(node: DOMNode) -> App[object]:
    """The app of a node; Textual leaves its type open."""
    return cast("App[object]", node.app)  # pyright: ignore[reportUnknownMemberType]


def grid(width: int, count: int) -> list[tuple[int, int]]:
    """Start and width of `count` equal panes with one rule between them; what is left over stays blank at the right."""
    each = (width - (count - 1)) // max(1, count)
    return [(index * (each + 1), each) for index in range(count)]


def fill(segments: list[Segment], width: int, count: int, ground: Style) -> list[Segment]:
    """Panes of a `grid` side by side, and the blank that is left over."""
    each = (width - (count - 1)) // max(1, count)
    left = width - count * each - max(0, count - 1)
    return [*segments, Segment(" " * left, ground)] if left else segments


def thousands(value: float) -> str:
    """An integer with its thousands apart."""
    return f"{round(value):,}"


def figure(value: float | None, digits: int = 4) -> str:
    """A small number with a fixed count of decimals, `—` where there is none."""
    return "—" if value is None else f"{value:.{digits}f}"


def depth(position: int) -> str:
    """A depth in thousands of tokens, as bins are named."""
    return f"{position // 1024}k" if position >= 1024 else str(position)
