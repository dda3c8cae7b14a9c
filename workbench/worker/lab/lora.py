"""Low-rank adapters: y = x·Wᵀ + (alpha / r)·(x·Aᵀ)·Bᵀ, W frozen, A (r, in) and B (out, r) trained in fp32.

An adapter's folder has PEFT's names and shapes, so that other programs load it too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from workbench.errors import ModelError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """A frozen Linear and its adapter. B begins at zero, so that the function begins as it was."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        if base.bias is not None:
            raise ModelError("a Linear with a bias has no adapter here", where="training")
        self.weight = base.weight
        self.scale = alpha / rank
        down = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(down)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), in the weight's dtype."""
        low = functional.linear(x, self.lora_A.to(x.dtype))
        up = (self.lora_B * self.scale).to(x.dtype)
        plain = functional.linear(x, self.weight)
        return torch.addmm(plain.flatten(0, -2), low.flatten(0, -2), up.T).view_as(plain)  # one pass, no extra sum


def add_adapters(model: nn.Module, rank: int, alpha: float, seed: int) -> dict[str, nn.Parameter]:
    """Wrap every decoder Linear; the trained tensors by their names in an adapter file."""
    generator = torch.Generator().manual_seed(seed)
    trained: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf not in TARGETS or not isinstance(module, nn.Linear):
            continue
        wrapped = LoraLinear(module, rank, alpha, generator)
        setattr(model.get_submodule(parent), leaf, wrapped)
        trained[f"{_PREFIX}{name}.lora_A.weight"] = wrapped.lora_A
        trained[f"{_PREFIX}{name}.lora_B.weight"] = wrapped.lora_B
    if not trained:
        raise ModelError("the model has none of the Linears that are adapted", where="training")
    return trained


def write_adapter(
    folder: Path, trained: dict[str, nn.Parameter], rank: int, alpha: float, about: dict[str, Any]
) -> int:
    """Write an adapter in bf16, and `about` beside it as `training.json`; returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{WEIGHTS}.part"
    save_file(
        {name: value.detach().to(torch.bfloat16).contiguous() for name, value in trained.items()},
        part,
        metadata={"format": "pt"},
    )
    part.replace(folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "base_model_name_or_path": about["base"]["name"],
        "inference_mode": True,
    }
    for name, value in ((CONFIG, config), ("training.json", about)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return (folder / WEIGHTS).stat().st_size


def read_adapter(folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float, dict[str, Any]]:
    """Each adapted tensor's name in the model with its A and B in fp32, the scale, and `training.json`.

    Raises ModelError.
    """
    again = "Train it again, or fetch the adapter that ships with the program."
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        about = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        scale = float(config["lora_alpha"]) / int(config["r"])
        pairs = {
            name.removeprefix(_PREFIX).replace(".lora_A.weight", ".weight"): (
                value.float(),
                tensors[name.replace(".lora_A.", ".lora_B.")].float(),
            )
            for name, value in tensors.items()
            if name.endswith(".lora_A.weight")
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"not an adapter: {error!r}", where=str(folder), next=again) from error
    if 2 * len(pairs) != len(tensors):
        raise ModelError("some of its tensors have no partner", where=str(folder), next=again)
    return pairs, scale, about
