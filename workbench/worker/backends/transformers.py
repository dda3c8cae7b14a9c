"""The transformers backend: eager PyTorch on CUDA, MPS or CPU, with KV caches and int8 weights of our own."""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; makes cuBLAS deterministic
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # flex compiles here, not in processes that outlive us

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from workbench.config.axes import ENGINES, check
from workbench.config.lane import Configuration
from workbench.errors import ConfigurationError
from workbench.metrics.divergence import HEAD_AND_SAMPLES
from workbench.protocol.events import Generate, Inspect, Score, Windows
from workbench.protocol.wire import Arrays
from workbench.worker import generation
from workbench.worker.architectures import check_attention
from workbench.worker.attention import implementation
from workbench.worker.backends.base import OutOfMemory
from workbench.worker.channel import Job
from workbench.worker.devices import choose_device, cpu_features, devices
from workbench.worker.forcing import Scoring, check_request, tokens_kept
from workbench.worker.loaded import Loaded
from workbench.worker.loading import DTYPES, load, read_config, vocabulary_size
from workbench.worker.memory import PeakMemory, first_line, is_out_of_memory, return_freed
from workbench.worker.quant import compressed
from workbench.worker.quant.kvcache import DEFAULT_GROUP, make_cache
from workbench.worker.resident import return_large_blocks
from workbench.worker.windows import Running, run_windows

ENGINE = ENGINES["transformers"]
DEFAULT_THREADS = torch.get_num_threads()  # torch's own choice, before any lane changes it
Answer = TypeVar("Answer")


def make() -> TransformersBackend:
    """The backend, torch set to be repeatable."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return_large_blocks()
    return TransformersBackend()


def _computing(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Run without autograd, and turn torch's several out-of-memory errors into OutOfMemory."""

    @wraps(method)
    def wrapped(*args: Any) -> Answer:
        try:
            with torch.inference_mode():
                return method(*args)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            text = first_line(error)
        # Raised outside the handler: the first error's traceback holds the tensors that filled the memory.
        raise OutOfMemory(f"out of memory: {text}")

    return wrapped


class TransformersBackend:
    """See `workbench.worker.backends.base.Backend`."""

    def __init__(self) -> None:
        self.loaded: Loaded | None = None
        self.configuration = Configuration()
        self._key: tuple[Any, ...] = ()
        self._memory = PeakMemory(torch.device("cpu"))

    def probe(self) -> dict[str, Any]:
        """Versions, devices and the values of each axis."""
        return {
            "name": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "executable": sys.executable,
            "devices": devices(),
            "axes": {axis: list(values) for axis, values in ENGINE.axes.items()},
            "keys": list(ENGINE.keys),
            "converts": ["gguf"],
            "cpu": cpu_features(),
        }

    @_computing
    def start(self, configuration: Configuration, model: Path, context: int, job: Job) -> dict[str, Any]:
        """Check everything that can be checked without weights, then load them (or keep them) and make the cache."""
        check(configuration)
        device = choose_device(configuration.device)
        implementation(configuration.attn)  # whether its package is here
        # transformers copies keys and values to every query head where there is a mask. The CPU's kernel reads them
        # where they lie: the same bits for a chunk, in less time and memory. CUDA would take another kernel.
        os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1" if device.type == "cpu" else "0"
        config = read_config(model, configuration.weights)
        check_attention(config, implementation(configuration.attn), str(model))
        stored = compressed.quantization(config)
        limit = int(config.max_position_embeddings)
        if not 0 < context <= limit:
            raise ConfigurationError(
                f"a context of {context} tokens is not within the model's limit of {limit}",
                where=str(model),
                next="Use a shorter session, --fit, or a model with a longer context.",
            )
        own = _cache_keys(configuration)
        make_cache(configuration.kv, config, 1, DTYPES[configuration.weights], torch.device("meta"), **own)
        vocabulary = vocabulary_size(model, config)
        key = (*configuration.weights_key(), str(model))
        network: Any = self.loaded.model if self.loaded is not None and key == self._key else None
        kept = network is not None
        self.release()  # the old cache's memory goes before the new one's comes
        if not kept:
            torch.set_num_threads(configuration.threads or DEFAULT_THREADS)
            job.progress("loading", 0, 1)
            network = load(model, config, configuration.weights, configuration.attn, device)
        network.set_attn_implementation(implementation(configuration.attn))
        cache = make_cache(configuration.kv, network.config, context, DTYPES[configuration.weights], device, **own)
        loaded = Loaded(network, cache, device, vocabulary, configuration.attn, configuration.chunk)
        if configuration.attn == "flex":
            job.progress("compiling", 0, 1)
            loaded.warm_flex(max(1, min(configuration.chunk, (context - 2) // 3)))
        loaded.watch_attention()
        effective = loaded.describe()
        if stored:
            effective["weights"] |= compressed.describe(stored, network, configuration.weights)
        self.loaded, self.configuration, self._key = loaded, configuration, key
        self._memory = PeakMemory(device)
        return_freed()
        job.progress("loading", 1, 1)
        return {
            "engine": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            **effective,
            "build": f"torch {torch.__version__}",
            "chunk": configuration.chunk,
            "estimator": HEAD_AND_SAMPLES,
            "logits": "full",
            "notes": [],
            "cpu": cpu_features(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "weights_kept": kept,
        }

    @_computing
    def score(self, request: Score, job: Job) -> dict[str, Any]:
        """Forced scoring."""
        loaded = self._require("score")
        check_request(request, loaded.cache.context, loaded.model.config.vocab_size, loaded.tokens)
        loaded.truncate(tokens_kept(request), job)
        self._memory.reset()
        stats = Scoring(loaded, request, job, self.configuration.chunk).run()
        loaded.tokens = request.arrays["ids"].tolist()
        return {**stats, **self.stats()}

    @_computing
    def windows(self, request: Windows, job: Job) -> dict[str, Any]:
        """Score or write a llama.cpp base file."""
        from workbench.worker.prompt import bos  # only where asked: it imports the tokenizers of every model

        loaded = self._require("windows")
        width, chunk, first = int(loaded.model.config.vocab_size), self.configuration.chunk, bos(Path(self._key[-1]))
        self._memory.reset()
        running = Running(loaded, _host, width, loaded.cache.context, chunk, torch.get_num_threads(), first)
        try:
            return {**run_windows(request, running, job), **self.stats()}
        finally:
            loaded.truncate(0)

    @_computing
    def generate(self, request: Generate, job: Job) -> dict[str, Any]:
        """Continue the context, or the ids that the request brings."""
        loaded = self._require("generate")
        ids = request.arrays.get("ids")
        keep = generation.check_generate(
            request, len(loaded.tokens), loaded.cache.context, loaded.model.config.vocab_size
        )
        self._memory.reset()
        if ids is not None:
            loaded.prefill(ids[:keep].tolist(), self.configuration.chunk, job)
        last = loaded.tokens[keep - 1]
        # The last token runs again on its own: its pass gives the first new token's logits, in decode's numerics.
        loaded.truncate(keep - 1, job)
        new, stats = generation.generate(loaded, last, request, job)
        loaded.tokens += [last, *new[:-1]]
        return {**stats, **self.stats()}

    def inspect(self, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        """The folder's own tokenizer and template."""
        from workbench.worker.prompt import inspect  # only where asked: it imports the tokenizers of every model

        return inspect(Path(request.model_path), request.text)

    def convert(self, source: Path, target: Path, scheme: str, job: Job) -> dict[str, Any]:
        """GGUF to safetensors; `permuted:SEED` puts the dimensions in another order."""
        kind, _, seed = scheme.partition(":")
        if scheme and (kind != "permuted" or not seed.isdecimal()):
            raise ConfigurationError(f"weights of {scheme} cannot be written", where="transformers")
        from workbench.worker.quant.gguf import convert  # needs the gguf package, which an engine can do without

        job.progress("converting", 0, 0)

        def report(done: int, total: int) -> None:
            job.check()
            job.progress("converting", done, total)

        return convert(source, target, report, int(seed) if seed else None)

    def stats(self) -> dict[str, Any]:
        """Memory and the KV cache now."""
        cache = self.loaded.cache if self.loaded else None
        return {
            "peak_memory_bytes": self._memory.read(),
            "memory_kind": self._memory.kind,
            "kv_cache_bytes": cache.nbytes if cache else 0,
            "kv_workspace_bytes": cache.workspace_bytes if cache else 0,
            "kv_state_bytes": cache.state_bytes if cache else 0,
            "kv_positions": cache.length if cache else 0,
        }

    def release(self) -> None:
        """Let go of model and cache."""
        self.loaded, self._key = None, ()
        gc.collect()
        return_freed()

    def stop(self) -> None:
        """Same as release."""
        self.release()

    def _require(self, what: str) -> Loaded:
        if self.loaded is None:
            raise ConfigurationError("no model is loaded", where=what, next="Send Start first.")
        return self.loaded


def _host(block: torch.Tensor) -> NDArray[np.float32]:
    """A block of logits as float32 in this process's memory."""
    return block.float().cpu().numpy()


def _cache_keys(configuration: Configuration) -> dict[str, Any]:
    """The lane's own keys as `make_cache` takes them; their form was checked with the lane."""
    own = dict(configuration.extra)
    return {
        "group": int(own.get("kv_group", DEFAULT_GROUP)),
        "window": int(own.get("kv_window", "0")),
        "channel": own.get("kv_keys") == "channel",
    }
