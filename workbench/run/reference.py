"""The reference trace: its key, and the cache that saves recording it twice."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from workbench.config.lane import Configuration
from workbench.errors import SavedSessionError
from workbench.paths import traces_dir
from workbench.store.saved import SavedSession

TRACE_SEED = 20260
"""Seeds the tail's samples; part of the key, so that two traces of one key are the same numbers."""
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
TRACE_RULE = "head 8|16|32|64 to a tail of 1e-3, samples 0|8|16|32"


def reference_key(configuration: Configuration, hashes: dict[str, str], versions: dict[str, str]) -> str:
    """Thirty-two hex digits over all that decides the trace's numbers.

    `hashes` are of the weights, tokenizer, template and token stream; `versions` of the engine and its libraries. The
    processor is part of it: another one may round otherwise.
    """
    parts = {
        "configuration": {**configuration.to_json(), "model": hashes["weights"]},
        "hashes": hashes,
        "versions": versions,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "seed": TRACE_SEED,
        "rule": TRACE_RULE,
    }
    if configuration.path == "decode":
        parts["single"] = "the assistant's tokens"
    # What decides how many threads an engine takes when none are asked for: speeds and, in places, rounding go by it.
    threads = {name: os.environ[name] for name in THREAD_SETTINGS if os.environ.get(name)}
    if threads and not configuration.threads:
        parts["threads"] = threads
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def processor() -> str:
    """The processor's own name, or the platform's where it has none."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else ():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return f"{platform.system()} {platform.machine()} {platform.processor()}".strip()


def cached(key: str) -> Path | None:
    """The cached trace of a key, where it is whole."""
    path = traces_dir() / f"{key}.wbs"
    if not path.is_file():
        return None
    try:
        with SavedSession.open(path) as saved:
            recorded = any(lane.kind == "reference" and lane.status == "done" for lane in saved.lanes())
            whole = recorded and not saved.verify()
    except SavedSessionError:
        whole = False
    return path if whole else None


def keep(saved: SavedSession, key: str, facts: dict[str, Any]) -> Path:
    """Put the reference of a saved session into the cache; what stood there is replaced."""
    path = traces_dir() / f"{key}.wbs"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{key}.{os.getpid()}.wbs")
    temporary.unlink(missing_ok=True)
    try:
        with SavedSession.create(temporary, saved.session, facts) as copy:
            copy.copy_reference(saved.path)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def keep_floor(key: str, floor: dict[str, Any]) -> None:
    """Store the noise floor with the cached trace that it belongs to, where that is there."""
    if (path := traces_dir() / f"{key}.wbs").is_file():
        with SavedSession.open(path, write=True) as saved:
            saved.set_fact("floor", floor)


def cached_floor(key: str) -> dict[str, Any] | None:
    """The noise floor that was measured with a cached trace, where one was."""
    path = traces_dir() / f"{key}.wbs"
    if not path.is_file():
        return None
    with SavedSession.open(path) as saved:
        return saved.facts.get("floor")
