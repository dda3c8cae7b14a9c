"""What a dialect must do: say what the server is, score forced tokens, generate, and read a prompt as the server does.

To add a dialect: one file with a class that fits `Dialect`, an entry in `detect.DIALECTS`, a scripted twin under
`tests/servers/`. What a server does not give is refused with the option that makes it give it; nothing is made up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError
from workbench.protocol.events import Generate
from workbench.worker.bounded import Top
from workbench.worker.servers import answers
from workbench.worker.servers.connection import Connection

Whole = NDArray[np.float32]
"""Logits (n, vocabulary) of n positions."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself; None where it does not. `facts` keeps its own names.

    `context` is the most tokens a request may hold, prompt and answer; `speculation` names its drafter, "" for none.
    """

    model: str
    version: str | None = None
    build: str | None = None
    context: int | None = None
    vocabulary: int | None = None
    speculation: str | None = None
    template: str | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()

    def identity(self) -> tuple[Any, ...]:
        """What must be the same when a server comes back after a loss."""
        return self.model, self.version, self.build, self.context, self.vocabulary


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that came together: ids, and ln q of each at temperature 1, NaN where it is not given.

    `end` is "" until generation ends, then `length` or `stop`; `acceptance` (`metrics.acceptance`) comes with the end;
    `drafted` and `accepted` where the server tells each step as it goes.
    """

    tokens: list[int]
    logprobs: list[float]
    end: str = ""
    acceptance: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt as the server reads it: its ids, and the text that it rendered where it tells."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is spoken to: its served name, and how many ids a vocabulary like ours has."""

    model: str
    vocabulary: int


class Dialect(Protocol):
    """One server's ways. Methods raise EngineError for malformed answers, ConfigurationError for what is not given."""

    name: str
    target: Target
    paths: tuple[str, ...]
    advice: str
    """What to do about the path that it has not."""
    probe_lengths: tuple[int, int]
    """How many tokens the two prompts of the self-check have."""
    stale_advice: str
    context_advice: str

    def served(self) -> Served:
        """Ask the server what it is."""
        ...

    def best(self, asked: int) -> int:
        """How many of its best ids a position can bring; `asked` 0 leaves the choice. Raises ConfigurationError."""
        ...

    def pieces(self, first: int, n: int, step: int) -> Iterator[tuple[int, int]]:
        """The position ranges that one request each scores; `step` 0 leaves the choice."""
        ...

    def prepare(self, ids: list[int]) -> None:
        """Before rows behind `ids` are scored that others came before: what makes them those of a run without a gap."""
        ...

    def score(self, ids: list[int], first: int, best: int) -> Top | Whole:
        """The distributions that predict the positions `first` to n − 1 of `ids` (n)."""
        ...

    def generate(self, ids: list[int], request: Generate, count: int) -> Iterator[Piece]:
        """Continue after `ids` by at most `count` tokens. Raises `wire.Lost` where the connection breaks."""
        ...

    def tokenize(self, text: str) -> list[int] | None:
        """The ids of a text, control tokens on, nothing put in front; None where the server cannot say."""
        ...

    def adds_in_front(self) -> list[int] | None:
        """The control tokens that it puts in front of a text on its own; None where it cannot say."""
        ...

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Read | None:
        """A conversation through the server's own template; None where it cannot say."""
        ...

    def sampling(self) -> dict[str, Any]:
        """The sampling defaults it applies, where it tells them."""
        ...


@dataclass(slots=True)
class Ranked:
    """Collects a `Top` row by row: best ids with log-probabilities, and the stream's token with its own."""

    width: int
    ids: list[list[int]] = field(default_factory=list[list[int]])
    logprobs: list[list[float]] = field(default_factory=list[list[float]])
    targets: list[float] = field(default_factory=list[float])
    ranks: list[int] = field(default_factory=list[int])

    def add(self, best: list[tuple[int, float]], target: float = math.nan, rank: int = 0) -> None:
        """A position; ids of probability 0 are left out, since they name nothing."""
        kept = [(i, value) for i, value in best if value > -math.inf][: self.width]
        empty = self.width - len(kept)
        self.ids.append([i for i, _ in kept] + [-1] * empty)
        self.logprobs.append([value for _, value in kept] + [-math.inf] * empty)
        self.targets.append(target)
        self.ranks.append(rank)

    def top(self) -> Top:
        """All rows."""
        shape = (len(self.ids), self.width)
        return Top(
            np.array(self.ids, "<i4").reshape(shape),
            np.array(self.logprobs, "<f4").reshape(shape),
            np.array(self.targets, "<f4"),
            np.array(self.ranks, "<i4"),
        )


def growing(first: int, n: int, step: int, least: int) -> Iterator[tuple[int, int]]:
    """Ranges for a server that runs the whole prefix for each request.

    With a fixed step the cost is quadratic in n; without one each prefix is at least twice as long as the last, which
    costs at most about twice the stream, and a broken request loses at most half of what is done.
    """
    while first < n:
        stop = min(n, first + (step or max(least, first)))
        yield first, stop
        first = stop


def evenly(first: int, n: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of `step` positions."""
    for start in range(first, n, step):
        yield start, min(n, start + step)


def _choose(connection: Connection, served: str, models: list[str]) -> str:
    """The name to ask for: `served`, or the only one there is. Raises ConfigurationError naming what there is."""
    names = [connection.clean(name) for name in models]
    if served:
        if names and served not in models:
            raise ConfigurationError(
                f"the server does not serve {served!r}",
                where=str(connection.address),
                next=f"It serves {', '.join(names[:8])}: name one as served=.",
            )
        return served
    if len(models) != 1:
        raise ConfigurationError(
            f"the server serves {len(models)} models",
            where=str(connection.address),
            next=f"Name one of {', '.join(names[:8]) or 'them'} as served=.",
        )
    return models[0]


def model_card(connection: Connection, served: str) -> tuple[dict[str, Any], str]:
    """The card of the model to ask for in `/v1/models`, and its name. Raises ConfigurationError where it is unclear."""
    data = answers.items(answers.field(connection.get("/v1/models"), "data", "/v1/models"), "/v1/models data")
    cards = [answers.table(item, "/v1/models data") for item in data]
    names = [answers.text(answers.field(card, "id", "/v1/models data"), "id") for card in cards]
    name = _choose(connection, served, names)
    return next((card for card, each in zip(cards, names, strict=True) if each == name), {}), name
