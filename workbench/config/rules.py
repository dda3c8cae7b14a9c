"""What an engine's table of values cannot say: values with parts, pairs that exclude each other, and reasons."""

from __future__ import annotations

import re

from workbench.config.lane import Configuration
from workbench.config.schemes import SCHEMES, recipe
from workbench.errors import ConfigurationError

DEFAULT_KV_GROUP = 32

QUANTIZED_KV = ("q8_0", "q5_0", "q4_0")
OUR_QUANTIZED_KV = ("int8", "int4", "int2", "fp8")
HUB_KERNEL = "OWNER/NAME"
"""Stands for any attention kernel of the Hugging Face hub, such as kernels-community/flash-attn3."""
PAIR_WORDS = {"16": "bf16", "8": "int8", "4": "int4", "2": "int2"}
"""Bits in a pair such as k8v4 → what is stored."""

_IGNORED_ATTENTION = ": on a CPU vLLM accepts the name, ignores it and runs CPU_ATTN"
_NONSENSE_KV = ": on a CPU vLLM accepts it without a word and computes nonsense"
_CPU_REASONS: dict[tuple[str, str], str] = {
    ("weights", "int8_per_channel_weight_only"): ": it has no effect on dense layers on a CPU",
    ("weights", "fp8_per_tensor"): ": on a CPU vLLM ends while it loads",
    ("draft", "mtp"): ": its model runner needs a GPU",
    ("draft", "dspark"): ": its model runner needs a GPU",
}
"""Of vLLM 0.32, seen on a machine without a GPU."""

_GPU_ATTENTION = ("sdpa-efficient", "flash_attention_2", "flash_attention_3")
_VLLM_GPU_PAIRS: dict[str, tuple[str, ...]] = {
    "FLASH_ATTN": ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3"),
    "FLASHINFER": ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"),
    "TRITON_ATTN": (
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int4_per_token_head", "int8_per_token_head",
        "fp8_per_token_head",
    ),
    "FLEX_ATTENTION": ("auto", "float16", "bfloat16"),
    "TURBOQUANT": ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
}  # fmt: skip
"""The KV caches that each attention backend of vLLM 0.33 declares on an NVIDIA GPU."""


def plain(configuration: Configuration, axis: str) -> list[str]:
    """The table's values that an axis of a lane is made of: llama.cpp's `q8_0/f16` are two, `ngram@PATH` is `ngram`."""
    value = str(getattr(configuration, axis))
    if axis == "kv" and configuration.engine in ("llamacpp", "transformers"):
        return list(keys_and_values(value))
    if axis == "attn" and configuration.engine == "transformers" and re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return [HUB_KERNEL]
    return [value.partition("@")[0]] if axis == "draft" else [value]


def keys_and_values(kv: str) -> tuple[str, str]:
    """What keys and values are stored as: `q8_0` is both, llama.cpp's `q8_0/f16` and our own `k8v4` set them apart."""
    if pair := re.fullmatch(r"k(16|8|4|2)v(16|8|4|2)", kv):
        return PAIR_WORDS[pair[1]], PAIR_WORDS[pair[2]]
    keys, slash, apart = kv.partition("/")
    return keys, apart if slash else keys


def drafter(configuration: Configuration) -> tuple[str, str]:
    """Kind and path of `KIND[@PATH]`."""
    kind, _, path = configuration.draft.partition("@")
    return kind, path


def reason(configuration: Configuration, axis: str, device: str) -> str:
    """Why a value is not in the table, as the end of a sentence; empty where the table says it all."""
    value = str(getattr(configuration, axis)).partition("@")[0]
    if configuration.engine == "transformers" and axis == "attn" and device == "cpu":
        return ": it needs a GPU" if value in _GPU_ATTENTION or "/" in value else ""
    if configuration.engine != "vllm" or device != "cpu":
        return ""
    if (axis, value) in _CPU_REASONS:
        return _CPU_REASONS[axis, value]
    if axis == "kv" and (value.endswith("_per_token_head") or value.startswith("turboquant")):
        return _NONSENSE_KV
    return _IGNORED_ATTENTION if axis == "attn" else ""


def conflict(configuration: Configuration, device: str) -> tuple[str, str] | None:
    """What is wrong with the combination of values, and what to do about it."""
    own = dict(configuration.extra)
    if (found := _drafter_conflict(configuration) or _scheme_conflict(configuration, own)) is not None:
        return found
    match configuration.engine:
        case "transformers":
            return _cache_conflict(configuration, own)
        case "llamacpp":
            return _llamacpp_conflict(configuration, own, device)
        case "vllm" if device == "cuda":
            allowed = _VLLM_GPU_PAIRS.get(configuration.attn)
            if allowed is not None and configuration.kv not in allowed:
                what = f"attn={configuration.attn} cannot read a KV cache of {configuration.kv}"
                return what, f"With it: kv={'|'.join(allowed)}; or attn=auto."
        case "vllm" if own.get("batch_invariant") == "on":
            return "batch_invariant=on has no effect without an NVIDIA GPU", "Leave it out."
        case "server" if "url" not in own:
            return "a server lane needs its address", "Such as server:url=http://127.0.0.1:8000."
        case _:
            pass
    return None


def _drafter_conflict(configuration: Configuration) -> tuple[str, str] | None:
    kind, path = drafter(configuration)
    if kind == "none" and configuration.width:
        return (
            f"width={configuration.width} would have no effect without a drafter",
            "Leave width out, or name a draft.",
        )
    if kind in ("draft_model", "eagle3", "dflash", "dspark") and not path:
        return f"draft={kind} needs the drafter's weights", f"Such as draft={kind}@PATH."
    if kind in ("none", "ngram", "suffix") and path:
        return f"draft={kind} takes no path", f"Write draft={kind}."
    return None


def _cache_conflict(configuration: Configuration, own: dict[str, str]) -> tuple[str, str] | None:
    keys, values = keys_and_values(configuration.kv)
    if "/" in configuration.kv:
        return f"kv={configuration.kv} is llama.cpp's way to set keys and values apart", "Write a pair such as kv=k8v4."
    if configuration.kv.startswith("k") and keys == values:
        return f"kv={configuration.kv} stores keys and values alike", f"Write kv={keys}."
    quantized = {keys, values} & {*OUR_QUANTIZED_KV}
    for key in ("kv_group", "kv_window", "kv_keys"):
        if key in own and not (quantized if key != "kv_keys" else keys in OUR_QUANTIZED_KV):
            what = f"{key}={own[key]} has no effect on kv={configuration.kv}"
            return what, f"Leave it out, or use kv={'|'.join(OUR_QUANTIZED_KV)}."
    return None


def _scheme_conflict(configuration: Configuration, own: dict[str, str]) -> tuple[str, str] | None:
    scheme = SCHEMES.get(configuration.weights)
    if "w_group" in own and scheme is None:
        return f"w_group has no effect on weights={configuration.weights}", f"Use weights={'|'.join(SCHEMES)}."
    if "w_calibration" in own and not (scheme and scheme.calibrated):
        calibrated = "|".join(name for name, each in SCHEMES.items() if each.calibrated)
        what = f"weights={configuration.weights} reads no calibration text"
        return what, f"Use weights={calibrated}, or leave w_calibration out."
    if scheme is not None:
        try:
            recipe(configuration.weights, own.get("w_group", ""))
        except ConfigurationError as error:
            return error.what, error.next
    return None


def _llamacpp_conflict(configuration: Configuration, own: dict[str, str], device: str) -> tuple[str, str] | None:
    _, apart = keys_and_values(configuration.kv)
    if apart in QUANTIZED_KV and configuration.attn == "off":
        what = f"llama.cpp cannot read values of {apart} without flash attention"
        return what, f"Use fa=on or fa=auto, or kv={configuration.kv.partition('/')[0]}/f16."
    if int(own.get("n_ubatch", "0")) > configuration.chunk:
        return f"n_ubatch={own['n_ubatch']} is larger than chunk={configuration.chunk}", "Use one that is not."
    if own.get("gpu_layers", "0") != "0" and device == "cpu":
        return "gpu_layers has no effect without a GPU", "Leave it out."
    return None
