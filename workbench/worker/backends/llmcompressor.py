"""The llmcompressor backend: it runs no model, it makes quantized weights for the engines that do."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any, NoReturn

from workbench.config.lane import Configuration
from workbench.config.schemes import SCHEMES, recipe
from workbench.errors import ConfigurationError
from workbench.protocol.events import Generate, Inspect, Quantize, Score
from workbench.protocol.wire import Arrays
from workbench.worker.channel import Job
from workbench.worker.devices import cpu_features, devices
from workbench.worker.quant.compressing import compress, versions


def make() -> LlmcompressorBackend:
    """The backend."""
    return LlmcompressorBackend()


class LlmcompressorBackend:
    """See `workbench.worker.backends.base`: only `probe` and `quantize` do something."""

    def probe(self) -> dict[str, Any]:
        """Versions and the schemes that can be made."""
        found = versions()
        return {
            "name": "llmcompressor",
            "version": found["llmcompressor"],
            **found,
            "python": platform.python_version(),
            "executable": sys.executable,
            "devices": devices(),
            "makes": list(SCHEMES),
            "cpu": cpu_features(),
        }

    def quantize(self, request: Quantize, job: Job) -> dict[str, Any]:
        """A folder of bf16 weights to a compressed-tensors folder; returns its manifest."""
        asked = request.recipe
        made = recipe(str(asked["scheme"]), str(asked["group"]), tuple(str(word) for word in asked["ignore"]))

        def report(done: int, total: int) -> None:
            job.check()
            job.progress(f"quantizing to {made.scheme}", done, total)

        windows = request.arrays["windows"]
        return compress(Path(request.source), Path(request.target), made, windows, request.facts, report)

    def inspect(self, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        """Refused."""
        _refuse()

    def start(self, configuration: Configuration, model: Path, context: int, job: Job) -> dict[str, Any]:
        """Refused."""
        _refuse()

    def score(self, request: Score, job: Job) -> dict[str, Any]:
        """Refused."""
        _refuse()

    def generate(self, request: Generate, job: Job) -> dict[str, Any]:
        """Refused."""
        _refuse()

    def convert(self, source: Path, target: Path, scheme: str, job: Job) -> dict[str, Any]:
        """Refused."""
        _refuse()

    def stats(self) -> dict[str, Any]:
        """Nothing is loaded."""
        return {}

    def release(self) -> None:
        """Nothing is held between requests."""

    def stop(self) -> None:
        """Same as release."""


def _refuse() -> NoReturn:
    raise ConfigurationError(
        "llmcompressor makes weights and runs no model",
        where="llmcompressor",
        next="Name the scheme as a lane's weights, such as transformers:weights=w8a16.",
    )
