"""llama.cpp's llama-server: log-probabilities of the next token only, so forced scoring asks once a token.

Each request is one token longer than the last and takes the rest from its slot's cache. Other histories give other
numerics, so a run begins with an empty cache; one that goes on in the middle, or on a server that was started again,
first feeds what lies before in the same way, and then gives the same rows, bit for bit. The stream's token is made the
one that is generated, by a bias that the log-probabilities do not see, so its own comes as well. Names: b11434; seen
with b11549. Generated tokens that came out of a verification step have no log-probabilities there (or 0.0 with nothing
beside it): those are never used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from workbench.errors import ConfigurationError, EngineError
from workbench.metrics.acceptance import acceptance
from workbench.protocol.events import Generate
from workbench.worker.bounded import Top
from workbench.worker.servers import answers
from workbench.worker.servers.base import Piece, Ranked, Read, Served, Target, evenly, model_card
from workbench.worker.servers.connection import ABSENT, Connection, Refused
from workbench.worker.servers.wire import Lost

DEFAULT_BEST = 256
"""Beside a pass of the model a request, they cost little; a thousand bound no better and take longer to write."""
PIECE = 32
"""Positions whose rows are sent together."""
BYTES_PER_ENTRY = 768
SPARE_BYTES = 1 << 20
SLOT = 0
BIAS = 1e4
KINDS = "generation_settings/speculative.types"
FIELDS = ["completion_probabilities", "tokens_evaluated", "truncated", "timings", "id_slot", KINDS]
"""What a scoring answer should bring: without this list it repeats the whole prompt as text."""
DRAFTED, ACCEPTED = "draft_n", "draft_n_accepted"
NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0,
}
"""What the server's own command line would else set."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "xtc_probability", "samplers")


class LlamaServer:
    """See `base.Dialect`."""

    name: str = "llama-server"
    paths: tuple[str, ...] = ("decode",)
    advice: str = "llama-server gives no log-probabilities of a prompt, only of the next token: use path=decode."
    probe_lengths: tuple[int, int] = (8, 16)
    stale_advice: str = "Start the server with --no-cache-prompt, and let no one else use slot 0 meanwhile."
    context_advice: str = "Start the server with a larger -c (it is divided among its slots)"

    def __init__(self, connection: Connection, target: Target) -> None:
        self.connection, self.target = connection, target
        self._held: list[int] = []
        """What the slot holds of the run in progress."""
        self._keeps = True
        """Whether feeding a slot anew that had lost what it held is of use."""
        self._kinds: str | None = None
        """The drafters of this server, as an answer tells them: its properties say `none` whatever it does."""
        self._plain = -1
        """A token that is a whole character."""
        self.recomputed = 0
        """Requests in which the slot had lost what it held, and the whole prefix was run at once."""
        self.fed = 0
        """Tokens that were fed only to have the slot hold them."""

    def served(self) -> Served:
        """Model card and properties; the card has no file's hash."""
        card, name = model_card(self.connection, self.target.model)
        props = self.connection.get("/props")
        meta = answers.table(card.get("meta") or {}, "/v1/models meta")
        defaults = answers.table(answers.field(props, "default_generation_settings", "/props"), "/props")
        facts = {key: meta.get(key) for key in ("n_ctx_train", "n_params", "size", "ftype")}
        facts |= {key: props.get(key) for key in ("model_ftype", "total_slots")}
        context, template = defaults.get("n_ctx"), props.get("chat_template")
        if self._kinds is None:
            self._next([0], 1, 0, keep=False)
        kinds = self._kinds
        build, vocabulary = props.get("build_info"), meta.get("n_vocab")
        notes = ["every token is fed by a pass of its own: the server can be made to do nothing else"]
        if (slots := props.get("total_slots")) not in (None, 1):
            notes.append(f"the server has {slots} slots; slot {SLOT} is used, and others' requests may take it")
        return Served(
            model=name,
            build=self.connection.clean(build) if isinstance(build, str) else None,
            context=context if isinstance(context, int) and context > 0 else None,
            vocabulary=vocabulary if isinstance(vocabulary, int) else None,
            speculation="" if kinds == "none" else kinds,
            template=template if isinstance(template, str) else None,
            facts={key: value for key, value in facts.items() if isinstance(value, (int, float, str))},
            notes=tuple(notes),
        )

    def best(self, asked: int) -> int:
        """256 unless asked otherwise."""
        wanted = min(asked or DEFAULT_BEST, self.target.vocabulary)
        try:
            self.score([0, 1], 1, wanted)
        except answers.Missing as error:
            raise ConfigurationError(
                f"the server gives no log-probabilities ({error.what})",
                where=str(self.connection.address),
                next="It takes n_probs of llama-server's /completion; another server needs another dialect=.",
            ) from error
        return wanted

    def pieces(self, first: int, n: int, step: int) -> Iterator[tuple[int, int]]:
        """Equal pieces, one request for each of their positions."""
        return evenly(first, n, step or PIECE)

    def prepare(self, ids: list[int]) -> None:
        """Feed them by one request each from an empty cache on."""
        self._keeps = True
        self._feed(ids)

    def score(self, ids: list[int], first: int, best: int) -> Top:
        """One request a position; a run that goes on where the last one stopped keeps the slot's cache."""
        ranked = Ranked(best)
        for position in range(first, len(ids)):
            wanted = ids[position]
            own, pairs = self._after(ids[:position], best, wanted)
            if not pairs:  # of a token that is half a character, or ends the text, it tells nothing
                _, pairs = self._next(ids[:position], best, self._plain_token(), keep=True)
                if not pairs:
                    raise answers.Missing("is missing", "answer.completion_probabilities")
            own = _value(pairs, wanted) if math.isnan(own) else own
            if math.isnan(own) and best < self.target.vocabulary:
                own = _value(
                    self._next(ids[:position], self.target.vocabulary, self._plain_token(), keep=True)[1], wanted
                )
            ranked.add(pairs, own)
        return ranked.top()

    def generate(self, ids: list[int], request: Generate, count: int) -> Iterator[Piece]:
        """A stream of token ids; each event's counters tell when a verification step began and what it accepted."""
        body: dict[str, Any] = {
            "prompt": ids,
            "n_predict": count,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **NEUTRAL,
            "seed": request.seed,
            "ignore_eos": True,
            "n_probs": 1,
            "return_tokens": True,
            "timings_per_token": True,
            "cache_prompt": True,
            "id_slot": SLOT,
            "stream": True,
        }
        self._held = []
        steps = _Steps()
        for event in self.connection.stream("/completion", body):
            chunk = answers.table(event, "event")
            counted = answers.whole(answers.field(chunk, "tokens_evaluated", "event"), "tokens_evaluated")
            answers.same_count(len(ids), counted, f"{self.connection.address}/completion")
            if "tokens" not in chunk:
                raise ConfigurationError(
                    "the server streams text without token ids",
                    where=str(self.connection.address),
                    next="It ignores return_tokens: use a newer llama-server.",
                )
            tokens = answers.tokens(chunk["tokens"], "tokens", self.target.vocabulary)
            ended = chunk.get("stop") is True
            steps.see(len(tokens), answers.table(chunk.get("timings") or {}, "timings"))
            if ended:
                if chunk.get("truncated") is True:
                    raise EngineError("the server truncated the context while it generated", where="/completion")
                end = "length" if chunk.get("stop_type") == "limit" else "stop"
                yield Piece(tokens, [math.nan] * len(tokens), end, steps.acceptance())
                return
            if tokens:
                yield Piece(tokens, self._logprobs(chunk, len(tokens)))
        raise Lost("the stream ended without its end mark")

    def tokenize(self, text: str) -> list[int] | None:
        """Through /tokenize, control tokens parsed."""
        return self._tokenized(text, False)

    def adds_in_front(self) -> list[int] | None:
        """What a text has with special tokens and not without."""
        with_them, alone = self._tokenized("a", True), self._tokenized("a", False)
        return None if with_them is None or alone is None else with_them[: len(with_them) - len(alone)]

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Read | None:
        """Its template through /apply-template, then its tokens as a chat request would have them."""
        asks = messages[-1].get("role") != "assistant"
        body = {"messages": messages, "add_generation_prompt": asks, **({"tools": tools} if tools else {})}
        try:
            answer = self.connection.post("/apply-template", body, SPARE_BYTES + 16 * len(str(body)))
        except Refused as error:
            if error.status in ABSENT:
                return None
            raise
        text = answers.text(answers.field(answer, "prompt", "/apply-template"), "prompt")
        ids = self._tokenized(text, True)
        return None if ids is None else Read(ids, text)

    def sampling(self) -> dict[str, Any]:
        """The defaults of its command line."""
        defaults = answers.table(
            answers.field(self.connection.get("/props"), "default_generation_settings", "/props"), ""
        )
        parameters = answers.table(defaults.get("params") or {}, "/props params")
        return {name: parameters[name] for name in SAMPLING if name in parameters}

    def _after(self, ids: list[int], best: int, token: int) -> tuple[float, list[tuple[int, float]]]:
        """`_next` behind what the slot holds, or from an empty cache; a slot that lost it is fed anew."""
        keep = len(ids) > 1 and self._held == ids[:-1]
        before = self.recomputed
        answer = self._next(ids, best, token, keep=keep)
        if self.recomputed > before and self._keeps:  # a server that was started again, or others in the slot
            self._feed(ids[:-1])
            before = self.recomputed
            answer = self._next(ids, best, token, keep=True)
            self._keeps = self.recomputed == before  # where it never keeps anything, this would have no end
        self._held = ids
        return answer

    def _feed(self, ids: list[int]) -> None:
        for stop in range(1, len(ids) + 1):
            self._next(ids[:stop], 0, ids[stop - 1], keep=stop > 1)
            self.fed += 1
        self._held = ids

    def _next(self, ids: list[int], best: int, token: int, *, keep: bool) -> tuple[float, list[tuple[int, float]]]:
        """ln q of `token`, NaN where it is not given, and the `best` ids that may follow; none where it tells none."""
        body = {
            "prompt": ids,
            "n_predict": 1,
            "n_probs": best,
            "post_sampling_probs": False,
            "temperature": 0,
            "logit_bias": [[token, BIAS]],
            "cache_prompt": keep,
            "id_slot": SLOT,
            "return_tokens": True,
            "response_fields": FIELDS,
        }
        answer = answers.table(
            self.connection.post("/completion", body, SPARE_BYTES + best * BYTES_PER_ENTRY), "answer"
        )
        where = f"{self.connection.address}/completion"
        counted = answers.whole(answers.field(answer, "tokens_evaluated", "answer"), "tokens_evaluated")
        answers.same_count(len(ids), counted, where)
        if answer.get("truncated") is True:
            raise EngineError("the server truncated the prompt", where=where, next=f"{self.context_advice}.")
        settings = answer.get("generation_settings")  # where the server does not know response_fields
        kinds = settings.get("speculative.types") if isinstance(settings, dict) else answer.get(KINDS)
        self._kinds = self.connection.clean(kinds) if isinstance(kinds, str) else self._kinds
        timings = answers.table(answer.get("timings") or {}, "timings")
        if timings.get(DRAFTED):
            raise EngineError("the server drafted tokens, which spoils its log-probabilities", where=where)
        if keep and timings.get("prompt_n") not in (None, 1):
            self.recomputed += 1
        name = "completion_probabilities"
        if answer.get(name) in (None, []):
            return math.nan, []
        entry = answers.table(answers.items(answer[name], name, 1)[0], name)
        pairs = answers.items(answers.field(entry, "top_logprobs", name), "top_logprobs")
        if not pairs and entry.get("logprob") == 0:
            raise EngineError(
                "the server answers 0.0 with nothing beside it: the token was accepted unseen, by speculation",
                where=where,
                next="Start it without speculation.",
            )
        if len(pairs) != best:
            raise answers.Malformed(f"names {len(pairs)} ids, not {best}", "top_logprobs")
        named = [self._pair(pair, i) for i, pair in enumerate(pairs)]
        own, value = entry.get("id"), entry.get("logprob")
        return (answers.logprob(value, f"{name}.logprob") if own == token and value is not None else math.nan), named

    def _plain_token(self) -> int:
        """A token that is a whole character by itself."""
        if self._plain < 0:
            found = self._tokenized("a", False)
            self._plain = found[-1] if found else 0
        return self._plain

    def _pair(self, value: Any, index: int) -> tuple[int, float]:
        where = f"top_logprobs[{index}]"
        token = answers.token(answers.field(value, "id", where), f"{where}.id", self.target.vocabulary)
        logprob = answers.table(value, where).get("logprob")
        return token, -math.inf if logprob is None else answers.logprob(logprob, f"{where}.logprob")

    def _logprobs(self, chunk: dict[str, Any], count: int) -> list[float]:
        """Of generated tokens; NaN for those that a verification step brought."""
        found = answers.items(chunk.get("completion_probabilities") or [], "completion_probabilities")
        if len(found) != count:
            return [math.nan] * count
        values: list[float] = []
        for item in found:
            entry = answers.table(item, "completion_probabilities")
            seen = bool(entry.get("top_logprobs")) and entry.get("logprob") is not None
            values.append(answers.logprob(entry["logprob"], "logprob") if seen else math.nan)
        return values

    def _tokenized(self, text: str, special: bool) -> list[int] | None:
        body = {"content": text, "add_special": special, "parse_special": True}
        try:
            answer = self.connection.post("/tokenize", body, SPARE_BYTES + 64 * len(text))
        except Refused as error:
            if error.status in ABSENT:
                return None
            raise
        return answers.tokens(answers.field(answer, "tokens", "/tokenize"), "tokens", 1 << 31)


def _value(pairs: list[tuple[int, float]], token: int) -> float:
    return next((value for each, value in pairs if each == token), math.nan)


class _Steps:
    """Verification steps from running totals: one that rises begins a step, whose accepted tokens then come alone.

    The first token comes from the prompt's own pass, and one that no totals announce is a step that drafted nothing.
    """

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self._totals = (0, 0)
        self._awaited = 0
        self._first = True
        self._told = False

    def see(self, tokens: int, timings: dict[str, Any]) -> None:
        """An event that brought so many tokens."""
        totals = tuple(answers.whole(timings.get(name) or 0, f"timings.{name}") for name in (DRAFTED, ACCEPTED))
        self._told = self._told or totals[0] > 0
        for _ in range(tokens):
            drafted, accepted = totals[0] - self._totals[0], totals[1] - self._totals[1]
            if drafted < 0 or not 0 <= accepted <= drafted:
                raise answers.Malformed(f"goes from {self._totals} to {totals}", "timings.draft_n")
            if self._first:
                self._first = False
            elif drafted:
                self.drafted.append(drafted)
                self.accepted.append(accepted)
                self._awaited = accepted
            elif self._awaited:
                self._awaited -= 1
            else:
                self.drafted.append(0)
                self.accepted.append(0)
            self._totals = (totals[0], totals[1])

    def acceptance(self) -> dict[str, Any] | None:
        """None where nothing was ever drafted."""
        if not self._told:
            return None
        return {**acceptance(self.drafted, self.accepted), "truncated": self._awaited > 0}
