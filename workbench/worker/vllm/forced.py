"""A logits processor that makes vLLM choose tokens given beforehand; the log-probabilities it reports stay raw."""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

KEY = "workbench_forced"


class Forced(LogitsProcessor):
    """Requests that bring `extra_args[KEY]`, a list of ids, get these as their tokens, one after the other."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # place in the batch: ids to force, tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            forced = (params.extra_args or {}).get(KEY)
            self.rows.pop(index, None)
            if forced:
                self.rows[index] = (forced, output)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (forced, output) in self.rows.items():
            if len(output) < len(forced):
                logits[index] = -torch.inf
                logits[index, forced[len(output)]] = 0.0
        return logits
