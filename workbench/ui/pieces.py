"""The text of tokens as it is drawn: one table of distinct pieces, one index per position.

A token that holds only a part of a character is drawn as `◌`; the token that completes it draws the character. Bytes that
are no UTF-8 are drawn as `\\xNN`. Every piece has passed `harmless`, so it can be drawn as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from workbench.session.text import harmless

PARTIAL = "◌"
UNKNOWN = -1
BROKEN = -1  # the width of a piece that holds a line break

# Zero-width joiners and variation selectors change the width of what stands before them, differently by terminal.
_DROP = dict.fromkeys([0x200D, *range(0xFE00, 0xFE10)])


@dataclass(slots=True)
class Pieces:
    """Distinct drawn texts with their cell widths; ids of whole tokens are looked up once."""

    texts: list[str] = field(default_factory=lambda: [])
    widths: list[int] = field(default_factory=lambda: [])
    spaced: list[bool] = field(default_factory=lambda: [])  # a line may break before it: a space, then a word
    _index: dict[str, int] = field(default_factory=lambda: {})

    def add(self, text: str) -> int:
        """The index of a text, made harmless; its width is BROKEN where it holds a line break."""
        safe = harmless(text).expandtabs(4).translate(_DROP)
        index = self._index.get(safe)
        if index is None:
            index = self._index[safe] = len(self.texts)
            self.texts.append(safe)
            self.widths.append(BROKEN if "\n" in safe else cell_len(safe))
            self.spaced.append(len(safe) > 1 and safe[0] == " " and safe[1] != " ")
        return index


class TokenText:
    """The pieces of a growing sequence of token ids."""

    def __init__(self, pieces: Pieces, token_bytes: Callable[[int], bytes]) -> None:
        self.pieces = pieces
        self.indices: list[int] = []
        self._token_bytes = token_bytes
        self._whole: dict[int, int] = {}
        self._pending = b""

    def __len__(self) -> int:
        return len(self.indices)

    def extend(self, ids: NDArray[Any]) -> None:
        """Append tokens; a character may begin in one call and end in the next."""
        unique, inverse = np.unique(ids, return_inverse=True)
        known = np.array([self._of_whole(int(token)) for token in unique], dtype=np.int64)
        indices: list[int] = known[inverse].tolist() if len(unique) else []
        parts = np.flatnonzero(known[inverse] == UNKNOWN) if len(unique) else np.zeros(0, np.int64)
        previous = -2 if not self._pending else -1
        for position in parts.tolist():
            if position != previous + 1:  # the unfinished character was never finished
                self._pending = b""
            indices[position] = self._part(self._token_bytes(int(ids[position])))
            previous = position
        if indices and previous != len(indices) - 1:
            self._pending = b""
        self.indices += indices

    def _of_whole(self, token: int) -> int:
        index = self._whole.get(token)
        if index is None:
            data = self._token_bytes(token)
            try:
                index = self.pieces.add(data.decode("utf-8") if data else f"⟨{token}⟩")
            except UnicodeDecodeError:
                index = UNKNOWN
            self._whole[token] = index
        return index

    def _part(self, data: bytes) -> int:
        pending, text = self._pending + data, ""
        while pending:
            try:
                text += pending.decode("utf-8")
                pending = b""
            except UnicodeDecodeError as error:
                text += pending[: error.start].decode("utf-8")
                if error.reason == "unexpected end of data":
                    pending = pending[error.start :]
                    break
                text += "".join(f"\\x{byte:02x}" for byte in pending[error.start : error.end])
                pending = pending[error.end :]
        self._pending = pending
        return self.pieces.add(text or PARTIAL)


def quoted(data: bytes, token: int) -> str:
    """One token for a table: its text in quotes with visible spaces and breaks, or its bytes where it is part of a character."""
    if not data:
        return f"⟨{token}⟩"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "‹" + data.hex(" ") + "›"
    shown = harmless(text.replace("\n", "↵").replace("\t", "⇥")).translate(_DROP)
    return f"‘{shown}’"


def message_kinds(roles: NDArray[Any], messages: NDArray[Any], names: Sequence[str]) -> NDArray[np.uint8]:
    """Per position which of KINDS wrote its message: from the messages' role names, else from the position's own role."""
    by_role = np.array([SYSTEM, USER, TOOL, *[ASSISTANT] * 6], np.uint8)
    kinds = by_role[np.minimum(roles, len(by_role) - 1)]
    lookup = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "tool": TOOL, "assistant": ASSISTANT}
    if names:
        table = np.array([lookup.get(name, ASSISTANT) for name in names], np.uint8)
        inside = (messages >= 0) & (messages < len(table))
        kinds[inside] = table[messages[inside]]
    kinds[messages < 0] = SYSTEM
    return kinds


ASSISTANT, USER, TOOL, SYSTEM = range(4)
KINDS: tuple[str, ...] = ("assistant", "user", "tool", "system")
