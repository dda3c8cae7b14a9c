"""Asking another Python what it has: a short script runs there, isolated, within a time limit, and its answer is data.

Whatever file the user names is run, so it may be no Python at all, hang, or print without end: each ends with a reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any, cast

from workbench.errors import ConfigurationError

PROBE_SECONDS = 30.0
LARGEST_ANSWER = 64 * 1024
LONGEST_REASON = 200
OLDEST = (3, 11)
"""The oldest Python that an engine process runs on: `-P` keeps our path clean, and lanes are read with tomllib."""

_SCRIPT = """
import json, sys
out = {"python": "%d.%d.%d" % sys.version_info[:3], "implementation": sys.implementation.name}
if sys.version_info >= (3, 8):
    import importlib.metadata as m, importlib.util as u
    for name, distributions in json.loads(sys.argv[1]).items():
        out[name] = ""
        for distribution in distributions if u.find_spec(name) else ():
            try:
                out[name] = m.version(distribution)
                break
            except m.PackageNotFoundError:
                pass
print()
print(json.dumps(out))
"""
_known: dict[tuple[Any, ...], dict[str, str]] = {}


def ask(python: str, modules: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The versions of `python`, its `implementation`, and of each module ("" where it is not there).

    `modules` maps a module to the distributions that may bring it. A whole answer is kept for this process. Raises
    ConfigurationError with what is wrong with the interpreter.
    """
    key = (python, _stamp(python), tuple(modules.items()))
    if key not in _known:
        answer = _asked(python, modules)
        if not all(answer.get(name) for name in modules):
            return answer  # asked again next time: something may have been installed
        _known[key] = answer
    return dict(_known[key])


def forget() -> None:
    """Ask every interpreter again: packages were installed or removed."""
    _known.clear()


def _stamp(python: str) -> tuple[int, ...]:
    try:
        state = os.stat(python)
    except OSError:
        return ()
    return (state.st_ino, state.st_mtime_ns, state.st_size)


def _asked(python: str, modules: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    if os.path.isdir(python):
        inner = os.path.join(python, "bin", "python")
        advice = f"its Python is {inner}" if os.path.exists(inner) else "name the interpreter itself"
        raise ConfigurationError(f"cannot be run: it is a folder; {advice}", where=python)
    command = [python, "-I", "-c", _SCRIPT, json.dumps(modules)]
    try:
        code, out, err = run(command, PROBE_SECONDS)
    except OSError as error:
        raise ConfigurationError(f"cannot be run: {error.strerror or error}", where=python) from error
    said = " ".join(err.strip().splitlines()[-2:])[-LONGEST_REASON:]
    if code != 0:
        if "nknown option: -I" in err:
            said = "it is older than Python 3.4"
        raise ConfigurationError(f"cannot be run: {said or _ended(code)}", where=python)
    line = out.strip().rpartition("\n")[2]
    try:
        answer: Any = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    version = _version(answer)
    if version is None:
        shown = f"it answered {line[:60]!r}" if line else "it answered nothing"
        raise ConfigurationError(f"cannot be run as a Python: {shown}", where=python)
    if version < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise ConfigurationError(f"is Python {answer['python']}; an engine needs {least} or newer", where=python)
    return {str(key): str(value) for key, value in cast("dict[str, Any]", answer).items()}


def _version(answer: Any) -> tuple[int, ...] | None:
    text = cast("dict[str, Any]", answer).get("python") if isinstance(answer, dict) else None
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,4}\.\d{1,4}\.\d{1,4}", text):
        return None
    return tuple(int(part) for part in text.split("."))


def _ended(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by signal {-code}"


def run(command: list[str], seconds: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a child that is ended, with all that it started, when its time is up.

    Raises OSError where it cannot be started, ConfigurationError where it prints too much or is not done in time.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    heard = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    out, err = heard.values()
    deadline = time.monotonic() + seconds
    try:
        with child.stdout, child.stderr, selectors.DefaultSelector() as selector:
            for descriptor in heard:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise _silent(command[0], seconds)
                for key, _ in ready:
                    block = os.read(key.fd, LARGEST_ANSWER)
                    heard[key.fd] += block
                    if not block:
                        selector.unregister(key.fd)
                    elif len(heard[key.fd]) > LARGEST_ANSWER:
                        raise ConfigurationError("cannot be run as a Python: it prints without end", where=command[0])
        code = child.wait(max(0.0, deadline - time.monotonic()))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise _silent(command[0], seconds) from None
        raise
    return code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def _silent(python: str, seconds: float) -> ConfigurationError:
    return ConfigurationError(f"gave no answer within {seconds:.0f} s", where=python)
