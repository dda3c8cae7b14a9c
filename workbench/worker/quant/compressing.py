"""Weights made by llmcompressor: round to nearest, GPTQ or AWQ, written as a compressed-tensors folder.

The library chooses the values and writes the format, which vLLM and transformers read. Ours is what it does not do:
refusing what does not fit before anything large loads, progress and cancelling a layer at a time, each layer's error,
and the manifest.
"""

# pyright: reportMissingImports=false
# llmcompressor lives in an environment of its own.

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from compressed_tensors import __version__ as compressed_tensors_version
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from datasets import Dataset
from llmcompressor import __version__ as llmcompressor_version
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from workbench.config.schemes import CHANNEL, MANIFEST, SCHEMES, Recipe, check_widths
from workbench.errors import ConfigurationError, ModelError

KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model")
Report = Callable[[int, int], None]
"""Told how many of how many layers are done; may raise Cancelled."""


def versions() -> dict[str, str]:
    """Of the libraries whose version decides the values."""
    return {
        "llmcompressor": llmcompressor_version,
        "compressed-tensors": compressed_tensors_version,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def compress(
    source: Path, target: Path, recipe: Recipe, windows: np.ndarray[Any, Any], facts: dict[str, Any], report: Report
) -> dict[str, Any]:
    """Quantize the folder `source` into `target`; returns the manifest, which is written there too.

    `windows` (n, length) int32 are the calibration texts' token ids, n = 0 for a scheme without calibration; `facts`
    go into the manifest. Raises ConfigurationError for a recipe that does not fit, ModelError for a folder that cannot
    be read.
    """
    config = _config(source)
    check_widths(recipe, _widths(config, recipe.ignore), str(source))
    scheme = SCHEMES[recipe.scheme]
    if scheme.calibrated and not len(windows):
        raise ConfigurationError(
            f"{recipe.scheme} needs calibration text", where=str(source), next="Name sessions with --calibrate."
        )
    report(0, 0)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype="auto", use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the weights cannot be read: {error}", where=str(source)) from error
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    if scheme.calibrated:
        _mend_pinning()
        rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in windows]
        n, length = windows.shape
        data = {"dataset": Dataset.from_list(rows), "num_calibration_samples": n, "max_seq_length": length}
    else:
        data = {}
    with _reporting(report, layers):
        oneshot(model=model, recipe=_modifiers(recipe), **data)
    errors = _errors(model, source, scheme.method)
    if not errors:
        raise ConfigurationError("no Linear of the model was quantized", where=str(source))
    model.save_pretrained(target, save_compressed=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    values = sorted(errors.values())
    manifest = {
        **facts,
        **recipe.to_json(),
        "symmetric": True,
        "versions": versions(),
        "modules": len(errors),
        "error_of": _ERROR_OF[scheme.method],
        "error_mean": float(np.mean(values)),
        "error_max": values[-1],
        "errors": errors,
    }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


_ERROR_OF = {
    "rtn": "|W − Q(W)| / |W| of each Linear, Frobenius norms, W the model's weights",
    "gptq": "|W − Q| / |W| of each Linear, Frobenius norms, W the model's weights, Q what GPTQ chose",
    "awq": "|V − Q(V)| / |V| of each Linear, Frobenius norms, V its weights after AWQ scaled its inputs",
}


@contextlib.contextmanager
def _reporting(report: Report, layers: int) -> Generator[None]:
    """Report each layer that is done: the library tells only its modifiers, and each of those in a pipeline apart."""
    ended = LifecycleCallbacks.sequential_epoch_end
    done = 0

    def end(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = ended(*args, **kwargs)
        done += 1
        report(min(done, layers), layers)
        return result

    LifecycleCallbacks.sequential_epoch_end = end
    try:
        yield
    finally:
        LifecycleCallbacks.sequential_epoch_end = ended


def _config(source: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"config.json is missing or damaged: {error}", where=str(source)) from error
    if getattr(config, "quantization_config", None):
        raise ConfigurationError(
            "the checkpoint is quantized already", where=str(source), next="Use the original weights."
        )
    return config


def _widths(config: Any, ignore: tuple[str, ...]) -> dict[str, int]:
    """Inputs of each Linear that will be quantized, by its name, from a model without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {
        name: module.in_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not _ignored(name, ignore)
    }


def _ignored(name: str, ignore: tuple[str, ...]) -> bool:
    return any(name == word or name.rpartition(".")[2] == word for word in ignore)


def _modifiers(recipe: Recipe) -> list[Any]:
    ignore = [word if "." in word or word == "lm_head" else f"re:.*\\b{re.escape(word)}$" for word in recipe.ignore]
    scheme = SCHEMES[recipe.scheme]
    if recipe.scheme == "nvfp4a16":
        return [QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignore)]
    stored: dict[str, Any] = {"num_bits": scheme.bits, "type": scheme.kind, "symmetric": True}
    by_group = (
        {"strategy": "channel"} if recipe.group == CHANNEL else {"strategy": "group", "group_size": int(recipe.group)}
    )
    inputs = None
    if scheme.activations:
        rounded = {"num_bits": scheme.activations, "type": scheme.kind, "symmetric": True}
        inputs = QuantizationArgs.model_validate({**rounded, "strategy": "token", "dynamic": True})
    weights = QuantizationArgs.model_validate({**stored, **by_group})
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)}
    if scheme.method == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=ignore)]
    scaling = [AWQModifier()] if scheme.method == "awq" else []
    return [*scaling, QuantizationModifier(config_groups=groups, ignore=ignore)]


def _mend_pinning() -> None:
    """AWQ prefetches batches into pinned memory, which torch gives only where there is an accelerator."""
    if not torch.accelerator.is_available():
        IntermediatesCache._pin_intermediate = classmethod(lambda _cls, _value: None)  # pyright: ignore


def _errors(model: nn.Module, source: Path, method: str) -> dict[str, float]:
    """Each quantized Linear's relative error, by name."""
    errors: dict[str, float] = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or not isinstance(module, nn.Linear) or scheme.weights is None:
            continue
        held: Any = module
        weight = module.weight.data
        quantized = fake_quantize(
            x=weight,
            scale=held.weight_scale,
            zero_point=getattr(held, "weight_zero_point", None),  # pyright: ignore[reportArgumentType]
            args=scheme.weights,
            global_scale=getattr(held, "weight_global_scale", None),
        )
        wanted = _original(source, f"{name}.weight") if method == "gptq" else weight
        if wanted is None:
            raise ModelError(f"the model's files hold no {name}.weight to compare with", where=str(source))
        wanted = wanted.to(quantized.device, torch.float32)
        errors[name] = float((wanted - quantized.float()).norm() / wanted.norm().clamp_min(1e-12))
    return errors


def _original(source: Path, name: str) -> torch.Tensor | None:
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 (not a dict)
                return file.get_tensor(name)
    return None
