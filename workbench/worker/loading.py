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
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from workbench.config.schemes import SCHEMES
from workbench.errors import ConfigurationError, ModelError
from workbench.worker.architectures import (
    MODELS,
    check_attention,
    layer_shapes,
    model_class,
    of_text,
    renamed,
    text_config,
)
from workbench.worker.attention import implementation
from workbench.worker.quant import compressed
from workbench.worker.quant.weights import Int8Linear, quantize_linears

DTYPES = {
    **{"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16, "checkpoint": torch.bfloat16},
    **dict.fromkeys(SCHEMES, torch.bfloat16),
}
FETCH_AGAIN = "Run `workbench models verify`, or fetch the model again."


transformers_logging.disable_progress_bar()  # a failed lane shows the log's last lines: no bars among them


def read_config(folder: Path, weights: str = "bf16") -> Any:
    """The configuration of the model's text part. Raises ModelError where it is missing or damaged, ConfigurationError
    for its type, or where it does not hold what a lane asks for as `weights`."""
    if not (folder / "config.json").is_file():
        raise ModelError("there is no config.json: not a model folder", where=str(folder), next=FETCH_AGAIN)
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in MODELS:
            raise ConfigurationError(
                f"model type {kind!r} is not supported", where=str(folder), next=f"Tested types: {', '.join(MODELS)}."
            )
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        config = text_config(whole)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"config.json is damaged: {error}", where=str(folder), next=FETCH_AGAIN) from error
    layer_shapes(config)  # refuses kinds of layers that are not supported
    compressed.check_folder(folder, whole, weights)
    if config is not whole and (weights == "checkpoint" or weights in SCHEMES):
        raise ConfigurationError(
            f"weights={weights} of model type {kind}, of which only the text part is loaded, is not supported",
            where=str(folder),
            next="Use weights=bf16 or weights=fp32.",
        )
    if weights == "int8" and hasattr(config, "num_experts_per_tok"):
        raise ConfigurationError(
            f"weights=int8 quantizes Linears, and the experts of model type {config.model_type} are none",
            where=str(folder),
            next="Use weights=bf16 or weights=fp32.",
        )
    return config


def load(folder: Path, config: Any, weights: str, attention: str, device: torch.device) -> nn.Module:
    """The model in evaluation mode; `config` is the text part's.

    Raises ModelError where its files are missing, damaged or incomplete, ConfigurationError for its attention.
    """
    check_attention(config, implementation(attention), str(folder))
    stored = compressed.quantization(config)
    compressed.prepare(config, stored)
    try:
        model, info = model_class(config).from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[weights],
            attn_implementation=implementation(attention),
            key_mapping=renamed(config),
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
    unknown = sorted(of_text(set(info["unexpected_keys"])))
    if missing or unknown:
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
    # Some models keep norms, sinks and decays in float32 beside bf16 weights: the scheme is that of the matrices.
    widest = {tensor.dtype for tensor in model.parameters() if tensor.ndim > 1}
    names = {dtype: name for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    return {
        "scheme": "int8" if quantized else "+".join(sorted(names.get(dtype, str(dtype)) for dtype in widest)),
        "values_by_dtype": dict(values),
        "quantized": f"{len(quantized)} decoder Linears, int8 per output channel, symmetric" if quantized else "",
        "left_alone": ", ".join(plain) + ", norms" if quantized else "",
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
