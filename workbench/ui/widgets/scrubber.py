"""Where the reader is in the session: state, speed, the active lane's divergence along the way, turns, position."""

from __future__ import annotations

import math

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from workbench.ui.board import Board
from workbench.ui.measures import BINS, densest
from workbench.ui.widgets.gauges import kl_block, kl_step
from workbench.ui.widgets.lines import Lines, Row, thousands

HEIGHT, COMPACT_HEIGHT = 2, 1
LEFT, RIGHT = 18, 40
COMPACT_LEFT, COMPACT_RIGHT = 12, 22
LABEL_GAP = 4  # at least so many cells between two turn numbers: the marks of flips need some


class Scrubber(Lines):
    """A marks line (turns, flips) over the track; the track alone where rows are dear."""

    class Sought(Message):
        """The track was clicked at a share of the session."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    def _sides(self) -> tuple[int, int]:
        return (COMPACT_LEFT, COMPACT_RIGHT) if self.size.width < 100 else (LEFT, RIGHT)

    def line(self, y: int, width: int) -> list[Segment]:
        board, row = self.desk.board, Row(width, self.desk.ink.text)
        if board is None:
            return row.segments()
        left, right = self._sides()
        cells = max(8, width - left - right)
        if y == 0 and not self.desk.compact:
            self._marks(board, row.to(left), cells)
            return row.segments()
        self._state(board, row)
        self._track(board, row.to(left), cells)
        self._place(board, row, width)
        return row.segments()

    def _state(self, board: Board, row: Row) -> None:
        ink, transport = self.desk.ink, board.transport
        if board.running and transport.playhead is None:
            row.add(" ● ", ink.accent).add("live", ink.text).add(" following" if transport.follow else "", ink.muted)
        elif transport.playing:
            row.add(" ▶ ", ink.accent).add(f"{transport.speed}/s", ink.text)
        else:
            row.add(" ❚❚ ", ink.muted).add(f"{transport.speed}/s", ink.muted)

    def _cell_of(self, board: Board, position: int, cells: int) -> int:
        return min(cells - 1, position * cells // max(1, board.transport.total))

    def _marks(self, board: Board, row: Row, cells: int) -> None:
        """Turn numbers where their turns begin, some cells apart, and between them `◆` where the active lane flips."""
        ink, active = self.desk.ink, board.active
        marks: dict[int, tuple[str, Style]] = {}
        free = 0
        for turn, position in enumerate(board.shared.turn_starts, 1):
            cell, label = self._cell_of(board, position, cells), f"t{turn}"
            if free <= cell <= cells - len(label):
                marks |= {cell + offset: (symbol, ink.muted) for offset, symbol in enumerate(label)}
                free = cell + len(label) + LABEL_GAP
        if active is not None and not active.measures.is_reference:
            inside = max(1, cells * board.count // max(1, board.transport.total))
            for cell, marked in enumerate(densest(active.measures.curve(inside)[2].tolist())):
                if marked:
                    marks.setdefault(cell * inside // max(1, min(inside, BINS)), ("◆", ink.warning))
        for cell in range(cells):
            row.add(*marks.get(cell, (" ", ink.text)))

    def _track(self, board: Board, row: Row, cells: int) -> None:
        ink, active, transport = self.desk.ink, board.active, board.transport
        inside = max(1, cells * board.count // max(1, transport.total))
        here = self._cell_of(board, transport.cursor, cells)
        shown = self._cell_of(board, max(0, transport.shown - 1), cells)
        plain = active is None or active.measures.is_reference
        means, marked = [math.nan], [False]
        if active is not None:
            curve = active.measures.curve(inside)
            means, marked = curve[0].tolist(), densest(curve[2].tolist())
        edge = self._cell_of(board, active.measures.edge, cells) if active is not None else 0
        for cell in range(cells):
            slice_ = min(len(means) - 1, cell * len(means) // inside)
            value = means[slice_]
            if cell == here:
                row.add("┃", ink.active)
            elif cell >= inside:
                row.add("┄", ink.muted)
            elif self.desk.compact and not plain and marked[slice_] and cell <= shown:
                row.add("◆", ink.warning)
            elif plain or math.isnan(value):
                row.add("─", ink.muted if cell < edge and cell <= shown else ink.rule)
            elif cell > shown:
                row.add(kl_block(value), ink.rule)
            else:
                row.add(
                    kl_block(value), Style(color=ink.palette.divergence[kl_step(value)], bgcolor=ink.palette.background)
                )

    def _place(self, board: Board, row: Row, width: int) -> None:
        ink, transport, active = self.desk.ink, board.transport, board.active
        place = f"{thousands(transport.cursor)} / {thousands(transport.total)}"
        turn = f"turn {board.turn_at(transport.cursor)}/{board.shared.turns}"
        if width < 100:
            place = place.replace(" ", "")
            row.right((f" {place}", ink.text), (f" t{board.turn_at(transport.cursor)} ", ink.muted))
            return
        least = "≥" if active is not None and active.measures.bounded else ""
        lane = f"lane {active.number} {least}" if active is not None else ""
        row.add("  ", ink.text).add(place, ink.text)
        row.right((f"{turn}   ", ink.muted), (lane, ink.muted))

    def on_click(self, event: events.Click) -> None:
        left, right = self._sides()
        cells = max(8, self.size.width - left - right)
        if left <= event.x < left + cells:
            self.post_message(self.Sought((event.x - left + 0.5) / cells))
