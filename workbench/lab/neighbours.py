"""Questions about neighbours, by CDP and LLDP."""

from __future__ import annotations

from random import Random

from workbench.lab.question import Draw, QuestionKind
from workbench.session.router.shows.system import cdp_word
from workbench.session.router.state import Device, Neighbour

_CDP = ("show cdp neighbors",)


def _alone(device: Device) -> list[Neighbour]:
    """Neighbours whose name and platform stand only once, so that questions have one answer."""
    names = [one.name for one in device.neighbours]
    return [one for one in device.neighbours if names.count(one.name) == 1]


def _local(device: Device, one: Neighbour) -> str:
    port = device.interface(one.local)
    return port.cdp if port else one.local


def _neighbour_on(device: Device, random: Random) -> Draw | None:
    if not (rows := _alone(device)):
        return None
    one = random.choice(rows)
    local = _local(device, one)
    return Draw((local,), _CDP, f"{one.name} is on {local}.", (one.name,))


def _neighbour_local(device: Device, random: Random) -> Draw | None:
    if not (rows := _alone(device)):
        return None
    one = random.choice(rows)
    local, remote = _local(device, one), cdp_word(one.remote)
    return Draw((one.name,), _CDP, f"{one.name} is on {local}, its port is {remote}.", (local, remote))


def _neighbour_platform(device: Device, random: Random) -> Draw | None:
    platforms = [one.platform for one in device.neighbours]
    rows = [one for one in device.neighbours if platforms.count(one.platform) == 1]
    if not rows:
        return None
    one = random.choice(rows)
    local = _local(device, one)
    return Draw((one.platform,), _CDP, f"{one.name} ({one.platform}) is on {local}.", (one.name, local))


def _lldp(device: Device, random: Random) -> Draw | None:
    rows = [one for one in _alone(device) if len(one.name) < 20]
    if not rows:
        return None
    one = random.choice(rows)
    port = device.interface(one.local)
    local = port.short if port else one.local
    return Draw((one.name,), ("show lldp neighbors",), f"LLDP sees {one.name} on {local}.", (local,))


KINDS: tuple[QuestionKind, ...] = (
    QuestionKind(
        "neighbour-on",
        (
            "Which neighbour is on {0}?",
            "What device is connected to {0}?",
            "Who is the CDP neighbor on {0}?",
            "Which neighbor do we see on {0}?",
            "What is at the other end of {0}?",
            "CDP neighbour on {0}?",
            "Which device does CDP show on {0}?",
            "To which device does {0} lead?",
        ),
        ("Tell me which device sits at the other end of {0}.", "Name the neighbour behind {0}."),
        _neighbour_on,
        1.6,
    ),
    QuestionKind(
        "neighbour-local",
        (
            "Which local port goes to {0}?",
            "Through which interface do we reach the neighbour {0}?",
            "On which local interface is {0} seen?",
            "Where is {0} connected, and with which of its ports?",
            "Local and remote port of the link to {0}?",
            "By which interface are we connected to {0}?",
            "Find the neighbour {0}: our port and its port.",
            "Which ports join us and {0}?",
        ),
        ("Which of our interfaces faces {0}?", "By which port are we cabled to {0}?"),
        _neighbour_local,
        1.6,
    ),
    QuestionKind(
        "neighbour-platform",
        (
            "Which neighbour has the platform {0}?",
            "On which interface is the {0}?",
            "Is a {0} among the neighbours? Where?",
            "Find the {0} among the CDP neighbours.",
            "Name of the neighbour of type {0}, and its local interface?",
            "Where is the {0} connected?",
            "Which CDP entry has the platform {0}?",
        ),
        ("Do we see a {0}, and behind which interface?", "Tell me the name and interface of the neighbouring {0}."),
        _neighbour_platform,
        1.4,
    ),
    QuestionKind(
        "lldp-local",
        (
            "On which port does LLDP see {0}?",
            "Where is {0} according to LLDP?",
            "LLDP: which local port has {0}?",
            "Which interface has the LLDP neighbour {0}?",
            "Look up {0} among the LLDP neighbours.",
            "Local port of the LLDP neighbour {0}?",
        ),
        ("Through which port did LLDP find {0}?", "Ask LLDP where {0} is."),
        _lldp,
    ),
)
