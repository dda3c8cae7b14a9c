"""How much memory a lane will take and how much is free: estimates, named so, before anything loads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.config.lane import Configuration
from workbench.errors import ConfigurationError

RUNTIME_BYTES = 700 << 20
"""A loaded torch and transformers, measured on Linux x86-64."""
WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0, "int8": 2.0}
"""Bytes a weight while the model loads, when it takes most: int8 is made from bf16."""
KV_BYTES = {"bf16": 2.0, "fp32": 4.0, "int8": 1.13, "int4": 0.63}
"""Bytes a stored value, groups of 32 with their scale and zero point included."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its memory: counts, not bytes."""

    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int


def shape_of(facts: dict[str, Any]) -> Shape:
    """The shape in a model's facts (`engines.weights.model_facts`)."""
    width = 4 if str(facts["dtype"]) in ("f32", "float32") else 2
    sizes = (int(facts[name]) for name in ("layers", "kv_heads", "head_dim", "vocabulary"))
    return Shape(int(facts["parameter_bytes"]) // width, *sizes)


def estimate_bytes(configuration: Configuration, shape: Shape, positions: int) -> int:
    """Weights while loading, KV cache, one chunk's logits and the runtime, in bytes.

    Raises KeyError for a scheme without a known size.
    """
    weights = shape.parameters * WEIGHT_BYTES[configuration.weights]
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * positions * KV_BYTES[configuration.kv]
    logits = configuration.chunk * shape.vocabulary * (4 if configuration.weights == "fp32" else 2)
    return int(weights + kv + 2 * logits) + RUNTIME_BYTES


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
            next="Close something, shorten ctx, or choose smaller weights or KV.",
        )
