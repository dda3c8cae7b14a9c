"""What each step of a ladder adds: the paired difference of KL to the reference, and of flips, in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config.lane import Configuration, from_json
from workbench.metrics.stats import paired_difference
from workbench.run.ladder import Step
from workbench.session.text import one_line
from workbench.store.state import LaneState, SessionState

RED, PLAIN = "\x1b[31m", "\x1b[0m"


def ladder_facts(state: SessionState, orders: Sequence[list[Step]]) -> list[list[dict[str, Any]]]:
    """One object a step, order by order: axes, joint, why, from, to, and what it adds: kl, kl_se (clustered by turn),
    flips (a share of the assistant's tokens), n. None where one of the two lanes has no rows."""
    return [[_step(state, step) for step in order] for order in orders]


def ladder_text(orders: Sequence[list[dict[str, Any]]], *, colour: bool) -> str:
    """Both orders below one another; a step that changes more than one variable is red, or marked, and says why."""
    blocks: list[str] = []
    for name, order in zip(("in this order", "in the other order"), orders, strict=False):
        lines = [f"each step's own share, {name}:  Δ KL ± se (nats), Δ flips"]
        for step in order:
            label = " + ".join(step["axes"])
            if step["kl"] is None:
                figures = "not measured"
            else:
                error = "–" if step["kl_se"] is None else f"{step['kl_se']:.2g}"
                figures = f"{step['kl']:+.3g} ± {error}, {100 * step['flips']:+.1f} %"
            mark = ""
            if step["joint"]:
                mark = "  more than one variable" + (f" ({step['why']})" if step["why"] else "")
            line = one_line(f"  {label:<24} {figures:<28} → {step['to']}{mark}")
            lines.append(f"{RED}{line}{PLAIN}" if step["joint"] and colour else line)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _step(state: SessionState, step: Step) -> dict[str, Any]:
    before, after = (_measures(state, configuration) for configuration in (step.start, step.stop))
    out: dict[str, Any] = {
        "axes": list(step.axes), "joint": step.joint, "why": step.why or None, "from": step.start.to_line(),
        "to": step.stop.to_line(), "kl": None, "kl_se": None, "flips": None, "n": 0,
    }  # fmt: skip
    if before is None or after is None:
        return out
    counted = before[2] & after[2]
    turns = state.stream["turn"][counted]
    added = paired_difference(after[0][counted], before[0][counted], turns)
    if added is None:
        return out
    flips = after[1][counted].mean() - before[1][counted].mean()
    return {**out, "kl": added.mean, "kl_se": added.se, "flips": float(flips), "n": int(counted.sum())}


def _measures(
    state: SessionState, configuration: Configuration
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]] | None:
    """KL, flips and whether a position counts, by absolute position; of the reference itself both are 0."""
    generated = state.stream["generated"] == 1
    n = len(generated)
    reference = state.reference
    if reference is not None and from_json(reference.record.configuration) == configuration:
        return np.zeros(n), np.zeros(n, bool), generated & (np.arange(n) >= 1)
    lane = next((each for each in state.lanes if _is(each, configuration)), None)
    if lane is None:
        return None
    kl, flips, counts = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
    here = slice(lane.rows.first, lane.rows.stop)
    kl[here] = lane.rows.column("kl")
    flips[here] = lane.rows.column("rank") > 1
    counts[here] = lane.rows.column("valid") == 1
    return kl, flips, counts & generated


def _is(lane: LaneState, configuration: Configuration) -> bool:
    done = lane.record.kind == "lane" and lane.record.status == "done" and lane.record.estimator != "bounded"
    return done and from_json(lane.record.configuration) == configuration
