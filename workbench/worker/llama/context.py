"""A context of llama.cpp: its KV cache, passes over tokens, rollback and branches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError, EngineError
from workbench.protocol.events import Generate
from workbench.protocol.wire import Arrays
from workbench.worker.backends.base import OutOfMemory
from workbench.worker.forcing import Report
from workbench.worker.host_sampler import HostSampler
from workbench.worker.host_scoring import lane_rows, lost_mass, record_rows
from workbench.worker.llama.binding import ATTENTION, KV_TYPES, api
from workbench.worker.llama.log import Log
from workbench.worker.llama.weights import Weights

SEQUENCES = 4
"""Branches that one context can hold, the main one included."""

_FULL = 1  # what llama_decode returns where the KV cache has no room left


@dataclass(frozen=True, slots=True)
class Settings:
    """What a context is made with: `context` tokens, `chunk` of them a pass at most, `ubatch` of these at once."""

    context: int
    chunk: int
    ubatch: int
    keys: str
    values: str
    attention: str
    threads: int
    offload: bool = False


class Loaded:
    """Weights with a context. `tokens` are the ids that finished requests left in the KV cache's sequence 0; a pass
    that broke off may have left more.

    Sequence 0 is what scoring and generation run on; 1 to SEQUENCES − 1 are branches of it.
    """

    def __init__(self, weights: Weights, settings: Settings, log: Log) -> None:
        """Raises OutOfMemory, and ConfigurationError with llama.cpp's words where it refuses the settings."""
        self.weights, self.log = weights, log
        self.vocabulary, self.width = weights.vocabulary, weights.width
        self.tokens: list[int] = []
        log.begin()
        self.context: Any = api.llama_init_from_model(weights.model, _params(settings))
        if not self.context:
            if log.says_memory():
                raise OutOfMemory(f"out of memory for a context of {settings.context} tokens: {log.complaint()}")
            raise ConfigurationError(
                f"llama.cpp cannot make this context: {log.complaint()}",
                where="llamacpp",
                next="Use another kv, fa or ctx.",
            )
        self.lines = log.lines
        self.memory: Any = api.llama_get_memory(self.context)
        self.size: int = api.llama_n_ctx(self.context)
        self._batch = _Batch(int(api.llama_n_batch(self.context)))

    def forward(self, ids: NDArray[Any], keep: int, sequence: int = 0) -> NDArray[np.float32]:
        """Run ids (n,) after what the sequence holds; logits of the last `keep`: (keep, width).

        One row is a copy; more are llama.cpp's own memory, which the next pass writes over. Raises EngineError.
        """
        self._batch.fill(ids, self.length(sequence), keep, sequence)
        code = api.llama_decode(self.context, self._batch.struct)
        if code == _FULL:
            raise EngineError(f"the KV cache of {self.size} tokens has no room for {len(ids)} more", where="llamacpp")
        if code:
            raise EngineError(f"llama_decode failed with {code}: {self.log.complaint()}", where="llamacpp")
        address = ctypes.cast(api.llama_get_logits(self.context), ctypes.c_void_p).value
        if not address:
            raise EngineError("llama.cpp gave no logits", where="llamacpp")
        memory: Any = (ctypes.c_float * (keep * self.width)).from_address(address)
        rows = np.frombuffer(memory, np.float32).reshape(keep, self.width)
        return rows.copy() if keep == 1 else rows

    def length(self, sequence: int = 0) -> int:
        """Tokens that a sequence holds, as llama.cpp counts them."""
        return int(api.llama_memory_seq_pos_max(self.memory, sequence)) + 1

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Roll a sequence back to its first `length` tokens. Raises EngineError where this memory cannot."""
        if not api.llama_memory_seq_rm(self.memory, sequence, length, -1):
            raise EngineError(f"llama.cpp cannot roll this model's memory back to {length} tokens", where="llamacpp")
        if sequence == 0:
            del self.tokens[length:]

    def branch(self, source: int, target: int) -> None:
        """Make sequence `target` what `source` is; they share the tokens so far and go on apart.

        Bit for bit a branch goes on as its source would while no other branch has put tokens between; else to rounding,
        since attention then sums over the same cells in another order.
        """
        if not 0 <= source < SEQUENCES or not 0 < target < SEQUENCES or source == target:
            raise ConfigurationError(f"cannot branch {source} to {target}: 0 to {SEQUENCES - 1}", where="llamacpp")
        api.llama_memory_seq_rm(self.memory, target, -1, -1)
        api.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def prefill(self, ids: list[int], chunk: int, report: Report) -> None:
        """Replace sequence 0 by ids, in chunks, without any rows."""
        self.truncate(0)
        tokens = np.array(ids)
        for start in range(0, len(ids), chunk):
            report.check()
            self.forward(tokens[start : start + chunk], 1)
            report.progress("prefill", min(start + chunk, len(ids)), len(ids))
        self.tokens = list(ids)

    def synchronize(self) -> None:
        """Wait for the device."""
        api.llama_synchronize(self.context)

    def joined(self, blocks: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Consecutive logits as one block."""
        return np.concatenate(blocks)

    def record(self, block: NDArray[np.float32], targets: NDArray[Any], position: int, seed: int) -> Arrays:
        """Trace rows."""
        return record_rows(block, targets, position, seed, self.vocabulary)

    def compare(self, block: NDArray[np.float32], targets: NDArray[Any], trace: Arrays, seconds: float) -> Arrays:
        """A lane's rows."""
        return lane_rows(block, targets, trace, seconds, self.vocabulary)

    def lost(self, block: NDArray[np.float32], targets: NDArray[Any], rows: Arrays) -> NDArray[np.float64] | None:
        """What the padding beyond the tokenizer's ids takes, where there is any."""
        return lost_mass(block, targets, rows, self.vocabulary) if self.width > self.vocabulary else None

    def chooser(self, request: Generate) -> Callable[[NDArray[np.float32]], tuple[int, float]]:
        """Greedy or sampled choice."""
        sampler = HostSampler(request, self.vocabulary)
        return lambda block: sampler.choose(block[-1])

    def free(self) -> None:
        """Give the context's memory back; the weights stay."""
        if self.context:
            api.llama_free(self.context)
            self.context = None


class _Batch:
    """The tokens of one pass. All of them belong to one sequence, so all point at one number."""

    def __init__(self, size: int) -> None:
        self.tokens, self.positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.wanted, self.counts = np.zeros(size, np.int8), np.ones(size, np.int32)
        self.sequence = np.zeros(1, np.int32)
        self.pointers = np.full(size, self.sequence.ctypes.data, np.uintp)
        self.struct = api.llama_batch()
        kinds: dict[str, Any] = {field[0]: field[1] for field in api.llama_batch._fields_}
        for name, array in (
            ("token", self.tokens),
            ("pos", self.positions),
            ("n_seq_id", self.counts),
            ("seq_id", self.pointers),
            ("logits", self.wanted),
        ):
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def fill(self, ids: NDArray[Any], start: int, keep: int, sequence: int) -> None:
        n = len(ids)
        self.struct.n_tokens = n
        self.sequence[0] = sequence
        self.tokens[:n] = ids
        self.positions[:n] = np.arange(start, start + n)
        self.wanted[: n - keep] = 0
        self.wanted[n - keep : n] = 1


def _params(settings: Settings) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx = settings.context
    params.n_batch = settings.chunk
    params.n_ubatch = settings.ubatch
    # Logits of a whole chunk, and of one token a sequence at least: llama.cpp aborts where it is given fewer.
    params.n_outputs_max = params.n_outputs_max_per_seq = max(settings.chunk, SEQUENCES)
    params.n_seq_max = SEQUENCES
    params.kv_unified = True  # every sequence can use the whole cache, and a branch shares its tokens
    params.n_threads = params.n_threads_batch = settings.threads
    params.type_k, params.type_v = KV_TYPES[settings.keys], KV_TYPES[settings.values]
    params.flash_attn_type = ATTENTION[settings.attention]
    params.offload_kqv = params.op_offload = settings.offload
    params.no_perf = True
    return params
