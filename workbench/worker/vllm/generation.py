"""Continuation with vLLM, with or without a drafter: when each token was known, and what each step accepted."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np

from workbench.metrics.acceptance import acceptance
from workbench.metrics.speed import decode_tps
from workbench.protocol.events import Generate
from workbench.worker.channel import Job
from workbench.worker.vllm.engine import Engine
from workbench.worker.vllm.flat import named

FLUSH_SECONDS = 0.05


def generate(engine: Engine, ids: list[int], request: Generate, job: Job) -> tuple[list[int], dict[str, Any]]:
    """Continue after `ids`; at most `request.count` tokens, sent in batches. Tokens of one step have one time.

    Returns the tokens and the statistics of `Generated`. A step that drafted nothing is a step of one token.
    """
    parameters: dict[str, Any] = {
        "max_tokens": request.count,
        "logprobs": 0,
        "stop_token_ids": list(request.stop),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    if request.temperature > 0:
        parameters["seed"] = request.seed
    new: list[int] = []
    logprobs: list[np.ndarray[Any, Any]] = []
    times: list[float] = []
    drafted: list[int] = []
    accepted: list[int] = []
    sent, reason, reported = 0, "length", None
    began = flushed = time.perf_counter()
    with closing(engine.run(ids, **parameters)) as steps:
        for step in steps:
            job.check()
            if step.output is None:
                continue
            now = time.perf_counter()
            if new:  # the first step's token comes from the prompt's own pass
                drafted.append(step.drafted)
                accepted.append(step.accepted)
            answer = step.output.outputs[0]
            new += step.tokens
            times += [now - began] * len(step.tokens)
            logprobs.append(named(answer.logprobs, 0, len(step.tokens)).target)
            if step.output.finished:
                reason = "stop" if answer.finish_reason == "stop" else "length"
                reported = answer.spec_decode_metrics
            if step.output.finished or now - flushed >= FLUSH_SECONDS:
                arrays = {
                    "ids": np.array(new[sent:], "<i4"),
                    "logprobs": np.concatenate(logprobs).astype("<f4"),
                    "seconds": np.array(times[sent:], "<f4"),
                }
                job.tokens(sent, arrays)
                sent, logprobs, flushed = len(new), [], now
    stats: dict[str, Any] = {
        "tokens": len(new),
        "seconds": times[-1] if times else 0.0,
        "median_tps": decode_tps(np.asarray(times)),
        "first_token_seconds": times[0] if times else None,
        "stop_reason": reason,
    }
    if engine.config.speculative_config is not None:
        # The last step's tokens may have been cut off at the count or at a stop token. `checked`: vLLM's scheduler
        # keeps the same list for the request, without the steps that drafted nothing.
        cut = sum(accepted) + len(accepted) != len(new) - 1
        checked = _same(drafted, accepted, reported)
        stats["acceptance"] = {**acceptance(drafted, accepted), "truncated": cut, "checked": checked}
    return new, stats


def _same(drafted: list[int], accepted: list[int], reported: Any) -> bool | None:
    """Whether vLLM's own list of the request's steps says the same; None where it gives none."""
    if reported is None:
        return None
    mine = [pair for pair in zip(drafted, accepted, strict=True) if pair[0]]
    return mine == list(zip(reported.per_step_drafted, reported.per_step_accepted, strict=True))
