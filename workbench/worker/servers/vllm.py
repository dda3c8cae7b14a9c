"""vLLM's OpenAI server: prompt log-probabilities at token ids, streamed ids, acceptance step by step.

A request scores a whole prefix: vLLM leaves its prefix cache aside for prompt log-probabilities, and gives them for all
positions, so pieces cost what their prefix costs. Field names: vLLM 0.32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from workbench.errors import ConfigurationError
from workbench.metrics.acceptance import acceptance, from_average, from_histogram
from workbench.protocol.events import Generate
from workbench.worker.bounded import Top
from workbench.worker.servers import answers, counters
from workbench.worker.servers.base import Piece, Ranked, Read, Served, Target, growing, model_card
from workbench.worker.servers.connection import Connection, Refused

DEFAULT_BEST = 20
"""The most that a server gives which was started without --max-logprobs."""
LEAST_PIECE = 2048
BYTES_PER_ENTRY = 512
"""At most, of one named id in JSON: its text may be a long run of escapes."""
SPARE_BYTES = 1 << 20
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a model's generation_config.json would else set."""


class Vllm:
    """See `base.Dialect`."""

    name: str = "vllm"
    paths: tuple[str, ...] = ("prefill",)
    advice: str = "Over HTTP vLLM forces no tokens one at a time: use path=prefill, or the engine vllm."
    probe_lengths: tuple[int, int] = (64, 128)
    stale_advice: str = "Start the server with --no-enable-prefix-caching."
    context_advice: str = "Start the server with a larger --max-model-len"

    def __init__(self, connection: Connection, target: Target) -> None:
        self.connection, self.target = connection, target

    def served(self) -> Served:
        """The model's card, the version, and what the development endpoint tells where it is on."""
        card, names = model_card(self.connection, self.target.model)
        version = answers.table(self.connection.find("/version") or {}, "/version").get("version")
        page = self.connection.text("/metrics")
        drafter = None if page is None else ("on" if counters.has(page, DRAFTS) else "")
        facts = {"root": card.get("root")} | self._development()
        notes = [] if page is not None else ["/metrics is off: whether the server speculates is not known"]
        return Served(
            model=names,
            version=version if isinstance(version, str) else None,
            context=_number(card.get("max_model_len")),
            speculation=facts.pop("speculative_method", None) or drafter,
            facts={name: value for name, value in facts.items() if value is not None},
            notes=tuple(notes),
        )

    def best(self, asked: int) -> int:
        """20 unless asked otherwise; one tiny request shows whether the server gives so many."""
        wanted = min(asked or DEFAULT_BEST, self.target.vocabulary)
        try:
            self.score([0, 1], 1, wanted)
        except Refused as error:
            if error.status not in (400, 422):
                raise
            raise ConfigurationError(
                f"the server refuses {wanted} log-probabilities a position: {error.said}",
                where=str(self.connection.address),
                next=f"Start it with --max-logprobs {wanted} or more, or ask for fewer: logprobs={wanted // 2 or 1}.",
            ) from error
        except answers.Missing as error:
            raise ConfigurationError(
                f"the server gives no prompt log-probabilities ({error.what})",
                where=str(self.connection.address),
                next="It takes vLLM's prompt_logprobs; another server needs another dialect=.",
            ) from error
        return wanted

    def pieces(self, first: int, n: int, step: int) -> Iterator[tuple[int, int]]:
        """Growing prefixes."""
        return growing(first, n, step, LEAST_PIECE)

    def prepare(self, ids: list[int]) -> None:
        """Nothing: a request runs its whole prefix."""

    def score(self, ids: list[int], first: int, best: int) -> Top:
        """One request for the whole prefix."""
        body = {
            "model": self.target.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": best,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        limit = SPARE_BYTES + len(ids) * (best + 1) * BYTES_PER_ENTRY
        answer = self.connection.post("/v1/completions", body, limit)
        where = f"{self.connection.address}/v1/completions"
        choice = answers.items(answers.field(answer, "choices", "answer"), "choices", 1)[0]
        usage = answers.field(answer, "usage", "answer")
        counted = answers.whole(answers.field(usage, "prompt_tokens", "usage"), "usage.prompt_tokens")
        answers.same_count(len(ids), counted, where)
        if (echoed := answers.table(choice, "choices[0]").get("prompt_token_ids")) is not None:
            answers.same_tokens(ids, answers.tokens(echoed, "prompt_token_ids", 1 << 31), where)
        rows = answers.items(answers.field(choice, "prompt_logprobs", "choices[0]"), "prompt_logprobs", len(ids))
        if rows[0] is not None:
            raise answers.Malformed("is not null", "prompt_logprobs[0]")
        ranked = Ranked(best)
        for position in range(first, len(ids)):
            self._row(rows[position], f"prompt_logprobs[{position}]", ids[position], ranked)
        return ranked.top()

    def generate(self, ids: list[int], request: Generate, count: int) -> Iterator[Piece]:
        """A stream of token ids; what speculation accepted comes with its last chunk."""
        before = self._counters()
        body: dict[str, Any] = {
            "model": self.target.model,
            "prompt": ids,
            "max_tokens": count,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **NEUTRAL,
            **({"seed": request.seed} if request.temperature > 0 else {}),
            "stop_token_ids": list(request.stop),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        end, new = "", 0
        where = f"{self.connection.address}/v1/completions"
        for event in self.connection.stream("/v1/completions", body):
            chunk = answers.table(event, "chunk")
            choices = answers.items(answers.field(chunk, "choices", "chunk"), "chunk.choices")
            if choices:
                choice = answers.table(choices[0], "chunk.choices[0]")
                if (echoed := choice.get("prompt_token_ids")) is not None:
                    answers.same_tokens(ids, answers.tokens(echoed, "prompt_token_ids", 1 << 31), where)
                if (piece := self._piece(choice)) is not None:
                    new += len(piece.tokens)
                    yield piece
                end = end or _reason(choice.get("finish_reason"))
            elif (usage := chunk.get("usage")) is not None:
                counted = answers.whole(answers.field(usage, "prompt_tokens", "usage"), "usage.prompt_tokens")
                answers.same_count(len(ids), counted, where)
                found = _speculation(chunk, new) or self._difference(before)
                yield Piece([], [], end or "length", found)
                return
        raise answers.Missing("is missing", "the stream's last chunk with usage")

    def tokenize(self, text: str) -> list[int] | None:
        """Through /tokenize."""
        return self._tokenized({"prompt": text, "add_special_tokens": False})

    def adds_in_front(self) -> list[int] | None:
        """What a text has with special tokens and not without."""
        with_them, alone = (self._tokenized({"prompt": "a", "add_special_tokens": on}) for on in (True, False))
        return None if with_them is None or alone is None else with_them[: len(with_them) - len(alone)]

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Read | None:
        """Its template through /tokenize, and the text back through /detokenize."""
        asks = messages[-1].get("role") != "assistant"
        body = {"messages": messages, "add_generation_prompt": asks, **({"tools": tools} if tools else {})}
        ids = self._tokenized(body)
        if ids is None:
            return None
        answer = self.connection.post("/detokenize", {"model": self.target.model, "tokens": ids}, _text_limit(len(ids)))
        return Read(ids, answers.text(answers.field(answer, "prompt", "/detokenize"), "prompt"))

    def sampling(self) -> dict[str, Any]:
        """It tells none over HTTP."""
        return {}

    def _row(self, value: Any, where: str, target: int, ranked: Ranked) -> None:
        """The best ids, and where the stream's token is not among them that one beside them.

        How many there are tells which: a rank does not, since equal ones share it.
        """
        best: list[tuple[int, float]] = []
        own = math.nan
        rank = 0
        entries = answers.table(value, where)
        for key, entry in entries.items():
            if not key.isdecimal():
                raise answers.Malformed(f"names {answers.shown(key, 40)!r}, not a token id", where)
            token = answers.token(int(key), where, self.target.vocabulary)
            logprob = answers.logprob(answers.field(entry, "logprob", where), f"{where}.logprob")
            place = answers.table(entry, where).get("rank")
            place = 0 if place is None else answers.whole(place, f"{where}.rank")
            if token == target:
                own, rank = logprob, place
            if token != target or len(entries) == ranked.width:
                best.append((token, logprob))
        if math.isnan(own):
            raise answers.Missing(f"does not name the prompt's token {target}", where)
        if len(best) != ranked.width:
            raise answers.Malformed(f"names {len(best)} best ids, not {ranked.width}", where)
        ranked.add(best, own, rank)

    def _piece(self, choice: dict[str, Any]) -> Piece | None:
        if choice.get("token_ids") is None:
            if not choice.get("text"):
                return None
            raise ConfigurationError(
                "the server streams text without token ids",
                where=str(self.connection.address),
                next="It ignores return_token_ids: vLLM gives them from 0.10.2 on.",
            )
        tokens = answers.tokens(choice["token_ids"], "token_ids", self.target.vocabulary)
        if not tokens:
            return None
        values = answers.table(choice.get("logprobs") or {}, "logprobs").get("token_logprobs")
        if values is None:
            return Piece(tokens, [math.nan] * len(tokens))
        found = answers.items(values, "token_logprobs", len(tokens))
        return Piece(tokens, [math.nan if v is None else answers.logprob(v, "token_logprobs") for v in found])

    def _tokenized(self, body: dict[str, Any]) -> list[int] | None:
        limit = _text_limit(len(str(body)))
        try:
            answer = self.connection.post("/tokenize", {"model": self.target.model, **body}, limit)
        except Refused as error:
            if error.status in (404, 405, 501):
                return None
            raise
        found = answers.tokens(answers.field(answer, "tokens", "/tokenize"), "tokens", 1 << 31)
        return found

    def _development(self) -> dict[str, Any]:
        """Of `/server_info`, which a server in development mode has: the settings that its lane is about."""
        info = self.connection.find("/server_info?config_format=json")
        config = info.get("vllm_config") if isinstance(info, dict) else None
        if not isinstance(config, dict):
            return {}
        wanted = {
            "dtype": ("model_config", "dtype"),
            "quantization": ("model_config", "quantization"),
            "cache_dtype": ("cache_config", "cache_dtype"),
            "enable_prefix_caching": ("cache_config", "enable_prefix_caching"),
            "attention_backend": ("attention_config", "backend"),
            "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
            "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
            "speculative_method": ("speculative_config", "method"),
        }
        found: dict[str, Any] = {}
        for name, (part, key) in wanted.items():
            section = config.get(part)
            value = section.get(key) if isinstance(section, dict) else None
            if isinstance(value, (str, int, float, bool)):
                found[name] = self.connection.clean(value) if isinstance(value, str) else value
        return found

    def _counters(self) -> tuple[float, float] | None:
        page = self.connection.text("/metrics")
        if page is None or not counters.has(page, DRAFTS):
            return None
        return counters.counter(page, DRAFTS) or 0.0, counters.counter(page, ACCEPTED) or 0.0

    def _difference(self, before: tuple[float, float] | None) -> dict[str, Any] | None:
        """The average over what the server drafted meanwhile, for whomever."""
        after = self._counters() if before is not None else None
        if before is None or after is None or after[0] <= before[0]:
            return None
        return {**from_average(1 + (after[1] - before[1]) / (after[0] - before[0])), "from": "the server's counters"}


def _speculation(chunk: dict[str, Any], new: int) -> dict[str, Any] | None:
    """Acceptance of `metrics.speculative_decoding`: its ordered steps, or its histogram.

    vLLM lists only the steps that drafted something; of `new` tokens all after the first came from a step, so the
    others are known in number, and stand behind.
    """
    metrics = chunk.get("metrics")
    found = answers.table(metrics, "metrics").get("speculative_decoding") if metrics is not None else None
    if found is None:
        return None
    part = answers.table(found, "speculative_decoding")
    taken, drafted = part.get("per_step_accepted"), part.get("per_step_drafted")
    try:
        if taken is not None and drafted is not None:
            steps = answers.counts(drafted, "per_step_drafted"), answers.counts(taken, "per_step_accepted")
            plain = new - 1 - sum(steps[1]) - len(steps[1])
            idle = [0] * max(0, plain)
            return {**acceptance(steps[0] + idle, steps[1] + idle), "undrafted": len(idle), "truncated": plain < 0}
        total = part.get("num_draft_tokens")
        total = None if total is None else answers.whole(total, "num_draft_tokens")
        histogram = answers.counts(answers.field(part, "acceptance_histogram", "speculative_decoding"), "histogram")
        note = "drafting steps only; all, and their order, need --per-request-spec-decode-metrics detailed"
        return {**from_histogram(histogram, total), "note": note}
    except ValueError as error:
        raise answers.Malformed(str(error), "speculative_decoding") from error


def _reason(value: Any) -> str:
    return "" if value is None else "stop" if value == "stop" else "length"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text_limit(size: int) -> int:
    return SPARE_BYTES + 64 * size
