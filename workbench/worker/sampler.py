"""Tokens chosen from a torch model's logits."""

from __future__ import annotations

import torch

from workbench.protocol.events import Generate


class Sampler:
    """Chooses a token from raw logits (width,). Temperature 0 is greedy; the lowest id wins among equals."""

    def __init__(self, request: Generate, vocabulary: int, device: torch.device) -> None:
        self.temperature, self.top_k, self.top_p = request.temperature, request.top_k, request.top_p
        self.vocabulary = vocabulary
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(request.seed)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token (int64 scalar) and its log-probability at temperature 1, before any sampler (float32 scalar)."""
        raw = logits[: self.vocabulary].float()
        token = raw.argmax() if self.temperature == 0 else self._draw(raw)
        return token, raw[token] - raw.logsumexp(dim=0)

    def _draw(self, raw: torch.Tensor) -> torch.Tensor:
        # A stable descending sort fixes the order of equal logits, so that a seed gives the same token everywhere.
        values, ids = raw.sort(descending=True, stable=True)
        if 0 < self.top_k < len(values):
            values, ids = values[: self.top_k], ids[: self.top_k]
        probabilities = (values / self.temperature).softmax(dim=0)
        if self.top_p < 1:
            # A token stays while the mass before it is below top_p; the first always does.
            before = probabilities.cumsum(dim=0) - probabilities
            probabilities = torch.where(before < self.top_p, probabilities, 0.0)
        return ids[torch.multinomial(probabilities, 1, generator=self.generator)[0]]
