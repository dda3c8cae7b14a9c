"""A virtual environment made and filled: venv and pip as children whose output goes to a log file, line by line.

A child is ended with everything that it started when we are interrupted; it never outlives us unseen, because it
inherits the lock of the environment that it changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.engines import interpreter
from workbench.engines.embedded import pips
from workbench.errors import EngineError

Say = Callable[[str], None]
TAIL_LINES = 12
GRACE_SECONDS = 5.0
_PIP = ("--no-input", "--disable-pip-version-check")
_LEFT_TO_PIP = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON")

_REQUIREMENTS = """
import email, json, sys
from pip._vendor.packaging.requirements import Requirement
asked = json.load(sys.stdin)
kept = []
for text in email.message_from_string(asked["metadata"]).get_all("Requires-Dist") or []:
    item = Requirement(text)
    if item.marker is not None and not item.marker.evaluate({"extra": ""}):
        continue
    if asked["left_out"] and item.name.lower().startswith(asked["left_out"]):
        continue
    item.marker = None
    kept.append(str(item))
print(json.dumps(kept))
"""


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where an environment is made: its folder, the log, the lock's descriptor, and who is told each line."""

    folder: Path
    log: Path
    lock: int
    say: Say

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def temporary(self) -> Path:
        """A folder for what pip unpacks and builds, on the disk whose space was checked."""
        return self.folder / ".temporary"


def run(place: Workplace, command: list[str]) -> None:
    """Run a command to its end. Raises EngineError with the last lines that it printed."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with place.log.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=place.folder,
                env=_environment(place),
                start_new_session=True,
                pass_fds=(place.lock,),
            )
        except OSError as error:
            raise EngineError(f"cannot start {command[0]}: {error.strerror}", where=str(place.folder)) from error
        assert child.stdout is not None
        try:
            with child.stdout:
                for raw in child.stdout:
                    log.write(raw)
                    log.flush()
                    if line := raw.decode("utf-8", "replace").strip():
                        tail.append(line)
                        place.say(line)
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise EngineError(
            f"{' '.join(command[:5])} … ended with {how}",
            where=str(place.folder),
            next=f"Its log: {place.log}.",
            log_tail=tuple(tail),
        )


def make(place: Workplace, base: str) -> None:
    """Make a virtual environment of the interpreter `base`, with pip in it. Raises EngineError."""
    make_command = [base, "-I", "-m", "venv", str(place.folder)]
    if _runs([base, "-I", "-c", "import ensurepip"]):
        run(place, make_command)
        return
    run(place, [*make_command, "--without-pip"])
    for pip in pips():  # a pip from 22.3 on can work for another interpreter
        with contextlib.suppress(EngineError):
            run(place, [*pip, *_PIP, "--python", place.python, "install", "pip"])
            return
    raise EngineError(
        f"{base} has no ensurepip, and there is no pip that could put itself into an environment",
        where=str(place.folder),
        next="On Debian and Ubuntu: apt install python3-venv; elsewhere install pip. Then run it again.",
    )


def has_pip(place: Workplace) -> bool:
    """Whether the environment is there with a pip that runs."""
    return os.path.exists(place.python) and _runs([place.python, "-I", "-m", "pip", "--version"])


def install(place: Workplace, requirements: list[str], *options: str) -> None:
    """`pip install` in the environment; a torch that is there already is never replaced.

    Raises EngineError, and ConfigurationError where the environment's interpreter does not answer.
    """
    held = place.temporary / "constraints.txt"
    torch = interpreter.ask(place.python, {"torch": ("torch",)})["torch"]
    held.write_text(f"torch=={torch}\n" if torch else "")
    command = [place.python, "-I", "-m", "pip", "install", *_PIP, "--progress-bar", "off"]
    run(place, [*command, "--constraint", str(held), *options, *requirements])


def fetch(place: Workplace, requirement: str) -> Path:
    """Download one wheel without what it needs. Raises EngineError."""
    folder = place.temporary / "wheel"
    command = [place.python, "-I", "-m", "pip", "download", *_PIP, "--progress-bar", "off", "--no-deps"]
    run(place, [*command, "--only-binary", ":all:", "--dest", str(folder), requirement])
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(python: str, metadata: str, left_out: str) -> list[str]:
    """What a wheel's METADATA requires on that interpreter without extras, except names that begin with `left_out`.

    The interpreter's own pip reads the markers. Raises EngineError.
    """
    asked = json.dumps({"metadata": metadata, "left_out": left_out})
    command = [python, "-I", "-c", _REQUIREMENTS]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise EngineError(f"cannot read the wheel's requirements: {' '.join(lines[-1:])}", where=python)
    return json.loads(done.stdout)


def loads(place: Workplace, statement: str) -> None:
    """Run a statement there. Raises EngineError with what it printed."""
    run(place, [place.python, "-I", "-c", statement])


def _environment(place: Workplace) -> dict[str, str]:
    """The user's environment, so that proxies, indexes and CMAKE_ARGS apply, without what would lead pip elsewhere."""
    environment: dict[str, Any] = {key: value for key, value in os.environ.items() if key not in _LEFT_TO_PIP}
    environment["PIP_USER"] = "0"
    environment["TMPDIR"] = str(place.temporary)
    return environment


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group, kindly first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
