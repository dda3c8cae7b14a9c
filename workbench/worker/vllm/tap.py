"""Whole logits of vLLM's V1 runner, read where it computes log-probabilities from them.

The runner keeps a request's best log-probabilities and throws the rest away; whole vocabularies through its interface
are Python lists, 5 MB a token. In one process with the runner, the logits themselves can be looked at as they pass.
Nothing is changed, and the log-probability that vLLM reports for each token is compared with what the logits say.
"""

from __future__ import annotations

from typing import Any

import torch


class Tap:
    """Keeps what passed in the current step: `prompt` rows from a position on, `sampled` rows (n requests, V)."""

    def __init__(self, runner: Any) -> None:
        self.prompt: list[tuple[int, torch.Tensor]] = []
        self.sampled: list[torch.Tensor] = []
        self._first: int | None = None
        gather, compute = runner._get_prompt_logprobs_dict, runner.sampler.compute_logprobs

        def gathering(hidden_states: torch.Tensor, scheduled: dict[str, int]) -> Any:
            computed = [runner.requests[name].num_computed_tokens for name in runner.num_prompt_logprobs]
            self._first = computed[0] + 1 if len(computed) == 1 else None
            try:
                return gather(hidden_states, scheduled)
            finally:
                self._first = None

        def computing(logits: torch.Tensor) -> torch.Tensor:
            if self._first is None:
                self.sampled.append(logits.detach().clone())  # processors may write into the original
            else:
                self.prompt.append((self._first, logits.detach()))
            return compute(logits)

        runner._get_prompt_logprobs_dict = gathering
        runner.sampler.compute_logprobs = computing

    def clear(self) -> None:
        """Forget the last step's rows."""
        self.prompt.clear()
        self.sampled.clear()


def make_tap(runner: Any) -> Tap | None:
    """A tap on a V1 runner in this process; None on another runner."""
    sampler = getattr(runner, "sampler", None)
    fits = all(hasattr(runner, name) for name in ("_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests"))
    return Tap(runner) if fits and hasattr(sampler, "compute_logprobs") else None
