"""A decoder's dimensions in another order: the same function, weights that lie on no quantization grid any more.

The weights of a dequantised file lie on its grid, in groups of consecutive inputs: quantised again in the same groups
they snap back, and a bench would measure that instead of the quantization. Three families of permutations leave the
function as it is and mix the groups: of the residual stream, of each layer's intermediate dimensions, and of each KV
head's value dimensions. Queries and keys stay, since their dimensions carry rotary pairs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ModelError

RULE = "residual, intermediate and value dimensions permuted"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.([a-z]+)_proj\.weight")
_RESIDUAL_IN = ("q", "k", "v", "gate", "up")
_RESIDUAL_OUT = ("o", "down")


@dataclass(frozen=True, slots=True)
class Permutation:
    """The orders of one seed for a decoder of these sizes; `head_dim` values a KV head."""

    seed: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any, seed: int) -> Permutation:
        """For a transformers configuration. Raises ModelError for a decoder whose tensors are not known here."""
        if config.model_type != "llama" or getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", 0):
            raise ModelError(f"a {config.model_type} with these tensors cannot be permuted", where="conversion")
        sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
        return cls(seed, *sizes, head_dim=config.head_dim or config.hidden_size // config.num_attention_heads)

    def apply(self, name: str, values: Any) -> Any:
        """The tensor of that name, (out, in) or (hidden,), in the new order; arrays and torch tensors alike."""
        if name.startswith(("model.embed_tokens.", "lm_head.")):
            return values[:, self._order(0)]
        if name.endswith("norm.weight"):
            return values[self._order(0)]
        match = _LAYER.fullmatch(name)
        if match is None:
            raise ModelError(f"tensor {name!r} has no place in the permutation", where="conversion")
        layer, kind = int(match[1]), match[2]
        if kind in _RESIDUAL_IN:
            values = values[:, self._order(0)]
        if kind in _RESIDUAL_OUT:
            values = values[self._order(0)]
        if kind in ("gate", "up"):
            values = values[self._order(1, layer)]
        elif kind == "down":
            values = values[:, self._order(1, layer)]
        elif kind == "v":
            values = values[self._values(layer, 1)]
        elif kind == "o":
            values = values[:, self._values(layer, self.heads // self.kv_heads)]
        return values

    def _values(self, layer: int, queries: int) -> NDArray[np.int64]:
        """Where each value dimension comes from: of every KV head (`queries` 1), or of every query head reading it."""
        orders = [self._order(2, layer, head) for head in range(self.kv_heads) for _ in range(queries)]
        return np.concatenate([order + place * self.head_dim for place, order in enumerate(orders)])

    def _order(self, family: int, layer: int = 0, head: int = 0) -> NDArray[np.int64]:
        size = (self.hidden, self.intermediate, self.head_dim)[family]
        key = np.array([self.seed, family << 48 | layer << 16 | head], np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(size)
