"""KV caches of our own: preallocated to the context, never grown or concatenated, plain or quantised by groups.

A token is quantised once and attention sees the dequantised values from its own pass on, so prefill and decode carry
the same error. No full-precision copy of the cache exists: one layer at a time is dequantised into a workspace that all
layers share. What is stored is in `kvstores.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from workbench.config.rules import keys_and_values
from workbench.errors import ConfigurationError
from workbench.worker.architectures import LINEAR, LayerShape, layer_shapes
from workbench.worker.quant import kvstores
from workbench.worker.quant.kvstores import BITS, PLAIN, QUANTIZED, Store, make_store, word
from workbench.worker.quant.states import Saved, StateLayer

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
    """One layer object per decoder layer; attention reads values in the dtype `attended`, whatever is stored.

    Before and after each pass `begin` and `end` are called: a pass that broke off has moved some states and not others.
    """

    def __init__(self, layers: list[Any], shapes: list[LayerShape], group: int, attended: torch.dtype) -> None:
        super().__init__(layers=layers)
        self.shapes, self.group, self.attended = shapes, group, attended
        self.stored: list[Layer] = [layer for layer in layers if isinstance(layer, Layer)]
        self.head_dim = next(shape.head_dim for shape in shapes if shape.stores)
        states = [layer for layer in layers if isinstance(layer, StateLayer)]
        self.states = Saved(states) if states else None
        self.broken = False

    @property
    def scheme(self) -> str:
        """The configuration's word for what the layers store, read from their tensors."""
        return word(*(store.kind for store in self.stored[0].stores))

    @property
    def nbytes(self) -> int:
        """Bytes that store keys and values, the shared workspace not counted."""
        return sum(layer.nbytes for layer in self.stored)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the values that attention reads: one layer's worth, and that of layers which others read from."""
        spaces = {id(layer.workspace): layer.workspace for layer in self.stored if layer.workspace is not None}
        return sum(space.nbytes for space in spaces.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of layers without a KV cache, the copies to go back to included."""
        return self.states.nbytes if self.states else 0

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self.stored[0].length

    @property
    def context(self) -> int:
        """Tokens that fit."""
        return self.stored[0].context

    def describe(self) -> str:
        """What the layers' tensors are, in words."""
        keys, values = (store.describe() for store in self.stored[0].stores)
        return f"keys and values {keys}" if keys == values else f"keys {keys}; values {values}"

    def begin(self, tokens: int) -> None:
        """A pass of so many tokens is about to run."""
        self.broken = True
        if self.states:
            self.states.before(self.length, tokens)

    def end(self) -> None:
        """The pass ran to its end."""
        self.broken = False

    @property
    def cuts_exactly(self) -> bool:
        """Whether a cache that grew and is cut back is what it was: not where groups or a window of exact tokens moved
        on, nor where layers have states."""
        stores = [store for layer in self.stored for store in layer.stores]
        moving = any(isinstance(store, kvstores.GroupedStore) and (store.step > 1 or store.window) for store in stores)
        return not self.states and not moving

    def truncate(self, length: int) -> int:
        """Keep the first `length` tokens, or fewer where layers have states that were saved at fewer; how many."""
        if self.states and (self.broken or length != self.length):
            length = self.states.back(length)
        for layer in self.stored:
            layer.crop(length - layer.length)
        self.broken = False
        return length


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
    by channel where `channel`, the newest `window` tokens exact. `config` is the text part's.

    Layers of sliding-window attention store the whole context too: it can then be cut back to any length.
    Raises ConfigurationError where it cannot be made.
    """
    kinds = keys_and_values(scheme)
    for kind in kinds:
        if kind not in PLAIN and kind not in QUANTIZED:
            raise ConfigurationError(
                f"kv={scheme} is unknown",
                where="transformers",
                next=f"It can do kv={'|'.join([*PLAIN, *QUANTIZED])}, and pairs such as k8v4.",
            )
    rounded = any(kind in QUANTIZED for kind in kinds)
    own = {"group": group, "window": window}
    shapes = layer_shapes(config)
    spaces: dict[tuple[int, int, int], Workspace] = {}
    made: list[Any] = []
    for each in shapes:
        if not each.stores:
            made.append(StateLayer() if each.kind == LINEAR else DummyLayer())
            continue
        shape = (each.heads, context, each.head_dim)
        _check_group(kinds, group, each.head_dim, channel)
        workspace = None
        if rounded or any(PLAIN[kind] != compute for kind in kinds):
            # What a layer lends must stay as it is until the last layer has read it.
            workspace = None if each.lends else spaces.get(shape)
            workspace = workspace or Workspace(shape, compute, device, rounded)
            if not each.lends:
                spaces[shape] = workspace
        keys = make_store(kinds[0], shape, compute, device, {**own, "channel": channel})
        values = make_store(kinds[1], shape, compute, device, {**own, "channel": False})
        made.append(Layer(context, (keys, values), workspace))
    return KVCache(made, shapes, group if rounded else 0, compute)


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
