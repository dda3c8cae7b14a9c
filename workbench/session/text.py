"""Text for eyes: tokens decoded one by one without losing bytes, and the one place where text is made harmless.

Nothing that comes out of here moves a cursor, hides, reorders or joins cells: what would do so is shown by a symbol or
as ⟨U+202E⟩, and bytes that are no whole character as ⟨e2 82⟩.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

TAB = "⇥   "
"""A tab: always four cells, whatever column it stands in."""

_SHORT = {
    0xAD: "SHY", 0x61C: "ALM", 0x200B: "ZWSP", 0x200C: "ZWNJ", 0x200D: "ZWJ", 0x200E: "LRM", 0x200F: "RLM",
    0x2060: "WJ", 0xFE0E: "VS15", 0xFE0F: "VS16", 0xFEFF: "BOM",
}  # fmt: skip
_BLANK = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, 0x2800}
"""Characters of visible categories that show nothing."""
_SELECTORS = (range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
_HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_PILE = re.compile(r"(?<=[^\W_])[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{3,}")


class _Symbols(dict[int, int | str]):
    """What each character is shown as, worked out when it is first met."""

    def __missing__(self, point: int) -> int | str:
        shown = self[point] = _symbol(point)
        return shown


def harmless(text: str) -> str:
    """The text with everything made visible that could act on a terminal; line feeds stay, everything else has cells.

    Controls become ␀ … ␡, a tab `TAB`; bidirectional controls, zero-width and tag characters, variation selectors,
    private, unassigned and surrogate code points become ⟨NAME⟩ or ⟨U+…⟩. Of marks piled on one letter two stay.
    """
    if text.isascii() and text.isprintable():
        return text
    shown = text.translate(_SYMBOLS)
    return shown if shown.isascii() else _PILE.sub(_unpile, shown)


def one_line(text: str) -> str:
    """The harmless text with its line feeds made visible too: for cells, narration and titles."""
    return harmless(text).replace("\n", "␊")


def pieces(ids: Iterable[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """One harmless piece of text for each token, by incremental decoding.

    A character that several tokens share is shown by the one that completes it; those before show their bytes.
    """
    decoder = PieceDecoder()
    return [decoder.piece(token_bytes(int(identity))) for identity in ids]


class PieceDecoder:
    """Decodes a stream token by token; holds the bytes of a character that is not yet whole."""

    def __init__(self) -> None:
        self._pending = b""

    def piece(self, data: bytes) -> str:
        """What the next token's bytes show; never U+FFFD for a part of a character."""
        old, joined = len(self._pending), self._pending + data
        self._pending = b""
        parts: list[str] = []
        loose = bytearray()
        at = 0
        while at < len(joined):
            try:
                whole, stop, after = joined[at:], len(joined), len(joined)
                whole.decode()
            except UnicodeDecodeError as error:
                stop, after = at + error.start, at + error.end
                if error.reason == "unexpected end of data":
                    self._pending, after = joined[stop:], len(joined)
            if stop > at:
                parts += [_bytes(loose), harmless(joined[at:stop].decode())]
                loose.clear()
            loose += joined[max(stop, old) : after]
            at = after
        parts.append(_bytes(loose))
        text = "".join(parts)
        return f"◌{text}" if text and unicodedata.combining(text[0]) else text


def plain(ids: Iterable[int], token_bytes: Callable[[int], bytes]) -> str:
    """The text of a run of tokens as it is (not harmless); bytes that are no character as ⟨…⟩."""
    data = b"".join(token_bytes(int(identity)) for identity in ids)
    parts: list[str] = []
    while data:
        try:
            parts.append(data.decode())
            break
        except UnicodeDecodeError as error:
            parts += [data[: error.start].decode(), _bytes(data[error.start : error.end])]
            data = data[error.end :]
    return "".join(parts)


def _bytes(data: bytes | bytearray) -> str:
    return f"⟨{data.hex(' ')}⟩" if data else ""


def _symbol(point: int) -> int | str:
    if point == 0x0A:
        return point
    if point == 0x09:
        return TAB
    if point < 0x20:
        return 0x2400 + point
    if point == 0x7F:
        return 0x2421
    hidden = unicodedata.category(chr(point)) in _HIDDEN_CATEGORIES or point in _BLANK
    if hidden or any(point in span for span in _SELECTORS):
        return f"⟨{_SHORT.get(point) or f'U+{point:04X}'}⟩"
    return point


def _unpile(match: re.Match[str]) -> str:
    marks = match.group()
    return marks[:2] + "".join(f"⟨U+{ord(mark):04X}⟩" for mark in marks[2:])


_SYMBOLS = _Symbols()
