"""Attention implementations of transformers: chosen, forced where a kernel is named, and read back from what ran.

`sdpa` leaves the kernel to torch; `sdpa-math`, `sdpa-flash` and `sdpa-efficient` allow torch that kernel only. What ran
is read from the operators of a short pass, not from the setting.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations import sdpa_attention

from workbench.errors import ConfigurationError

IMPLEMENTATIONS = {
    "sdpa": "sdpa",
    "sdpa-math": "sdpa",
    "sdpa-flash": "sdpa",
    "sdpa-efficient": "sdpa",
    "eager": "eager",
    "flex": "flex_attention",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
}
"""A lane's word → transformers' own. A hub kernel, `owner/name`, is its own word."""
KERNELS = {
    "sdpa-math": SDPBackend.MATH,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_OPERATORS = {
    "_scaled_dot_product_attention_math": "sdpa-math",
    "_scaled_dot_product_flash_attention": "sdpa-flash",
    "_scaled_dot_product_flash_attention_for_cpu": "sdpa-flash",
    "_scaled_dot_product_efficient_attention": "sdpa-efficient",
    "_scaled_dot_product_cudnn_attention": "sdpa-cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "sdpa-fused",
}
"""torch's operators → our words for the kernels behind scaled_dot_product_attention."""
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def implementation(attention: str) -> str:
    """transformers' word for a lane's. Raises ConfigurationError where its package is not installed."""
    package = "kernels" if "/" in attention else _PACKAGES.get(attention)
    if package and importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"attn={attention} needs the package {package}, which is not in the engine's environment",
            where="transformers",
            next="Install it there, or use attn=sdpa|eager|flex.",
        )
    return attention if "/" in attention else IMPLEMENTATIONS[attention]


@contextlib.contextmanager
def allowing(attention: str) -> Generator[None]:
    """Within it torch may use only the kernel that a lane names; any, where it names none."""
    kernel = KERNELS.get(attention)
    if kernel is None:
        yield
        return
    kept = sdpa_attention.use_gqa_in_sdpa
    try:
        if kernel is SDPBackend.EFFICIENT_ATTENTION:
            # transformers lets the kernel share a key among query heads where there is no mask; this one cannot.
            sdpa_attention.use_gqa_in_sdpa = lambda *_: False
        with sdpa_kernel([kernel]):
            yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = kept


def effective(attention: str, set_to: str, operators: frozenset[str]) -> tuple[str | None, list[str]]:
    """The lane's word for what ran, and the kernels that were seen in it, from the operators of `watching`.

    None where it cannot be read back: several kernels ran where one was named.
    """
    kernels = sorted({_OPERATORS[name] for name in operators if name in _OPERATORS})
    if attention in KERNELS:
        return (attention if kernels == [attention] else None), kernels
    if set_to == "sdpa":
        return ("sdpa" if kernels else None), kernels
    own = next((word for word, theirs in IMPLEMENTATIONS.items() if theirs == set_to and word not in KERNELS), set_to)
    return (None if kernels else own), kernels or [f"{own}: none of torch's sdpa kernels"]


def watching(model: nn.Module, run: Callable[[], None]) -> frozenset[str]:
    """The names of torch's operators that the first attention module ran while `run` did. Raises ConfigurationError
    where torch has no kernel for it."""
    name = re.compile(r"(?<!Linear)Attention$")
    module = next((module for module in model.modules() if name.search(type(module).__name__)), None)
    if module is None:
        return frozenset()
    seen: set[str] = set()
    with _watched(module, seen):
        try:
            run()
        except RuntimeError as error:
            if "viable backend" not in str(error) and "available kernel" not in str(error).lower():
                raise
            raise ConfigurationError(
                f"torch has no such kernel for this model on this device: {str(error).splitlines()[0]}",
                where="transformers",
                next="Use attn=sdpa, which takes what there is; or, for CUDA's flash kernel, a chunk as long as ctx.",
            ) from error
    return frozenset(seen)


@contextlib.contextmanager
def _watched(module: nn.Module, seen: set[str]) -> Generator[None]:
    active: list[Any] = []

    def begin(*_: Any) -> None:
        active.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
        active[-1].__enter__()

    def end(*_: Any) -> None:
        profile = active.pop()
        profile.__exit__(None, None, None)
        seen.update(event.key.removeprefix("aten::") for event in profile.key_averages())

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while active:
            active.pop().__exit__(None, None, None)
