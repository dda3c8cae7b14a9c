"""What an engine can do here: declared by our tables, or verified by an engine process that was started for it.

A verification is kept with the interpreter and the versions that it saw, and counts only as long as they are the same.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from workbench import __version__
from workbench.config.axes import ENGINES
from workbench.config.machine import accelerator
from workbench.engines import interpreter
from workbench.engines.environments import LOADED, Environment
from workbench.engines.process import LOG_TAIL_LINES, EngineProcess
from workbench.engines.weights import locked
from workbench.errors import ConfigurationError, EngineError
from workbench.paths import data_dir
from workbench.protocol.events import Failed, Ready

CHECK_SECONDS = 240.0
"""How long an engine may take to load, and to say that it is there; vLLM takes 8 s to load on an idle machine."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What an engine can do: the values of each axis on this machine, the default first.

    `facts` are the engine process's own words (Ready) where it was verified: version, build, devices and more; `when`
    is the time of that in ISO form.
    """

    engine: str
    source: Literal["declared", "verified"]
    axes: dict[str, tuple[str, ...]]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    when: str = ""

    @property
    def version(self) -> str:
        """The engine's version, where it was verified."""
        return str(self.facts.get("version") or "")

    @property
    def build(self) -> str:
        """How the engine was built, or which package it is, and with which torch, as far as it says so."""
        torch = self.facts.get("torch")
        parts = [self.facts.get("build") or self.facts.get("distribution"), f"torch {torch}" if torch else None]
        return ", ".join(str(part) for part in parts if part)

    @property
    def devices(self) -> list[str]:
        """The devices that the engine sees."""
        found: Any = self.facts.get("devices")
        return [str(device) for device in cast("list[Any]", found)] if isinstance(found, list) else []


def capability(environment: Environment) -> Capability:
    """What is known of an engine in this environment: verified where that still holds, else declared."""
    for record in _read():
        if _fits(record, environment):
            facts = cast("dict[str, Any]", record["ready"])
            axes = _axes(facts) or _declared(environment.engine)
            return Capability(environment.engine, "verified", axes, facts, str(record.get("when", "")))
    return Capability(environment.engine, "declared", _declared(environment.engine))


def verify(environment: Environment) -> Capability:
    """Load the engine's libraries, start its process, keep what it says of itself, and end it. No model is loaded.

    Raises EngineError with what was printed last where the libraries do not load or the process does not start.
    """
    _load(environment)
    process = EngineProcess(environment.python, environment.engine)
    try:
        event = process.receive(CHECK_SECONDS)
    finally:
        process.stop()
    if isinstance(event, Failed):
        raise EngineError(
            event.what, where=f"engine {environment.engine}", next=event.next, log_tail=process.log_tail()
        )
    if not isinstance(event, Ready):
        raise EngineError(
            f"did not say that it is there within {CHECK_SECONDS:.0f} s",
            where=f"engine {environment.engine}",
            next=f"Its log: {process.log_path}",
            log_tail=process.log_tail(),
        )
    _keep(
        {
            "engine": environment.engine,
            "python": environment.python,
            "versions": environment.versions,
            "workbench": __version__,
            "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ready": event.engine,
        }
    )
    return capability(environment)


def _load(environment: Environment) -> None:
    """An engine process may say what it is without loading anything, so the libraries are loaded for themselves."""
    engine, statement = environment.engine, LOADED[environment.engine]
    where = f"engine {engine}"
    anew = f"Make it anew: workbench engines remove {engine}; workbench engines install {engine}"
    advice = anew if environment.source == "created" else ""
    try:
        code, _, printed = interpreter.run([environment.python, "-I", "-c", statement], CHECK_SECONDS)
    except (OSError, ConfigurationError) as error:
        what = error.what if isinstance(error, ConfigurationError) else str(error)
        raise EngineError(f"{statement}: {what}", where=where, next=advice) from error
    if code:
        tail = tuple(printed.strip().splitlines()[-LOG_TAIL_LINES:])
        raise EngineError(f"{statement} ends with exit code {code}", where=where, next=advice, log_tail=tail)


def _declared(engine: str) -> dict[str, tuple[str, ...]]:
    table, device = ENGINES.get(engine), accelerator()
    return {axis: table.values(axis, device) for axis in table.axes} if table else {}


def _axes(facts: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    axes = facts.get("axes")
    if not isinstance(axes, dict):
        return {}
    return {
        str(axis): tuple(str(value) for value in cast("list[Any]", values))
        for axis, values in cast("dict[Any, Any]", axes).items()
        if isinstance(values, list)
    }


def _fits(record: dict[str, Any], environment: Environment) -> bool:
    return (
        record.get("engine") == environment.engine
        and _place(record.get("python")) == _place(environment.python)
        and record.get("versions") == environment.versions
        and record.get("workbench") == __version__
        and isinstance(record.get("ready"), dict)
    )


def _place(python: Any) -> str:
    """The folder of an interpreter: `python` and `python3` there are the same one."""
    return os.path.dirname(str(python))


def _path() -> Path:
    return data_dir() / "engines.json"


def _read() -> list[dict[str, Any]]:
    """The kept records; a file that is absent or damaged holds none, and is written anew by the next check."""
    try:
        records: Any = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(records, list):
        return []
    return [cast("dict[str, Any]", record) for record in cast("list[Any]", records) if isinstance(record, dict)]


def _keep(record: dict[str, Any]) -> None:
    """Replace the record of this engine and interpreter."""
    with locked(data_dir() / ".engines.lock"):
        same = (record["engine"], _place(record["python"]))
        others = [each for each in _read() if (each.get("engine"), _place(each.get("python"))) != same]
        part = _path().with_name(".engines.json.part")
        part.write_text(json.dumps([*others, record], indent=1), encoding="utf-8")
        part.replace(_path())
