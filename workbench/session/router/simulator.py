"""The lab: devices by name, generated or recorded, and the answer of each to a command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from workbench.errors import SessionError
from workbench.paths import data_dir, sessions_dir
from workbench.session.router.commands import GRAMMARS, PATTERNS
from workbench.session.router.devices import generate
from workbench.session.router.grammar import CommandError, Fault, Grammar
from workbench.session.router.state import Device

_SAME = {"show arp": "show ip arp", "show ip arp": "show arp"}
"""Commands that IOS answers alike: a recording of one answers the other."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a device printed, the command in full ("" where it was not understood), and what was wrong with it."""

    text: str
    command: str
    fault: Fault = ""


@dataclass(frozen=True)
class Recorded:
    """A real device of which some outputs were recorded. `kind` is what users call it."""

    name: str
    kind: str
    outputs: Mapping[str, str]
    source: str = ""
    licence: str = ""

    @property
    def grammar(self) -> Grammar[str]:
        """Reads what a simulated device reads, and what was recorded."""
        return Grammar([(pattern, pattern) for pattern in (*PATTERNS, *self.outputs)])


class Lab:
    """Devices that answer. The same devices give the same text to the same command, whoever asks."""

    def __init__(self, devices: Iterable[Device | Recorded]) -> None:
        self.devices: dict[str, Device | Recorded] = {device.name: device for device in devices}
        self._grammars = {one.name: one.grammar for one in self.devices.values() if isinstance(one, Recorded)}

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Lab:
        """The lab that a session's `meta["lab"]` describes: seed, split, count, recorded. Raises SessionError."""
        try:
            split, count = about.get("split", "train"), int(about.get("count", 0))
            if split not in ("train", "test") or not 0 <= count <= 1000:
                raise ValueError(f"split {split!r}, count {count}")
            devices: list[Device | Recorded] = [*generate(str(about.get("seed", 0)), split, count)]
            wanted = [str(name) for name in cast(list[Any], about.get("recorded") or [])]
        except (TypeError, ValueError) as error:
            raise SessionError(f"not a description of a lab: {error}", where="meta, lab") from error
        if wanted:
            known = recorded_devices()
            if missing := [name for name in wanted if name not in known]:
                raise SessionError(
                    f"no recording of {', '.join(missing)} is here",
                    where="meta, lab",
                    next=f"Recorded devices: {', '.join(known) or 'none'}.",
                )
            devices += [known[name] for name in wanted]
        return cls(devices)

    def run(self, name: str, line: str) -> Answer:
        """What the device prints for a command line."""
        device = self.devices.get(name)
        if device is None:
            known = ", ".join(self.devices)
            return Answer(f'% Unknown device "{name}". Devices: {known}\n', "", "unknown device")
        prompt = f"{name}#"
        try:
            if isinstance(device, Recorded):
                return self._recorded(device, line, prompt)
            command = GRAMMARS[device.kind].read(line, prompt)
            text = command.handler(device, command.arguments)
            return Answer(command.filtered(text).rstrip("\n") + "\n", command.text)
        except CommandError as error:
            return Answer(error.text.rstrip("\n") + "\n", "", error.fault)

    def _recorded(self, device: Recorded, line: str, prompt: str) -> Answer:
        command = self._grammars[device.name].read(line, prompt)
        plain = " ".join(command.words)
        text = device.outputs.get(plain, device.outputs.get(_SAME.get(plain, ""), None))
        if text is None:
            known = ", ".join(device.outputs)
            return Answer(f"% Not recorded on {device.name}. Recorded: {known}\n", command.text, "not recorded")
        return Answer(command.filtered(text), command.text)


def recorded_devices(*folders: Path) -> dict[str, Recorded]:
    """Recorded devices of the JSON files in folders, by name. Raises SessionError.

    Without folders: those that ship, and the user's own in `router/` of the data folder.
    """
    found: dict[str, Recorded] = {}
    for path in _files(folders or (sessions_dir() / "router", data_dir() / "router")):
        try:
            rows: list[Any] = json.loads(path.read_text(encoding="utf-8"))["devices"]
            for row in rows:
                outputs = {str(key): str(value) for key, value in row["commands"].items()}
                one = Recorded(
                    str(row["device"]), str(row["kind"]), outputs, str(row.get("note", "")), str(row.get("licence", ""))
                )
                found[one.name] = one
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SessionError(f"not a file of recorded devices: {error!r}", where=str(path)) from error
    return found


def _files(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("*.json"))]
