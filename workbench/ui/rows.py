"""The rows of a pane at one width: the stream's, then a rule, then the lane's free continuation."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len

from workbench.ui.board import Board, LaneView
from workbench.ui.layout import Layout, Part


@dataclass(frozen=True, slots=True)
class Rows:
    """Positions and rows of a board's lanes, text wrapped at `width` cells."""

    board: Board
    width: int

    @property
    def stream(self) -> Layout:
        return self.board.layout(self.width)

    def count(self, view: LaneView, shown: int) -> int:
        """How many rows a lane has when its first `shown` positions are visible."""
        board, stream = self.board, self.stream
        if shown <= 0:
            return 0
        if shown <= board.count:
            return stream.row_of(shown - 1) + 1
        return len(stream) + 1 + view.tail.layout.row_of(shown - board.count - 1) + 1

    def at(self, view: LaneView, position: int) -> int:
        """The row of a position; a position that a continuation does not have is its last row."""
        board, stream = self.board, self.stream
        if position < board.count:
            return stream.row_of(position)
        if not len(view.tail.text):
            return max(0, len(stream) - 1)
        return len(stream) + 1 + view.tail.layout.row_of(min(position - board.count, len(view.tail.text) - 1))

    def parts(self, view: LaneView, row: int) -> list[Part]:
        """Positions and texts of a row; the rule has none."""
        stream, offset = self.stream, self.board.count
        if row < len(stream):
            return list(stream.parts(row))
        if row == len(stream):
            return []
        return [Part(token + offset, text) for token, text in view.tail.layout.parts(row - len(stream) - 1)]

    def hit(self, view: LaneView, row: int, column: int) -> int | None:
        """The position that covers a column of a row, or the row's last one."""
        found, col = None, 0
        for token, text in self.parts(view, row):
            if found is not None and col > column:
                break
            found, col = token, col + cell_len(text)
        return found

    def move(self, view: LaneView, cursor: int, rows: int) -> int | None:
        """The position some rows below (or above) the cursor, in about the same column."""
        row = self.at(view, cursor)
        column = 0
        for token, text in self.parts(view, row):
            if token >= cursor:
                break
            column += cell_len(text)
        stream, tail = self.stream, view.tail
        last = len(stream) + (1 + len(tail.layout) if len(tail.text) else 0) - 1
        target = max(0, min(row + rows, last))
        if target == len(stream):  # the rule holds no token
            target += 1 if rows > 0 else -1
        found = self.hit(view, target, column)
        # A row that holds only the rest of a long token has no place of its own: go on in the same direction.
        if found is not None and rows and self.at(view, found) == row:
            return found + (1 if rows > 0 else -1)
        return found
