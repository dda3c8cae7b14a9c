"""One vLLM engine, stepped by us: a request at a time, so that each step can be timed, watched and given up."""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.triton_utils import dispatcher
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from workbench.errors import EngineError
from workbench.worker.vllm.tap import Tap, make_tap

set_num_threads = torch.set_num_threads  # vLLM's CPU worker puts a function in its place that does nothing
DEFAULT_THREADS = torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: its seconds, vLLM's output for the request (None within a prompt), tokens drafted, accepted."""

    seconds: float
    output: Any
    drafted: int
    accepted: int

    @property
    def tokens(self) -> list[int]:
        """The tokens that this step made known."""
        return list(self.output.outputs[0].token_ids) if self.output is not None else []


class _Drafts(StatLoggerBase):
    """Drafted and accepted tokens of the step in progress, as the scheduler counts them."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.drafted = self.accepted = 0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        found = getattr(scheduler_stats, "spec_decoding_stats", None)
        if found is not None:
            self.drafted += int(found.num_draft_tokens)
            self.accepted += int(found.num_accepted_tokens)

    def log_engine_initialized(self) -> None:
        pass


def _register_once(overrides: Any) -> None:
    """vLLM registers its CPU kernels for each engine anew, which fails once numba is loaded; they are the same ones."""
    missing = {name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry}
    if missing:
        _register(missing)


_register = dispatcher.register_kernels
dispatcher.register_kernels = _register_once


class Engine:
    """A loaded model. `tap` reads whole logits where the runner is in this process, else None."""

    def __init__(self, arguments: dict[str, Any], threads: int) -> None:
        set_num_threads(threads or DEFAULT_THREADS)
        values = dict(arguments)
        if "attention_backend" in values:
            values["attention_backend"] = AttentionBackendEnum[values["attention_backend"]]
        self._drafts = _Drafts(None)
        self._numbers = itertools.count(1)
        self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**values), stat_loggers=[lambda *_: self._drafts])
        self.config: Any = self.llm.vllm_config
        worker = getattr(getattr(getattr(self.llm, "model_executor", None), "driver_worker", None), "worker", None)
        runner = getattr(worker, "model_runner", None)
        self.v2 = bool(self.config.use_v2_model_runner)
        self.chunk = int(self.config.scheduler_config.max_num_batched_tokens)
        self.tap: Tap | None = None
        if runner is not None and not self.v2 and self.config.speculative_config is None:
            self.tap = make_tap(runner)

    def describe(self) -> dict[str, Any]:
        """What the first worker says of itself (`readback.Readback`)."""
        return self.llm.collective_rpc("workbench_describe")[0]

    def forget(self) -> None:
        """Drop what the prefix cache holds."""
        self.llm.reset_prefix_cache()

    def run(self, ids: list[int], **parameters: Any) -> Generator[Step]:
        """Step through one request: `ids`, then `max_tokens` tokens, greedy unless `parameters` say otherwise.

        Closing the generator before its end aborts the request.
        """
        name = f"workbench-{next(self._numbers)}"
        values = {"temperature": 0.0, "ignore_eos": True, **parameters}
        params = SamplingParams(detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.DELTA, **values)
        self.llm.add_request(name, {"prompt_token_ids": ids}, params)
        try:
            while self.llm.has_unfinished_requests():
                self._drafts.drafted = self._drafts.accepted = 0
                if self.tap is not None:
                    self.tap.clear()
                began = time.perf_counter()
                outputs = self.llm.step()
                seconds = time.perf_counter() - began
                output = outputs[0] if outputs else None
                yield Step(seconds, output, self._drafts.drafted, self._drafts.accepted)
                if output is not None and output.finished and output.outputs[0].finish_reason == "error":
                    raise EngineError("vLLM gave the request up", where="vllm", next="The engine's log has the cause.")
        finally:
            if self.tap is not None:
                self.tap.clear()
            if self.llm.has_unfinished_requests():
                self.llm.abort_request([name])

    def close(self) -> None:
        """Free the model and the cache; another engine can be made in this process afterwards."""
        self.tap = None
        with contextlib.suppress(Exception):  # a core that has died cannot be asked to end
            self.llm.engine_core.shutdown()
        self.llm = self.config = None
        cleanup_dist_env_and_memory()
        gc.collect()
