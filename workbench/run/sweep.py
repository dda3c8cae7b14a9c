"""A sweep: one lane for every value of an axis that this machine can do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from workbench.config.axes import ENGINES, refusal
from workbench.config.lane import Configuration
from workbench.config.rules import HUB_KERNEL
from workbench.errors import ConfigurationError

AXES = ("weights", "kv", "attn")
LEFT_TO_THE_ENGINE = ("auto", "checkpoint", "file", HUB_KERNEL)
"""Values that name nothing by themselves."""


def sweep(
    axis: str, bases: tuple[Configuration, ...], reference: Configuration, refused: Callable[[str], None]
) -> tuple[Configuration, ...]:
    """Each base with every value of `axis`, the reference's own configuration left out.

    A value that this machine cannot do is told to `refused` with its reason. Raises ConfigurationError where no lane is
    left.
    """
    lanes: list[Configuration] = []
    for base in bases:
        for value in ENGINES[base.engine].axes[axis]:
            if value in LEFT_TO_THE_ENGINE:
                continue
            lane = replace(base, **{axis: value})
            if lane == reference or lane in lanes:
                continue
            if (error := refusal(lane)) is not None:
                refused(re.sub(r"\s+", " ", f"left out {axis}={value}: {error.what}"))
            else:
                lanes.append(lane)
    if not lanes:
        raise ConfigurationError(f"a sweep of {axis} has no lane here", where="run", next=f"Axes: {', '.join(AXES)}.")
    return tuple(lanes)
