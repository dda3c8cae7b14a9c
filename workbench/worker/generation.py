"""Greedy and sampled continuation, one token a pass."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from workbench.errors import ConfigurationError
from workbench.metrics.speed import decode_tps
from workbench.protocol.events import Generate
from workbench.worker.forcing import FLUSH_SECONDS, Model, Report


def check_generate(request: Generate, held: int, context: int, width: int) -> int:
    """How many tokens to keep of the `held` ones, or of the ids that the request brings.

    Raises ConfigurationError for what cannot be generated in a cache of `context` tokens from logits of `width` ids.
    """
    ids = request.arrays.get("ids")
    held = held if ids is None else len(ids)
    keep = held if request.keep < 0 else request.keep
    if not 0 < keep <= held or request.count < 1:
        raise ConfigurationError(f"cannot keep {keep} of {held} tokens and generate {request.count}", where="generate")
    # The last generated token is never run, so it needs no place.
    if keep + request.count - 1 > context:
        raise ConfigurationError(
            f"{keep} tokens and {request.count} new ones do not fit a context of {context}",
            where="generate",
            next="Start with a larger context.",
        )
    if not 0 <= request.temperature < float("inf") or not 0 < request.top_p <= 1 or request.top_k < 0:
        raise ConfigurationError("temperature, top_p or top_k is out of range", where="generate")
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < width:
        raise ConfigurationError("ids lie outside the vocabulary: another model's?", where="generate")
    return keep


def generate(model: Model, last: int, request: Generate, report: Report) -> tuple[list[int], dict[str, Any]]:
    """Continue after token `last`, which the KV cache does not hold yet; at most `request.count` tokens.

    Returns the tokens and the statistics of `Generated` that the loop itself knows. Speed is the median over a moving
    window of tokens; the first token, whose pass stands for the prompt, is left out.
    """
    choose = model.chooser(request)
    stop = frozenset(request.stop)
    ids: list[int] = []
    logprobs: list[float] = []
    times: list[float] = []
    sent, reason = 0, "length"
    began = time.perf_counter()
    flushed = began
    while len(ids) < request.count:
        report.check()
        last, logprob = choose(model.forward(np.array([last]), 1))  # also waits for the device
        ids.append(last)
        times.append(time.perf_counter() - began)
        logprobs.append(logprob)
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


def _flush(report: Report, sent: int, ids: list[int], logprobs: list[float], times: list[float]) -> None:
    arrays = {
        "ids": np.array(ids[sent:], dtype="<i4"),
        "logprobs": np.array(logprobs[sent:], dtype="<f4"),
        "seconds": np.array(times[sent:], dtype="<f4"),
    }
    report.tokens(sent, arrays)
