"""What each engine can do, axis by axis, and why it cannot do the rest: refusals before anything loads.

The table is declared here so that a lane can be checked where its engine is not installed; an engine process reads back
what really runs, and a lane whose engine runs something else is marked. `rules` holds what one table cannot say.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from workbench.config import rules
from workbench.config.lane import Configuration
from workbench.config.machine import Accelerator, accelerator
from workbench.config.schemes import GROUPS, SCHEMES
from workbench.errors import ConfigurationError

NUMBER = r"[0-9]+"
COUNT = r"0*[1-9][0-9]*"
"""Zero would be taken for "as you like" by one engine, and end another."""
_SPACE = r"(?=.*[1-9])[0-9]+(\.[0-9]+)?"
_SHARE = r"0\.0*[1-9][0-9]*|1"
_GROUPS = "|".join(GROUPS)
_FORMS = {
    NUMBER: "a number", COUNT: "a number above 0", _SPACE: "a number of GiB above 0", _SHARE: "a share of up to 1",
    r"https?://[^@]+": "an http address", r"[A-Za-z_][A-Za-z0-9_]*": "the name of a variable",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's declared values, and its own keys with the pattern of their values.

    `axes` are the values on any machine, the default first; `on` narrows them for an accelerator. `records`: whether it
    gives whole distributions, so that its lane can be a reference.
    """

    name: str
    axes: dict[str, tuple[str, ...]]
    keys: dict[str, str] = field(default_factory=dict[str, str])
    on: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict[str, dict[str, tuple[str, ...]]])
    records: bool = True

    def values(self, axis: str, device: str) -> tuple[str, ...]:
        """The values of an axis on a device's kind (`cpu`, `cuda`, ...)."""
        return self.on.get(device, {}).get(axis, self.axes[axis])


VLLM_CPU: dict[str, tuple[str, ...]] = {
    "weights": ("bf16", "fp32", "fp16", "checkpoint"),
    "kv": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "attn": ("auto", "CPU_ATTN"),
    "draft": ("none", "ngram", "suffix", "draft_model", "eagle3", "dflash"),
}

ENGINES: dict[str, Engine] = {
    "transformers": Engine(
        "transformers",
        {
            "weights": ("bf16", "fp32", "int8", *SCHEMES, "checkpoint"),
            "kv": ("bf16", "fp32", "int8", "int4", "int2", "fp8"),
            "attn": (
                "sdpa", "eager", "flex", "sdpa-math", "sdpa-flash", "sdpa-efficient", "flash_attention_2",
                "flash_attention_3", rules.HUB_KERNEL,
            ),
            "draft": ("none",),
            "path": ("prefill", "decode"),
        },
        keys={
            "kv_group": COUNT,
            "kv_keys": "token|channel",
            "kv_window": COUNT,
            "w_group": _GROUPS,
            "w_calibration": ".+",
        },
        on={
            "cpu": {"attn": ("sdpa", "eager", "flex", "sdpa-math", "sdpa-flash")},
            "mps": {"attn": ("sdpa", "eager", "sdpa-math")},
        },
    ),
    "llamacpp": Engine(
        "llamacpp",
        {
            "weights": ("BF16", "F32", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "file"),
            "kv": ("f16", "f32", "bf16", "q8_0", "q5_0", "q4_0"),
            "attn": ("auto", "off", "on"),
            "draft": ("none",),
            "path": ("prefill", "decode"),
        },
        keys={"gpu_layers": NUMBER, "n_ubatch": COUNT},
    ),
    "vllm": Engine(
        "vllm",
        {
            "weights": (
                "bf16", "fp32", "fp16", "checkpoint", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel",
                "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8",
            ),
            "kv": (
                "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head",
                "int4_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant_k8v4", "turboquant_4bit_nc",
                "turboquant_k3v4_nc", "turboquant_3bit_nc",
            ),
            "attn": (
                "auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "CPU_ATTN",
            ),
            "draft": ("none", "ngram", "suffix", "draft_model", "eagle3", "mtp", "dflash", "dspark"),
            "path": ("prefill", "decode"),
        },
        keys={
            "logprobs": rf"auto|trace|full|{COUNT}",
            "tensor_parallel": COUNT,
            "pipeline_parallel": COUNT,
            "executor": "mp|uni|ray",
            "batch_invariant": "on|off",
            "kv_space": _SPACE,
            "gpu_memory": _SHARE,
            "lookup_min": COUNT,
            "lookup_max": COUNT,
        },
        on={"cpu": VLLM_CPU},
    ),
    "server": Engine(
        "server",
        {
            "weights": ("served",),
            "kv": ("served",),
            "attn": ("served",),
            "draft": ("none",),
            "path": ("prefill", "decode"),
        },
        keys={
            "url": r"https?://[^@]+",
            "dialect": "auto|vllm|sglang|trtllm|llama-server",
            "served": ".+",
            "key_env": r"[A-Za-z_][A-Za-z0-9_]*",
            "logprobs": NUMBER,
            "timeout": NUMBER,
            "step": NUMBER,
        },
        records=False,
    ),
}  # fmt: skip

AXIS_NAMES: tuple[str, ...] = ("engine", "weights", "kv", "attn", "draft", "path")
"""The axes a person switches by arrow keys, in the order of the screen."""

MOST_THREADS_A_CORE = 8
"""More than this is a slip of the pen, and would take a machine down."""

NO_EFFECT: tuple[str, ...] = ("temperature", "top_p", "top_k", "seed")
"""Keys of free lanes, refused until there are any."""


def values(engine: str, axis: str) -> tuple[str, ...]:
    """The values of an axis that an engine can do on this machine."""
    if axis == "engine":
        return tuple(ENGINES)
    return ENGINES[engine].values(axis, accelerator())


def kind_of(configuration: Configuration, here: Accelerator | None = None) -> str:
    """The kind of device that a lane asks for: its own `device`, or what this machine has."""
    asked = configuration.device.partition(":")[0]
    return (here or accelerator()) if asked == "auto" else asked


def refusal(configuration: Configuration, here: Accelerator | None = None) -> ConfigurationError | None:
    """Why this configuration cannot run on its engine on a machine of this kind (this one where None), or None."""
    engine = ENGINES.get(configuration.engine)
    where = f"lane {_masked(configuration.to_line())}"
    if engine is None:
        return ConfigurationError(
            f"there is no engine {configuration.engine!r}", where=where, next=f"Engines: {', '.join(ENGINES)}."
        )
    device = kind_of(configuration, here)
    if found := _not_here(configuration, device, here):
        return ConfigurationError(found[0], where=where, next=found[1])
    for axis in engine.axes:
        allowed, value = engine.values(axis, device), rules.plain(configuration, axis)
        if not set(value) <= set(allowed):
            asked = getattr(configuration, axis)
            return ConfigurationError(
                f"{engine.name} cannot do {axis}={asked}" + rules.reason(configuration, axis, device),
                where=where,
                next=f"It can do {axis}={'|'.join(allowed)}.",
            )
    for key in NO_EFFECT:
        if (value := getattr(configuration, key)) != getattr(Configuration(), key):
            return ConfigurationError(
                f"{key}={value} would have no effect: lanes are forced, and decode speed is measured on greedy tokens",
                where=where,
                next=f"Leave {key} out.",
            )
    for key, value in configuration.extra:
        if key not in engine.keys:
            own = f"Its own keys: {', '.join(engine.keys) or 'none'}."
            return ConfigurationError(f"{engine.name} has no key {key!r}", where=where, next=own)
        if not re.fullmatch(engine.keys[key], value):
            pattern = engine.keys[key]
            form = _FORMS.get(pattern) or pattern.replace(COUNT, _FORMS[COUNT]).replace("|", ", ")
            what = f"{key}={_masked(value)} is not {form}"
            if key == "url" and "@" in value:
                what = f"url={_masked(value)} holds a name or password, which would be stored with the lane"
            return ConfigurationError(what, where=where, next=f"Such as {key}={_sample(key)}.")
    if found := rules.conflict(configuration, device):
        return ConfigurationError(found[0], where=where, next=found[1])
    return None


def _not_here(configuration: Configuration, device: str, here: Accelerator | None) -> tuple[str, str] | None:
    """What a lane asks for that this machine does not have, and what it has."""
    machine, cores = here or accelerator(), os.cpu_count() or 1
    kind, number, _ = configuration.device.partition(":")
    if (number and kind not in ("cuda", "rocm")) or (
        device not in ("cpu", machine) and (device, machine) != ("cuda", "rocm")
    ):
        return (
            f"device={configuration.device} is not here",
            f"Here: {'|'.join(dict.fromkeys(('auto', machine, 'cpu')))}.",
        )
    if configuration.threads > MOST_THREADS_A_CORE * cores:
        what = f"threads={configuration.threads} would starve one another on {cores} cores"
        return what, f"Use at most {MOST_THREADS_A_CORE * cores}."
    return None


def check(configuration: Configuration) -> Configuration:
    """The configuration itself, where its engine can do it. Raises ConfigurationError with what would work."""
    if error := refusal(configuration):
        raise error
    return configuration


def _masked(text: str) -> str:
    """Without what stands between an address's scheme and its host."""
    return re.sub(r"//[^/]*@", "//…@", text)


def _sample(key: str) -> str:
    samples = {
        "url": "http://127.0.0.1:8000, and key_env=NAME for a key from the environment", "dialect": "auto",
        "served": "NAME", "key_env": "OPENAI_API_KEY",
        "logprobs": "256", "executor": "ray", "batch_invariant": "on", "kv_space": "4", "gpu_memory": "0.9",
    }  # fmt: skip
    return samples.get(key, "32")
