"""KV caches of our own: preallocated to the context, never grown or concatenated, plain or quantised by groups.

A token is quantised once and attention sees the dequantised values from its own pass on, so prefill and decode carry
the same error. No full-precision copy of the cache exists: one layer at a time is dequantised into a workspace that all
layers share. What is stored is in `kvstores.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from workbench.config.rules import keys_and_values
from workbench.errors import ConfigurationError
from workbench.worker.quant import kvstores
from workbench.worker.quant.kvstores import BITS, PLAIN, QUANTIZED, Store, make_store, word

DEFAULT_GROUP = 32


class Workspace:
    """What one layer's attention reads, reused by the next layer: keys and values (1, heads, context, head_dim).

    `rounded` is set where what is stored is dequantised: in float32, then rounded once to what attention computes in.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rounded: bool) -> None:
        self.outputs = tuple(torch.empty((1, *shape), dtype=dtype, device=device) for _ in range(2))
        size = kvstores.CPU_BLOCK if device.type == "cpu" else kvstores.DEVICE_BLOCK
        block = (shape[0], min(shape[1], size), shape[2])
        needs_float = rounded and dtype != torch.float32
        self.float = torch.empty(block, dtype=torch.float32, device=device) if needs_float else None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in self.outputs) + (0 if self.float is None else self.float.nbytes)


class Layer(CacheLayerMixin):
    """A decoder layer's keys and values, by transformers' interface; `length` tokens are stored."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, context: int, stores: tuple[Store, Store], workspace: Workspace | None) -> None:
        super().__init__()
        self.context, self.stores, self.workspace = context, stores, workspace
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: everything is allocated when the layer is made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the states (1, heads, n, head_dim) and return all that attention reads."""
        if key_states.shape[0] != 1:
            raise ValueError(f"the cache holds one sequence, not {key_states.shape[0]}")
        stop = self.length + key_states.shape[-2]
        if stop > self.context:
            raise ValueError(f"{stop} tokens do not fit a KV cache of {self.context}")
        self.length = stop
        seen: list[torch.Tensor] = []
        for index, (store, states) in enumerate(zip(self.stores, (key_states, value_states), strict=True)):
            store.put(states[0])
            output = None if self.workspace is None else self.workspace.outputs[index][0]
            if isinstance(store, kvstores.PlainStore) and store.values.dtype == states.dtype:
                output = None  # read where it lies
            seen.append(store.read(output, None if self.workspace is None else self.workspace.float)[None])
        return seen[0], seen[1]

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return sum(store.nbytes for store in self.stores)

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
        for store in self.stores:
            store.crop(self.length)

    def reset(self) -> None:
        self.crop(-self.length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("one sequence, no beams")


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
        return word(*(store.kind for store in layer.stores))

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
        keys, values = (store.describe() for store in layer.stores)
        return f"keys and values {keys}" if keys == values else f"keys {keys}; values {values}"

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.crop(length - layer.length)


def make_cache(
    scheme: str,
    config: Any,
    context: int,
    compute: torch.dtype,
    device: torch.device,
    group: int = DEFAULT_GROUP,
    window: int = 0,
    channel: bool = False,
) -> KVCache:
    """A cache for a model whose attention computes in `compute`: keys and values of `scheme` in groups of `group`, keys
    by channel where `channel`, the newest `window` tokens exact.

    Raises ConfigurationError where it cannot be made.
    """
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape, kinds = (heads, context, head_dim), keys_and_values(scheme)
    for kind in kinds:
        if kind not in PLAIN and kind not in QUANTIZED:
            raise ConfigurationError(
                f"kv={scheme} is unknown",
                where="transformers",
                next=f"It can do kv={'|'.join([*PLAIN, *QUANTIZED])}, and pairs such as k8v4.",
            )
    rounded = any(kind in QUANTIZED for kind in kinds)
    _check_group(kinds, group, head_dim, channel)
    workspace = None
    if rounded or PLAIN[kinds[0]] != compute:
        workspace = Workspace(shape, compute, device, rounded)
    own = {"group": group, "window": window}
    made: list[Any] = []
    for _ in range(layers):
        keys = make_store(kinds[0], shape, compute, device, {**own, "channel": channel})
        values = make_store(kinds[1], shape, compute, device, {**own, "channel": False})
        made.append(Layer(context, (keys, values), workspace))
    return KVCache(made, group if rounded else 0, head_dim, compute, workspace)


def _check_group(kinds: tuple[str, str], group: int, head_dim: int, channel: bool) -> None:
    """Raise ConfigurationError where groups along head_dim do not divide it into whole bytes."""
    along = [kind for index, kind in enumerate(kinds) if kind in QUANTIZED and not (channel and index == 0)]
    per_byte = max((8 // BITS.get(kind, 8) for kind in along), default=1)
    if along and (group < 2 or group % max(2, per_byte) or head_dim % group):
        raise ConfigurationError(
            f"kv_group={group} does not divide the head size {head_dim} into even groups",
            where="transformers",
            next=f"Use {', '.join(str(n) for n in (16, 32, 64, 128) if head_dim % n == 0) or head_dim}.",
        )
