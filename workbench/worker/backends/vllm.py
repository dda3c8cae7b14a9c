"""The vLLM backend: its offline engine in this process, on a CPU with the V1 model runner, on a GPU with V2.

Importing vLLM takes seconds and reads environment variables, so it happens in `start`, once what can be refused has
been. The GPU's side of it (trace ids, trace replay, parallel executors) follows vLLM's source and was not run here.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.config.axes import ENGINES, check, kind_of, refusal
from workbench.config.lane import Configuration
from workbench.config.machine import accelerator
from workbench.errors import ConfigurationError, WorkbenchError
from workbench.protocol.events import Generate, Inspect, Score
from workbench.protocol.wire import Arrays
from workbench.worker.channel import Job
from workbench.worker.vllm import settings
from workbench.worker.vllm.failures import as_ours
from workbench.worker.vllm.versions import versions

if TYPE_CHECKING:
    from workbench.worker.vllm.engine import Engine
    from workbench.worker.vllm.scoring import Way

ENGINE = ENGINES["vllm"]
DEFAULT_BEST = 256
"""Own best ids that stand for the distribution where neither whole logits nor the trace's ids can be had."""

Answer = TypeVar("Answer")


def make() -> VllmBackend:
    """The backend. Raises EngineError where vLLM is not installed in this interpreter."""
    versions()
    return VllmBackend()


def _answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turn what vLLM raises into our errors: out of memory, a dead core's cause from its log, the first line else."""

    @wraps(method)
    def wrapped(self: VllmBackend, *args: Any) -> Answer:
        try:
            return method(self, *args)
        except WorkbenchError:
            raise
        except Exception as error:  # vLLM raises ValueError, RuntimeError, pydantic's and its own for anything
            traceback.print_exc()  # into the log, before what it holds is let go
            failure = as_ours(error)
        if not isinstance(failure, ConfigurationError):
            self.release()
        raise failure

    return wrapped


class VllmBackend:
    """See `workbench.worker.backends.base.Backend`."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.configuration = Configuration(engine="vllm")
        self.effective: dict[str, Any] = {}
        self.way: Way = "top"
        self._best = 0
        self._key: tuple[Any, ...] = ()
        self._context = 0
        self._tokens: list[int] = []
        self._memory: Any = None

    def probe(self) -> dict[str, Any]:
        """Versions and the values of each axis; vLLM itself is not imported."""
        kind = accelerator()
        return {
            "name": "vllm",
            **versions(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "devices": [kind] if kind == "cpu" else [kind, "cpu"],
            "axes": {axis: list(ENGINE.values(axis, kind)) for axis in ENGINE.axes},
            "keys": list(ENGINE.keys),
            "converts": [],
            "cpu": platform.machine(),
        }

    @_answering
    def start(self, configuration: Configuration, model: Path, context: int, job: Job) -> dict[str, Any]:
        """Refuse what can be refused, import vLLM, load, and read back."""
        check(configuration)
        kind = kind_of(configuration)
        settings.check_keys(configuration, kind)
        config = settings.read_config(model)
        settings.check_folder(configuration, config, context, str(model))
        arguments = settings.arguments(configuration, model, config, context, kind)
        key = (*configuration.weights_key(), str(model))
        if self.engine is not None and key == self._key and context <= self._context:
            return {**self.effective, "weights_kept": True}
        self.release()
        environment = settings.environment(configuration, kind)
        for name in settings.REMOVED_ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(environment)
        job.progress("loading", 0, 1)
        self._check_platform(configuration, kind)
        job.check()
        from workbench.worker.memory import PeakMemory, return_freed
        from workbench.worker.vllm.effective import describe
        from workbench.worker.vllm.engine import Engine

        self.engine = Engine(arguments, configuration.threads)
        try:
            self.way, self._best = self._choose(configuration, self.engine)
            self.effective = describe(self.engine, configuration, model, self.way, self._best)
            self.effective |= {"environment": environment, "arguments": _plain(arguments)}
        except BaseException:
            self.release()
            raise
        self.configuration, self._key, self._context = configuration, key, context
        import torch

        self._memory = PeakMemory(torch.device("cpu" if kind == "cpu" else "cuda"))
        return_freed()
        job.progress("loading", 1, 1)
        return {**self.effective, "weights_kept": False}

    @_answering
    def score(self, request: Score, job: Job) -> dict[str, Any]:
        """Forced scoring; refused while a drafter is active."""
        from workbench.worker.forcing import check_request
        from workbench.worker.vllm.scoring import Scoring

        engine = self._require("score")
        if engine.config.speculative_config is not None:
            raise ConfigurationError(
                "log-probabilities under speculation are unchecked", where="score", next="Start without the drafter."
            )
        if request.record and self.way not in ("logits", "whole"):
            raise ConfigurationError(
                "a reference needs whole distributions", where="vllm", next="Use logprobs=full, or another reference."
            )
        check_request(request, self._context, int(self.effective["logits_width"]), self._tokens)
        self._memory.reset()
        try:
            vocabulary, held = int(self.effective["vocabulary"]), len(self._tokens)
            stats = Scoring(engine, request, job, self.way, self._best, vocabulary, held).run()
        except BaseException:
            self._tokens = []
            raise
        self._tokens = request.arrays["ids"].tolist()
        return {**stats, "chunk": engine.chunk, **self.stats()}

    @_answering
    def generate(self, request: Generate, job: Job) -> dict[str, Any]:
        """Continue the ids that the request brings, or those of the last request."""
        from workbench.worker.vllm import generation

        engine = self._require("generate")
        ids = request.arrays.get("ids")
        held = self._tokens if ids is None else ids.tolist()
        keep = len(held) if request.keep < 0 else request.keep
        if not 0 < keep <= len(held) or request.count < 1:
            raise ConfigurationError(
                f"cannot keep {keep} of {len(held)} tokens and generate {request.count}", where="generate"
            )
        if keep + request.count - 1 > self._context:
            raise ConfigurationError(
                f"{keep} tokens and {request.count} new ones do not fit a context of {self._context}",
                where="generate",
                next="Start with a larger context.",
            )
        if not 0 <= min(held) <= max(held) < int(self.effective["logits_width"]):
            raise ConfigurationError("ids lie outside the vocabulary: another model's?", where="generate")
        self._memory.reset()
        new, stats = generation.generate(engine, held[:keep], request, job)
        self._tokens = held[:keep] + new[:-1]
        return {**stats, **self.stats()}

    def inspect(self, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        """The folder's own tokenizer and template, and vLLM's sampling defaults."""
        from workbench.worker.vllm.prompt import inspect

        return inspect(Path(request.model_path), request.text)

    def convert(self, source: Path, target: Path, scheme: str, job: Job) -> dict[str, Any]:
        """Nothing: vLLM loads safetensors folders."""
        raise ConfigurationError(
            "vLLM converts no models",
            where="vllm",
            next="Use a safetensors folder, such as the one transformers makes.",
        )

    def stats(self) -> dict[str, Any]:
        """Memory and the KV cache now. Memory is this process's, or its device's: not that of other ranks."""
        return {
            "peak_memory_bytes": self._memory.read() if self._memory else 0,
            "memory_kind": self._memory.kind if self._memory else "rss",
            "kv_cache_bytes": self.effective.get("kv_cache_bytes", 0),
            "kv_workspace_bytes": 0,
            "kv_positions": len(self._tokens),
        }

    def release(self) -> None:
        """Let go of model and cache."""
        engine, self.engine = self.engine, None
        self._key, self._tokens, self.effective = (), [], {}
        if engine is not None:
            engine.close()
            from workbench.worker.memory import return_freed

            return_freed()

    def stop(self) -> None:
        """Same as release."""
        self.release()

    def _require(self, what: str) -> Engine:
        if self.engine is None:
            raise ConfigurationError("no model is loaded", where=what, next="Send Start first.")
        return self.engine

    @staticmethod
    def _check_platform(configuration: Configuration, kind: str) -> None:
        """Raises ConfigurationError where this build of vLLM is for another device than the lane was checked for."""
        from vllm.platforms import current_platform

        built = str(current_platform.device_type)
        if built == kind:
            return
        if configuration.device == "auto" and built == "cpu":
            where = f"lane {configuration.to_line()}"
            error = refusal(configuration, "cpu") or ConfigurationError(
                "this build of vLLM is for a CPU", where=where, next="Write device=cpu, or install the GPU's build."
            )
            raise error
        raise ConfigurationError(
            f"this build of vLLM runs on {built or 'nothing here'}, not on {kind}",
            where="vllm",
            next="Install the build for this device, or name the other device.",
        )

    @staticmethod
    def _choose(configuration: Configuration, engine: Engine) -> tuple[Way, int]:
        """How rows are made, and how many of vLLM's own best ids are asked for. Raises ConfigurationError."""
        from workbench.worker.vllm.scoring import NAMED_BEST

        asked = dict(configuration.extra).get("logprobs", "auto")
        forced = configuration.path == "decode"
        if asked in ("auto", "full") and engine.tap is not None:
            return "logits", 0
        if asked in ("auto", "trace") and engine.v2 and not forced:
            return "ids", NAMED_BEST
        if asked == "trace":
            raise ConfigurationError(
                "logprobs=trace needs vLLM's V2 model runner, and this lane runs on V1",
                where="vllm",
                next="Use logprobs=auto, full or 256.",
            )
        if asked == "full":
            return "whole", 0
        return "top", DEFAULT_BEST if asked == "auto" else int(asked)


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the manifest, without the place of the model, which is this machine's."""
    return {name: value for name, value in arguments.items() if name != "model"}
