"""A model on its device with a KV cache and the tokens in it; and what of it really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.errors import ConfigurationError, WorkbenchError
from workbench.protocol.events import Generate
from workbench.protocol.wire import Arrays
from workbench.worker.architectures import describe_layers
from workbench.worker.attention import allowing, effective, watching
from workbench.worker.devices import device_name, synchronize
from workbench.worker.forcing import Report
from workbench.worker.loading import describe_weights
from workbench.worker.memory import first_line, is_out_of_memory
from workbench.worker.quant.kvcache import KVCache
from workbench.worker.sampler import Sampler
from workbench.worker.scoring import lane_rows, lost_mass, record_rows

DEFAULT_CHUNK = 512


class Loaded:
    """`tokens` are the ids that finished requests left in the cache; a pass that broke off may have left more."""

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        device: torch.device,
        vocabulary: int,
        attention: str = "sdpa",
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        self.model, self.cache, self.device, self.vocabulary = model, cache, device, vocabulary
        self.attention, self.chunk = attention, chunk
        self.tokens: list[int] = []
        self._operators: frozenset[str] = frozenset()

    def forward(self, ids: NDArray[Any], keep: int) -> torch.Tensor:
        """Run ids (n,) after the cache's tokens; logits of the last `keep`: (keep, width), in the model's dtype."""
        tensor = torch.from_numpy(ids.astype("int64")).to(self.device)
        self.cache.begin(len(ids))
        with allowing(self.attention):
            output = self.model(input_ids=tensor[None], cache=self.cache, use_cache=True, logits_to_keep=keep)
        self.cache.end()
        return output.logits[0]

    def joined(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """Consecutive logits as one block."""
        return torch.cat(blocks)

    def record(self, block: torch.Tensor, targets: NDArray[Any], position: int, seed: int) -> Arrays:
        """Trace rows."""
        return record_rows(block, torch.from_numpy(targets.astype("int64")), position, seed, self.vocabulary)

    def compare(self, block: torch.Tensor, targets: NDArray[Any], trace: Arrays, seconds: float) -> Arrays:
        """A lane's rows."""
        return lane_rows(block, torch.from_numpy(targets.astype("int64")), trace, seconds, self.vocabulary)

    def lost(self, block: torch.Tensor, targets: NDArray[Any], rows: Arrays) -> NDArray[np.float64] | None:
        """What the padding beyond the tokenizer's ids takes, where there is any."""
        if block.shape[1] <= self.vocabulary:
            return None
        return lost_mass(block, torch.from_numpy(targets.astype("int64")), rows, self.vocabulary)

    def chooser(self, request: Generate) -> Callable[[torch.Tensor], tuple[int, float]]:
        """Greedy or sampled choice."""
        sampler = Sampler(request, self.vocabulary, self.device)

        def choose(block: torch.Tensor) -> tuple[int, float]:
            token, logprob = sampler.choose(block[-1])
            return int(token), float(logprob)

        return choose

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self.device)

    def truncate(self, length: int, report: Report | None = None) -> None:
        """Keep the first `length` tokens of the context; run those again that a model with states had to give up."""
        wanted = np.array(self.tokens[:length], dtype=np.int64)
        kept = self.cache.truncate(length)
        del self.tokens[kept:]
        for start in range(kept, len(wanted), self.chunk):
            if report is not None:
                report.check()
                report.progress("prefill", start, len(wanted))
            self.forward(wanted[start : start + self.chunk], 1)
            self.tokens += wanted[start : start + self.chunk].tolist()

    def prefill(self, ids: list[int], chunk: int, report: Report) -> None:
        """Replace the context by ids, in aligned chunks, without any rows."""
        self.truncate(0)
        tokens = np.array(ids)
        for start in range(0, len(ids), chunk):
            report.check()
            self.forward(tokens[start : start + chunk], 1)
            report.progress("prefill", min(start + chunk, len(ids)), len(ids))
        self.synchronize()
        self.tokens = list(ids)

    def warm_flex(self, length: int) -> None:
        """Compile flex attention for the shapes to come, and find out whether it can be. Raises ConfigurationError."""
        try:
            # The second chunk, a shorter last one and the second token bring lengths that are compiled once more.
            for tokens in (length, length, max(1, length - 1), 1, 1):
                self.forward(np.zeros(tokens, np.int64), 1)
        except WorkbenchError:
            raise
        except Exception as error:  # torch's compilers raise anything, from a missing g++ to a Triton assertion
            if is_out_of_memory(error):
                raise
            raise ConfigurationError(
                f"flex attention cannot be compiled here: {first_line(error)}",
                where="transformers",
                next="Install a C++ compiler (CPU), or use attn=sdpa or attn=eager.",
            ) from error
        self.truncate(0)

    def watch_attention(self) -> None:
        """Run short passes as prefill and decode do, and see which operators attention runs. Raises ConfigurationError
        where a kernel cannot do one of them."""

        def run() -> None:
            room = self.cache.context
            self.forward(np.zeros(min(3, room), np.int64), 1)
            # A second chunk, which needs a mask, where there will be one: CUDA's flash kernel takes none.
            if room >= 5 and room > self.chunk:
                self.forward(np.zeros(2, np.int64), 1)
            self.truncate(min(self.cache.length, room - 1))
            if room > 1:
                self.forward(np.zeros(1, np.int64), 1)

        self._operators = watching(self.model, run)
        self.truncate(0)

    def describe(self) -> dict[str, Any]:
        """Weights, KV cache, attention, device and sizes, read from the loaded objects."""
        config, cache, weights = self.model.config, self.cache, describe_weights(self.model)
        attention, kernels = effective(self.attention, config._attn_implementation, self._operators)
        return {
            "weights": weights,
            "weights_bytes": weights["bytes"],
            "kv": {
                "scheme": cache.scheme,
                "stored": cache.describe(),
                "group": cache.group,
                "layers": describe_layers(cache.shapes),
                "attended_dtype": _name(cache.attended),
                "bytes": cache.nbytes,
                "positions": cache.context,
                "cuts_exactly": cache.cuts_exactly,
            },
            "attn": attention,
            "attn_kernels": kernels,
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "logits_dtype": _name(self.model.lm_head.weight.dtype),
            "logits_width": int(config.vocab_size),
            "vocabulary": self.vocabulary,
            "layers": int(config.num_hidden_layers),
            "kv_heads": int(config.num_key_value_heads),
            "head_dim": cache.head_dim,
            "model_type": config.model_type,
            "context": cache.context,
            "context_limit": int(config.max_position_embeddings),
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
