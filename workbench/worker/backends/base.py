"""What an engine must be able to do to be driven by `workbench.worker.serve`.

To add an engine: write `worker/backends/NAME.py` with a class that fits `Backend` and a function `make()` that returns
it; declare its axes in `config/axes.py`; add a tiny-model test beside `tests/worker/test_engine_process.py`. The class
must

* read back what really runs, never echo what was asked for, and raise ConfigurationError (answered as *refused*) for
  what it cannot do, before anything large is loaded;
* call `job.check()` between chunks and tokens, so that Cancel works;
* raise OutOfMemory for its device's own out-of-memory errors;
* keep full logits inside the process: rows leave through `worker.scoring`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from workbench.config.lane import Configuration
from workbench.protocol.events import Generate, Inspect, Quantize, Score, Windows
from workbench.protocol.wire import Arrays
from workbench.worker.channel import Job


class OutOfMemory(MemoryError):
    """The device or the machine could not give the memory; the message says how much was asked for, where known."""


class Backend(Protocol):
    """One engine. Methods run on the main thread, one at a time."""

    def probe(self) -> dict[str, Any]:
        """Name, versions, Python, devices and the values of each axis that this installation can do."""
        ...

    def inspect(self, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        """How the engine itself would read a prompt: the facts and arrays of `Inspected`, without loading weights."""
        ...

    def start(self, configuration: Configuration, model: Path, context: int, job: Job) -> dict[str, Any]:
        """Load a model, or keep it where `weights_key()` and the path are the same; returns what really runs."""
        ...

    def score(self, request: Score, job: Job) -> dict[str, Any]:
        """Teacher forcing; sends rows through `job` and returns the statistics of `Scored`."""
        ...

    def generate(self, request: Generate, job: Job) -> dict[str, Any]:
        """Continue the context; sends tokens through `job` and returns the statistics of `Generated`."""
        ...

    def convert(self, source: Path, target: Path, scheme: str, job: Job) -> dict[str, Any]:
        """Make what this engine loads out of another form of the model; returns facts. Raises ConfigurationError."""
        ...

    def stats(self) -> dict[str, Any]:
        """Memory now: peak_memory_bytes, memory_kind (`rss` or `device`), kv_cache_bytes, kv_positions."""
        ...

    def release(self) -> None:
        """Give back memory after an out-of-memory failure; a later Start must work."""
        ...

    def stop(self) -> None:
        """Free the engine; the process ends next."""
        ...


@runtime_checkable
class Quantizer(Protocol):
    """A backend that makes quantized weights."""

    def quantize(self, request: Quantize, job: Job) -> dict[str, Any]:
        """Write a folder of quantized weights; returns its manifest. Raises ConfigurationError, ModelError."""
        ...


@runtime_checkable
class Windower(Protocol):
    """A backend with whole distributions, and a context that can be emptied."""

    def windows(self, request: Windows, job: Job) -> dict[str, Any]:
        """Score or write a llama.cpp base file; returns the statistics of `Scored`. Raises LogitsFileError."""
        ...
