"""A model folder becomes a module on a device, in the dtype or quantization asked for; and what was really loaded."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from workbench.errors import ConfigurationError, ModelError
from workbench.config.schemes import SCHEMES
from workbench.worker.quant import compressed
from workbench.worker.quant.weights import Int8Linear, quantize_linears

MODELS: dict[str, Any] = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}
"""Model types that were tested with our KV caches; others may keep states beside keys and values."""

DTYPES = {
    **{"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16, "checkpoint": torch.bfloat16},
    **dict.fromkeys(SCHEMES, torch.bfloat16),
}
ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
FETCH_AGAIN = "Run `workbench models verify`, or fetch the model again."


transformers_logging.disable_progress_bar()  # a failed lane shows the log's last lines: no bars among them


def read_config(folder: Path, weights: str = "bf16") -> Any:
    """The model's configuration. Raises ModelError where it is missing or damaged, ConfigurationError for its type, or
    where it does not hold what a lane asks for as `weights`."""
    if not (folder / "config.json").is_file():
        raise ModelError("there is no config.json: not a model folder", where=str(folder), next=FETCH_AGAIN)
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in MODELS:
            raise ConfigurationError(
                f"model type {kind!r} is not supported", where=str(folder), next=f"Tested types: {', '.join(MODELS)}."
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"config.json is damaged: {error}", where=str(folder), next=FETCH_AGAIN) from error
    if any(layer != "full_attention" for layer in getattr(config, "layer_types", None) or ()):
        raise ConfigurationError("the model has layers without full attention", where=str(folder))
    compressed.check_folder(folder, config, weights)
    return config


def load(folder: Path, config: Any, weights: str, attention: str, device: torch.device) -> nn.Module:
    """The model in evaluation mode. Raises ModelError where its files are missing, damaged or incomplete."""
    stored = compressed.quantization(config)
    compressed.prepare(config, stored)
    try:
        model, info = MODELS[config.model_type].from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[weights],
            attn_implementation=ATTENTION[attention],
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"the weights cannot be read: {error}", where=str(folder), next=FETCH_AGAIN) from error
    except RuntimeError as error:
        if "size mismatch" not in str(error) and "mismatched" not in str(error).lower():
            raise
        raise ModelError("tensors of the wrong shape", where=str(folder), next=FETCH_AGAIN) from error
    missing = sorted(info["missing_keys"])
    # transformers fills what a file lacks with random numbers and only warns.
    if missing or info["unexpected_keys"]:
        unknown = sorted(info["unexpected_keys"])
        raise ModelError(
            f"{len(missing)} tensors are missing ({', '.join(missing[:3])}) and {len(unknown)} unknown"
            f" ({', '.join(unknown[:3])})",
            where=str(folder),
            next=FETCH_AGAIN,
        )
    model.eval().requires_grad_(False)
    if weights == "int8":
        quantize_linears(model)
    compressed.finish_loading(model, stored)
    if device.type == "cpu":
        # Loaded tensors are views of the mapped file. Copies let the mapping go: else the bf16 originals of int8
        # weights stay resident, bf16 weights are read during the first scoring, and a file cut short kills us.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    gc.collect()
    return model.to(device)


def vocabulary_size(folder: Path, config: Any) -> int:
    """Ids of the folder's tokenizer; the logits' width where there is no tokenizer.json. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return int(config.vocab_size)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
        top = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        return min(max([top, *(int(item["id"]) for item in added)]) + 1, int(config.vocab_size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"tokenizer.json is damaged: {error}", where=str(folder), next=FETCH_AGAIN) from error


def describe_weights(model: nn.Module) -> dict[str, Any]:
    """What the loaded tensors are: values counted by dtype, what was quantized, what was left alone, bytes."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    values: Counter[str] = Counter()
    for tensor in tensors.values():
        values[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    quantized = [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    plain = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    widest = {tensor.dtype for tensor in model.parameters()}
    names = {dtype: name for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    return {
        "scheme": "int8" if quantized else "+".join(sorted(names.get(dtype, str(dtype)) for dtype in widest)),
        "values_by_dtype": dict(values),
        "quantized": f"{len(quantized)} decoder Linears, int8 per output channel, symmetric" if quantized else "",
        "left_alone": ", ".join(plain) + ", norms" if quantized else "",
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
