"""What really runs: asked of each vLLM worker after loading, and put into the lane's words."""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections import Counter
from typing import Any

NAMES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


class Readback:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its method is called through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def workbench_describe(self) -> dict[str, Any]:
        """Plain values: linear layers by method and scheme, tensors by dtype, attention layers, the KV cache."""
        import torch
        from vllm.model_executor.layers.linear import LinearBase

        runner = self.model_runner
        model = runner.get_model()
        linears: Counter[str] = Counter()
        for module in model.modules():
            if isinstance(module, LinearBase):
                linears[_method(module)] += 1
        dtypes: Counter[str] = Counter()
        for parameter in model.parameters():
            dtypes[_dtype(parameter)] += 1
        layers = [
            layer
            for layer in self.vllm_config.compilation_config.static_forward_context.values()
            if hasattr(layer, "attn_backend") and hasattr(layer, "kv_cache_dtype")
        ]
        caches = {tensor.data_ptr(): tensor for tensor in _tensors(getattr(runner, "kv_caches", []))}
        return {
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "linears": dict(linears),
            "tensors": dict(dtypes),
            "attention": dict(Counter(layer.attn_backend.get_name() for layer in layers)),
            "kv_types": dict(Counter(str(layer.kv_cache_dtype) for layer in layers)),
            "kv_declared": sorted(set.intersection(*(_declared(layer.attn_backend) for layer in layers))),
            "kv_tensors": sorted({_dtype(tensor) for tensor in caches.values()}),
            "kv_bytes": sum(tensor.nbytes for tensor in caches.values()),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "drafter": type(runner.drafter).__name__ if getattr(runner, "drafter", None) is not None else "",
        }


def weights_word(linears: dict[str, int], tensors: dict[str, int], quantization: str) -> str | None:
    """The weights in a lane's words: a dtype where no linear layer is quantized, else vLLM's name of the method.

    `quantization` is what vLLM resolved; it counts only where a layer has a method of it.
    """
    quantized = [name for name in linears if not name.startswith("Unquantized")]
    if quantized:
        # The folder's own format says too little: compressed-tensors holds W8A8 and W4A16 alike.
        schemes = sorted({_scheme(name) for name in quantized} - {""})
        return " ".join([quantization or "+".join(sorted(quantized)), *(["+".join(schemes)] if schemes else [])])
    return "+".join(sorted(NAMES.get(name, name) for name in tensors)) or None


def kv_word(found: dict[str, Any]) -> str | None:
    """The KV cache in vLLM's words: the tensors' dtype for `auto`; None for a type its backend does not declare."""
    words = list(found["kv_types"])
    if len(words) != 1 or not found["kv_tensors"]:
        return None
    if words[0] == "auto":
        return "+".join(found["kv_tensors"])
    return words[0] if words[0] in found["kv_declared"] else None


def _method(module: Any) -> str:
    """A linear layer's method, scheme and kernel by class, and whether the kernel quantizes activations on its own."""
    method, scheme = type(module.quant_method).__name__, getattr(module, "scheme", None)
    kernel = getattr(scheme, "kernel", None)
    names = [method, *(type(part).__name__ for part in (scheme, kernel) if part is not None)]
    return " ".join([*names, *(["W4A8"] if getattr(module, "use_w4a8", False) else [])])


def _scheme(name: str) -> str:
    """The scheme in what `_method` says, in the words of the format: W8A8Int8, WNA16, or W4A8 where that is run."""
    parts = name.split(" ")
    found = next((part for part in parts[1:] if part.startswith("CompressedTensors")), "")
    return "W4A8" if "W4A8" in parts else found.removeprefix("CompressedTensors")


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _declared(backend: Any) -> set[str]:
    return {str(name) for name in backend.supported_kv_cache_dtypes}


def _tensors(caches: Any) -> list[Any]:
    flat: list[Any] = []
    for cache in caches:
        flat += _tensors(cache) if isinstance(cache, (list, tuple)) else [cache]
    return flat
