"""Engine environments that we create: made in place under a lock, marked as unfinished until all of it is there.

An interrupted installation is no environment; running it again goes on with what is there. What is finished and made
by the same plan is left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.engines import interpreter, packages
from workbench.engines.environments import NEEDED, UNFINISHED, created_folder, created_python
from workbench.engines.models import folder_bytes
from workbench.engines.packages import Workplace
from workbench.engines.plans import Plan, plan_for
from workbench.engines.weights import locked
from workbench.errors import ConfigurationError, EngineError
from workbench.paths import environments_dir, expanded, logs_dir

Tell = Callable[[str, str], None]
"""Told a phase, and the last line of what runs in it ("" when the phase begins)."""

RECORD = "workbench.json"
"""A file in a finished environment: the plan that it was made by."""


def install(name: str, tell: Tell, python: str = "", plan: Plan | None = None) -> bool:
    """Make the environment of that name, or finish it; False where it is there already.

    `python` is the interpreter to make it from (our own where empty). Raises ConfigurationError for a name, machine or
    interpreter that cannot be used, EngineError where the disk is too small or pip fails.
    """
    plan = plan or plan_for(name)
    base = os.path.abspath(expanded(python)) if python else sys.executable
    version = interpreter.ask(base, {})["python"]
    with locked(_lock(name), lambda phase, _done, _total: tell(phase, "")) as lock:
        _sweep(name)
        if _is_finished(name, plan, version if python else ""):
            return False
        if not _continues(name, version):
            _set_aside(name)
        folder = created_folder(name)
        _check_space(folder, plan)
        place = _workplace(folder, name, lock)
        try:
            _fill(place, plan, base, tell)
        except EngineError as error:
            advice = f"{error.next} {plan.advice}".strip()
            kept = f"What is installed so far is kept: run it again, or workbench engines remove {name}."
            raise EngineError(
                error.what, where=error.where, next=f"{advice} {kept}", log_tail=error.log_tail
            ) from error
        finally:
            shutil.rmtree(place.temporary, ignore_errors=True)
            interpreter.forget()
        record = {"plan": _plain(plan), "python": version, "made": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        (folder / UNFINISHED).unlink()
    return True


def remove(name: str, tell: Tell | None = None) -> int:
    """Delete a created environment, finished or not; returns the bytes freed. Raises ConfigurationError."""
    with locked(_lock(name), lambda phase, _done, _total: tell(phase, "") if tell else None):
        _sweep(name)
        folder = created_folder(name)
        if not folder.is_dir():
            raise ConfigurationError(
                f"no environment of {name} was created", where="engines remove", next="See `workbench engines`."
            )
        freed = folder_bytes(folder)
        _set_aside(name)
        interpreter.forget()
    return freed


def state(name: str) -> str:
    """`absent`, `unfinished` or `installed`: what is there of the environment of that name."""
    if not os.path.lexists(created_python(name)):
        return "absent"
    return "unfinished" if (created_folder(name) / UNFINISHED).exists() else "installed"


def _fill(place: Workplace, plan: Plan, base: str, tell: Tell) -> None:
    phase = ""

    def begin(text: str) -> None:
        nonlocal phase
        phase = text
        tell(text, "")

    place = Workplace(place.folder, place.log, place.lock, lambda line: tell(phase, line))
    if not packages.has_pip(place):
        begin("making the environment")
        packages.make(place, base)
    for step in plan.steps:
        begin(f"installing {' '.join(step)}")
        packages.install(place, list(step))
    if plan.bare:
        begin(f"fetching {plan.bare}")
        wheel = packages.fetch(place, plan.bare)
        needs = packages.requirements(place.python, metadata_of(wheel), plan.left_out)
        if needs:
            begin(f"installing what {plan.bare} needs: {len(needs)} packages and theirs")
            packages.install(place, needs)
        begin(f"installing {plan.bare}")
        packages.install(place, [str(wheel)], "--no-deps")
    begin(f"checking: {plan.loads}")
    packages.loads(place, plan.loads)


def metadata_of(wheel: Path) -> str:
    """The text of a wheel's METADATA. Raises EngineError where it is no wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            return archive.read(name).decode("utf-8")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise EngineError(f"is no wheel: {error}", where=wheel.name, next="Fetch it again.") from error


def _workplace(folder: Path, name: str, lock: int) -> Workplace:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()
    log = logs_dir() / f"install-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    place = Workplace(folder, log, lock, lambda _line: None)
    shutil.rmtree(place.temporary, ignore_errors=True)
    place.temporary.mkdir()
    return place


def _is_finished(name: str, plan: Plan, version: str) -> bool:
    """Whether the environment is there, made by this plan, and (where one is given) of this Python version."""
    folder = created_folder(name)
    if (folder / UNFINISHED).exists():
        return False
    try:
        record: Any = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        made, there = record["plan"], record["python"]
        answer = interpreter.ask(str(created_python(name)), NEEDED.get(name, {}))
    except (OSError, ValueError, KeyError, TypeError, ConfigurationError):
        return False
    return made == _plain(plan) and version in ("", there) and all(answer.values())


def _continues(name: str, version: str) -> bool:
    """Whether what is there can be gone on with: an interpreter that answers, of the same version."""
    if not created_folder(name).exists():
        return True
    try:
        return interpreter.ask(str(created_python(name)), {})["python"] == version
    except ConfigurationError:
        return False


def _plain(plan: Plan) -> Any:
    """What of a plan decides the environment, as JSON gives it back."""
    kept = {key: value for key, value in asdict(plan).items() if key in ("steps", "bare", "left_out")}
    return json.loads(json.dumps(kept))


def _check_space(folder: Path, plan: Plan) -> None:
    above = next(each for each in (folder, *folder.parents) if each.exists())
    there = folder_bytes(folder) if folder.is_dir() else 0
    free = shutil.disk_usage(above).free
    if free + there < plan.bytes:
        lacks = (plan.bytes - there) / (1 << 30)
        raise EngineError(
            f"needs {lacks:.1f} GiB on this disk, {free / (1 << 30):.1f} GiB are free",
            where=str(folder),
            next="See `workbench models` for what can be cleared, or set WORKBENCH_HOME to another disk.",
        )


def is_name(name: str) -> bool:
    """Whether an environment can be called so."""
    return re.fullmatch(r"[a-z][a-z0-9-]*", name) is not None


def _lock(name: str) -> Path:
    if not is_name(name):
        raise ConfigurationError(f"{name!r} is no name of an environment", where="engines")
    return environments_dir() / f".{name}.lock"


def _set_aside(name: str) -> None:
    """Delete a folder in a way that never leaves half of it in its place."""
    folder = created_folder(name)
    if os.path.lexists(folder):
        folder.rename(_aside(name))
        _sweep(name)


def _sweep(name: str) -> None:
    """Delete what an interrupted removal left."""
    aside = _aside(name)
    if aside.is_symlink():  # the environment lay on another disk
        aside.unlink()
    elif aside.exists():
        shutil.rmtree(aside)


def _aside(name: str) -> Path:
    return environments_dir() / f".{name}.old"
