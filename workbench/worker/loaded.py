"""A model on its device with a KV cache and the tokens in it; and what of it really runs."""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import ConfigurationError, WorkbenchError
from workbench.worker.devices import device_name, synchronize
from workbench.worker.forcing import Report
from workbench.worker.loading import ATTENTION, describe_weights
from workbench.worker.memory import first_line, is_out_of_memory
from workbench.worker.quant.kvcache import KVCache


class Loaded:
    """`tokens` are the ids that finished requests left in the cache; a pass that broke off may have left more."""

    def __init__(self, model: Any, cache: KVCache, device: torch.device, vocabulary: int) -> None:
        self.model, self.cache, self.device, self.vocabulary = model, cache, device, vocabulary
        self.tokens: list[int] = []

    def forward(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Run ids (n,) after the cache's tokens; logits of the last `keep`: (keep, width), in the model's dtype."""
        output = self.model(input_ids=ids[None], cache=self.cache, use_cache=True, logits_to_keep=keep)
        return output.logits[0]

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self.device)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context."""
        self.cache.truncate(length)
        del self.tokens[length:]

    def prefill(self, ids: list[int], chunk: int, report: Report) -> None:
        """Replace the context by ids, in aligned chunks, without any rows."""
        self.truncate(0)
        tensor = torch.tensor(ids, device=self.device)
        for start in range(0, len(ids), chunk):
            report.check()
            self.forward(tensor[start : start + chunk], 1)
            report.progress("prefill", min(start + chunk, len(ids)), len(ids))
        self.synchronize()
        self.tokens = list(ids)

    def warm_flex(self, length: int) -> None:
        """Compile flex attention for the shapes to come, and find out whether it can be. Raises ConfigurationError."""
        try:
            # The second chunk, a shorter last one and the second token bring lengths that are compiled once more.
            for tokens in (length, length, max(1, length - 1), 1, 1):
                self.forward(torch.zeros(tokens, dtype=torch.int64, device=self.device), 1)
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

    def describe(self) -> dict[str, Any]:
        """Weights, KV cache, attention, device and sizes, read from the loaded objects."""
        config, cache, weights = self.model.config, self.cache, describe_weights(self.model)
        return {
            "weights": weights,
            "weights_bytes": weights["bytes"],
            "kv": {
                "scheme": cache.scheme,
                "stored": cache.describe(),
                "group": cache.group,
                "layers": len(cache.layers),
                "attended_dtype": _name(cache.attended),
                "bytes": cache.nbytes,
                "positions": cache.context,
            },
            "attn": {theirs: ours for ours, theirs in ATTENTION.items()}[config._attn_implementation],
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
