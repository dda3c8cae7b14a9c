"""Layers that keep a state instead of keys and values: gated delta-net, with the convolution before it.

A state cannot be cut back to fewer tokens. So it is saved as it was before the last pass of several tokens and before
the last pass of one: to go back, the nearest saved state is put back, and the tokens after it run again.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

States = tuple[torch.Tensor, torch.Tensor] | None
"""What one layer holds: the inputs that its convolution still reads, and the recurrent state; None at the start."""


class StateLayer(LinearAttentionLayer):
    """A linear-attention layer's convolution and recurrent state, by transformers' interface."""

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Make the tensors; unlike transformers' own this marks no addresses for CUDA graphs, which loads dynamo."""
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = conv_states.new_zeros((*conv_states.shape[:-1], size))
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first pass."""
        return sum(x.nbytes for x in (self.conv_states[0], self.recurrent_states[0]) if x is not None)

    def save(self) -> States:
        """A copy of the state."""
        if not self.has_previous_state[0]:
            return None
        convolution, recurrent = self.conv_states[0], self.recurrent_states[0]
        assert convolution is not None
        assert recurrent is not None
        return convolution.clone(), recurrent.clone()

    def restore(self, saved: States) -> None:
        """Put a saved state back; None is the start."""
        if saved is None:
            self.reset()
            return
        for held, copy in zip((self.conv_states[0], self.recurrent_states[0]), saved, strict=True):
            assert held is not None
            held.copy_(copy)
        self.has_previous_state[0] = True


class Saved:
    """The states of all such layers as they were at a length, for the last pass of each sort."""

    def __init__(self, layers: list[StateLayer]) -> None:
        self.layers = layers
        self._kept: dict[bool, tuple[int, list[States]]] = {}  # by whether the pass after it was of one token

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of the copies."""
        copies = (x for _, states in self._kept.values() for state in states if state is not None for x in state)
        return sum(layer.nbytes for layer in self.layers) + sum(x.nbytes for x in copies)

    def before(self, length: int, tokens: int) -> None:
        """Save the states of `length` tokens: a pass of `tokens` more is about to run."""
        self._kept[tokens == 1] = (length, [layer.save() for layer in self.layers])

    def back(self, length: int) -> int:
        """Put back the longest saved state of at most `length` tokens, else the start; how many tokens it has."""
        self._kept = {single: kept for single, kept in self._kept.items() if kept[0] <= length}
        start: tuple[int, list[Any]] = (0, [None] * len(self.layers))
        found, states = max(self._kept.values(), key=lambda kept: kept[0], default=start)
        for layer, state in zip(self.layers, states, strict=True):
            layer.restore(state)
        return found
