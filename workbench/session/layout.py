"""From a marked render to what every character is: role, message, and whether the assistant writes it.

An assistant writes from the end of its header (what the template adds for a generation prompt) to its end-of-turn
token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.session.marks import Placed
from workbench.session.regions import Role


@dataclass(frozen=True, slots=True)
class Layout:
    """Per character of the text: role (uint8), message (int32, −1 for none), generated (uint8)."""

    role: NDArray[np.uint8]
    message: NDArray[np.int32]
    generated: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring pieces of one message."""

    message: int
    start: int
    stop: int


def lay_out(
    text: str,
    pieces: Sequence[Placed],
    assistants: frozenset[int],
    header: str,
    ends: Sequence[str],
    prefix: Callable[[int], str],
) -> Layout:
    """What every character is.

    `header` opens an assistant's turn ("" where the template has none), `ends` are the texts of end-of-turn tokens, and
    `prefix(m)` renders what an engine is given before it writes message m: asked once for each kind of gap that has
    no header.
    """
    layout = Layout(
        np.full(len(text), Role.STRUCTURE, np.uint8), np.full(len(text), -1, np.int32), np.zeros(len(text), np.uint8)
    )
    end_pattern = re.compile("|".join(re.escape(end) for end in ends)) if ends else None
    known: dict[str, int] = {}
    last, message, begin = 0, -1, None
    for block in [*_blocks(pieces), _Block(-1, len(text), len(text))]:
        gap = text[last : block.start]
        closing = _closing(gap, end_pattern, first=last == 0 and message == -1)
        cut = last + (closing + _blanks(gap, closing) if closing else 0)
        if begin is not None:
            written = last + (closing or _open_end(gap, header))
            layout.generated[begin:written] = 1
            cut = max(cut, written)
        layout.message[last:cut] = message
        begin = None
        if block.message in assistants:
            begin = last + _header_end(gap, header, known, lambda m=block.message: prefix(m), text, last)
            if not closing and header and header in gap:
                cut = max(cut, last + gap.rfind(header))
        layout.message[cut : block.stop] = block.message
        last, message = block.stop, block.message
    for place in pieces:
        layout.role[place.start : place.stop] = place.piece.role
    return layout


def tokens_of(layout: Layout, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Layout:
    """What each token is: its last character's message, the role of most of its characters.

    A token counts as generated only where all of it is.
    """
    size = len(layout.role)
    if not size or not len(starts):
        return Layout(np.zeros(0, np.uint8), np.zeros(0, np.int32), np.zeros(0, np.uint8))
    first = np.minimum(starts, size - 1)
    final = np.maximum(np.minimum(stops, size) - 1, first)
    role = layout.role[first]
    for index in np.flatnonzero(role != layout.role[final]):
        inside = layout.role[first[index] : final[index] + 1]
        role[index] = np.bincount(inside).argmax()
    message = layout.message[final]
    return Layout(role, message, layout.generated[first] & layout.generated[final])


def _blocks(pieces: Sequence[Placed]) -> list[_Block]:
    blocks: list[_Block] = []
    for place in pieces:
        if blocks and (blocks[-1].message == place.piece.message or place.stop <= blocks[-1].stop):
            blocks[-1] = _Block(blocks[-1].message, blocks[-1].start, max(place.stop, blocks[-1].stop))
        else:
            blocks.append(_Block(place.piece.message, place.start, place.stop))
    return blocks


def _closing(gap: str, ends: re.Pattern[str] | None, first: bool) -> int:
    """Characters of a gap that close what stands before it: up to its end-of-turn token, 0 where there is none.

    Before the first message only a text of the template's own can be closed, by the last such token.
    """
    found = list(ends.finditer(gap)) if ends else []
    return found[-1 if first else 0].end() if found else 0


def _open_end(gap: str, header: str) -> int:
    """Characters that an assistant still writes after its last piece where the template sets no end-of-turn token.

    That is call syntax up to the next turn's header; blanks at its end are the template's.
    """
    stop = gap.find(header) if header and header in gap else len(gap)
    match = re.match(r"[\"'}\])]*(?:\s*</?[A-Za-z_|]+>)?", gap[:stop])
    return match.end() if match else 0


def _blanks(gap: str, start: int) -> int:
    return len(gap[start:]) - len(gap[start:].lstrip())


def _header_end(gap: str, header: str, known: dict[str, int], prefix: Callable[[], str], text: str, start: int) -> int:
    """Characters of a gap before the first one that the assistant writes."""
    core = header.strip()
    for form in (header, core):  # the one that ends a prompt may have other blanks at its edges
        if form and (at := gap.rfind(form)) >= 0:
            end = at + len(form)
            lines = len(gap[end:]) - len(gap[end:].lstrip("\n"))  # a blank would be part of the first word's token
            return end if form == header else end + lines
    if gap not in known:
        given = prefix()
        common = _common(given, text)
        if common < len(given):  # inside a header that this turn does not have: back to its last whole token
            marks = [match.end() for match in re.finditer(r"[>\n\]｜|]", text[start:common])]
            common = start + marks[-1] if marks else start
        inside = start <= common <= start + len(gap)
        known[gap] = common - start if inside else len(gap)
    return known[gap]


def _common(left: str, right: str) -> int:
    """The length of the common prefix, found by halving."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
