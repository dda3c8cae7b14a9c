"""What vLLM raises, as our errors: out of memory, the cause of a core's death from its log, else the first line."""

from __future__ import annotations

import os
import re

from workbench.errors import EngineError
from workbench.worker.backends.base import OutOfMemory

ROOT_CAUSE = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception)): (\S.*)")
LACKING = ("can't allocate memory", "not enough memory", "out of memory", "less than requested memory for kv")
LOG_BYTES = 256 * 1024


def as_ours(error: Exception) -> Exception:
    """OutOfMemory, or an EngineError that says what happened."""
    text = str(error)
    if "root cause" in text or type(error).__name__ == "EngineDeadError":
        text = root_cause(os.environ.get("WORKBENCH_LOG", "")) or text
    if "method failed: cancelled" in text:
        text = root_cause(os.environ.get("WORKBENCH_LOG", "")) or "a process of vLLM's has ended"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # pydantic's first line counts the errors, the next ones name them
    wanted = lines[2:3] if lines and "validation error" in lines[0] else lines[:1]
    line = (wanted or [type(error).__name__])[0][:400]
    if isinstance(error, MemoryError) or any(words in text for words in LACKING):
        return OutOfMemory(f"out of memory: {line}")
    return EngineError(f"{type(error).__name__}: {line}", where="vllm", next="The engine's log has the whole trace.")


def root_cause(path: str) -> str:
    """The first error that a core in another process wrote to the log, which vLLM's own message only points at."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.path.getsize(path) - LOG_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = [match for line in lines if "ERROR" in line and (match := ROOT_CAUSE.search(line))]
    return f"{found[0][1]}: {found[0][2]}" if found else ""
