"""Folders that are quantized already, in the compressed-tensors format: what they say of themselves, and what runs.

transformers has no packed kernels on a CPU: weights are dequantised to bf16 while they load, so that the values are
the quantized ones and memory and speed are those of bf16. Where inputs are rounded as well, compressed-tensors does it
in each Linear's forward pass.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from workbench.config.schemes import CHANNEL, MANIFEST, SCHEMES
from workbench.errors import ConfigurationError, ModelError

AS_IT_IS = "checkpoint"


def quantization(config: Any) -> dict[str, Any]:
    """The quantization that config.json names; empty where there is none. A copy: loading takes it off the config."""
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    return copy.deepcopy(cast(dict[str, Any], found if isinstance(found, dict) else found.to_dict()))


def check_folder(folder: Path, config: Any, weights: str) -> None:
    """Raise ConfigurationError where a lane's weights and what the folder holds do not go together."""
    found = quantization(config)
    wanted = weights in SCHEMES or weights == AS_IT_IS
    if found and not wanted:
        raise ConfigurationError(
            "the checkpoint is quantized already",
            where=str(folder),
            next="Use weights=checkpoint, or the original weights.",
        )
    if wanted and not found:
        raise ConfigurationError(
            f"the folder's weights are not quantized: there is no {weights} to load", where=str(folder)
        )
    if not found:
        return
    if (method := found.get("quant_method")) != "compressed-tensors":
        raise ConfigurationError(
            f"its weights are quantized by {method}; compressed-tensors is what is read here",
            where=str(folder),
            next="Try the engine vllm, or quantize the original weights: workbench quantize.",
        )
    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "reading quantized weights needs the package compressed-tensors",
            where="transformers",
            next="pip install compressed-tensors in the engine's environment.",
        ) from error
    if weights in SCHEMES:
        _check_scheme(folder, found, weights)


def inputs_rounded(found: dict[str, Any]) -> bool:
    """Whether a Linear's inputs are rounded while it runs."""
    groups: dict[str, dict[str, Any]] = found.get("config_groups") or {}
    return any(group.get("input_activations") for group in groups.values())


def prepare(config: Any, found: dict[str, Any]) -> None:
    """Have weights dequantised while they load; where inputs are rounded too, compressed-tensors runs the Linears."""
    if found and not inputs_rounded(found):
        config.quantization_config = {**found, "dequantize": True}


def finish_loading(model: nn.Module, found: dict[str, Any]) -> None:
    """Have what is decompressed at the first pass decompressed now: load time and memory are not the lane's."""
    if inputs_rounded(found):
        with torch.inference_mode():
            model(torch.zeros((1, 1), dtype=torch.long))


def describe(found: dict[str, Any], model: nn.Module, weights: str) -> dict[str, Any]:
    """What a loaded folder's quantization is: the words of `effective["weights"]` beyond those of plain tensors.

    `levels` is read back from the values that run: how many one group of the first quantized Linear takes.
    """
    groups: list[dict[str, Any]] = list((found.get("config_groups") or {}).values())
    stored = "; ".join(sorted({_words(group["weights"]) for group in groups if group.get("weights")}))
    inputs = "; ".join(
        sorted({_words(group["input_activations"]) for group in groups if group.get("input_activations")})
    )
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in (found.get("ignore") or ())
    ]
    return {
        "scheme": weights,
        "quantized": f"{len(linears)} Linears: {stored}" + (f"; inputs {inputs}" if inputs else ""),
        "format": found.get("format"),
        "ran": "emulated: weights dequantised when loaded" + (", inputs rounded in each pass" if inputs else ""),
        "levels": _levels(linears[0][1].weight, groups[0]["weights"]) if linears and groups else None,
    }


def _levels(weight: torch.Tensor, args: dict[str, Any]) -> int:
    """Distinct values in the first group of each of the first rows, the most there are."""
    size = int(args.get("group_size") or weight.shape[1])
    return max(len(row[:size].unique()) for row in weight[:8])


def _words(args: dict[str, Any]) -> str:
    size = f"groups of {args['group_size']}" if args.get("group_size") else f"per {args.get('strategy')}"
    kind = "symmetric" if args.get("symmetric") else "asymmetric"
    return f"{args.get('type')}{args.get('num_bits')}, {size}, {kind}"


def _check_scheme(folder: Path, found: dict[str, Any], weights: str) -> None:
    """The folder's own words must be the scheme's; how values were chosen only our manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        made, group = str(manifest["scheme"]), str(manifest["group"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{MANIFEST} is missing or damaged: {error}", where=str(folder)) from error
    scheme = SCHEMES[weights]
    wanted = (scheme.bits, scheme.kind, None if group == CHANNEL else int(group))
    stored: list[dict[str, Any]] = [each["weights"] for each in (found.get("config_groups") or {}).values()]
    here = [(args["num_bits"], args["type"], args.get("group_size")) for args in stored]
    if made != weights or any(each != wanted for each in here) or not here:
        raise ConfigurationError(
            f"the folder holds {made} ({', '.join(map(_words, stored))}), not {weights}", where=str(folder)
        )
