"""Greedy and sampled continuation, one token a pass."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from workbench.metrics.speed import decode_tps
from workbench.protocol.events import Generate
from workbench.worker.forcing import FLUSH_SECONDS, Model, Report


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


def generate(
    model: Model, last: torch.Tensor, request: Generate, report: Report, device: torch.device
) -> tuple[list[int], dict[str, Any]]:
    """Continue after token `last` (1,), which the KV cache does not hold yet; at most `request.count` tokens.

    Returns the tokens and the statistics of `Generated` that the loop itself knows. Speed is the median over a moving
    window of tokens; the first token, whose pass stands for the prompt, is left out.
    """
    sampler = Sampler(request, model.vocabulary, device)
    stop = frozenset(request.stop)
    ids: list[int] = []
    logprobs: list[torch.Tensor] = []
    times: list[float] = []
    sent, reason = 0, "length"
    began = time.perf_counter()
    flushed = began
    while len(ids) < request.count:
        report.check()
        last, logprob = sampler.choose(model.forward(last, 1)[-1])
        ids.append(int(last))  # also waits for the device
        times.append(time.perf_counter() - began)
        logprobs.append(logprob)
        last = last.view(1)
        stopped = ids[-1] in stop
        if stopped or len(ids) == request.count or began + times[-1] - flushed >= FLUSH_SECONDS:
            _flush(report, sent, ids, logprobs, times)
            sent, flushed = len(ids), time.perf_counter()
        if stopped:
            reason = "stop"
            break
    return ids, {
        "tokens": len(ids),
        "seconds": times[-1] if times else 0.0,
        "median_tps": decode_tps(np.asarray(times)),
        "first_token_seconds": times[0] if times else None,
        "stop_reason": reason,
    }


def _flush(report: Report, sent: int, ids: list[int], logprobs: list[torch.Tensor], times: list[float]) -> None:
    arrays = {
        "ids": np.array(ids[sent:], dtype="<i4"),
        "logprobs": torch.stack(logprobs[sent:]).cpu().numpy().astype("<f4"),
        "seconds": np.array(times[sent:], dtype="<f4"),
    }
    report.tokens(sent, arrays)
