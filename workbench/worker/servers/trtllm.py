"""TensorRT-LLM's trtllm-serve: no prompt log-probabilities over HTTP but whole logits of the prompt, as JSON.

That is exact and large, so only short sessions fit. Unknown keys are rejected there. Not run against a server here:
written after its source, and tested against a scripted twin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.errors import ConfigurationError
from workbench.metrics.acceptance import from_average
from workbench.protocol.events import Generate
from workbench.worker.servers import answers
from workbench.worker.servers.base import Piece, Read, Served, Target, Whole, model_card
from workbench.worker.servers.connection import ABSENT, Connection, Refused

MOST_VALUES = 32 << 20
"""Logits in one answer: about 20 bytes each on the wire, and 32 while they are parsed."""
BYTES_PER_VALUE = 26
SPARE_BYTES = 1 << 20
NO_LOGITS = (
    "It takes return_context_logits of trtllm-serve: start it with gather_context_logits on (TensorRT engines), and"
    " with enable_block_reuse: false, since reused blocks have no logits."
)


class Trtllm:
    """See `base.Dialect`."""

    name: str = "trtllm"
    paths: tuple[str, ...] = ("prefill",)
    advice: str = "Over HTTP TensorRT-LLM forces no tokens one at a time: use path=prefill."
    probe_lengths: tuple[int, int] = (16, 32)
    stale_advice: str = "Start the server with kv_cache_config: enable_block_reuse: false."
    context_advice: str = "Start the server with a larger --max_seq_len"

    def __init__(self, connection: Connection, target: Target) -> None:
        self.connection, self.target = connection, target

    def served(self) -> Served:
        """The model's name and the version; it tells little else."""
        _, name = model_card(self.connection, self.target.model)
        found = self.connection.find("/version")
        version = found.get("version") if isinstance(found, dict) else None
        return Served(
            model=name,
            version=version if isinstance(version, str) else None,
            speculation="on" if self._speculates() else None,
            notes=("the server does not tell its context, cache or weights",),
        )

    def best(self, asked: int) -> int:
        """Whole logits: nothing to choose."""
        if asked:
            raise ConfigurationError(
                f"logprobs={asked} would have no effect: trtllm gives whole logits of a prompt, or nothing",
                where=str(self.connection.address),
                next="Leave logprobs out.",
            )
        try:
            self.score([0, 1], 1, 0)
        except (Refused, answers.Missing) as error:
            if isinstance(error, Refused) and error.status not in (400, 422):
                raise
            raise ConfigurationError(
                f"the server gives no logits of a prompt: {error.what}",
                where=str(self.connection.address),
                next=NO_LOGITS,
            ) from error
        return self.target.vocabulary

    def pieces(self, first: int, n: int, step: int) -> Iterator[tuple[int, int]]:
        """All at once: it cannot leave out what came before. Raises ConfigurationError where that is too much."""
        values = n * self.target.vocabulary
        if values > MOST_VALUES:
            raise ConfigurationError(
                f"{n:,} tokens times {self.target.vocabulary:,} ids are {values:,} logits in one JSON answer,"
                f" and {MOST_VALUES:,} are read at most",
                where=str(self.connection.address),
                next=f"Use a session of at most {MOST_VALUES // self.target.vocabulary:,} tokens, or another engine.",
            )
        if first < n:
            yield first, n

    def prepare(self, ids: list[int]) -> None:
        """Nothing: a request runs its whole prefix."""

    def score(self, ids: list[int], first: int, best: int) -> Whole:
        """One request; row i of the answer predicts position i + 1."""
        body = {
            "model": self.target.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "return_context_logits": True,
            "detokenize": False,
        }
        limit = SPARE_BYTES + len(ids) * self.target.vocabulary * BYTES_PER_VALUE
        answer = self.connection.post("/v1/completions", body, limit)
        where = f"{self.connection.address}/v1/completions"
        choice = answers.items(answers.field(answer, "choices", "answer"), "choices", 1)[0]
        usage = answers.field(answer, "usage", "answer")
        counted = answers.whole(answers.field(usage, "prompt_tokens", "usage"), "usage.prompt_tokens")
        answers.same_count(len(ids), counted, where)
        rows = answers.items(answers.field(choice, "context_logits", "choices[0]"), "context_logits")
        if len(rows) != len(ids):
            raise answers.Missing(f"has {len(rows):,} rows, not {len(ids):,}", "context_logits")
        logits = np.empty((len(ids) - first, self.target.vocabulary), np.float32)
        for i, row in enumerate(rows[first - 1 : -1]):
            logits[i] = self._row(row, f"context_logits[{first - 1 + i}]")
        return logits

    def generate(self, ids: list[int], request: Generate, count: int) -> Iterator[Piece]:
        """A stream of token ids, which come only with detokenize off; the acceptance length is an average."""
        body: dict[str, Any] = {
            "model": self.target.model,
            "prompt": ids,
            "max_tokens": count,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **({"top_k": request.top_k} if request.top_k else {}),
            **({"seed": request.seed} if request.temperature > 0 else {}),
            "stop_token_ids": list(request.stop),
            "ignore_eos": True,
            "logprobs": 1,
            "detokenize": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        end, found = "", None
        for event in self.connection.stream("/v1/completions", body):
            chunk = answers.table(event, "chunk")
            choices = answers.items(answers.field(chunk, "choices", "chunk"), "chunk.choices")
            if choices:
                choice = answers.table(choices[0], "chunk.choices[0]")
                yield from self._piece(choice)
                found = _average(choice) or found
                reason = choice.get("finish_reason")
                end = end or ("" if reason is None else "stop" if reason == "stop" else "length")
            elif (usage := chunk.get("usage")) is not None:
                counted = answers.whole(answers.field(usage, "prompt_tokens", "usage"), "usage.prompt_tokens")
                answers.same_count(len(ids), counted, f"{self.connection.address}/v1/completions")
                yield Piece([], [], end or "length", found)
                return
        raise answers.Missing("is missing", "the stream's last chunk with usage")

    def tokenize(self, text: str) -> list[int] | None:
        """Through /_internal/tokenize, which puts control tokens in front: what an empty text has is taken off."""
        front, ids = self._tokenized(""), self._tokenized(text)
        if front is None or ids is None:
            return None
        return ids[len(front) :] if ids[: len(front)] == front else ids

    def adds_in_front(self) -> list[int] | None:
        """What an empty text has."""
        return self._tokenized("")

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Read | None:
        """It does not tell."""
        return None

    def sampling(self) -> dict[str, Any]:
        """It tells none over HTTP."""
        return {}

    def _row(self, row: Any, where: str) -> Any:
        values = answers.items(row, where)
        if len(values) < self.target.vocabulary:
            raise answers.Malformed(f"has {len(values):,} values, not {self.target.vocabulary:,}", where)
        try:
            found = np.array(values[: self.target.vocabulary], np.float32)
        except (ValueError, TypeError, OverflowError) as error:
            raise answers.Malformed("holds what is no number", where) from error
        if not set(map(type, values)) <= {int, float}:
            raise answers.Malformed("holds what is no number", where)
        return found

    def _piece(self, choice: dict[str, Any]) -> Iterator[Piece]:
        if choice.get("token_ids") is None:
            if choice.get("text"):
                raise ConfigurationError(
                    "the server streams text without token ids",
                    where=str(self.connection.address),
                    next="It ignores detokenize=false: use a newer trtllm-serve.",
                )
            return
        tokens = answers.tokens(choice["token_ids"], "token_ids", self.target.vocabulary)
        values = answers.table(choice.get("logprobs") or {}, "logprobs").get("token_logprobs")
        found = [None] * len(tokens) if values is None else answers.items(values, "token_logprobs", len(tokens))
        if tokens:
            yield Piece(tokens, [math.nan if v is None else answers.logprob(v, "token_logprobs") for v in found])

    def _tokenized(self, text: str) -> list[int] | None:
        try:
            answer = self.connection.post("/_internal/tokenize", {"prompt": text}, SPARE_BYTES + 64 * len(text))
        except Refused as error:
            if error.status in ABSENT or not text:
                return None
            raise
        return answers.tokens(answers.field(answer, "tokens", "/_internal/tokenize"), "tokens", 1 << 31)

    def _speculates(self) -> bool:
        """Whether the last iterations' statistics hold any of drafting; they are there only after requests."""
        found = self.connection.find("/metrics")
        return isinstance(found, list) and any(
            isinstance(item, dict) and item.get("specDecodingStats") for item in found
        )


def _average(choice: dict[str, Any]) -> dict[str, Any] | None:
    """The average, which is 1 as well where nothing is ever drafted: that says nothing."""
    length = choice.get("avg_decoded_tokens_per_iter")
    if length is None or answers.number(length, "avg_decoded_tokens_per_iter") <= 1:
        return None
    return from_average(float(length))
