"""What each scripted server answers: field names as the servers' own sources have them, numbers from `truth`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.servers import truth
from tests.servers.truth import VOCABULARY

Answer = tuple[int, Any]
NOT_FOUND: Answer = (404, {"error": {"message": "Not Found", "code": 404}})


@dataclass
class Options:
    """How the server was started."""

    model: str = "tiny"
    models: tuple[str, ...] = ()
    version: str = "1.2.3"
    context: int = 200
    max_logprobs: int = 20
    steps: tuple[tuple[int, int], ...] = ()  # (drafted, accepted) of each verification step
    histogram_only: bool = False
    counters: bool = True
    nested: bool = False
    incremental: bool = False
    metrics: bool = True
    stale: bool = False
    bias: bool = True
    halves: tuple[int, ...] = ()  # tokens that are half a character: llama-server tells nothing of them

    def names(self) -> tuple[str, ...]:
        return self.models or (self.model,)


def encode(text: str) -> list[int]:
    """Bytes, moved by two: 0 and 1 are control tokens."""
    return [byte + 2 for byte in text.encode()]


class Dialect:
    """Shared: the model and a prefix cache that may be stale."""

    owner = ""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cached: set[tuple[int, ...]] = set()
        self.drafts = [0, 0]

    def forget(self) -> None:
        """The server has been ended."""
        self.cached = set()

    def cards(self, **more: Any) -> dict[str, Any]:
        names = self.options.names()
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "owned_by": self.owner, **more} for name in names],
        }

    def distributions(self, ids: list[int], first: int) -> Any:
        """Rows of what predicts `first` to the end; behind a cached prefix, where that is stale, other ones."""
        rows = truth.rows(ids, first)
        key = tuple(ids[:32])
        if self.options.stale and key in self.cached:
            rows = np.roll(rows, 7, axis=1)
        self.cached.add(key)
        return rows

    def bursts(self, count: int) -> list[int]:
        """How many tokens come together: the prompt's one, then each step's accepted ones and its bonus."""
        sizes = [1, *(accepted + 1 for _, accepted in self.options.steps)]
        out: list[int] = []
        while sum(out) < count:
            out.append(sizes[len(out)] if len(out) < len(sizes) else 1)
        out[-1] -= sum(out) - count
        return out

    def drafted(self, count: int) -> None:
        steps = self.options.steps[: len(self.bursts(count)) - 1]
        self.drafts[0] += len(steps)
        self.drafts[1] += sum(accepted for _, accepted in steps)

    def answer(self, path: str, body: Any) -> Answer:
        raise NotImplementedError


class Vllm(Dialect):
    owner = "vllm"

    def answer(self, path: str, body: Any) -> Answer:
        match path:
            case "/v1/models":
                return 200, self.cards(max_model_len=self.options.context, root="/models/tiny")
            case "/version":
                return 200, {"version": self.options.version}
            case "/metrics" if self.options.metrics:
                lines = ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 0.0']
                if self.options.steps and self.options.counters:
                    for name, value in zip(("drafts", "accepted_tokens"), self.drafts, strict=True):
                        lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="tiny"}} {value}.0')
                return 200, "\n".join(lines)
            case "/tokenize" if "prompt" in body:
                ids = [0] * body.get("add_special_tokens", True) + encode(body["prompt"])
                return 200, {"count": len(ids), "max_model_len": self.options.context, "tokens": ids}
            case "/tokenize":
                text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
                ids = encode(text + "<assistant>" * body["add_generation_prompt"])
                return 200, {"count": len(ids), "max_model_len": self.options.context, "tokens": ids}
            case "/detokenize":
                return 200, {"prompt": bytes(i - 2 for i in body["tokens"]).decode()}
            case "/v1/completions":
                return self._stream(body) if body.get("stream") else self._score(body)
            case _:
                return NOT_FOUND

    def _score(self, body: dict[str, Any]) -> Answer:
        ids, k = body["prompt"], body["prompt_logprobs"]
        if k > self.options.max_logprobs:
            message = (
                f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.options.max_logprobs}"
            )
            return 400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        if len(ids) + body["max_tokens"] > self.options.context:
            return 400, {"error": {"message": "maximum context length", "type": "BadRequestError", "code": 400}}
        rows: list[Any] = [None]
        for target, values in zip(ids[1:], self.distributions(ids, 1), strict=True):
            rank = int((values > values[target]).sum()) + 1
            row = {str(target): {"logprob": float(values[target]), "rank": rank, "decoded_token": "\x1b[2J"}}
            for place, token in enumerate(truth.best(values, k), 1):
                row.setdefault(
                    str(token), {"logprob": float(values[token]), "rank": place, "decoded_token": f"t{token}"}
                )
            rows.append(row)
        choice = {
            "index": 0,
            "text": "x",
            "logprobs": None,
            "finish_reason": "length",
            "prompt_logprobs": rows,
            "prompt_token_ids": ids,
            "token_ids": truth.greedy(ids, 1),
        }
        return 200, {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}

    def _stream(self, body: dict[str, Any]) -> Answer:
        return 200, self._events(body)

    def _events(self, body: dict[str, Any]) -> Iterator[Any]:
        ids, count = body["prompt"], body["max_tokens"]
        out = truth.greedy(ids, count)
        first = True
        done = 0
        for size in self.bursts(count):
            part = out[done : done + size]
            values = [float(truth.logprobs(ids + out[: done + i])[token]) for i, token in enumerate(part)]
            done += size
            choice: dict[str, Any] = {
                "index": 0,
                "text": "…",
                "token_ids": part,
                "logprobs": {
                    "tokens": [f"token_id:{t}" for t in part],
                    "token_logprobs": values,
                    "top_logprobs": [{} for _ in part],
                    "text_offset": [0 for _ in part],
                },
                "finish_reason": "length" if done == count else None,
            }
            if first:
                choice["prompt_token_ids"], first = ids, False
            yield {"id": "cmpl-1", "choices": [choice]}
        last: dict[str, Any] = {
            "id": "cmpl-1",
            "choices": [],
            "usage": {"prompt_tokens": len(ids), "completion_tokens": count},
        }
        if self.options.steps:
            self.drafted(count)
            drafting = [step for step in self.options.steps if step[0]]
            most = max(drafted for drafted, _ in drafting)
            part = {
                "acceptance_histogram": np.bincount([a for _, a in drafting], minlength=most + 1).tolist(),
                "num_draft_tokens": sum(d for d, _ in drafting),
                "num_accepted_draft_tokens": sum(a for _, a in drafting),
                "num_spec_steps": len(drafting),
            }
            if not self.options.histogram_only:
                part |= {"per_step_accepted": [a for _, a in drafting], "per_step_drafted": [d for d, _ in drafting]}
            last["metrics"] = {"time_to_first_token_ms": 1.0, "speculative_decoding": part}
        yield last
        yield "[DONE]"


class Sglang(Dialect):
    owner = "sglang"

    def answer(self, path: str, body: Any) -> Answer:
        match path:
            case "/v1/models":
                return 200, self.cards(max_model_len=self.options.context)
            case "/server_info":
                info = {
                    "model_path": "/models/tiny",
                    "version": self.options.version,
                    "kv_cache_dtype": "fp8_e5m2",
                    "attention_backend": "triton",
                    "disable_radix_cache": False,
                    "context_length": self.options.context,
                    "speculative_algorithm": "EAGLE" if self.options.steps else None,
                    "internal_states": [{"last_gen_throughput": 1.0}],
                }
                return 200, info
            case "/model_info":
                return 200, {"model_path": "/models/tiny", "weight_version": "default"}
            case "/tokenize":
                ids = [0] * body.get("add_special_tokens", True) + encode(body["prompt"])
                return 200, {"tokens": ids, "count": len(ids), "max_model_len": self.options.context}
            case "/generate":
                return (200, self._events(body)) if body.get("stream") else self._score(body)
            case _:
                return NOT_FOUND

    def _score(self, body: dict[str, Any]) -> Answer:
        ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        values = self.distributions(ids, start + 1)
        named = [truth.best(row, k) for row in values]
        meta: dict[str, Any] = {
            "id": "1",
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "cached_tokens": start,
            "input_token_logprobs": [[None, ids[start], None]]
            + [[float(row[token]), token, None] for row, token in zip(values, ids[start + 1 :], strict=True)],
        }
        if self.options.nested or not body.get("return_flat_raw_top_logprobs"):
            pairs = zip(values, named, strict=True)
            meta["input_top_logprobs"] = [None, *([[float(row[t]), t, None] for t in best] for row, best in pairs)]
        else:
            top = np.array([[row[t] for t in best] for row, best in zip(values, named, strict=True)], "<f4")
            for name, array, dtype in (("val", top, "float32"), ("idx", np.array(named, "<i4"), "int32")):
                meta[f"input_top_logprobs_{name}_flat_b64"] = base64.b64encode(array.tobytes()).decode()
                meta[f"input_top_logprobs_{name}_flat_b64_dtype"] = dtype
            meta |= {"input_top_logprobs_shape": list(top.shape), "input_top_logprobs_null_prefix": 1}
        return 200, {"text": "", "output_ids": [], "meta_info": meta}

    def _events(self, body: dict[str, Any]) -> Iterator[Any]:
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        out = truth.greedy(ids, count)
        values = [[float(truth.logprobs(ids + out[:i])[t]), t, None] for i, t in enumerate(out)]
        done = 0
        for size in self.bursts(count):
            start, done = (done if self.options.incremental else 0), done + size
            meta: dict[str, Any] = {
                "id": "1",
                "prompt_tokens": len(ids),
                "completion_tokens": done,
                "finish_reason": {"type": "length", "length": count} if done == count else None,
                "output_token_logprobs": values[start:done],
            }
            if done == count and self.options.steps:
                steps = self.options.steps
                meta |= {
                    "spec_verify_ct": len(steps),
                    "spec_accept_length": count / len(steps),
                    "spec_num_proposed_drafts": sum(d for d, _ in steps),
                    "spec_correct_drafts_histogram": np.bincount([a for _, a in steps]).tolist(),
                }
            yield {"text": "…", "output_ids": out[start:done], "meta_info": meta}
        yield "[DONE]"


class Trtllm(Dialect):
    owner = "tensorrt_llm"

    def answer(self, path: str, body: Any) -> Answer:
        match path:
            case "/v1/models":
                return 200, self.cards()
            case "/version":
                return 200, {"version": self.options.version}
            case "/metrics" if self.options.metrics:
                drafting = {"specDecodingStats": {"numDraftTokens": 4, "acceptanceLength": 2.0}}
                return 200, [{"iter": 1, **(drafting if self.options.steps else {})}]
            case "/_internal/tokenize":
                ids = [0, *encode(body["prompt"])]
                return 200, {"count": len(ids), "tokens": ids}
            case "/v1/completions":
                unknown = body.keys() - TRTLLM_KEYS
                if unknown:
                    return 400, {
                        "object": "error",
                        "message": f"Extra inputs are not permitted: {unknown}",
                        "code": 400,
                    }
                return (200, self._events(body)) if body.get("stream") else self._score(body)
            case _:
                return NOT_FOUND

    def _score(self, body: dict[str, Any]) -> Answer:
        ids = body["prompt"]
        assert body["return_context_logits"] and body["detokenize"] is False
        key = tuple(ids[:8])
        shift = 7 if self.options.stale and key in self.cached else 0
        self.cached.add(key)
        rows = [np.roll(truth.logits(ids[:end]), shift).tolist() for end in range(1, len(ids) + 1)]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": truth.greedy(ids, 1),
            "logprobs": None,
            "context_logits": rows,
            "finish_reason": "length",
            "stop_reason": None,
            "avg_decoded_tokens_per_iter": 1.0,
        }
        return 200, {"id": "1", "choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}

    def _events(self, body: dict[str, Any]) -> Iterator[Any]:
        ids, count = body["prompt"], body["max_tokens"]
        out = truth.greedy(ids, count)
        done = 0
        bursts = self.bursts(count)
        for number, size in enumerate(bursts, 1):
            part = out[done : done + size]
            values = [float(truth.logprobs(ids + out[: done + i])[token]) for i, token in enumerate(part)]
            done += size
            choice = {
                "index": 0,
                "text": "",
                "token_ids": part,
                "logprobs": {"tokens": ["x"] * size, "token_logprobs": values, "top_logprobs": [], "text_offset": []},
                "finish_reason": "length" if done == count else None,
                "stop_reason": None,
                "avg_decoded_tokens_per_iter": done / number,
            }
            yield {"id": "1", "choices": [choice], "usage": None}
        yield {"id": "1", "choices": [], "usage": {"prompt_tokens": len(ids), "completion_tokens": count}}
        yield "[DONE]"


TRTLLM_KEYS = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos",
    "logprobs", "detokenize", "stream", "stream_options", "return_context_logits",
}  # fmt: skip


class LlamaServer(Dialect):
    owner = "llamacpp"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.slot: list[int] = []

    def forget(self) -> None:
        self.slot = []

    def answer(self, path: str, body: Any) -> Answer:
        match path:
            case "/v1/models":
                meta = {"n_vocab": VOCABULARY, "n_ctx": self.options.context, "n_params": 1000, "ftype": "Q8_0"}
                return 200, self.cards(meta=meta)
            case "/props":
                parameters = {"temperature": 0.8, "top_k": 40, "speculative.types": "none"}  # whatever it does
                return 200, {
                    "default_generation_settings": {"params": parameters, "n_ctx": self.options.context},
                    "total_slots": 1,
                    "model_ftype": "Q8_0",
                    "chat_template": "{{ messages }}",
                    "build_info": "b11434-abcdef",
                }
            case "/tokenize":
                ids = [0] * body.get("add_special", False) + encode(body["content"])
                return 200, {"tokens": ids}
            case "/apply-template":
                return 200, {"prompt": "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])}
            case "/completion":
                return (200, self._events(body)) if body.get("stream") else self._next(body)
            case _:
                return NOT_FOUND

    def _next(self, body: dict[str, Any]) -> Answer:
        ids, k = body["prompt"], body["n_probs"]
        if len(ids) >= self.options.context:
            return 400, {"error": {"code": 400, "message": "exceeds the available context size"}}
        kept = 0
        if body["cache_prompt"]:
            while kept < min(len(ids) - 1, len(self.slot)) and ids[kept] == self.slot[kept]:
                kept += 1
        self.slot = list(ids)
        values = truth.logprobs(ids)
        if self.options.stale and kept:
            values = np.roll(values, 7)
        chosen = body["logit_bias"][0][0] if self.options.bias and body.get("logit_bias") else truth.greedy(ids, 1)[0]
        entries = [
            {"id": t, "token": "\x1b", "bytes": [27], "logprob": float(values[t])}
            for t in (chosen, *truth.best(values, k))
        ]
        probabilities = [{**entries[0], "top_logprobs": entries[1:]}]
        answer = {
            "index": 0,
            "content": "x",
            "tokens": [chosen],
            "id_slot": body["id_slot"],
            "stop": True,
            "tokens_evaluated": len(ids),
            "truncated": False,
            "prompt": "x" * len(ids),
            "timings": {"cache_n": kept, "prompt_n": len(ids) - kept, "predicted_n": 1},
            "completion_probabilities": probabilities,
            "generation_settings/speculative.types": "ngram-simple" if self.options.steps else "none",
        }
        if chosen in self.options.halves:
            del answer["completion_probabilities"]
        wanted = body.get("response_fields") or list(answer)
        return 200, {name: answer[name] for name in wanted if name in answer}

    def _events(self, body: dict[str, Any]) -> Iterator[Any]:
        ids, count = body["prompt"], body["n_predict"]
        out = truth.greedy(ids, count)
        done, totals = 0, [0, 0]
        for index, size in enumerate(self.bursts(count)):
            if 0 < index <= len(self.options.steps):
                totals = [totals[0] + self.options.steps[index - 1][0], totals[1] + self.options.steps[index - 1][1]]
            for _ in range(size):
                token = out[done]
                value = float(truth.logprobs(ids + out[:done])[token])
                done += 1
                entry = {"id": token, "token": "x", "bytes": [1], "logprob": value}
                event: dict[str, Any] = {
                    "index": 0,
                    "content": "x",
                    "tokens": [token],
                    "stop": False,
                    "id_slot": body["id_slot"],
                    "tokens_predicted": done,
                    "tokens_evaluated": len(ids),
                    "timings": {"predicted_n": done},
                    "completion_probabilities": [{**entry, "top_logprobs": [entry]}],
                }
                if totals[0]:
                    event["timings"] |= {"draft_n": totals[0], "draft_n_accepted": totals[1]}
                    event["completion_probabilities"] = [{**entry, "logprob": 0.0, "top_logprobs": []}]
                yield event
        last = {"tokens": [], "stop": True, "stop_type": "limit", "truncated": False, "tokens_evaluated": len(ids)}
        timings = {"draft_n": totals[0], "draft_n_accepted": totals[1]} if totals[0] else {}
        yield {**last, "timings": timings, "tokens_predicted": count}


DIALECTS: dict[str, type[Dialect]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "trtllm": Trtllm,
    "llama-server": LlamaServer,
}
