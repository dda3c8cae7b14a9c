"""Whether a lane gives the same bits when it is run again, and which of its paths does not.

Three questions, each over the same number of runs: forced passes from an empty cache (`prefill`), greedy decodes on one
and the same cache (`decode`), and both together (`prefill_decode`). Rows are compared in every figure but their clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config.lane import Configuration
from workbench.errors import ConfigurationError
from workbench.protocol.columns import CONTINUATION, ROWS, join
from workbench.protocol.events import Progress, Rows, Tokens
from workbench.protocol.wire import Arrays
from workbench.store.state import Columns

CLOCK = "seconds"
FIGURES = tuple(name for name in ROWS if name != CLOCK)
GENERATED = tuple(name for name in CONTINUATION if name != CLOCK)

Take = Callable[[Rows | Tokens | Progress], None]


def differing(one: Arrays, other: Arrays, names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Of each row (n,), whether any bit of the named columns differs; NaNs of the same bits are equal."""
    rows = len(one[names[0]])
    out = np.zeros(rows, bool)
    for name in names:
        left, right = (np.ascontiguousarray(side[name]).view(np.uint8).reshape(rows, -1) for side in (one, other))
        out |= (left != right).any(axis=1)
    return out


@dataclass(slots=True)
class RepeatedRows:
    """Forced passes against the rows that are stored. A row that a pass does not send counts as one that differs."""

    stored: Columns
    differs: NDArray[np.bool_] = field(init=False)
    _came: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.differs, self._came = np.zeros(len(self.stored), bool), np.zeros(len(self.stored), bool)

    def take(self, event: Rows) -> None:
        """Compare a piece of a pass."""
        low = event.first - self.stored.first
        high = low + len(event.arrays[FIGURES[0]])
        stored = {name: self.stored.column(name)[low:high] for name in FIGURES}
        self.differs[low:high] |= differing(stored, event.arrays, FIGURES)
        self._came[low:high] = True

    def end_pass(self) -> None:
        """A pass is over."""
        self.differs |= ~self._came
        self._came[:] = False

    def fact(self) -> dict[str, Any]:
        """identical, first_position (of the stream, or None) and positions_that_differ, over all passes."""
        count = int(self.differs.sum())
        first = int(self.differs.argmax()) + self.stored.first if count else None
        return {"identical": count == 0, "first_position": first, "positions_that_differ": count}


def decode_fact(runs: list[Arrays]) -> dict[str, Any]:
    """identical and first_step (from 0, or None) of greedy continuations: where any differs from the first one.

    After the step at which tokens differ, two runs continue other texts, so later steps are not counted.
    """
    steps: list[int] = []
    for other in runs[1:]:
        length = min(len(runs[0]["ids"]), len(other["ids"]))
        cut = [{name: run[name][:length] for name in GENERATED} for run in (runs[0], other)]
        differs = differing(cut[0], cut[1], GENERATED)
        if differs.any():
            steps.append(int(differs.argmax()))
        elif len(runs[0]["ids"]) != len(other["ids"]):
            steps.append(length)
    return {"identical": not steps, "first_step": min(steps, default=None)}


def check_repeat(configuration: Configuration, runs: int) -> None:
    """Raise ConfigurationError for a lane that cannot be run `runs` times and compared with itself."""
    if runs > 1 and configuration.draft != "none":
        raise ConfigurationError(
            "a lane with a drafter is not repeated: its decode is the drafter's as well",
            where=f"lane {configuration.to_line()}",
            next="Repeat the lane with draft=none.",
        )


@dataclass(slots=True)
class Repeats:
    """Runs a measured lane again. `score(take)` is a forced pass from an empty cache, `generate(take)` a greedy decode
    after it; `together` says why a decode cannot be repeated on the same cache, and is empty where it can."""

    runs: int
    stored: Columns
    continuation: Arrays
    together: str
    score: Callable[[Take], object]
    generate: Callable[[Take], object]
    progress: Callable[[Progress], None]

    def run(self) -> dict[str, Any]:
        """runs, prefill, decode and prefill_decode as `compare --json` shows them; decode is None for the
        reason `decode_reason`, both are where the lane generated nothing."""
        rows = RepeatedRows(self.stored)
        whole = [self.continuation] if len(self.continuation["ids"]) else []
        for number in range(2, self.runs + 1):
            self.score(self._told(number, rows.take))
            rows.end_pass()
            if whole:
                whole.append(self._generated(number))
        decodes = [whole[-1]] if whole and not self.together else []
        if decodes:
            decodes += [self._generated(number) for number in range(2, self.runs + 1)]
        return {
            "runs": self.runs,
            "prefill": rows.fact(),
            "decode": decode_fact(decodes) if decodes else None,
            "decode_reason": self.together or None,
            "prefill_decode": decode_fact(whole) if whole else None,
        }

    def _generated(self, number: int) -> Arrays:
        parts: list[Arrays] = []
        self.generate(self._told(number, lambda event: parts.append(event.arrays)))
        return join("continuation", parts)

    def _told(self, number: int, take: Callable[[Any], None]) -> Take:
        def told(event: Rows | Tokens | Progress) -> None:
            if isinstance(event, Progress):
                phase = f"run {number} of {self.runs}: {event.phase}"
                self.progress(Progress(event.job, phase, event.done, event.total))
            else:
                take(event)

        return told


def sentence(fact: dict[str, Any], path: str) -> str:
    """What the repeated runs of a lane on a path showed, for the notes under a table."""
    parts: list[str] = []
    prefill, decode, whole = fact["prefill"], fact.get("decode"), fact.get("prefill_decode")
    forced = "decode path" if path == "decode" else "prefill"
    if not prefill["identical"]:
        count, first = prefill["positions_that_differ"], prefill["first_position"]
        parts.append(f"{forced} differs at {count:,} positions, first at {first:,}")
    if decode and not decode["identical"]:
        parts.append(f"decode on the same KV cache differs from step {decode['first_step']} on")
    if whole and not whole["identical"] and not parts:
        parts.append(f"{forced} then decode differs from step {whole['first_step']} on")
    if parts:
        return f"{fact['runs']} runs are not bit-identical: {'; '.join(parts)}"
    alone = ", decode on the same KV cache" if decode else ""
    both = ", then decode" if whole and not decode else ", and both together" if whole else ""
    why = f"; decode was not repeated alone: {fact['decode_reason']}" if fact.get("decode_reason") else ""
    return f"{fact['runs']} runs are bit-identical ({forced}{alone}{both}){why}"
