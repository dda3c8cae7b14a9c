"""What really runs, from the loaded objects, the file's metadata and llama.cpp's own words while it loaded."""

from __future__ import annotations

import re
from typing import Any

from workbench.worker.llama.binding import FILE_TYPES, api, has_amx
from workbench.worker.llama.context import SEQUENCES, Loaded
from workbench.worker.llama.header import Header
from workbench.worker.llama.weights import Weights

_BUFFER = re.compile(r"load_tensors:\s+(\S+) model buffer size =\s+([\d.]+) MiB")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_CACHE = re.compile(r"llama_kv_cache: size =\s+([\d.]+) MiB .*K \((\w+)\):.*V \((\w+)\):")
_ATTENTION = re.compile(r"flash_attn\s+= (\w+)")
_RESOLVED = re.compile(r"flash.?att\w*.*\b(?:set to|is|now)?\s*\b(enabled|disabled)", re.IGNORECASE)
_COMPUTE = re.compile(r"(\S+)\s+compute buffer size =\s+([\d.]+) MiB")
_WHOLE = ("F32", "F16", "BF16")
_MIXED: dict[str, tuple[str, ...]] = {
    "Q2_K": ("Q2_K", "Q3_K", "Q4_0", "IQ4_NL"),
    "Q3_K": ("Q3_K", "Q4_0", "IQ4_NL"),
    "Q4_K": ("Q4_K", "Q5_0"),
    "Q5_K": ("Q5_K", "Q5_1"),
    "Q6_K": ("Q6_K", "Q8_0"),
}
"""K types, and what llama.cpp takes in their place for rows that are no multiple of 256."""
_MIB = 1 << 20


def describe(loaded: Loaded, asked_kv: str) -> dict[str, Any]:
    """Weights, KV cache, attention, device and sizes; `asked_kv` only decides how equal types are written."""
    weights, context, lines = loaded.weights, loaded.context, loaded.lines
    layers, on_gpu = _offloaded(weights)
    attention = flash_attention(lines)
    kv = _cache(lines, asked_kv)
    return {
        "weights": describe_weights(weights.header, int(api.llama_model_size(weights.model))),
        "weights_bytes": int(api.llama_model_size(weights.model)),
        "kv": {**kv, "positions": loaded.size, "sequences": SEQUENCES, "layers": layers},
        "attn": attention,
        "device": _device(weights, on_gpu),
        "gpu_layers": on_gpu,
        "threads": int(api.llama_n_threads(context)),
        "threads_batch": int(api.llama_n_threads_batch(context)),
        "chunk": int(api.llama_n_batch(context)),
        "n_ubatch": int(api.llama_n_ubatch(context)),
        "logits_dtype": "float32",
        "logits_width": loaded.width,
        "vocabulary": loaded.vocabulary,
        "layers": layers,
        "kv_heads": int(api.llama_model_n_head_kv(weights.model)),
        "model_type": weights.header.architecture,
        "context": loaded.size,
        "context_limit": weights.context_limit,
        "buffers": {**_sizes(_BUFFER, weights.lines), **_sizes(_COMPUTE, lines, " (compute)")},
        "notes": _notes(loaded, attention),
    }


def describe_weights(header: Header, size: int) -> dict[str, Any]:
    """The file's quantization in our words, its tensors counted by type, and their bytes."""
    return {"scheme": scheme_of(header), "tensors": header.tensors, "stored": header.bytes, "bytes": size}


def scheme_of(header: Header) -> str | None:
    """The scheme that `general.file_type` names, where most quantised tensors are of its type; else the type that most
    of them are of. Of whole numbers, the type that the tensors are of, whatever the file says.
    """
    if header.dominant in _WHOLE and not header.quantized:
        return header.dominant
    names = {number: name for name, number in FILE_TYPES.items()}
    named = names.get(header.metadata.get("general.file_type", -1), "")
    base, most = _base(named), _most(header)
    return named if most in _MIXED.get(base, (base,)) else most


def _base(scheme: str) -> str:
    return re.sub(r"_[SML]$", "", scheme)


def _most(header: Header) -> str:
    """The type of most quantised tensors; the embedding, a large part of a small model's bytes, is often of another."""
    counts = {name: count for name, count in header.tensors.items() if name not in _WHOLE}
    return max(counts, key=lambda name: counts[name])


def flash_attention(lines: list[str]) -> str | None:
    """`on` or `off`; what `auto` came to be is said after it. None where nothing is said."""
    said: str | None = None
    for line in lines:
        match = _ATTENTION.search(line) or _RESOLVED.search(line)
        said = match[1].lower() if match else said
    return {"enabled": "on", "disabled": "off"}.get(said or "")


def _cache(lines: list[str], asked: str) -> dict[str, Any]:
    found = [match for line in lines if (match := _CACHE.search(line))]
    if not found:
        return {"scheme": None, "bytes": None}
    kinds = {(match[2], match[3]) for match in found}
    keys, values = next(iter(kinds)) if len(kinds) == 1 else (None, None)
    same = keys if keys == values and "/" not in asked else f"{keys}/{values}"
    return {
        "scheme": same if len(kinds) == 1 else None,
        "keys": keys,
        "values": values,
        "bytes": round(sum(float(match[1]) for match in found) * _MIB),
    }


def _device(weights: Weights, on_gpu: int) -> str:
    names = list(_sizes(_BUFFER, weights.lines))
    gpus = [name for name in names if not name.startswith(("CPU", "AMX")) and "Host" not in name]
    return "+".join(gpus) if on_gpu and gpus else "cpu"


def _offloaded(weights: Weights) -> tuple[int, int]:
    layers = int(api.llama_model_n_layer(weights.model))
    found = [match for line in weights.lines if (match := _OFFLOADED.search(line))]
    return layers, int(found[-1][1]) if found else 0


def _sizes(pattern: re.Pattern[str], lines: list[str], suffix: str = "") -> dict[str, int]:
    sizes: dict[str, int] = {}
    for match in (match for line in lines if (match := pattern.search(line))):
        sizes[match[1] + suffix] = sizes.get(match[1] + suffix, 0) + round(float(match[2]) * _MIB)
    return sizes


def _notes(loaded: Loaded, attention: str | None) -> list[str]:
    notes: list[str] = []
    if loaded.weights.header.quantized and has_amx():
        notes.append(
            "llama.cpp's AMX kernels and repacked weights are off here: they end the process where GCC 12 built them"
        )
    notes += _stand_ins(loaded.weights.header)
    rotated = {match[1] for line in loaded.lines if (match := re.search(r"attn_rot_([kv]) = 1", line))}
    if rotated:
        what = " and ".join(word for letter, word in (("k", "keys"), ("v", "values")) if letter in rotated)
        notes.append(f"llama.cpp rotates {what} before it quantises them")
    if any("Sliding" in line or "swa" in line.lower() for line in loaded.lines if "llama_kv_cache_iswa" in line):
        notes.append("the model has layers with a sliding window")
    if attention is None:
        notes.append("llama.cpp did not say whether flash attention is on")
    return notes


def _stand_ins(header: Header) -> list[str]:
    """That a K scheme is mostly something else, as in models whose rows are no multiple of 256."""
    scheme = scheme_of(header)
    base = _base(scheme or "")
    if base not in _MIXED or _most(header) == base:
        return []
    counted = sorted(header.tensors.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{count} {name}" for name, count in counted if name not in _WHOLE)
    return [
        f"few of this model's rows are multiples of 256, as {base} needs: llama.cpp took larger types in its place, so"
        f" {scheme} is larger and better here than its name says ({listed})"
    ]
