"""SGLang's native /generate: prompt log-probabilities from a position on, so pieces are cheap. Names: SGLang 0.5.23.

Not run against a server here: written after its source, and tested against a scripted twin.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError, EngineError
from workbench.metrics.acceptance import from_average, from_histogram
from workbench.protocol.events import Generate
from workbench.worker.bounded import Top
from workbench.worker.servers import answers
from workbench.worker.servers.base import Piece, Ranked, Read, Served, Target, evenly, model_card
from workbench.worker.servers.connection import ABSENT, Connection, Refused

DEFAULT_BEST = 20
PIECE = 2048
BYTES_PER_ENTRY = 64
SPARE_BYTES = 1 << 20
FACTS = (
    "dtype", "quantization", "kv_cache_dtype", "attention_backend", "prefill_attention_backend",
    "decode_attention_backend", "chunked_prefill_size", "disable_radix_cache", "tp_size", "pp_size",
    "enable_deterministic_inference", "speculative_algorithm", "speculative_num_steps",
    "speculative_num_draft_tokens", "speculative_draft_model_path",
)  # fmt: skip


class Sglang:
    """See `base.Dialect`."""

    name: str = "sglang"
    paths: tuple[str, ...] = ("prefill",)
    advice: str = "Over HTTP SGLang forces no tokens one at a time: use path=prefill."
    probe_lengths: tuple[int, int] = (64, 128)
    stale_advice: str = "Start the server with --disable-radix-cache."
    context_advice: str = "Start the server with a larger --context-length"

    def __init__(self, connection: Connection, target: Target) -> None:
        self.connection, self.target = connection, target

    def served(self) -> Served:
        """The model's card, and what /server_info tells of its settings."""
        card, name = model_card(self.connection, self.target.model)
        info = self._info("/server_info", "/get_server_info")
        model = self._info("/model_info", "/get_model_info")
        facts = {key: info[key] for key in FACTS if isinstance(info.get(key), (str, int, float, bool))}
        facts |= {key: model[key] for key in ("model_path", "weight_version") if isinstance(model.get(key), str)}
        facts = {key: self.connection.clean(value) if isinstance(value, str) else value for key, value in facts.items()}
        limit = card.get("max_model_len") or info.get("context_length")
        version = info.get("version")
        return Served(
            model=name,
            version=version if isinstance(version, str) else None,
            context=limit if isinstance(limit, int) and limit > 0 else None,
            speculation=str(info.get("speculative_algorithm") or "") if info else None,
            facts=facts,
        )

    def best(self, asked: int) -> int:
        """20 unless asked otherwise; one tiny request shows whether the server gives so many."""
        wanted = min(asked or DEFAULT_BEST, self.target.vocabulary)
        try:
            self.score([0, 1], 1, wanted)
        except (Refused, answers.Missing) as error:
            if isinstance(error, Refused) and error.status not in (400, 422):
                raise
            raise ConfigurationError(
                f"the server gives no {wanted} log-probabilities of a prompt: {error.what}",
                where=str(self.connection.address),
                next="It takes SGLang's /generate with return_logprob and top_logprobs_num; ask for fewer: logprobs=.",
            ) from error
        return wanted

    def pieces(self, first: int, n: int, step: int) -> Iterator[tuple[int, int]]:
        """Equal pieces: each runs again only what it scores."""
        return evenly(first, n, step or PIECE)

    def prepare(self, ids: list[int]) -> None:
        """Nothing: a request runs what it scores."""

    def score(self, ids: list[int], first: int, best: int) -> Top:
        """One request; the server runs the positions from `first` − 1 on and takes the rest from its cache."""
        rows = len(ids) - first
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            "top_logprobs_num": best,
            "return_text_in_logprobs": False,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
            "stream": False,
        }
        limit = SPARE_BYTES + (rows + 1) * (best + 1) * BYTES_PER_ENTRY
        meta = self._meta(self.connection.post("/generate", body, limit))
        self._same_prompt(ids, meta)
        own = answers.items(answers.field(meta, "input_token_logprobs", "meta_info"), "input_token_logprobs", rows + 1)
        targets: list[float] = []
        for i, entry in enumerate(own):
            where = f"input_token_logprobs[{i}]"
            triple = answers.items(entry, where)
            if len(triple) < 2:
                raise answers.Malformed(f"has {len(triple)} entries, not 3", where)
            named = answers.token(triple[1], where, self.target.vocabulary)
            if named != ids[first - 1 + i]:
                raise EngineError(
                    f"the server truncated or re-tokenised the prompt: token {first - 1 + i} is {named},"
                    f" ours is {ids[first - 1 + i]}",
                    where=str(self.connection.address),
                )
            if i:
                targets.append(answers.logprob(triple[0], where))
        top = self._flat(meta, rows, best) if "input_top_logprobs_shape" in meta else self._nested(meta, rows, best)
        return Top(top.ids, top.logprobs, np.array(targets, "<f4"), top.rank)

    def generate(self, ids: list[int], request: Generate, count: int) -> Iterator[Piece]:
        """A stream whose chunks hold all ids so far, or only the new ones, as the server was started."""
        sampling: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": count,
            "ignore_eos": True,
            "stop_token_ids": list(request.stop),
            "skip_special_tokens": False,
        }
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True}
        known = 0
        for event in self.connection.stream("/generate", body):
            meta = self._meta(event)
            total = answers.whole(answers.field(meta, "completion_tokens", "meta_info"), "completion_tokens")
            tokens = answers.tokens(answers.field(event, "output_ids", "chunk"), "output_ids", self.target.vocabulary)
            values = answers.items(meta.get("output_token_logprobs") or [], "output_token_logprobs")
            finish = meta.get("finish_reason")
            if len(tokens) == total:  # all so far
                tokens, values = tokens[known:], values[known:]
            elif known + len(tokens) != total:
                raise answers.Malformed(f"has {len(tokens)} ids after {known}, of {total}", "output_ids")
            known += len(tokens)
            end, found = "", None
            if finish is not None:
                self._same_prompt(ids, meta)
                kind = answers.table(finish, "finish_reason").get("type")
                if kind == "abort":
                    said = answers.table(finish, "finish_reason").get("message") or "no reason"
                    raise EngineError(f"the server gave up: {self.connection.clean(str(said))}", where="/generate")
                end, found = "stop" if kind == "stop" else "length", _speculation(meta)
            if tokens or end:
                yield Piece(tokens, [_first(v) for v in values] or [math.nan] * len(tokens), end, found)
            if end:
                return
        raise answers.Missing("is missing", "finish_reason")

    def tokenize(self, text: str) -> list[int] | None:
        """Through /tokenize."""
        return self._tokenized({"prompt": text, "add_special_tokens": False})

    def adds_in_front(self) -> list[int] | None:
        """What a text has with special tokens and not without."""
        with_them, alone = (self._tokenized({"prompt": "a", "add_special_tokens": on}) for on in (True, False))
        return None if with_them is None or alone is None else with_them[: len(with_them) - len(alone)]

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Read | None:
        """Its template through /tokenize, where this version takes messages."""
        asks = messages[-1].get("role") != "assistant"
        body = {"messages": messages, "add_generation_prompt": asks, **({"tools": tools} if tools else {})}
        try:
            ids = self._tokenized(body)
        except Refused as error:
            if error.status in (400, 422):
                return None
            raise
        return None if ids is None else Read(ids, self._text(ids))

    def sampling(self) -> dict[str, Any]:
        """What /model_info calls preferred."""
        found = self._info("/model_info", "/get_model_info").get("preferred_sampling_params")
        return dict(found) if isinstance(found, dict) else {}

    def _meta(self, answer: Any) -> dict[str, Any]:
        return answers.table(answers.field(answer, "meta_info", "answer"), "meta_info")

    def _same_prompt(self, ids: list[int], meta: dict[str, Any]) -> None:
        counted = answers.whole(answers.field(meta, "prompt_tokens", "meta_info"), "meta_info.prompt_tokens")
        answers.same_count(len(ids), counted, f"{self.connection.address}/generate")

    def _flat(self, meta: dict[str, Any], rows: int, best: int) -> Top:
        """Whole arrays, plain or as base64 of little-endian bytes; the first position is null and stands apart."""
        shape = answers.counts(meta["input_top_logprobs_shape"], "input_top_logprobs_shape")
        nulls = answers.whole(answers.field(meta, "input_top_logprobs_null_prefix", "meta_info"), "null_prefix")
        if shape != [rows, best] or nulls != 1:
            raise answers.Malformed(
                f"is {shape} after {nulls}, not [{rows}, {best}] after 1", "input_top_logprobs_shape"
            )
        values = _array(meta, "input_top_logprobs_val_flat", "float32", rows * best)
        ids = _array(meta, "input_top_logprobs_idx_flat", "int32", rows * best)
        if not np.isfinite(values).all() or float(values.max(initial=0)) > answers.ABOVE_ZERO:
            raise answers.Malformed("holds what is no log-probability", "input_top_logprobs_val_flat")
        if int(ids.min(initial=0)) < 0 or int(ids.max(initial=0)) >= self.target.vocabulary:
            raise answers.Malformed("names ids outside the vocabulary", "input_top_logprobs_idx_flat")
        named = values > answers.NOTHING
        return Top(
            np.where(named, ids, -1).astype("<i4").reshape(rows, best),
            np.where(named, np.minimum(values, 0), -np.inf).astype("<f4").reshape(rows, best),
            np.full(rows, np.nan, "<f4"),
            np.zeros(rows, "<i4"),
        )

    def _nested(self, meta: dict[str, Any], rows: int, best: int) -> Top:
        """Lists of (log-probability, id, text) a position, the first null."""
        name = "input_top_logprobs"
        found = answers.items(answers.field(meta, name, "meta_info"), name, rows + 1)
        if found[0] is not None:
            raise answers.Malformed("is not null", f"{name}[0]")
        ranked = Ranked(best)
        for i, row in enumerate(found[1:], 1):
            where = f"{name}[{i}]"
            pairs = [answers.items(entry, where) for entry in answers.items(row, where, best)]
            if any(len(pair) < 2 for pair in pairs):
                raise answers.Malformed("holds an entry that is no triple", where)
            ranked.add(
                [
                    (answers.token(pair[1], where, self.target.vocabulary), answers.logprob(pair[0], where))
                    for pair in pairs
                ]
            )
        return ranked.top()

    def _info(self, *paths: str) -> dict[str, Any]:
        for path in paths:
            if isinstance(found := self.connection.find(path), dict):
                return found
        return {}

    def _tokenized(self, body: dict[str, Any]) -> list[int] | None:
        limit = SPARE_BYTES + 64 * len(str(body))
        try:
            answer = self.connection.post("/tokenize", {"model": self.target.model, **body}, limit)
        except Refused as error:
            if error.status in ABSENT:
                return None
            raise
        return answers.tokens(answers.field(answer, "tokens", "/tokenize"), "tokens", 1 << 31)

    def _text(self, ids: list[int]) -> str | None:
        body = {"model": self.target.model, "tokens": ids, "skip_special_tokens": False}
        try:
            answer = self.connection.post("/detokenize", body, SPARE_BYTES + 64 * len(ids))
        except Refused as error:
            if error.status in ABSENT:
                return None
            raise
        return answers.text(answers.field(answer, "text", "/detokenize"), "text")


def _array(meta: dict[str, Any], name: str, dtype: str, size: int) -> NDArray[Any]:
    """A flat array of `size` values, from its base64 or its list. Raises Malformed."""
    encoded = meta.get(f"{name}_b64")
    if encoded is None:
        values = answers.items(answers.field(meta, name, "meta_info"), name, size)
        check = answers.number if dtype == "float32" else answers.whole
        return np.array([check(value, name) for value in values], dtype)
    if meta.get(f"{name}_b64_dtype") != dtype:
        raise answers.Malformed(f"is {answers.shown(str(meta.get(f'{name}_b64_dtype')), 40)}, not {dtype}", name)
    try:
        data = base64.b64decode(answers.text(encoded, name), validate=True)
    except ValueError as error:
        raise answers.Malformed("is not base64", name) from error
    if len(data) != size * 4:
        raise answers.Malformed(f"has {len(data):,} bytes, not {size * 4:,}", name)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _first(entry: Any) -> float:
    triple = answers.items(entry, "output_token_logprobs")
    if len(triple) < 2:
        raise answers.Malformed("holds an entry that is no triple", "output_token_logprobs")
    return math.nan if triple[0] is None else answers.logprob(triple[0], "output_token_logprobs")


def _speculation(meta: dict[str, Any]) -> dict[str, Any] | None:
    """Its histogram of accepted drafts a step, or else the average with the bonus token."""
    try:
        if (histogram := meta.get("spec_correct_drafts_histogram")) is not None:
            drafted = meta.get("spec_num_proposed_drafts")
            total = None if drafted is None else answers.whole(drafted, "spec_num_proposed_drafts")
            return from_histogram(answers.counts(histogram, "spec_correct_drafts_histogram"), total)
        if (length := meta.get("spec_accept_length")) is not None:
            return from_average(answers.number(length, "spec_accept_length"))
    except ValueError as error:
        raise answers.Malformed(str(error), "meta_info") from error
    return None
