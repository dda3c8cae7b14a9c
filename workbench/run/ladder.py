"""Which knob did it? From one configuration to another, one axis at a time, in one order and in the other.

A step that cannot be taken alone joins the next one, and says so: it changes more than one variable. Another engine
brings its own words for weights, KV cache and attention with it, so that step always does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from workbench.config.axes import refusal
from workbench.config.lane import Configuration, with_engine
from workbench.errors import ConfigurationError

AXES = ("weights", "kv", "attn", "draft", "path", "chunk", "ctx", "threads", "device", "model")
_WITH: dict[str, tuple[str, ...]] = {
    "weights": ("w_group", "w_calibration"),
    "kv": ("kv_group", "kv_keys", "kv_window"),
}
"""Keys that say more about an axis, and change with it."""


@dataclass(frozen=True, slots=True)
class Step:
    """From one configuration to the next: `axes` names what changes, `why` the reason where it is not one variable."""

    axes: tuple[str, ...]
    start: Configuration
    stop: Configuration
    why: str = ""

    @property
    def joint(self) -> bool:
        """Whether more than one variable changes."""
        return len(self.axes) > 1


def differing(a: Configuration, b: Configuration) -> list[str]:
    """The axes, and the engine's own keys that belong to none, in which two configurations of one engine differ."""
    mine, theirs = dict(a.extra), dict(b.extra)
    found: list[str] = []
    taken: set[str] = set()
    for axis in AXES:
        keys = _WITH.get(axis, ())
        taken.update(keys)
        fields = ("draft", "width") if axis == "draft" else (axis,)
        if any(getattr(a, name) != getattr(b, name) for name in fields) or any(
            mine.get(key) != theirs.get(key) for key in keys
        ):
            found.append(axis)
    own = sorted({*mine, *theirs} - taken)
    return found + [key for key in own if mine.get(key) != theirs.get(key)]


def ladder(start: Configuration, stop: Configuration, *, backwards: bool = False) -> list[Step]:
    """The steps from `start` to `stop`, the axes in the table's order or the other way round.

    Raises ConfigurationError where there is nothing to change.
    """
    steps: list[Step] = []
    here = start
    if start.engine != stop.engine:
        here = with_engine(start, stop.engine)
        brought = [axis for axis in ("weights", "kv", "attn") if getattr(here, axis) != getattr(start, axis)]
        why = f"{stop.engine} has its own words for {', '.join(brought)}" if brought else ""
        steps.append(Step(("engine", *brought), start, here, why))
    axes = differing(here, stop)
    if not axes and not steps:
        raise ConfigurationError("the two configurations are the same", where="ladder", next="Give another --to SPEC.")
    waiting: list[str] = []
    why = ""
    begin = here
    for axis in reversed(axes) if backwards else axes:
        here = _with(here, stop, axis)
        waiting.append(axis)
        error = refusal(here)
        if error is not None and here != stop:
            why = f"{axis} alone: {error.what}"
            continue
        steps.append(Step(tuple(waiting), begin, here, why if len(waiting) > 1 else ""))
        waiting, why, begin = [], "", here
    return steps


def lanes(*orders: list[Step]) -> tuple[Configuration, ...]:
    """Every configuration that the steps lead to, once."""
    return tuple(dict.fromkeys(step.stop for order in orders for step in order))


def _with(here: Configuration, stop: Configuration, axis: str) -> Configuration:
    """`here` with one axis, or one of the engine's own keys, as `stop` has it."""
    mine, theirs = dict(here.extra), dict(stop.extra)
    for key in (*_WITH.get(axis, ()), *(() if axis in AXES else (axis,))):
        mine.pop(key, None)
        if key in theirs:
            mine[key] = theirs[key]
    fields: dict[str, Any] = {}
    if axis in AXES:
        fields = {name: getattr(stop, name) for name in (("draft", "width") if axis == "draft" else (axis,))}
    return replace(here, extra=tuple(sorted(mine.items())), **fields)
