"""The engines driven bare, as `overhead` compares our worker with: the least that gives the same logits and tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from workbench.config.lane import Configuration

Clock = Callable[[], float]


class Bare(Protocol):
    """One engine, with our backend started on it beside the bare calls; both use the same weights."""

    backend: Any
    versions: str
    on_cpu: bool

    def score(self, ids: np.ndarray[Any, Any], chunk: int) -> None:
        """All logits of all tokens, in chunks."""
        ...

    def decode(self, ids: np.ndarray[Any, Any], tokens: int, clock: Clock) -> float:
        """Greedy tokens/s after a prompt; the first token, whose pass stands for the prompt, is left out."""
        ...


class Transformers:
    """The model's own forward pass with transformers' DynamicCache, and its `generate`."""

    def __init__(self, configuration: Configuration, model: Path, context: int, job: Any) -> None:
        from workbench.worker.backends.transformers import make
        from workbench.worker.devices import cpu_features, device_name

        self.backend = make()
        self.backend.start(configuration, model, context, job)
        loaded = self.backend.loaded
        assert loaded is not None
        self.loaded: Any = loaded
        self.loaded.model.generation_config.eos_token_id = None
        self.on_cpu = loaded.device.type == "cpu"
        self.versions = (
            f"torch {torch.__version__}, transformers {transformers.__version__}, {device_name(loaded.device)}"
            f" {cpu_features()}, {torch.get_num_threads()} threads"
        )

    def score(self, ids: np.ndarray[Any, Any], chunk: int) -> None:
        """All logits."""
        tensor = torch.from_numpy(ids).long().to(self.loaded.device)[None]
        cache = DynamicCache(config=self.loaded.model.config)
        with torch.inference_mode():
            for start in range(0, len(ids), chunk):
                self.loaded.model(input_ids=tensor[:, start : start + chunk], cache=cache, use_cache=True)
        self.loaded.synchronize()

    def decode(self, ids: np.ndarray[Any, Any], tokens: int, clock: Clock) -> float:
        """`generate`."""
        times = _Times(clock)
        prompt = torch.from_numpy(ids).long().to(self.loaded.device)[None]
        self.loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=times,
        )
        return (len(times.at) - 2) / (times.at[-1] - times.at[1])


class _Times:
    """A streamer of transformers' `generate` that only notes when tokens come; the first call brings the prompt."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(self.clock())

    def end(self) -> None:
        pass


class LlamaCpp:
    """A loop over llama_decode on our backend's own context, with llama-cpp-python's own batch; greedy by argmax."""

    def __init__(self, configuration: Configuration, model: Path, context: int, job: Any) -> None:
        import llama_cpp.llama_cpp as api

        from workbench.worker.backends.llamacpp import make

        self.api: Any = api
        self.backend: Any = make()
        effective = self.backend.start(configuration, model, context, job)
        self.batch: Any = api.llama_batch_init(configuration.chunk, 0, 1)
        self.on_cpu = effective["device"] == "cpu"
        self.versions = (
            f"llama-cpp-python {effective['version']} ({effective['build']}), {effective['device']},"
            f" {effective['threads']} threads, fa {effective['attn']}"
        )

    @property
    def context(self) -> Any:
        assert self.backend.loaded is not None
        return self.backend.loaded.context

    def score(self, ids: np.ndarray[Any, Any], chunk: int) -> None:
        """All logits."""
        self._clear()
        for start in range(0, len(ids), chunk):
            self._run(ids[start : start + chunk], start, every=True)
            self.api.llama_get_logits(self.context)

    def decode(self, ids: np.ndarray[Any, Any], tokens: int, clock: Clock) -> float:
        """Argmax and llama_decode."""
        self._clear()
        chunk, times = self.backend.configuration.chunk, list[float]()
        for start in range(0, len(ids), chunk):
            self._run(ids[start : start + chunk], start)
        width = self.backend.loaded.width
        for position in range(len(ids), len(ids) + tokens):
            logits = np.ctypeslib.as_array(self.api.llama_get_logits(self.context), (1, width))
            token = int(logits[0].argmax())
            times.append(clock())
            self._run(np.array([token]), position)
        return (len(times) - 1) / (times[-1] - times[0])

    def _clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def _run(self, ids: np.ndarray[Any, Any], start: int, every: bool = False) -> None:
        batch, n = self.batch, len(ids)
        batch.n_tokens = n
        np.ctypeslib.as_array(batch.token, (n,))[:] = ids
        np.ctypeslib.as_array(batch.pos, (n,))[:] = np.arange(start, start + n)
        np.ctypeslib.as_array(batch.n_seq_id, (n,))[:] = 1
        wanted = np.ctypeslib.as_array(ctypes.cast(batch.logits, ctypes.POINTER(ctypes.c_int8)), (n,))
        wanted[:] = every
        wanted[-1] = 1
        for i in range(n):
            batch.seq_id[i][0] = 0
        if code := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {code}")
