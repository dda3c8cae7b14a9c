"""Tokens chosen from logits in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.protocol.events import Generate


class HostSampler:
    """Chooses a token from raw float32 logits (width,). Temperature 0 is greedy; the lowest id wins among equals."""

    def __init__(self, request: Generate, vocabulary: int) -> None:
        self.temperature, self.top_k, self.top_p = request.temperature, request.top_k, request.top_p
        self.vocabulary = vocabulary
        self.generator = np.random.Generator(np.random.Philox(request.seed))

    def choose(self, logits: NDArray[Any]) -> tuple[int, float]:
        """The token and its log-probability at temperature 1, before any sampler."""
        raw = logits[: self.vocabulary]
        best = int(raw.argmax())
        token = best if self.temperature == 0 else self._draw(raw)
        with np.errstate(all="ignore"):
            lse = float(raw[best]) + np.log(np.exp(raw - raw[best]).sum(dtype=np.float64))
            return token, float(raw[token] - lse)

    def _draw(self, raw: NDArray[Any]) -> int:
        # A stable descending sort fixes the order of equal logits, so that a seed gives the same token everywhere.
        ids = np.argsort(-raw, kind="stable")
        if 0 < self.top_k < len(ids):
            ids = ids[: self.top_k]
        values = raw[ids].astype(np.float64)
        weights = np.exp((values - values[0]) / self.temperature)
        edges = (weights / weights.sum()).cumsum()
        if self.top_p < 1:
            # A token stays while the mass before it is below top_p; the first always does.
            edges = edges[: 1 + int(np.count_nonzero(edges[:-1] < self.top_p))]
        return int(ids[min(np.searchsorted(edges, self.generator.random() * edges[-1], "right"), len(edges) - 1)])
