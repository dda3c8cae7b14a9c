"""A kind of question: its phrasings, and how a device's state gives the commands and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from workbench.session.router.state import Device, Kind


@dataclass(frozen=True, slots=True)
class Draw:
    """One question of a kind. `slots` fill the phrasing, `must` are the values that a right answer holds."""

    slots: tuple[str, ...]
    commands: tuple[str, ...]
    answer: str
    must: tuple[str, ...]


Drawer = Callable[[Device, Random], Draw | None]
"""None where the device has nothing to ask about."""


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """`seen` phrasings are trained on, `held` ones only tested; `devices` names the one kind of device it needs."""

    name: str
    seen: tuple[str, ...]
    held: tuple[str, ...]
    draw: Drawer
    weight: float = 1.0
    devices: Kind | None = None


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def arp_command(device: Device) -> str:
    """The lab's habit: `show arp` on routers, `show ip arp` on switches."""
    return "show ip arp" if device.kind == "switch" else "show arp"
