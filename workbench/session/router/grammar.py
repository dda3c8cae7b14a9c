"""How IOS reads a command line: unambiguous abbreviations, arguments, pipes, and its own `%` errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from workbench.session.router.state import ABBREVIATIONS

Fault = Literal["", "ambiguous", "invalid", "incomplete", "unknown", "unknown device", "not recorded"]
Handler = TypeVar("Handler")

_ADDRESS = re.compile(r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)", re.ASCII)
_MAC = re.compile(r"[0-9a-f]{4}\.[0-9a-f]{4}\.[0-9a-f]{4}", re.ASCII | re.IGNORECASE)
_PLACE = re.compile(r"\d+(?:/\d+)*(?:\.\d+)?", re.ASCII)
_JOINED = re.compile(r"([a-z-]+)(\d.*)", re.ASCII | re.IGNORECASE)
_LONGEST = 254
"""Characters of a line that IOS takes."""
FILTERS = ("begin", "exclude", "include", "section")


class CommandError(Exception):
    """A line that the device refuses: `text` is what it prints, `fault` what was wrong."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault: Fault = fault
        self.text = text


@dataclass(frozen=True, slots=True)
class Command(Generic[Handler]):
    """A line that was understood: its full words, what runs it, its arguments, and the filter behind its pipe."""

    words: tuple[str, ...]
    handler: Handler
    arguments: tuple[str, ...]
    filter: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """The command as IOS would write it in full."""
        line = " ".join(self.words)
        return line if self.filter is None else f"{line} | {self.filter[0]} {self.filter[1]}"

    def filtered(self, text: str) -> str:
        """The lines that the filter lets pass. Patterns come from models: only `^`, `$` and `|` mean something."""
        if self.filter is None:
            return text
        kind, pattern = self.filter
        lines = text.split("\n")
        hits = [_hit(line, pattern) for line in lines]
        if kind == "begin":
            return "\n".join(lines[hits.index(True) :]) if True in hits else ""
        if kind == "section":
            keep = False
            kept: list[str] = []
            for line, hit in zip(lines, hits, strict=True):
                keep = hit or (keep and line.startswith(" "))
                if keep:
                    kept.append(line)
            return "\n".join(kept)
        return "\n".join(line for line, hit in zip(lines, hits, strict=True) if hit == (kind == "include"))


@dataclass(slots=True)
class _Node(Generic[Handler]):
    words: dict[str, _Node[Handler]] = field(default_factory=dict[str, "_Node[Handler]"])
    argument: tuple[str, _Node[Handler]] | None = None
    handler: Handler | None = None


class Grammar(Generic[Handler]):
    """The commands of a device. In patterns, `<interface>`, `<address>`, `<mac>` and `<number>` are arguments."""

    def __init__(self, patterns: Iterable[tuple[str, Handler]]) -> None:
        self._root: _Node[Handler] = _Node()
        for pattern, handler in patterns:
            node = self._root
            for word in pattern.split():
                if word.startswith("<"):
                    node.argument = node.argument or (word.strip("<>"), _Node())
                    node = node.argument[1]
                else:
                    node = node.words.setdefault(word, _Node())
            node.handler = handler

    def read(self, line: str, prompt: str) -> Command[Handler]:
        """The command of a line typed behind `prompt`, whose length places the error marker. Raises CommandError."""
        line = line.rstrip()
        tokens = [(match.group(), match.start()) for match in re.finditer(r"\S+", line.partition("|")[0])]
        if len(line) > _LONGEST or not tokens:
            raise _invalid(prompt, 0)
        node, words, arguments = self._root, list[str](), list[str]()
        index = 0
        while index < len(tokens):
            token, place = tokens[index]
            index += 1
            if word := _keyword(node.words, token, line):
                node = node.words[word]
                words.append(word)
                continue
            following = tokens[index][0] if index < len(tokens) else ""
            value, used = read_argument(node.argument[0], token, following) if node.argument else ("", 0)
            if not used or node.argument is None:
                if node is self._root and len(tokens) == 1:
                    raise CommandError("unknown", _untranslated(token))
                raise _invalid(prompt, place)
            node = node.argument[1]
            words.append(value)
            arguments.append(value)
            index += used - 1
        if node.handler is None:
            raise CommandError("incomplete", "% Incomplete command.\n")
        return Command(tuple(words), node.handler, tuple(arguments), _read_filter(line, prompt))


def read_argument(kind: str, token: str, following: str) -> tuple[str, int]:
    """An argument in full and the tokens it takes: 1, 2 for `Gi 0/1`, 0 where the token is no such argument."""
    if kind == "number":
        return (str(int(token)), 1) if token.isascii() and token.isdigit() and len(token) < 6 else ("", 0)
    if kind == "address":
        return (token, 1) if _ADDRESS.fullmatch(token) else ("", 0)
    if kind == "mac":
        return (token.lower(), 1) if _MAC.fullmatch(token) else ("", 0)
    joined = _JOINED.fullmatch(token)
    letters, place, used = (joined[1], joined[2], 1) if joined else (token, following, 2)
    found = [name for name in ABBREVIATIONS if name.lower().startswith(letters.lower())]
    if len(found) != 1 or not _PLACE.fullmatch(place):
        return "", 0
    return found[0] + place, used


def _keyword(words: dict[str, _Node[Handler]], token: str, line: str) -> str:
    """The one word that a token stands for; "" for none. Raises CommandError where it could be several."""
    typed = token.lower()
    if typed in words:
        return typed
    found = [word for word in words if word.startswith(typed)]
    if len(found) > 1:
        raise CommandError("ambiguous", f'% Ambiguous command:  "{line}"')
    return found[0] if found else ""


def _read_filter(line: str, prompt: str) -> tuple[str, str] | None:
    before, pipe, after = line.partition("|")
    if not pipe:
        return None
    kind, _, pattern = after.strip().partition(" ")
    found = [name for name in FILTERS if kind and name.startswith(kind.lower())]
    if len(found) != 1:
        raise _invalid(prompt, len(before) + 1 + len(after) - len(after.lstrip()))
    if not pattern.strip():
        raise CommandError("incomplete", "% Incomplete command.\n")
    return found[0], pattern.strip()


def _hit(line: str, pattern: str) -> bool:
    for part in pattern.split("|"):
        text = part.removeprefix("^").removesuffix("$")
        if part.startswith("^") and part.endswith("$"):
            hit = line == text
        elif part.startswith("^"):
            hit = line.startswith(text)
        elif part.endswith("$"):
            hit = line.endswith(text)
        else:
            hit = text in line
        if hit:
            return True
    return False


def _invalid(prompt: str, place: int) -> CommandError:
    return CommandError("invalid", f"{' ' * (len(prompt) + place)}^\n% Invalid input detected at '^' marker.\n")


def _untranslated(token: str) -> str:
    return (
        f'Translating "{token}"...domain server (255.255.255.255)\n'
        "% Unknown command or computer name, or unable to find computer address"
    )
