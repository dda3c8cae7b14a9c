"""How much memory a lane will take and how much is free: estimates, named so, before anything loads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.config.lane import Configuration
from workbench.config.rules import keys_and_values
from workbench.errors import ConfigurationError

RUNTIME_BYTES = {"transformers": 700 << 20, "llamacpp": 120 << 20, "vllm": 1800 << 20, "server": 60 << 20}
"""A loaded engine without a model, measured on Linux x86-64: torch and transformers; vLLM with its core process."""
WEIGHT_BYTES = {
    "bf16": 2.0, "fp32": 4.0, "int8": 2.0, "fp16": 2.0,
    "BF16": 2.0, "F16": 2.0, "F32": 4.0, "Q8_0": 1.07, "Q6_K": 0.9, "Q5_K_M": 0.75, "Q4_K_M": 0.65, "Q4_0": 0.6,
    "Q3_K_M": 0.55,
}  # fmt: skip
"""Bytes a weight while the model loads, when it takes most: int8 is made from bf16; what is not here loads as bf16."""
KV_BYTES = {
    "bf16": 2.0, "fp32": 4.0, "int8": 1.13, "int4": 0.63, "int2": 0.38,
    "f32": 4.0, "f16": 2.0, "q8_0": 1.07, "q5_0": 0.69, "q4_0": 0.57,
    "auto": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0,
}  # fmt: skip
"""Bytes a stored value, groups of 32 with their scale and zero point included; what is not here counts as bf16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its memory: counts, and the bytes of its own files."""

    parameters: int
    layers: int  # those with a KV cache
    kv_heads: int
    head_dim: int
    vocabulary: int
    file_bytes: int = 0


def shape_of(facts: dict[str, Any]) -> Shape:
    """The shape in a model's facts (`engines.weights.model_facts`)."""
    width = 4 if str(facts["dtype"]) in ("f32", "float32") else 2
    layers = int(facts.get("kv_layers") or facts["layers"])
    sizes = (layers, *(int(facts[name]) for name in ("kv_heads", "head_dim", "vocabulary")))
    own = int(facts.get("file_bytes") or facts["parameter_bytes"])
    return Shape(int(facts["parameter_bytes"]) // width, *sizes, file_bytes=own)


def estimate_bytes(configuration: Configuration, shape: Shape, positions: int) -> int:
    """Weights while loading, KV cache, one chunk's logits and the runtime, in bytes; a server's are not ours."""
    runtime = RUNTIME_BYTES[configuration.engine]
    if configuration.engine == "server":
        return runtime
    weights = shape.parameters * WEIGHT_BYTES.get(configuration.weights, 2.0)
    if configuration.weights in ("file", "checkpoint") and shape.file_bytes:
        weights = float(shape.file_bytes)
    stored = keys_and_values(configuration.kv)
    value = sum(KV_BYTES.get(kind, 2.0) for kind in stored) / 2
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * positions * value
    if (space := dict(configuration.extra).get("kv_space")) is not None:
        kv = float(space) * 2**30
    wide = configuration.engine != "transformers" or configuration.weights == "fp32"
    # vLLM makes room for whole chunks, however short the session is.
    rows = configuration.chunk if configuration.engine == "vllm" else min(configuration.chunk, positions)
    logits = rows * shape.vocabulary * (4 if wide else 2)
    return int(weights + kv + 2 * logits) + runtime


def free_bytes() -> int | None:
    """Memory that new processes can take now, or None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    names = os.sysconf_names
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def check_fits(configuration: Configuration, needed: int, free: int | None) -> None:
    """Raise ConfigurationError with the numbers where a lane cannot fit."""
    if free is not None and needed > free:
        raise ConfigurationError(
            f"needs about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free",
            where=f"lane {configuration.to_line()}",
            next="Close something, shorten ctx or chunk, or choose smaller weights or KV.",
        )
