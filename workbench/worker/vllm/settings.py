"""vLLM's arguments and environment for a lane, made without importing it: plain values in, plain values out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, cast

from workbench.config.lane import Configuration
from workbench.errors import ConfigurationError, ModelError
from workbench.worker.vllm.drafters import speculation

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
"""Weights that are a dtype, in vLLM's words; `checkpoint` is the folder's own format, others quantize on loading."""

READBACK = "workbench.worker.vllm.readback.Readback"
FORCED = "workbench.worker.vllm.forced:Forced"

BLOCK = 128
"""Positions in a block of the CPU's KV cache."""
LEAST_KV_BYTES = 64 << 20
UNKNOWN_KV_BYTES = 1 << 30

REMOVED_ENVIRONMENT = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER")
"""Variables that would overrule an argument of ours."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ModelError where it is missing or damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError("there is no config.json: not a model folder", where=str(folder))
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"config.json is damaged: {error}", where=str(folder)) from error
    if not isinstance(config, dict):
        raise ModelError("config.json is damaged: not an object", where=str(folder))
    return cast(dict[str, Any], config)


def check_keys(configuration: Configuration, device: str) -> None:
    """Raises ConfigurationError where the trace's ids cannot be asked for, or the executor is not installed."""
    own = dict(configuration.extra)
    if own.get("executor") == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            "executor=ray needs the package ray, which is not in vLLM's environment",
            where="vllm",
            next="Install ray there, or use executor=mp.",
        )
    asked = own.get("logprobs", "auto")
    if asked == "trace" and (device == "cpu" or configuration.path == "decode"):
        raise ConfigurationError(
            "logprobs=trace needs vLLM's V2 model runner, which needs a GPU, and path=prefill",
            where="vllm",
            next="Use logprobs=auto, full or 256.",
        )


def check_folder(configuration: Configuration, config: dict[str, Any], context: int, where: str) -> None:
    """Raises ConfigurationError for weights or a context that this folder cannot give."""
    method = _quantized(config)
    if method and configuration.weights != "checkpoint":
        raise ConfigurationError(
            f"the folder's weights are quantized ({method}), weights={configuration.weights} cannot be had from them",
            where=where,
            next="Use weights=checkpoint.",
        )
    limit = context_limit(config)
    if context < 1 or (limit and context > limit):
        raise ConfigurationError(
            f"a context of {context} tokens is not within the model's limit of {limit}",
            where=where,
            next="Use a shorter session, --fit, or a model with a longer context.",
        )


def context_limit(config: dict[str, Any]) -> int:
    """The model's own limit of positions; 0 where its configuration does not say."""
    return int(_text(config).get("max_position_embeddings") or 0)


def in_process(configuration: Configuration) -> bool:
    """Whether the engine's core runs in this very process: on one device, unless another executor is asked for."""
    own = dict(configuration.extra)
    devices = int(own.get("tensor_parallel", "1")) * int(own.get("pipeline_parallel", "1"))
    return devices == 1 and own.get("executor", "uni") == "uni"


def environment(configuration: Configuration, device: str) -> dict[str, str]:
    """Variables that vLLM reads while it starts: offline, silent, and the numerics that have no argument."""
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process(configuration) else "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        # The limit is checked above; vLLM asks for one position more, for a token that is never run.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_BATCH_INVARIANT": "1" if dict(configuration.extra).get("batch_invariant") == "on" else "0",
    }
    if device == "cpu":
        # The model runs eagerly. What is left to compile is a helper that counts ranks: 12 s at the first request.
        values["TORCHDYNAMO_DISABLE"] = "1"
    return values


def arguments(
    configuration: Configuration, folder: Path, config: dict[str, Any], context: int, device: str
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs; `context` positions fit the KV cache. Raises ConfigurationError."""
    own = dict(configuration.extra)
    values: dict[str, Any] = {
        "model": str(folder),
        "dtype": DTYPES.get(configuration.weights, "auto"),
        "load_format": "safetensors",
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
        "kv_cache_dtype": configuration.kv,
        "max_model_len": context + 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": configuration.chunk,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "enforce_eager": device == "cpu",
        "max_logprobs": -1,
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": False,
        "tensor_parallel_size": int(own.get("tensor_parallel", "1")),
        "pipeline_parallel_size": int(own.get("pipeline_parallel", "1")),
        "distributed_executor_backend": own.get("executor") or ("uni" if in_process(configuration) else "mp"),
        "worker_extension_cls": READBACK,
    }
    if configuration.weights not in DTYPES and configuration.weights != "checkpoint":
        values["quantization"] = configuration.weights
    if configuration.attn != "auto":
        values["attention_backend"] = configuration.attn
    speculative = speculation(configuration)
    if speculative is not None:
        values["speculative_config"] = speculative
        values["per_request_spec_decode_metrics"] = "detailed"
    elif configuration.path == "decode":
        values |= {"logits_processors": [FORCED]} if device == "cpu" else {"enable_trace_replay": True}
    if "gpu_memory" in own and device != "cpu":
        values["gpu_memory_utilization"] = float(own["gpu_memory"])
    if "kv_space" in own:
        values["kv_cache_memory_bytes"] = int(float(own["kv_space"]) * (1 << 30))
    elif device == "cpu":
        drafter = speculative.get("model", "") if speculative else ""
        models = [config] + ([read_config(Path(drafter))] if drafter else [])
        width = {"fp32": 4}.get(configuration.weights, 2)
        each = [_position_bytes(model, 1 if configuration.kv.startswith("fp8") else width) for model in models]
        values["kv_cache_memory_bytes"] = _kv_bytes(each, context)
    return values


def _kv_bytes(each: list[int], context: int) -> int:
    """Bytes of KV cache for `context` positions, blocks rounded up and a quarter to spare, where sizes are known."""
    if not all(each):
        return UNKNOWN_KV_BYTES
    blocks = -(-(context + 1) // BLOCK) + 4
    # Layers of two models share pages of the larger size.
    return max(LEAST_KV_BYTES, len(each) * sum(each) * blocks * BLOCK * 5 // 4)


def _position_bytes(config: dict[str, Any], width: int) -> int:
    """Bytes of one position's keys and values with `width` bytes a value; 0 where the config does not say."""
    text = _text(config)
    layers, heads = text.get("num_hidden_layers"), text.get("num_key_value_heads") or text.get("num_attention_heads")
    size = text.get("head_dim")
    if not size and text.get("hidden_size") and text.get("num_attention_heads"):
        size = int(text["hidden_size"]) // int(text["num_attention_heads"])
    return 2 * int(layers) * int(heads) * int(size) * width if layers and heads and size else 0


def _text(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else config


def _quantized(config: dict[str, Any]) -> str:
    """The method that the folder's own weights are quantized with; empty where they are not."""
    found: Any = config.get("quantization_config") or _text(config).get("quantization_config")
    return str(cast(dict[str, Any], found).get("quant_method", "unknown")) if isinstance(found, dict) else ""
