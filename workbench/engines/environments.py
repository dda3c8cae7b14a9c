"""Which Python runs which engine: our own interpreter, environments that we created, and those named in the settings.

Nothing is imported to find out: our own packages are looked up by their specs and metadata, other interpreters are
asked by a short script that does the same there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from workbench.paths import environments_dir, expanded

Source = Literal["own", "created", "settings"]

NEEDED: dict[str, dict[str, str]] = {
    "transformers": {"numpy": "numpy", "torch": "torch", "transformers": "transformers", "safetensors": "safetensors"},
}
"""Engine → what it imports → the distribution that brings it."""

PROBE_SECONDS = 30.0
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
out = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name, dist in json.loads(sys.argv[1]).items():
    try:
        out[name] = m.version(dist) if u.find_spec(name) else ""
    except (m.PackageNotFoundError, ValueError):
        out[name] = ""
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """One interpreter for one engine. `missing` are distributions to install, `install` the command that does it.

    `reason` says why an interpreter could not be asked.
    """

    python: str
    engine: str
    source: Source
    versions: dict[str, str] = field(default_factory=dict[str, str])
    missing: tuple[str, ...] = ()
    install: str = ""
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether the engine can be started there."""
        return not self.missing and not self.reason


def find_environments(settings: Mapping[str, str] | None = None) -> list[Environment]:
    """Every engine with each interpreter that may run it, the one to use first.

    `settings` names an interpreter for an engine: that one is used, also where it lacks something, so that the user
    learns of it.
    """
    found: list[Environment] = []
    for engine in NEEDED:
        chosen = [_asked(engine, settings[engine], "settings")] if settings and engine in settings else []
        python = environments_dir() / engine / "bin" / "python"
        made = [_asked(engine, str(python), "created")] if python.exists() else []
        found += chosen + sorted([_own(engine), *made], key=lambda environment: not environment.usable)
    return found


def environment_for(engine: str, settings: Mapping[str, str] | None = None) -> Environment | None:
    """The environment that an engine starts in, usable or not; None for an engine that we do not know."""
    return next((each for each in find_environments(settings) if each.engine == engine), None)


def _own(engine: str) -> Environment:
    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name, distribution in NEEDED[engine].items():
        try:
            versions[name] = importlib.metadata.version(distribution) if importlib.util.find_spec(name) else ""
        except (importlib.metadata.PackageNotFoundError, ValueError):
            versions[name] = ""
    return _judged(engine, sys.executable, "own", versions)


def _asked(engine: str, python: str, source: Source) -> Environment:
    path = expanded(python)
    command = [str(path), "-I", "-c", _PROBE, json.dumps(NEEDED[engine])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        answer: Any = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return Environment(python, engine, source, reason=f"no answer within {PROBE_SECONDS:.0f} s")
    except (OSError, ValueError) as error:
        return Environment(python, engine, source, reason=f"cannot be run: {error}")
    if not isinstance(answer, dict):
        lines = done.stderr.strip().splitlines()
        return Environment(python, engine, source, reason=lines[-1] if lines else f"exit code {done.returncode}")
    versions = {str(key): str(value) for key, value in cast(dict[str, Any], answer).items()}
    return _judged(engine, str(path), source, versions)


def _judged(engine: str, python: str, source: Source, versions: dict[str, str]) -> Environment:
    missing = tuple(dist for name, dist in NEEDED[engine].items() if not versions.get(name))
    wanted = f"'inference-workbench[{engine}]'" if source == "own" else " ".join(missing)
    install = f"{python} -m pip install {wanted}" if missing else ""
    present = {name: version for name, version in versions.items() if version}
    return Environment(python, engine, source, present, missing, install)
