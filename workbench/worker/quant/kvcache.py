"""KV caches of our own: preallocated to the context, never grown or concatenated, plain or quantised by groups.

A quantised cache holds, for each token and head, groups of `group` values along head_dim as unsigned codes (int4: two a
byte) with a float16 scale and minimum: x ~ code * scale + minimum; float16 rather than bfloat16, whose 8 bits of
mantissa would cost about as much as the int8 codes themselves. A token is quantised once, when it arrives, and
attention sees the dequantised values from its own pass on, so prefill and decode carry the same error. No
full-precision copy of the cache exists: one layer at a time is dequantised into a workspace that all layers share.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from workbench.errors import ConfigurationError

PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
BITS = {"int8": 8, "int4": 4}
DEFAULT_GROUP = 32
CPU_BLOCK, DEVICE_BLOCK = 1024, 16384
"""Tokens dequantised at a time. 8,192 tokens of 3 heads of 64 took 0.71 ms in blocks of 1,024, 1.11 ms at once: L2."""


class Workspace:
    """What one layer's attention reads, reused by the next layer: keys and values (1, heads, context, head_dim)."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, exact: bool) -> None:
        self.outputs = tuple(torch.empty((1, *shape), dtype=dtype, device=device) for _ in range(2))
        # Dequantising multiplies and adds in float32, then rounds once to what attention computes in.
        needs_float = not exact and dtype != torch.float32
        block = (shape[0], min(shape[1], CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK), shape[2])
        self.float = torch.empty(block, dtype=torch.float32, device=device) if needs_float else None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in self.outputs) + (0 if self.float is None else self.float.nbytes)


class _Layer(CacheLayerMixin):
    """The part of transformers' layer interface that both kinds share; `length` tokens are stored."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context = context
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: everything is allocated when the layer is made."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.context

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; as transformers calls it, their number is negative."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"cannot crop {tokens_to_remove} from {self.length} stored tokens")
        self.length += tokens_to_remove

    def reset(self) -> None:
        self.length = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("one sequence, no beams")

    def _place(self, states: torch.Tensor) -> tuple[int, int]:
        start, stop = self.length, self.length + states.shape[-2]
        if states.shape[0] != 1:
            raise ValueError(f"the cache holds one sequence, not {states.shape[0]}")
        if stop > self.context:
            raise ValueError(f"{stop} tokens do not fit a KV cache of {self.context}")
        self.length = stop
        return start, stop


class PlainLayer(_Layer):
    """Keys and values as they are, in `dtype`; cast into the workspace where attention computes in another."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, workspace: Workspace | None
    ) -> None:
        super().__init__(shape[1])
        self.keys = torch.empty((1, *shape), dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.workspace = workspace

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = self._place(key_states)
        seen: list[torch.Tensor] = []
        for index, (store, states) in enumerate(((self.keys, key_states), (self.values, value_states))):
            assert store is not None
            store[:, :, start:stop].copy_(states)
            stored = store[:, :, :stop]
            if self.workspace is not None:
                stored = self.workspace.outputs[index][:, :, :stop].copy_(stored)
            seen.append(stored)
        return seen[0], seen[1]

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        assert self.keys is not None and self.values is not None
        return self.keys.nbytes + self.values.nbytes


class QuantizedLayer(_Layer):
    """Keys and values by groups: codes (heads, context, groups, bytes), scale, minimum (heads, context, groups, 1)."""

    def __init__(
        self, shape: tuple[int, int, int], bits: int, group: int, device: torch.device, workspace: Workspace
    ) -> None:
        heads, context, head_dim = shape
        super().__init__(context)
        self.bits, self.group, self.groups = bits, group, head_dim // group
        width = group * bits // 8

        def zeros(last: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((heads, context, self.groups, last), dtype=dtype, device=device)

        self.codes = tuple(zeros(width, torch.uint8) for _ in range(2))
        self.scale = tuple(zeros(1, torch.float16) for _ in range(2))
        self.minimum = tuple(zeros(1, torch.float16) for _ in range(2))
        self.workspace = workspace

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = self._place(key_states)
        for index, states in enumerate((key_states, value_states)):
            grouped = states[0].reshape(*states.shape[1:3], self.groups, self.group)
            parts = quantize(grouped, self.bits)
            stores = (self.codes[index], self.scale[index], self.minimum[index])
            for store, part in zip(stores, parts, strict=True):
                store[:, start:stop] = part
        return self._read(0, stop), self._read(1, stop)

    def _read(self, index: int, stop: int) -> torch.Tensor:
        """The first `stop` tokens, dequantised into the workspace: (1, heads, stop, head_dim)."""
        output = self.workspace.outputs[index][:, :, :stop]
        block = self.workspace.float
        size = stop if block is None else block.shape[1]
        for start in range(0, stop, size):
            part = slice(start, min(start + size, stop))
            codes, scale, minimum = (x[index][:, part] for x in (self.codes, self.scale, self.minimum))
            target = output[0, :, part] if block is None else block[:, : part.stop - start]
            dequantize(codes, scale, minimum, self.bits, target.view((*codes.shape[:3], self.group)))
            if block is not None:
                output[0, :, part] = target
        return output

    @property
    def nbytes(self) -> int:
        """Bytes stored: codes, scales and minima."""
        return sum(x.nbytes for x in (*self.codes, *self.scale, *self.minimum))


def quantize(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (..., group * bits / 8) uint8, scale and minimum (..., 1) float16 of groups along the last axis.

    The codes follow the rounded scale and minimum. Of an int4 byte the low half belongs to the group's first half.
    """
    values = values.float()
    low, high = values.aminmax(dim=-1, keepdim=True)
    levels = (1 << bits) - 1
    minimum = low.half()
    scale = ((high - low) / levels).half()
    step = scale.float()
    # A group of equal values, or one too narrow for float16, has scale 0: its codes are 0, its values the minimum.
    codes = (values - minimum.float()).div_(torch.where(step > 0, step, torch.inf)).round_().clamp_(0, levels)
    codes = codes.to(torch.uint8)
    if bits == 4:
        first, second = codes.chunk(2, dim=-1)
        codes = first | (second << 4)
    return codes, scale, minimum


def dequantize(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write the float32 values of `quantize`'s groups into `out` (..., group)."""
    if bits == 4:
        first, second = out.chunk(2, dim=-1)
        first.copy_(codes & 15)
        second.copy_(codes >> 4)
    else:
        out.copy_(codes)
    out.mul_(scale.float()).add_(minimum.float())


class KVCache(Cache):
    """One layer object per decoder layer; attention reads values in the dtype `attended`, whatever is stored."""

    def __init__(
        self, layers: list[Any], group: int, head_dim: int, attended: torch.dtype, workspace: Workspace | None
    ):
        super().__init__(layers=layers)
        self.group, self.head_dim, self.attended, self.workspace = group, head_dim, attended, workspace

    @property
    def scheme(self) -> str:
        """The configuration's word for what the layers store, read from their tensors."""
        layer: Any = self.layers[0]
        if isinstance(layer, QuantizedLayer):
            return {bits: name for name, bits in BITS.items()}[layer.bits]
        return {dtype: name for name, dtype in PLAIN.items()}[layer.keys.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes that store keys and values, the shared workspace not counted."""
        return sum(layer.nbytes for layer in self.layers)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the one layer's worth of values that attention reads."""
        return 0 if self.workspace is None else self.workspace.nbytes

    @property
    def length(self) -> int:
        """Tokens stored."""
        layer: Any = self.layers[0]
        return layer.get_seq_length()

    @property
    def context(self) -> int:
        """Tokens that fit."""
        return int(self.layers[0].get_max_length())

    def describe(self) -> str:
        """What the layers' tensors are, in words."""
        layer: Any = self.layers[0]
        if isinstance(layer, PlainLayer):
            return f"keys and values {layer.keys.dtype}".replace("torch.", "")  # pyright: ignore[reportOptionalMemberAccess]
        scale = str(layer.scale[0].dtype).removeprefix("torch.")
        return f"keys and values int{layer.bits} per token, groups of {layer.group}, {scale} scale and minimum"

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.crop(length - layer.length)


def make_cache(
    scheme: str, config: Any, context: int, compute: torch.dtype, device: torch.device, group: int = DEFAULT_GROUP
) -> KVCache:
    """A cache for a model whose attention computes in `compute`. Raises ConfigurationError where it cannot be made."""
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (heads, context, head_dim)
    if dtype := PLAIN.get(scheme):
        workspace = None if dtype == compute else Workspace(shape, compute, device, exact=True)
        made: list[Any] = [PlainLayer(shape, dtype, device, workspace) for _ in range(layers)]
        return KVCache(made, 0, head_dim, compute, workspace)
    if scheme not in BITS:
        raise ConfigurationError(
            f"kv={scheme} is unknown", where="transformers", next=f"It can do kv={'|'.join([*PLAIN, *BITS])}."
        )
    if group < 2 or group % 2 or head_dim % group:
        raise ConfigurationError(
            f"kv_group={group} does not divide the head size {head_dim} into even groups",
            where="transformers",
            next=f"Use {', '.join(str(n) for n in (16, 32, 64, 128) if head_dim % n == 0) or head_dim}.",
        )
    workspace = Workspace(shape, compute, device, exact=False)
    made = [QuantizedLayer(shape, BITS[scheme], group, device, workspace) for _ in range(layers)]
    return KVCache(made, group, head_dim, compute, workspace)
