"""What must hold before a lane's numbers are believed: the engine runs what was asked, reads the same tokens, predicts
better than chance; and a setting that differs must have changed something.

A lane that fails here is *invalid*, which says nothing about the quality of what it was meant to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from workbench.config.lane import Configuration, from_json
from workbench.errors import ConfigurationError, InvalidLaneError
from workbench.store.state import LaneState

GATE_POSITIONS = 256
GATE_FLIPS = 0.9
"""More flips than this over the first positions: nonsense, whatever was asked for."""

AS_IT_COMES = ("auto", "file", "checkpoint", "served")
"""Values that leave the choice to the engine, the file or the server: what runs cannot contradict them."""

SETTINGS = ("model", "weights", "kv", "attn")
_NO_SETTING = ("logprobs", "timeout", "step", "key_env", "kv_space", "gpu_memory", "lookup_min", "lookup_max")


def differences(configuration: Configuration, effective: dict[str, Any]) -> list[str]:
    """A sentence for each axis on which the engine runs another value than asked for."""
    found: list[str] = []
    for axis in ("weights", "kv", "attn", "threads", "chunk"):
        asked: Any = getattr(configuration, axis)
        if asked in AS_IT_COMES or (axis == "threads" and not asked) or (axis == "chunk" and axis not in effective):
            continue
        ran = _scheme(effective.get(axis))
        if axis == "chunk" and ran is None:
            continue  # an engine without chunks
        if ran != asked:
            found.append(f"{axis}: asked for {asked}, {'cannot be read back' if ran is None else f'runs {ran}'}")
    return found


def check_effective(configuration: Configuration, effective: dict[str, Any]) -> None:
    """Raise InvalidLaneError where an engine accepted a setting and runs another."""
    if found := differences(configuration, effective):
        raise InvalidLaneError(
            "; ".join(found),
            where=f"lane {configuration.to_line()}",
            next="Nothing was measured: its numbers would not be about what it says.",
        )


def check_predictions(lane: LaneState, reference: LaneState | None, vocabulary: int) -> None:
    """The sanity gate on a lane's first positions, once they are there. Raises InvalidLaneError.

    Worse than blind guessing counts only where the reference does better on these positions.
    """
    rows = lane.rows
    valid = rows.column("valid")[:GATE_POSITIONS] == 1
    if len(valid) < GATE_POSITIONS or not valid.any():
        return
    logprobs = rows.column("logprob")[:GATE_POSITIONS][valid]
    logprobs = logprobs[np.isfinite(logprobs)]  # a server need not name the stream's token
    nll = -float(logprobs.mean(dtype=np.float64)) if len(logprobs) else 0.0
    flips = float((rows.column("rank")[:GATE_POSITIONS][valid] > 1).mean())
    guessing = float(np.log(vocabulary)) if vocabulary > 1 else float("inf")
    first = lane.rows.first - reference.rows.first if reference else 0
    theirs = reference.rows.column("logprob")[first : first + GATE_POSITIONS] if reference else np.zeros(1, np.float32)
    what = ""
    if nll > guessing >= -float(theirs.mean(dtype=np.float64)):
        what = f"NLL {nll:.2f} nats a token, and blind guessing among {vocabulary:,} ids gives {guessing:.2f}"
    elif flips > GATE_FLIPS:
        what = f"{flips:.0%} of the top tokens differ from the reference's"
    if what:
        raise InvalidLaneError(
            f"the first {GATE_POSITIONS} positions are nonsense: {what}",
            where=lane.record.name,
            next="The engine may have taken a setting that it cannot do, another model, or shifted positions.",
        )


def no_effect(lane: LaneState, others: Sequence[LaneState]) -> str:
    """The name of another finished lane that this one equals bit by bit although a setting differs; "" for none."""
    mine = from_json(lane.record.configuration)
    for other in others:
        theirs = from_json(other.record.configuration)
        if other is lane or other.record.status != "done" or mine.engine != theirs.engine or mine.path != theirs.path:
            continue
        if _differ(mine, theirs) and _same_rows(lane, other):
            return other.record.name
    return ""


def check_tokens(
    ours: NDArray[np.int32], theirs: NDArray[np.int32], engine: str, text_of: Callable[[int], bytes]
) -> None:
    """Raise ConfigurationError with the first difference where an engine makes other ids of the same text."""
    at = first_difference(ours, theirs)
    if at is None:
        return

    def shown(ids: NDArray[np.int32]) -> str:
        return f"{int(ids[at])} {text_of(int(ids[at])).decode('utf-8', 'replace')!r}" if at < len(ids) else "the end"

    raise ConfigurationError(
        f"its tokenizer reads the session otherwise: token {at} is {shown(theirs)}, ours is {shown(ours)}"
        f" ({len(theirs):,} and {len(ours):,} tokens)",
        where=f"engine {engine}",
        next="See `workbench template`; distributions over different tokens cannot be compared.",
    )


def first_difference(ours: NDArray[np.int32], theirs: NDArray[np.int32]) -> int | None:
    """The first place where two token streams differ, which may be the end of the shorter one."""
    shorter = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    if len(differ):
        return int(differ[0])
    return None if len(ours) == len(theirs) else shorter


def _scheme(value: Any) -> Any:
    return cast(dict[str, Any], value).get("scheme") if isinstance(value, dict) else value


def _differ(mine: Configuration, theirs: Configuration) -> bool:
    """Whether a setting of the numerics was asked for otherwise; what was left open may well be what the other names.

    Drafters are no such setting: divergence is measured without them.
    """
    pairs = [(getattr(mine, name), getattr(theirs, name)) for name in SETTINGS]
    own, other = ([(key, value) for key, value in each.extra if key not in _NO_SETTING] for each in (mine, theirs))
    return own != other or any(a != b and not {a, b} & set(AS_IT_COMES) for a, b in pairs)


def _same_rows(lane: LaneState, other: LaneState) -> bool:
    first, stop = max(lane.rows.first, other.rows.first), min(lane.rows.stop, other.rows.stop)
    if stop - first < min(len(lane.rows), len(other.rows)) or stop <= first:
        return False
    names = ("logprob", "top_ids", "top_logprobs")
    return all(
        np.array_equal(
            lane.rows.column(name)[first - lane.rows.first : stop - lane.rows.first],
            other.rows.column(name)[first - other.rows.first : stop - other.rows.first],
            equal_nan=name != "top_ids",
        )
        for name in names
    )
