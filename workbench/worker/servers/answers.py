"""Answers checked field by field: every value has the type, length and range that it must have, or the lane fails.

Several servers ignore what they do not know, so a request that was accepted says nothing; what came back does.
"""

from __future__ import annotations

import math
from typing import Any, cast

from workbench.errors import EngineError

SHOWN = 300
ABOVE_ZERO = 1e-3
"""Log-probabilities are at most 0, but for rounding."""
NOTHING = -9000.0
"""At and below this a log-probability stands for a probability of 0: servers write −9999, or float's least."""


class Malformed(EngineError):
    """An answer that is not what the dialect says; names the field."""

    def __init__(self, what: str, field: str) -> None:
        super().__init__(
            f"the server's answer is malformed: {field} {what}", next="Is it the dialect that it was taken for?"
        )


class Missing(Malformed):
    """A field that is not there, or null: the server does not give it."""


def shown(text: str, limit: int = SHOWN) -> str:
    """A server's text on one line, without control characters, at most `limit` characters."""
    plain = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def field(value: Any, name: str, where: str) -> Any:
    """A member of an object that must be there and not null."""
    found = table(value, where).get(name)
    if found is None:
        raise Missing("is missing", f"{where}.{name}")
    return found


def table(value: Any, where: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise Malformed(f"is {_kind(value)}, not an object", where)
    return cast(dict[str, Any], value)


def items(value: Any, where: str, length: int | None = None) -> list[Any]:
    """A list, of that length where one is given."""
    if not isinstance(value, list):
        raise Malformed(f"is {_kind(value)}, not a list", where)
    found = cast(list[Any], value)
    if length is not None and len(found) != length:
        raise Malformed(f"has {len(found):,} entries, not {length:,}", where)
    return found


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise Malformed(f"is {_kind(value)}, not a string", where)
    return value


def whole(value: Any, where: str, low: int = 0, high: int = 1 << 53) -> int:
    """A whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Malformed(f"is {_kind(value)}, not a whole number from {low} to {high:,}", where)
    return value


def number(value: Any, where: str) -> float:
    """A finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise Malformed(f"is {_kind(value)}, not a finite number", where)
    return float(value)


def logprob(value: Any, where: str) -> float:
    """A natural log-probability; −inf for what servers write in its place."""
    found = number(value, where)
    if found > ABOVE_ZERO:
        raise Malformed(f"is {found:g}, which is no log-probability", where)
    return -math.inf if found <= NOTHING else min(found, 0.0)


def token(value: Any, where: str, vocabulary: int) -> int:
    """A token id below `vocabulary`."""
    return whole(value, where, 0, vocabulary - 1)


def tokens(value: Any, where: str, vocabulary: int) -> list[int]:
    """A list of token ids below `vocabulary`."""
    return [token(item, f"{where}[{i}]", vocabulary) for i, item in enumerate(items(value, where))]


def counts(value: Any, where: str) -> list[int]:
    """A list of whole numbers."""
    return [whole(item, f"{where}[{i}]") for i, item in enumerate(items(value, where))]


def same_tokens(ours: list[int], theirs: list[int], where: str) -> None:
    """Raise EngineError where the server read another prompt than it was sent."""
    same_count(len(ours), len(theirs), where)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise EngineError(
                f"the server truncated or re-tokenised the prompt: token {i} is {b}, ours is {a}", where=where
            )


def same_count(ours: int, theirs: int, where: str) -> None:
    """Raise EngineError where the server counted other prompt tokens than it was sent."""
    if ours != theirs:
        raise EngineError(
            f"the server truncated or re-tokenised the prompt: it counts {theirs:,} tokens, ours are {ours:,}",
            where=where,
            next="Look for a context limit, a truncation setting, or a control token put in front.",
        )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return shown(repr(value), 40) if isinstance(value, (int, float, str, bool)) else type(value).__name__
