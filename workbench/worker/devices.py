"""The devices of this machine as torch sees them."""

from __future__ import annotations

import platform

import torch

from workbench.errors import ConfigurationError


def devices() -> list[str]:
    """The devices here, the preferred one first: cuda, mps, cpu."""
    found = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else []) + ["cpu"]


def choose_device(asked: str) -> torch.device:
    """The device of a name, or for `auto` the best one. Raises ConfigurationError where it is not here."""
    names = [name.split(" ")[0] for name in devices()]
    if asked == "auto":
        return torch.device(names[0])
    if asked in names:
        return torch.device(asked)
    if asked == "cuda" and names[0].startswith("cuda"):
        return torch.device(names[0])
    raise ConfigurationError(f"device={asked} is not here", where="transformers", next=f"Here: {', '.join(names)}.")


def device_name(device: torch.device) -> str:
    """The device as the manifest names it."""
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def cpu_features() -> str:
    """The CPU's instruction set as torch uses it."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
