"""The model types that are tested here, and which of their layers keep keys and values, of what size.

A layer has a KV cache of its own (full or sliding-window attention), keeps a state of fixed size (linear attention), or
reads what an earlier layer stored (shared). Every type is tested with a tiny model with random weights, in float32:
chunks and single tokens give the logits of one pass. What was not tested is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.cache_utils import get_layer_types_and_kwargs

from workbench.errors import ConfigurationError

MODELS: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}
"""Classes by model type. The last four are folders with a vision part, of which the text part alone is loaded."""

TEXT_PREFIX = {r"^(model\.)?language_model\.(model\.)?": "model."}
"""Names of the text part's tensors in folders with a vision part → their names in a folder without one."""
_OTHER_PARTS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\.")

FULL, SLIDING, LINEAR, SHARED = "full attention", "sliding-window attention", "linear attention", "shared"
_KINDS = {"full_attention": FULL, "sliding_attention": SLIDING, "linear_attention": LINEAR, "dummy": SHARED}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer: its kind; heads and size of its keys and values; whether later layers read what it stored."""

    kind: str
    heads: int
    head_dim: int
    lends: bool = False

    @property
    def stores(self) -> bool:
        """Whether it has a KV cache of its own."""
        return self.kind in (FULL, SLIDING)


def model_class(config: Any) -> Any:
    """The class that loads a text configuration (`text_config`)."""
    return getattr(transformers, MODELS[config.model_type])


def renamed(config: Any) -> dict[str, str] | None:
    """How to rename the tensors of a folder with a vision part, where transformers does not do it itself."""
    return TEXT_PREFIX if config.model_type in ("gemma3_text", "gemma4_text") else None


def of_text(names: set[str]) -> set[str]:
    """The names that belong to no part for pictures or sound."""
    return {name for name in names if not _OTHER_PARTS.match(name)}


def text_config(config: Any) -> Any:
    """The configuration of the part that reads and writes text: the same object where there is no other part."""
    return config.get_text_config(decoder=True)


def layer_shapes(config: Any) -> list[LayerShape]:
    """Every layer of a text configuration. Raises ConfigurationError for a kind of layer that is not supported."""
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ConfigurationError(
            "tokens attend to those after them: this model predicts no next token",
            where=f"model type {config.model_type}",
        )
    kinds, _ = get_layer_types_and_kwargs(config)
    lending = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    shared = "dummy" in kinds
    shapes: list[LayerShape] = []
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise ConfigurationError(
            f"layers of the kind {unknown[0]!r} are not supported",
            where=f"model type {config.model_type}",
            next=f"Supported: {', '.join(_KINDS)}.",
        )
    for kind, layer, mode in zip(kinds, config.per_layer_config, lending, strict=True):
        if _KINDS[kind] == SLIDING and not getattr(layer, "sliding_window", None):
            raise ConfigurationError(
                "config.json names layers of sliding-window attention and no window",
                where=f"model type {config.model_type}",
            )
        heads = int(layer.num_key_value_heads)
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        shapes.append(LayerShape(_KINDS[kind], heads, int(size), shared and mode == "store"))
    if not any(shape.stores for shape in shapes):
        raise ConfigurationError("no layer has a KV cache", where=f"model type {config.model_type}")
    return shapes


def check_attention(config: Any, attention: str, where: str) -> None:
    """Raise ConfigurationError where transformers has no such attention for a model, or one that leaves parts out.

    `attention` is transformers' word. Its sdpa knows neither sinks nor a soft-cap of attention scores.
    """
    if "sdpa" not in attention:
        return
    softcap = getattr(config, "attn_logit_softcapping", None)
    if not model_class(config)._supports_sdpa or softcap:
        reason = "a soft-cap of attention scores" if softcap else "attention that sdpa cannot compute (sinks)"
        flex = "attn=flex" if softcap else "on CUDA attn=flex"
        raise ConfigurationError(
            f"attn=sdpa is not possible: model type {config.model_type} has {reason}",
            where=where,
            next=f"Use attn=eager, or {flex}.",
        )


def describe_layers(shapes: list[LayerShape]) -> str:
    """Which layers a KV scheme applies to, in words."""
    kinds = Counter(shape.kind for shape in shapes)
    stored = [f"{kinds[kind]} {kind}" for kind in (FULL, SLIDING) if kinds[kind]]
    total = sum(shape.stores for shape in shapes)
    text = f"{total} of {len(shapes)} layers ({', '.join(stored) if len(stored) > 1 else stored[0].split(' ', 1)[1]})"
    if kinds[LINEAR]:
        text += f"; {kinds[LINEAR]} linear-attention layers keep their own state"
    if kinds[SHARED]:
        text += f"; {kinds[SHARED]} layers read what earlier ones stored"
    return text
