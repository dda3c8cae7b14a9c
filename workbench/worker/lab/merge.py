"""An adapter added to its base model's weights: a model folder like any other."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workbench.errors import ModelError
from workbench.worker.lab.lora import WEIGHTS, read_adapter

_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def merge(model: Path, adapter: Path, output: Path) -> dict[str, Any]:
    """Write `model` with W + scale·B·A (summed in fp32, rounded once to the weights' dtype) into the folder `output`.

    Returns facts. Raises ModelError where the adapter belongs to another model.
    """
    pairs, scale, about = read_adapter(adapter)
    files = sorted(model.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(f"{len(files)} weights files, expected one", where=str(model))
    tensors: dict[str, torch.Tensor] = {}
    moved, size = 0.0, 0.0
    try:
        with safe_open(files[0], "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                value = file.get_tensor(name)
                if name in pairs:
                    down, up = pairs.pop(name)
                    delta = scale * (up @ down)
                    moved += float(delta.square().sum())
                    size += float(value.float().square().sum())
                    value = (value.float() + delta).to(value.dtype)
                tensors[name] = value
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"the adapter does not fit: {error}", where=str(adapter)) from error
    if pairs:
        raise ModelError(f"the model has no {next(iter(pairs))}", where=str(adapter), next="Use the model it is for.")
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / files[0].name, metadata={"format": "pt"})
    for name in _COPIED:
        if (model / name).is_file():
            shutil.copyfile(model / name, output / name)
    facts = {
        "base": about["base"],
        "adapter_sha256": hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest(),
        "relative_change": (moved / size) ** 0.5,
        "steps": about["step"],
        "tokens": about["tokens"],
    }
    (output / "merge.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts
