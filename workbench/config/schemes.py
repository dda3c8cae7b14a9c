"""Weight schemes that llmcompressor makes: what each one is, and what a lane or a command may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ConfigurationError

CHANNEL = "channel"
GROUPS = (CHANNEL, "32", "64", "128")
MANIFEST = "quantization.json"
"""Beside made weights: how they were made. The engine process writes it."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How Linears are stored: `bits` of a `kind` of number, symmetric; `method` is how the values are chosen.

    `group` is the default: a number of inputs, or `channel` for one scale an output; `fixed` where the format has no
    other. `activations` are the bits that a Linear's input is rounded to while it runs, 0 where it stays as it is.
    """

    bits: int
    kind: str
    group: str
    method: str = "rtn"
    activations: int = 0
    fixed: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether the values depend on text that the model reads."""
        return self.method != "rtn"


SCHEMES: dict[str, Scheme] = {
    "w8a16": Scheme(8, "int", CHANNEL),
    "w4a16": Scheme(4, "int", "64"),
    "w4a16-awq": Scheme(4, "int", "64", "awq"),
    "w4a16-gptq": Scheme(4, "int", "64", "gptq"),
    "nvfp4a16": Scheme(4, "float", "16", fixed=True),
    "w8a8-int8": Scheme(8, "int", CHANNEL, activations=8, fixed=True),
    "fp8": Scheme(8, "float", CHANNEL, activations=8, fixed=True),
}
"""Name → scheme, the best preserved first."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is to be made of a model: a scheme, its group, and the modules whose weights are left as they are."""

    scheme: str
    group: str
    ignore: tuple[str, ...] = ("lm_head",)

    def to_json(self) -> dict[str, Any]:
        """As it is sent to the engine and written into the manifest."""
        return {"scheme": self.scheme, "group": self.group, "ignore": list(self.ignore)}


def recipe(scheme: str, group: str = "", ignore: tuple[str, ...] = (), where: str = "quantize") -> Recipe:
    """The recipe of a scheme, `group` the scheme's own where empty. Raises ConfigurationError."""
    found = SCHEMES.get(scheme)
    if found is None:
        raise ConfigurationError(
            f"there is no weight scheme {scheme!r}", where=where, next=f"Use {', '.join(SCHEMES)}."
        )
    if group and group not in GROUPS and group != found.group:
        raise ConfigurationError(f"groups of {group!r} are not made", where=where, next=f"Use {'|'.join(GROUPS)}.")
    if group and found.fixed and group != found.group:
        raise ConfigurationError(
            f"{scheme} has no groups of {group}: its format is {_named(found.group)}", where=where, next="Leave it out."
        )
    return Recipe(scheme, group or found.group, tuple(dict.fromkeys(("lm_head", *ignore))))


def check_widths(made: Recipe, widths: Mapping[str, int], where: str) -> None:
    """Raise ConfigurationError with the groups that fit where a Linear's inputs (`widths`, by name) are no whole
    number of groups."""
    if made.group == CHANNEL:
        return
    size = int(made.group)
    odd = {name: width for name, width in widths.items() if width % size}
    if odd:
        name, width = next(iter(odd.items()))
        own = (*GROUPS[1:], "16") if SCHEMES[made.scheme].fixed else GROUPS[1:]
        fit = [group for group in own if not any(width % int(group) for width in widths.values())]
        raise ConfigurationError(
            f"groups of {size} do not divide the {width} inputs of {name}"
            + (f" and of {len(odd) - 1} more Linears" if len(odd) > 1 else ""),
            where=where,
            next=f"Use {'|'.join([*fit, CHANNEL])}." if not SCHEMES[made.scheme].fixed else "Use another scheme.",
        )


def _named(group: str) -> str:
    return "one scale an output channel" if group == CHANNEL else f"groups of {group}"
