"""A GGUF file becomes a safetensors folder that any engine of this process family loads in a second.

The weights are dequantised exactly as the file's blocks define and rounded once to bfloat16. Names, the rotary
permutation of Llama files and the tokenizer are rebuilt here, one tensor at a time, rather than through transformers'
GGUF loader: that takes a minute of parsing, and its models refuse to be saved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ModelError
from workbench.worker.quant.gguf_tokenizer import write_tokenizer
from workbench.worker.quant.permute import RULE, Permutation

if TYPE_CHECKING:
    from gguf import GGUFReader

SHARD_BYTES = 2 << 30
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert(
    source: Path, target: Path, progress: Callable[[int, int], None] | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Write `target` (a folder that must not exist yet) from the GGUF file `source`; returns the facts.

    `progress(done, total)` counts tensors. A `seed` puts the dimensions in another order (`quant.permute`). The folder
    appears whole or not at all. Raises ModelError.
    """
    if target.exists():
        raise ModelError("the folder exists already", where=str(target), next="Remove it, or name another folder.")
    reader = _open(source)
    fields = {name: field for name, field in reader.fields.items()}
    config = _configuration(fields, source, {tensor.name for tensor in reader.tensors})
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tokenizer = write_tokenizer(fields, building, config.max_position_embeddings, str(source))
        permutation = None if seed is None else Permutation.of(config, seed)
        _write_weights(reader, config, building, source, progress or (lambda done, total: None), permutation)
        config.save_pretrained(building)
        facts = {
            "format": "gguf",
            "architecture": _value(fields, "general.architecture"),
            "model_type": config.model_type,
            "name": _value(fields, "general.name", ""),
            "organization": _value(fields, "general.organization", ""),
            "licence": _value(fields, "general.license", ""),
            "source_file": source.name,
            "source_bytes": source.stat().st_size,
            "source_types": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
            "dtype": "bfloat16",
            "parameters": sum(int(tensor.n_elements) for tensor in reader.tensors),
            "context_limit": config.max_position_embeddings,
            "tokenizer": tokenizer,
            **({} if seed is None else {"permuted": f"{RULE}, seed {seed}"}),
        }
        (building / "conversion.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        building.chmod(0o755)
        os.rename(building, target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return facts


def _open(source: Path) -> GGUFReader:
    """The reader of a file whose tensors all lie inside it. Raises ModelError."""
    from gguf import GGUFReader

    try:
        with source.open("rb") as stream:
            magic = stream.read(4)
        if magic != b"GGUF":
            raise ModelError(f"not a GGUF file: it begins with {magic!r}", where=str(source))
        return GGUFReader(source)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(source)) from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, struct.error, MemoryError) as error:
        # The reader finds damage as a failed reshape, an unknown type number or an index out of the file.
        raise ModelError(
            f"the GGUF file is damaged or cut off ({type(error).__name__}: {error})",
            where=str(source),
            next="Fetch it again and compare its size and sha256 with the publisher's.",
        ) from error


def _value(fields: dict[str, Any], name: str, default: Any = None) -> Any:
    field = fields.get(name)
    return default if field is None else field.contents()


def _configuration(fields: dict[str, Any], source: Path, tensors: set[str]) -> Any:
    """The transformers configuration of the file's metadata. Raises ModelError for what is not supported."""
    architecture = _value(fields, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} cannot be converted",
            where=str(source),
            next=f"Architectures that can: {', '.join(ARCHITECTURES)}.",
        )
    scaling = _value(fields, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ModelError(
            "the file rescales its rotary positions, which the conversion does not carry over",
            where=str(source),
            next="Use the publisher's safetensors files.",
        )

    def number(key: str, default: Any = None) -> Any:
        value = _value(fields, f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"the metadata lack {architecture}.{key}", where=str(source))
        return value

    from transformers import LlamaConfig, Qwen3Config

    heads = int(number("attention.head_count"))
    hidden = int(number("embedding_length"))
    config = (LlamaConfig if architecture == "llama" else Qwen3Config)(
        hidden_size=hidden,
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(number("attention.head_count_kv", heads)),
        head_dim=int(number("attention.key_length", hidden // heads)),
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(number("rope.freq_base", 10000.0))},
        vocab_size=len(fields["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in fields else 0,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=_value(fields, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(fields, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(fields, "tokenizer.ggml.padding_token_id"),
    )
    config.architectures = [ARCHITECTURES[architecture]]
    config.dtype = "bfloat16"
    return config


def _target_name(name: str, source: Path) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise ModelError(f"tensor {name!r} has no place in this architecture", where=str(source))
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"


def _write_weights(
    reader: GGUFReader,
    config: Any,
    folder: Path,
    source: Path,
    progress: Callable[[int, int], None],
    permutation: Permutation | None,
) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    total = sum(int(tensor.n_elements) * 2 for tensor in reader.tensors)
    shards = max(1, -(-total // SHARD_BYTES))
    index: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    written = size = 0
    for done, tensor in enumerate(reader.tensors, 1):
        name = _target_name(tensor.name, source)
        try:
            array = dequantize(tensor.data, tensor.tensor_type).reshape([int(side) for side in reversed(tensor.shape)])
        except (NotImplementedError, KeyError, ValueError) as error:
            raise ModelError(f"tensor {tensor.name}: {error}", where=str(source)) from error
        values = torch.from_numpy(array if array.flags.writeable else array.copy())
        if config.model_type == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            values = unpermute(values, heads)
        if permutation is not None:
            values = permutation.apply(name, values)
        pending[name] = values.to(torch.bfloat16).contiguous()
        size += pending[name].nbytes
        if done == len(reader.tensors) or (size >= SHARD_BYTES and written + 1 < shards):
            written += 1
            file = "model.safetensors" if shards == 1 else f"model-{written:05d}-of-{shards:05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # safetensors makes files that only their owner reads
            index.update(dict.fromkeys(pending, file))
            pending, size = {}, 0
        progress(done, len(reader.tensors))
    if shards > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def unpermute(values: Any, heads: int) -> Any:
    """Undo the interleaving of each head's rotary halves that GGUF's Llama writers apply to q and k rows."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
