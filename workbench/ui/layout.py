"""Where each row of wrapped token text begins, for one width: columns only, grown at the end.

A row begins at a token and a character inside it, so a token may be wider than the pane, hold line breaks, or leave its
leading space on the row before. Wrapping costs about 0.3 µs a token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from rich.cells import cell_len

from workbench.ui.pieces import BROKEN, TokenText


class Part(NamedTuple):
    """What a row shows of one token: the index of the token and the slice of its text."""

    token: int
    text: str


class Layout:
    """Rows of a TokenText at a width; `breaks[i]` is 1 where token i must begin a row."""

    def __init__(self, text: TokenText, width: int, breaks: bytes = b"") -> None:
        self.width = max(1, width)
        self._text = text
        self._breaks = breaks
        self._tokens = array("l", [0])
        self._chars = array("l", [0])
        self._done = 0
        self._col = 0
        self._break_at = -1
        self._break_col = 0
        self.extend()

    def __len__(self) -> int:
        empty_last = self._tokens[-1] >= self._done and len(self._tokens) > 1
        return len(self._tokens) - (1 if empty_last else 0)

    def extend(self) -> None:
        """Wrap the tokens that came since the last call."""
        indices, pieces = self._text.indices, self._text.pieces
        widths, spaced, breaks, limit = pieces.widths, pieces.spaced, self._breaks, self.width
        col, marked = self._col, len(breaks)
        for token in range(self._done, len(indices)):
            piece = indices[token]
            width = widths[piece]
            if token < marked and breaks[token] and col:
                self._row(token, 0)
                col = 0
            if width == BROKEN or width > limit:
                col = self._long(token, pieces.texts[piece], col)
                continue
            if spaced[piece] and col:
                self._break_at, self._break_col = token, col
            col += width
            if col > limit:
                col = self._overflow(token, width, col)
        self._col, self._done = col, len(indices)

    def row_of(self, token: int) -> int:
        """The row that shows the first visible character of a token."""
        row = bisect_right(self._tokens, token) - 1
        while row and self._tokens[row] == token and self._chars[row] > 1:
            row -= 1
        if row and self._tokens[row] == token and self._chars[row] == 1:
            piece = self._text.indices[token] if token < len(self._text) else 0
            if not self._text.pieces.spaced[piece]:
                row -= 1
        return min(row, max(0, len(self) - 1))

    def first_token(self, row: int) -> int:
        """The token that a row begins with."""
        return self._tokens[max(0, min(row, len(self._tokens) - 1))]

    def begins(self, row: int) -> bool:
        """Whether a row begins at the first character of its token."""
        return self._chars[row] == 0

    def parts(self, row: int) -> Iterator[Part]:
        """What a row shows, token by token, without line breaks."""
        indices, texts = self._text.indices, self._text.pieces.texts
        first, skip = self._tokens[row], self._chars[row]
        last, stop = (self._tokens[row + 1], self._chars[row + 1]) if row + 1 < len(self._tokens) else (len(indices), 0)
        for token in range(first, last + (1 if stop else 0)):
            text = texts[indices[token]]
            part = text[skip if token == first else 0 : stop if token == last else None]
            yield Part(token, part.rstrip("\n"))

    def _row(self, token: int, char: int) -> None:
        self._tokens.append(token)
        self._chars.append(char)
        self._break_at = -1

    def _overflow(self, token: int, width: int, col: int) -> int:
        if self._break_at > self._tokens[-1] and col - self._break_col - 1 <= self.width:
            at, before = self._break_at, self._break_col
            self._row(at, 1)
            return col - before - 1
        self._row(token, 0)
        return width

    def _long(self, token: int, text: str, col: int) -> int:
        """A token with line breaks, or wider than a row: broken character by character."""
        lines = text.split("\n")
        char = 0
        for number, line in enumerate(lines):
            if number:
                if char == len(text):
                    self._row(token + 1, 0)
                    return 0
                self._row(token, char)
                col = 0
            if not number and line and col and col + cell_len(line) > self.width:
                self._row(token, 0)
                col = 0
            for offset, symbol in enumerate(line):
                cells = cell_len(symbol)
                if col + cells > self.width and col:
                    self._row(token, char + offset)
                    col = 0
                col += cells
            char += len(line) + 1
        return col
