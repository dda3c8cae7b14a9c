"""The llamacpp backend: GGUF files in llama.cpp, by llama-cpp-python's low-level functions."""

from __future__ import annotations

import gc
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.config.axes import ENGINES, check, kind_of
from workbench.config.lane import Configuration
from workbench.config.rules import keys_and_values
from workbench.errors import ConfigurationError
from workbench.metrics.divergence import HEAD_AND_SAMPLES
from workbench.protocol.events import Generate, Inspect, Score, Windows
from workbench.protocol.wire import Arrays
from workbench.worker import generation
from workbench.worker.channel import Job
from workbench.worker.forcing import Scoring, check_request, tokens_kept
from workbench.worker.llama.binding import VERSION, api, build, cpu_features, devices, physical_cores, system_info
from workbench.worker.llama.context import Loaded, Settings
from workbench.worker.llama.convert import KINDS, write_folder
from workbench.worker.llama.effective import describe
from workbench.worker.llama.log import Log
from workbench.worker.llama.prompt import bos, inspect
from workbench.worker.llama.quantize import quantize
from workbench.worker.llama.weights import ALL_LAYERS, Weights, open_weights
from workbench.worker.resident import peak_bytes, reset_peak, trim_heap
from workbench.worker.windows import Running, run_windows

ENGINE = ENGINES["llamacpp"]
STEPS = 100  # of loading, as progress


def make() -> LlamaBackend:
    """The backend, llama.cpp started and its messages caught."""
    return LlamaBackend(Log())


class LlamaBackend:
    """See `workbench.worker.backends.base.Backend`."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.loaded: Loaded | None = None
        self.configuration = Configuration()
        self._weights: Weights | None = None
        self._key: tuple[Any, ...] = ()
        self._kv_bytes = 0
        api.llama_backend_init()

    def probe(self) -> dict[str, Any]:
        """Versions, build, devices and the values of each axis."""
        return {
            "name": "llamacpp",
            "version": VERSION,
            "build": build(),
            "system_info": system_info(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "devices": [f"{name} {described}".strip() for name, described in devices()] + ["cpu"],
            "axes": {axis: list(values) for axis, values in ENGINE.axes.items()},
            "keys": list(ENGINE.keys),
            "converts": ["safetensors", "gguf"],
            "cpu": cpu_features(),
        }

    def inspect(self, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        """The file's own vocabulary and template; its weights are not loaded."""
        path = _file(Path(request.model_path))
        weights = self._weights if self._weights is not None and self._weights.path == path else None
        if weights is not None:
            return inspect(weights, request.text)
        weights = open_weights(path, self.log, vocab_only=True)
        try:
            return inspect(weights, request.text)
        finally:
            weights.free()

    def start(self, configuration: Configuration, model: Path, context: int, job: Job) -> dict[str, Any]:
        """Load the file (or keep it) and make a context."""
        check(configuration)
        path = _file(model)
        own = dict(configuration.extra)
        gpu_layers, main_gpu, note = _placement(configuration, own)
        key = (*configuration.weights_key(), str(path), gpu_layers, main_gpu)
        kept = self._weights is not None and key == self._key
        self._drop_context()  # the old cache's memory goes before the new one's comes
        if not kept:
            self.release()
            self._weights = self._open(path, gpu_layers, main_gpu, job)
        weights = self._weights
        assert weights is not None
        if not 0 < context <= weights.context_limit:
            raise ConfigurationError(
                f"a context of {context} tokens is not within the model's limit of {weights.context_limit}",
                where=str(model),
                next="Use a shorter session, --fit, or a model with a longer context.",
            )
        keys, values = keys_and_values(configuration.kv)
        settings = Settings(
            context=max(context, configuration.chunk),  # llama.cpp cuts a chunk that is longer than the context
            chunk=configuration.chunk,
            ubatch=int(own.get("n_ubatch", configuration.chunk)),
            keys=keys,
            values=values,
            attention=configuration.attn,
            threads=configuration.threads or physical_cores(),
            offload=gpu_layers != 0,
        )
        loaded = Loaded(weights, settings, self.log)
        effective = describe(loaded, configuration.kv)
        self.loaded, self.configuration, self._key = loaded, replace(configuration), key
        self._kv_bytes = effective["kv"]["bytes"] or 0
        job.progress("loading", STEPS, STEPS)
        return {
            "engine": "llamacpp",
            "version": VERSION,
            "build": build(),
            **effective,
            "estimator": HEAD_AND_SAMPLES,
            "logits": "full",
            "notes": [*effective["notes"], *note],
            "cpu": cpu_features(),
            "weights_kept": kept,
        }

    def score(self, request: Score, job: Job) -> dict[str, Any]:
        """Forced scoring."""
        loaded = self._require("score")
        check_request(request, loaded.size, loaded.width, loaded.tokens)
        loaded.truncate(tokens_kept(request))
        reset_peak()
        stats = Scoring(loaded, request, job, self.configuration.chunk).run()
        loaded.tokens = request.arrays["ids"].tolist()
        return {**stats, **self.stats()}

    def windows(self, request: Windows, job: Job) -> dict[str, Any]:
        """Score or write a llama.cpp base file."""
        loaded = self._require("windows")
        reset_peak()
        threads = self.configuration.threads or physical_cores()
        chunk, first = self.configuration.chunk, bos(loaded.weights)
        running = Running(loaded, lambda block: block, loaded.width, loaded.size, chunk, threads, first)
        try:
            return {**run_windows(request, running, job), **self.stats()}
        finally:
            loaded.truncate(0)

    def generate(self, request: Generate, job: Job) -> dict[str, Any]:
        """Continue the context, or the ids that the request brings."""
        loaded = self._require("generate")
        ids = request.arrays.get("ids")
        keep = generation.check_generate(request, len(loaded.tokens), loaded.size, loaded.width)
        reset_peak()
        if ids is not None:
            loaded.prefill(ids[:keep].tolist(), self.configuration.chunk, job)
        last = loaded.tokens[keep - 1]
        # The last token runs again on its own: its pass gives the first new token's logits, in decode's numerics.
        loaded.truncate(keep - 1)
        new, stats = generation.generate(loaded, last, request, job)
        loaded.tokens += [last, *new[:-1]]
        return {**stats, **self.stats()}

    def convert(self, source: Path, target: Path, scheme: str, job: Job) -> dict[str, Any]:
        """A model folder, or a GGUF file, to a GGUF file with the weights of `scheme`."""
        schemes = [value for value in ENGINE.axes["weights"] if value != "file"]
        if scheme not in schemes:
            raise ConfigurationError(
                f"weights of {scheme or 'no type'} cannot be written",
                where="llamacpp",
                next=f"Use {'|'.join(schemes)}.",
            )
        job.progress("converting", 0, 0)

        def report(done: int, total: int) -> None:
            job.progress("converting", done, total)

        def report_and_check(done: int, total: int) -> None:
            job.check()
            report(done, total)

        if not source.is_dir():
            return quantize(source, target, scheme, self.log, report)
        if scheme in KINDS:
            return write_folder(source, target, scheme, report_and_check)
        # Made of float32 numbers, as llama.cpp's own tools do it: bf16 would round the source once more.
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as between:
            whole = Path(between) / "F32.gguf"
            facts = write_folder(source, whole, "F32", report_and_check)
            made = quantize(whole, target, scheme, self.log, report)
        return {**facts, **made, "source": source.name, "source_types": facts["source_types"]}

    def stats(self) -> dict[str, Any]:
        """Memory and the KV cache now; memory on a GPU is not counted."""
        return {
            "peak_memory_bytes": peak_bytes(),
            "memory_kind": "rss",
            "kv_cache_bytes": self._kv_bytes if self.loaded else 0,
            "kv_workspace_bytes": 0,
            "kv_positions": self.loaded.length() if self.loaded else 0,
        }

    def release(self) -> None:
        """Let go of context and weights."""
        self._drop_context()
        if self._weights is not None:
            self._weights.free()
        self._weights, self._key = None, ()
        gc.collect()
        trim_heap()

    def stop(self) -> None:
        """Same as release."""
        self.release()

    def _open(self, path: Path, gpu_layers: int, main_gpu: int | None, job: Job) -> Weights:
        told = -1

        def report(done: float) -> None:
            nonlocal told
            job.check()
            if int(done * STEPS) > told:
                told = int(done * STEPS)
                job.progress("loading", told, STEPS)

        return open_weights(path, self.log, gpu_layers=gpu_layers, main_gpu=main_gpu, progress=report)

    def _drop_context(self) -> None:
        if self.loaded is not None:
            self.loaded.free()
        self.loaded = None

    def _require(self, what: str) -> Loaded:
        if self.loaded is None:
            raise ConfigurationError("no model is loaded", where=what, next="Send Start first.")
        return self.loaded


def _file(path: Path) -> Path:
    """Raises ConfigurationError for a folder: llama.cpp loads one file."""
    if path.is_dir():
        raise ConfigurationError(
            "llama.cpp loads a GGUF file, and this is a folder",
            where=str(path),
            next="Convert it to a GGUF file first.",
        )
    return path


def _placement(configuration: Configuration, own: dict[str, str]) -> tuple[int, int | None, list[str]]:
    """Layers on the GPU, the one GPU to use, and what the user should know. Raises ConfigurationError."""
    asked, gpus = kind_of(configuration), devices()
    if asked == "cpu":
        return 0, None, []
    if not gpus:
        if configuration.device != "auto" or int(own.get("gpu_layers", "0")):
            raise ConfigurationError(
                f"this build of llama.cpp has no support for {asked}",
                where="llamacpp",
                next="Use device=cpu, or install a llama-cpp-python that was built for the GPU.",
            )
        return 0, None, [f"this build of llama.cpp does not use the {asked} device that is here"]
    _, _, number = configuration.device.partition(":")
    if number and int(number) >= len(gpus):
        raise ConfigurationError(
            f"device={configuration.device} is not here", where="llamacpp", next=f"llama.cpp sees {len(gpus)} GPUs."
        )
    return int(own.get("gpu_layers", ALL_LAYERS)), int(number) if number else None, []
