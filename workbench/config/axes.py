"""What each engine can do, axis by axis, and why it cannot do the rest: refusals before anything loads.

The table is declared here so that a lane can be checked where its engine is not installed; an engine process reads back
what really runs and refuses what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config.lane import Configuration
from workbench.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's declared values, the default first, and the keys of its own."""

    name: str
    axes: dict[str, tuple[str, ...]]
    keys: tuple[str, ...] = ()


ENGINES: dict[str, Engine] = {
    "transformers": Engine(
        "transformers",
        {
            "weights": ("bf16", "fp32", "int8"),
            "kv": ("bf16", "fp32", "int8", "int4"),
            "attn": ("sdpa", "eager", "flex"),
            "draft": ("none",),
            "path": ("prefill", "decode"),
        },
        keys=("kv_group",),
    ),
}

AXIS_NAMES: tuple[str, ...] = ("engine", "weights", "kv", "attn", "draft", "path")
"""The axes a person switches by arrow keys, in the order of the screen."""


NO_EFFECT: tuple[str, ...] = ("width", "temperature", "top_p", "top_k", "seed")
"""Keys of drafters and free lanes, refused until there are any."""

DEFAULT_KV_GROUP = 32

_DEFAULT = Configuration()


def values(engine: str, axis: str) -> tuple[str, ...]:
    """The values of an axis that an engine can do."""
    if axis == "engine":
        return tuple(ENGINES)
    return ENGINES[engine].axes[axis]


def refusal(configuration: Configuration) -> ConfigurationError | None:
    """Why this configuration cannot run on its engine, or None."""
    engine = ENGINES.get(configuration.engine)
    where = f"lane {configuration.to_line()}"
    if engine is None:
        return ConfigurationError(
            f"there is no engine {configuration.engine!r}", where=where, next=f"Engines: {', '.join(ENGINES)}."
        )
    for axis, allowed in engine.axes.items():
        value = getattr(configuration, axis)
        if value not in allowed:
            return ConfigurationError(
                f"{engine.name} cannot do {axis}={value}", where=where, next=f"It can do {axis}={'|'.join(allowed)}."
            )
    for key in NO_EFFECT:
        if (value := getattr(configuration, key)) != getattr(_DEFAULT, key):
            return ConfigurationError(
                f"{key}={value} would have no effect: lanes are forced, and decode speed is measured on greedy tokens",
                where=where,
                next=f"Leave {key} out.",
            )
    group = dict(configuration.extra).get("kv_group")
    if group is not None and configuration.kv not in ("int8", "int4"):
        return ConfigurationError(
            f"kv_group={group} has no effect on kv={configuration.kv}",
            where=where,
            next="Leave it out, or use kv=int8|int4.",
        )
    if group is not None and not (group.isascii() and group.isdecimal()):
        return ConfigurationError(f"kv_group={group} is not a number", where=where, next="Such as kv_group=32.")
    for key, _ in configuration.extra:
        if key not in engine.keys:
            return ConfigurationError(
                f"{engine.name} has no key {key!r}",
                where=where,
                next=f"Its own keys: {', '.join(engine.keys) or 'none'}.",
            )
    return None


def check(configuration: Configuration) -> Configuration:
    """The configuration itself, where its engine can do it. Raises ConfigurationError with what would work."""
    if error := refusal(configuration):
        raise error
    return configuration
