"""Marks: private-use characters around what messages bring into a render, so that it tells where each piece went.

A marked render minus its marks must equal the plain one; then every piece's place is known exactly, whatever the
template did to it (JSON escapes, trimming, reordering). Numbers and truth values are marked by `marked_json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from workbench.session.regions import Role

_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_HELD = "\U000ffffe"  # a noncharacter, around the number of a value that waits for its JSON
_HELD_VALUE = re.compile(f'"{_HELD}([0-9]+){_HELD}"')

Placing = Literal["none", "outer", "inner"]
"""Where marks stand: nowhere, around a text's own blanks, or inside them (for templates that trim)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One text of a message (-1: the tools) and what it is."""

    role: Role
    message: int
    text: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece at its half-open character span of the render."""

    piece: Piece
    start: int
    stop: int


class Marked:
    """A value other than text that carries its marks; `marked_json` and `str` print them."""

    opening: str = ""
    closing: str = ""


class _MarkedInt(Marked, int):
    def __str__(self) -> str:
        return f"{self.opening}{int(self)}{self.closing}"


class _MarkedFloat(Marked, float):
    def __str__(self) -> str:
        return f"{self.opening}{float(self)}{self.closing}"


class _MarkedDict(Marked, dict[str, Any]):
    pass


class _MarkedList(Marked, list[Any]):
    pass


class Arguments(dict[str, Any]):
    """A call's arguments; `marks` holds the pair of a value that cannot carry its own (true, false, null)."""

    marks: dict[str, tuple[str, str]]


@dataclass
class Marks:
    """Hands out a pair of marks for each piece and finds them again."""

    placing: Placing
    taken: frozenset[str] = frozenset()  # private-use characters of the session itself
    literals: Callable[[str], list[str]] = lambda _: []
    empty: bool = True  # mark empty texts too; some templates ask whether there is a text
    calls: bool = True  # mark names and arguments of calls, and tools
    pieces: list[Piece] = field(default_factory=list[Piece])
    _pairs: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    _free: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        points = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
        self._free = (letter for point in points if (letter := chr(point)) not in self.taken)

    def text(self, text: str, role: Role, message: int) -> str:
        """The text with marks."""
        if self.placing == "none" or not (text or self.empty):
            return text
        opening, closing = self._pair(Piece(role, message, text))
        if self.placing == "outer":
            return f"{opening}{text}{closing}"
        core = text.strip()
        lead = text[: len(text) - len(text.lstrip())] if core else text
        return f"{lead}{opening}{core}{closing}{text[len(lead) + len(core) :]}"

    def call_text(self, text: str, role: Role, message: int) -> str:
        """The text of a call's name or key with marks, where calls are marked."""
        return self.text(text, role, message) if self.calls and text else self.guard(text, message)

    def guard(self, text: str, message: int) -> str:
        """A text that templates compare or count: marked only where it holds a control token's letters."""
        return self.text(text, Role.STRUCTURE, message) if self.literals(text) else text

    def arguments(self, values: dict[str, Any], message: int) -> dict[str, Any]:
        """A call's arguments with marked keys and values."""
        out = Arguments()
        out.marks = {}
        for key, value in values.items():
            name = self.call_text(key, Role.ARGUMENT_KEY, message)
            if isinstance(value, str):
                out[name] = self.call_text(value, Role.ARGUMENT_VALUE, message)
            elif value is None or isinstance(value, bool):
                out[name] = value
                if self.placing != "none" and self.calls:
                    out.marks[name] = self._pair(Piece(Role.ARGUMENT_VALUE, message, json.dumps(value)))
            else:
                out[name] = self.value(value, Role.ARGUMENT_VALUE, message)
        return out

    def value(self, value: Any, role: Role, message: int) -> Any:
        """A number, object or list with marks around the whole; texts in it are guarded."""
        plain = self._guarded(value, message)
        if self.placing == "none" or not self.calls:
            return plain
        kinds: dict[Any, type[Marked]] = {int: _MarkedInt, float: _MarkedFloat, dict: _MarkedDict, list: _MarkedList}
        kind = kinds.get(type(cast(object, plain)))
        if kind is None:
            return plain
        marked = cast(Callable[[Any], Marked], kind)(plain)
        marked.opening, marked.closing = self._pair(Piece(role, message, json.dumps(value)))
        return marked

    def tool(self, tool: dict[str, Any]) -> Any:
        """A tool's schema, marked as a whole and as its function, whichever the template prints."""
        return self.value({**tool, "function": self.value(tool["function"], Role.SYSTEM, -1)}, Role.SYSTEM, -1)

    def wrapped_list(self, values: list[Any], role: Role) -> list[Any]:
        """A list of which the whole is marked when it is printed as JSON at once."""
        if self.placing == "none" or not self.calls:
            return values
        marked = _MarkedList(values)
        marked.opening, marked.closing = self._pair(Piece(role, -1, ""))
        return marked

    def locate(self, marked: str) -> tuple[str, list[Placed]] | None:
        """The text without marks and the place of each piece, outer ones first; None where a pair was torn apart."""
        opens = {pair[0]: index for index, pair in enumerate(self._pairs)}
        closes = {pair[1]: index for index, pair in enumerate(self._pairs)}
        parts: list[str] = []
        found: list[Placed] = []
        stack: list[tuple[int, int]] = []
        last = length = 0
        for match in _PRIVATE.finditer(marked):
            letter = match.group()
            if letter not in opens and letter not in closes:
                continue
            parts.append(marked[last : match.start()])
            length += match.start() - last
            last = match.end()
            if letter in opens:
                stack.append((opens[letter], length))
            elif not stack or stack[-1][0] != closes[letter]:
                return None
            else:
                index, start = stack.pop()
                found.append(Placed(self.pieces[index], start, length))
        if stack:
            return None
        parts.append(marked[last:])
        return "".join(parts), sorted(found, key=lambda place: (place.start, -place.stop))

    def _guarded(self, value: Any, message: int) -> Any:
        if isinstance(value, Marked):
            return value
        if isinstance(value, str):
            return self.guard(value, message)
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {self.guard(key, message): self._guarded(item, message) for key, item in items}
        if isinstance(value, list):
            return [self._guarded(item, message) for item in cast(list[Any], value)]
        return value

    def _pair(self, piece: Piece) -> tuple[str, str]:
        pair = next(self._free, ""), next(self._free, "")
        if not pair[1]:
            raise OverflowError("no private-use characters are left for marks")
        self.pieces.append(piece)
        self._pairs.append(pair)
        return pair


def private_characters(text: str) -> frozenset[str]:
    """The private-use characters of a text, which cannot serve as marks."""
    return frozenset(_PRIVATE.findall(text))


def marked_json(value: Any, *, ensure_ascii: bool = False, sort_keys: bool = False, **options: Any) -> str:
    """`json.dumps` that prints a marked value between its marks; `options` are its own."""
    held: list[str] = []

    def dump(item: Any) -> str:
        return json.dumps(item, ensure_ascii=ensure_ascii, **options)

    def hold(item: Any, opening: str, closing: str) -> str:
        held.append(f"{opening}{dump(walk(item, True))}{closing}")
        return f"{_HELD}{len(held) - 1}{_HELD}"

    def walk(item: Any, inside: bool = False) -> Any:
        # A held value starts at column 0, so with an indent only the outermost one may be held.
        if isinstance(item, Marked) and not inside:
            plain: Any = list(cast(list[Any], item)) if isinstance(item, list) else item
            plain = dict(cast(dict[str, Any], item)) if isinstance(item, dict) else plain
            plain = (
                int(item) if isinstance(item, _MarkedInt) else float(item) if isinstance(item, _MarkedFloat) else plain
            )
            return hold(plain, item.opening, item.closing)
        if isinstance(item, dict):
            entries = list(cast(dict[str, Any], item).items())
            if sort_keys:
                entries.sort(key=lambda entry: _PRIVATE.sub("", entry[0]))
            marks = item.marks if isinstance(item, Arguments) and not inside else {}
            nested = inside or options.get("indent") is not None
            return {
                key: hold(each, *marks[key]) if key in marks and not nested else walk(each, nested)
                for key, each in entries
            }
        if isinstance(item, list | tuple):
            return [walk(each, inside or options.get("indent") is not None) for each in cast(list[Any], item)]
        return item

    text = dump(walk(value))
    return _HELD_VALUE.sub(lambda match: held[int(match.group(1))], text) if held else text
