"""The text of tokens as it is drawn: one table of distinct pieces, one index per position.

What a piece shows is decided in `workbench.session.text` alone; here it is stored once, measured, and looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from workbench.session.regions import Role
from workbench.session.text import PieceDecoder, one_line

UNKNOWN = -1
BROKEN = -1  # the width of a piece that holds a line break


@dataclass(slots=True)
class Pieces:
    """Distinct drawn texts with their cell widths; ids of whole tokens are looked up once."""

    texts: list[str] = field(default_factory=lambda: [])
    widths: list[int] = field(default_factory=lambda: [])
    spaced: list[bool] = field(default_factory=lambda: [])  # a line may break before it: a space, then a word
    _index: dict[str, int] = field(default_factory=lambda: {})

    def add(self, text: str) -> int:
        """The index of a harmless text; its width is BROKEN where it holds a line break."""
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self.texts)
            self.texts.append(text)
            self.widths.append(BROKEN if "\n" in text else cell_len(text))
            self.spaced.append(len(text) > 1 and text[0] == " " and text[1] not in " \n")
        return index


class TokenText:
    """The pieces of a growing sequence of token ids."""

    def __init__(self, pieces: Pieces, token_bytes: Callable[[int], bytes]) -> None:
        self.pieces = pieces
        self.indices: list[int] = []
        self._token_bytes = token_bytes
        self._whole: dict[int, int] = {}
        self._decoder = PieceDecoder()

    def __len__(self) -> int:
        return len(self.indices)

    def extend(self, ids: NDArray[Any]) -> None:
        """Append tokens; a character may begin in one call and end in the next."""
        unique, inverse = np.unique(ids, return_inverse=True)
        known = np.array([self._of_whole(int(token)) for token in unique], dtype=np.int64)
        indices: list[int] = known[inverse].tolist() if len(unique) else []
        parts = np.flatnonzero(known[inverse] == UNKNOWN) if len(unique) else np.zeros(0, np.int64)
        previous = -1
        for position in parts.tolist():
            if position != previous + 1:  # a whole token came between: what was pending is never completed
                self._decoder = PieceDecoder()
            indices[position] = self.pieces.add(self._decoder.piece(self._token_bytes(int(ids[position]))))
            previous = position
        if previous != len(indices) - 1:
            self._decoder = PieceDecoder()
        self.indices += indices

    def _of_whole(self, token: int) -> int:
        index = self._whole.get(token)
        if index is None:
            data = self._token_bytes(token)
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:
                index = UNKNOWN
            else:
                index = self.pieces.add(PieceDecoder().piece(data) if data else f"⟨{token}⟩")
            self._whole[token] = index
        return index


def quoted(data: bytes, token: int) -> str:
    """One token for a table: its text in quotes, or its bytes where it is a part of a character."""
    if not data:
        return f"⟨{token}⟩"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return f"⟨{data.hex(' ')}⟩"
    return f"‘{one_line(text)}’"


def message_kinds(roles: NDArray[Any], messages: NDArray[Any], names: Sequence[str]) -> NDArray[np.uint8]:
    """Per position which of KINDS wrote its message: by the messages' role names, else by the position's role."""
    by_role = np.array([SYSTEM, USER, TOOL, *[ASSISTANT] * 6], np.uint8)
    kinds = by_role[np.minimum(roles, len(by_role) - 1)]
    lookup = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "tool": TOOL, "assistant": ASSISTANT}
    if names:
        table = np.array([lookup.get(name, ASSISTANT) for name in names], np.uint8)
        inside = (messages >= 0) & (messages < len(table))
        kinds[inside] = table[messages[inside]]
    # What belongs to no message is the template's own: a system prompt, or at the end the opening of the next turn.
    outside = np.flatnonzero(messages < 0)
    for run in np.split(outside, np.flatnonzero(np.diff(outside) > 1) + 1):
        said = roles[run][roles[run] != Role.STRUCTURE]
        kinds[run] = by_role[said[0]] if len(said) else ASSISTANT
    return kinds


ASSISTANT, USER, TOOL, SYSTEM = range(4)
KINDS: tuple[str, ...] = ("assistant", "user", "tool", "system")
