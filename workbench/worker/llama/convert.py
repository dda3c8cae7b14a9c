"""A safetensors folder becomes a GGUF file of whole numbers: names, rotary order and metadata as llama.cpp reads them.

The mirror of `worker.quant.gguf`. bf16 widens to float32 exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError, ModelError
from workbench.worker.llama.binding import FILE_TYPES
from workbench.worker.llama.safetensors import Tensor, read_folder
from workbench.worker.llama.tokens import OTHERWISE, read_object, tokenizer_metadata
from workbench.worker.llama.writer import BF16, F16, F32, U32, Planned, write_gguf
from workbench.worker.quant.gguf import ARCHITECTURES, BLOCK_NAMES, GLOBAL_NAMES

KINDS = {"F32": F32, "F16": F16, "BF16": BF16}
_GLOBAL = {theirs: ours for ours, theirs in GLOBAL_NAMES.items()}
_BLOCK = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def write_folder(folder: Path, target: Path, scheme: str, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Write `target` with weights of F32, F16 or BF16; vectors stay float32. Returns facts.

    Raises ConfigurationError for what has no place in such a file, ModelError for damage.
    """
    config = read_object(folder / "config.json")
    if not config:
        raise ModelError("there is no config.json: not a model folder", where=str(folder))
    metadata = _metadata(config, folder, scheme)
    tensors = read_folder(folder)
    planned = [tensor for name, item in sorted(tensors.items()) if (tensor := _plan(name, item, config, scheme))]
    _check_whole(planned, config, folder)
    planned += _rope_factors(config, folder)
    width = next(tensor.shape[0] for tensor in planned if tensor.name == "token_embd.weight")
    architecture = config["model_type"]
    metadata[f"{architecture}.vocab_size"] = U32(width)
    metadata |= tokenizer_metadata(folder, config, width)
    write_gguf(target, metadata, planned, progress)
    return {
        "format": "gguf",
        "architecture": architecture,
        "scheme": scheme,
        "source": folder.name,
        "source_types": dict(Counter(item.dtype for item in tensors.values())),
        "tensors": dict(Counter(name for tensor in planned for name, kind in KINDS.items() if kind == tensor.kind)),
        "parameters": sum(int(np.prod(tensor.shape)) for tensor in planned),
        "tokenizer": metadata["tokenizer.ggml.model"],
        "pre_tokenizer": metadata.get("tokenizer.ggml.pre"),
        "requantised": False,
    }


def _metadata(config: dict[str, Any], folder: Path, scheme: str) -> dict[str, Any]:
    """The architecture's entries. Raises ConfigurationError for what they cannot say."""
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ConfigurationError(
            f"model type {architecture!r} cannot be written as GGUF here",
            where=str(folder),
            next=f"Types that can: {', '.join(ARCHITECTURES)}. {OTHERWISE}",
        )
    kinds = {layer for layer in config.get("layer_types") or ()} - {"full_attention"}
    for wrong, what in (
        (_rope(config)[0] not in ("default", "llama3"), f"it rescales its rotary positions by {_rope(config)[0]}"),
        (bool(kinds), f"it has layers of {', '.join(map(str, kinds))}"),
        (config.get("hidden_act", "silu") != "silu", f"its activation is {config.get('hidden_act')}"),
        (bool(config.get("quantization_config")), "its checkpoint is quantised already"),
    ):
        if wrong:
            raise ConfigurationError(f"{what}, which is not written here", where=str(folder), next=OTHERWISE)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        numbers = {
            "context_length": int(config["max_position_embeddings"]),
            "embedding_length": hidden,
            "block_count": int(config["num_hidden_layers"]),
            "feed_forward_length": int(config["intermediate_size"]),
            "attention.head_count": heads,
            "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
        }
        epsilon = float(config["rms_norm_eps"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json is incomplete: {error!r}", where=str(folder)) from error
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": folder.name,
        "general.file_type": U32(FILE_TYPES[scheme]),
        "general.quantization_version": U32(2),
        **{f"{architecture}.{name}": U32(number) for name, number in numbers.items()},
        f"{architecture}.rope.freq_base": float(_rope(config)[1]["rope_theta"]),
        f"{architecture}.attention.layer_norm_rms_epsilon": epsilon,
    }


def _rope(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Type and numbers of the rotary positions, from either of the forms that config.json has had."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", 10000.0)
    return rope.get("rope_type", rope.get("type", "default")), {"rope_theta": theta, **rope}


def _rope_factors(config: dict[str, Any], folder: Path) -> list[Planned]:
    """Llama 3's divisors of the rotary frequencies, (head size / 2,), as llama.cpp reads them from a tensor.

    Wavelengths below `original / high` keep their frequency, those above `original / low` are stretched by `factor`;
    between the two, the frequency is mixed by how many wavelengths fit the original context.
    """
    kind, rope = _rope(config)
    if kind != "llama3":
        return []
    try:
        factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
        low, high, theta = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "rope_theta"))
        size = int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
        wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
        share = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        factors = (1 / ((1 - share) / factor + share)).astype(np.float32)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json is incomplete: {error!r}", where=str(folder)) from error
    return [Planned("rope_freqs.weight", factors.shape, F32, lambda: factors)]


def _plan(name: str, tensor: Tensor, config: dict[str, Any], scheme: str) -> Planned | None:
    """The tensor under its name in the file, or None where the file has no place for it because it repeats another."""
    if name == "lm_head.weight" and config.get("tie_word_embeddings"):
        return None
    if name in _GLOBAL:
        theirs = _GLOBAL[name]
    else:
        match = _LAYER.fullmatch(name)
        if match is None or match[2] not in _BLOCK:
            raise ConfigurationError(
                f"tensor {name!r} has no place in this architecture", where=str(tensor.path), next=OTHERWISE
            )
        theirs = f"blk.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    heads = 0
    if config["model_type"] == "llama" and (match := re.search(r"\.self_attn\.([qk])_proj\.", name)):
        heads = int(config["num_attention_heads"])
        heads = heads if match[1] == "q" else int(config.get("num_key_value_heads") or heads)
    kind = KINDS[scheme] if len(tensor.shape) > 1 else F32

    def data() -> NDArray[Any]:
        values = stored_as(tensor.read(), tensor.dtype, kind, theirs)
        return permute(values, heads) if heads else values

    return Planned(theirs, tensor.shape, kind, data)


def _check_whole(planned: list[Planned], config: dict[str, Any], folder: Path) -> None:
    there = {tensor.name for tensor in planned}
    blocks = [
        name for name in BLOCK_NAMES if config["model_type"] == "qwen3" or not name.endswith(("q_norm", "k_norm"))
    ]
    wanted = {"token_embd.weight", "output_norm.weight"}
    wanted |= set() if config.get("tie_word_embeddings") else {"output.weight"}
    wanted |= {f"blk.{index}.{name}.weight" for index in range(int(config["num_hidden_layers"])) for name in blocks}
    if missing := sorted(wanted - there):
        raise ModelError(f"{len(missing)} tensors are missing ({', '.join(missing[:3])})", where=str(folder))


def stored_as(values: NDArray[Any], dtype: str, kind: int, name: str) -> NDArray[Any]:
    """Values of a safetensors dtype as ggml's type stores them: bf16 widens exactly, floats round to nearest even.

    Raises ConfigurationError for values that float16 cannot hold.
    """
    if dtype == "BF16" and kind == BF16:
        return values
    wide = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values.astype(np.float32)
    if kind == F32:
        return wide
    if kind == BF16:
        bits = wide.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if np.isinf(half).any() and not np.isinf(wide).any():
        raise ConfigurationError(f"tensor {name} holds values beyond float16's range", where="F16", next="Use BF16.")
    return half


def permute(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Interleave each head's rotary halves, as llama.cpp wants the q and k rows of Llama models."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
