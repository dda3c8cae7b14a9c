"""A training run's state on disk: whole or not there, tensors in safetensors, never a pickle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.errors import ModelError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path, trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, facts: dict[str, Any]
) -> None:
    """Write parameters, AdamW's moments and `facts`, beside the old state, and then in its place."""
    part, old = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for name, value in trained.items():
        tensors[name] = value.detach()
        for moment in _MOMENTS:
            if moment in optimizer.state.get(value, {}):
                tensors[f"{moment}/{name}"] = optimizer.state[value][moment]
    save_file(tensors, part / "state.safetensors")
    (part / "state.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load(
    folder: Path, trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, run: dict[str, Any]
) -> dict[str, Any]:
    """Continue from a state: fills parameters and moments, and returns its facts; {} where there is none.

    Raises ModelError where the state belongs to another run (`facts["run"]` differs) or is damaged.
    """
    old = folder.with_name(folder.name + ".old")
    if not folder.is_dir() and old.is_dir():  # ended between two renames
        old.rename(folder)
    if not folder.is_dir():
        return {}
    try:
        facts: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if facts["run"] != run:
            changed = ", ".join(sorted(key for key in {*run, *facts["run"]} if run.get(key) != facts["run"].get(key)))
            raise ModelError(
                f"the unfinished training there is another one: {changed} differ",
                where=str(folder.parent),
                next="Use another -o, or --restart to throw it away.",
            )
        tensors = load_file(folder / "state.safetensors")
        with torch.no_grad():
            for name, value in trained.items():
                value.copy_(tensors[name])
                if f"{_MOMENTS[0]}/{name}" in tensors:
                    moments = {moment: tensors[f"{moment}/{name}"].clone() for moment in _MOMENTS}
                    optimizer.state[value] = {"step": torch.tensor(float(facts["step"])), **moments}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"the unfinished training cannot be read: {error!r}", where=str(folder), next="Use --restart."
        ) from error
    return facts
