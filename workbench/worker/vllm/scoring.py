"""Forced scoring with vLLM. What it can show of its distributions differs by runner: four ways to rows, see `Way`."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.errors import ConfigurationError, EngineError
from workbench.protocol.columns import cut
from workbench.protocol.events import Score
from workbench.protocol.wire import Arrays
from workbench.worker.bounded import Top, bounded_rows
from workbench.worker.channel import Job
from workbench.worker.scoring import lane_rows, lost_mass, record_rows
from workbench.worker.vllm.engine import Engine, Step
from workbench.worker.vllm.flat import Named, joined, named
from workbench.worker.vllm.forced import KEY
from workbench.worker.vllm.named import named_rows, trace_ids
from workbench.worker.vllm.segments import Segment, segments

Way = Literal["logits", "whole", "ids", "top"]
"""`logits`: read in the runner (`tap`); `whole`: every id's log-probability through vLLM's interface; `ids`: at the
trace's ids (V2 runner); `top`: vLLM's own best ids, which bound the divergence."""

FLUSH_SECONDS = 0.05
BLOCK = 512
TOLERANCE = 1e-3
"""Nats between the logits that were read and the log-probability that vLLM reports: float32 sums differ by 1e-5."""

NAMED_BEST = 64
"""Own best ids asked for beside the trace's ids, for ranks."""
MOST_ENTRIES = 30_000_000
ENTRY_BYTES = 130
"""Log-probabilities that vLLM may hand over in one request, and what one takes in its Python lists."""
USE_TOP = "Use logprobs=256, which takes what vLLM reports."


class Scoring:
    """One Score request after one of `held` tokens. `run()` sends its rows."""

    def __init__(
        self, engine: Engine, request: Score, job: Job, way: Way, best: int, vocabulary: int, held: int
    ) -> None:
        self.engine, self.request, self.job, self.way, self.best = engine, request, job, way, best
        self.vocabulary, self.held = vocabulary, held
        self.ids: NDArray[np.int32] = request.arrays["ids"]
        self.n = len(self.ids)
        self.single = None
        if request.path == "decode":
            self.single = request.arrays.get("single", np.ones(self.n, dtype=np.uint8))
        self.tokens = {"prefill": 0, "decode": 0}
        self.busy = {"prefill": 0.0, "decode": 0.0}
        self.rows_seconds = 0.0
        self.sent = 0
        self.lost: list[NDArray[np.float64]] = []
        self.read = np.full(self.n, np.nan)  # ln q of the stream's tokens, by the logits that were read
        self.reported = np.full(self.n, np.nan)  # and as vLLM says it

    def run(self) -> dict[str, Any]:
        """The statistics of `Scored` that scoring itself knows. Raises EngineError, ConfigurationError, Cancelled."""
        reuse = self.request.reuse
        kept = 0 < reuse < self.request.first
        if not kept or self.held != reuse:
            self.engine.forget()
        if kept and self.held != reuse:  # more than the prefix would be taken over, rows that are wanted among it
            for _ in self._steps(Segment(0, reuse, reuse), [], {}):
                pass
        for segment in segments(self.single, self.n):
            cached = kept or segment.held > 0
            if self.way == "logits":
                self._by_logits(segment, cached)
            else:
                self._by_names(segment, cached)
        wanted = self.n - min(self.request.first, self.n)
        if self.sent != wanted:
            raise EngineError(f"vLLM gave {self.sent:,} of {wanted:,} rows", where="vllm", next=USE_TOP)
        lost = np.concatenate(self.lost) if self.lost else np.zeros(0)
        lost = lost[np.isfinite(lost)]
        padding = {"padding_mass_mean": float(lost.mean()), "padding_mass_max": float(lost.max())} if len(lost) else {}
        return {
            "prefill_tokens": self.tokens["prefill"],
            "prefill_seconds": self.busy["prefill"],
            "decode_tokens": self.tokens["decode"],
            "decode_seconds": self.busy["decode"],
            "rows_seconds": self.rows_seconds,
            **padding,
        }

    def _steps(self, segment: Segment, forced: list[int], parameters: dict[str, Any]) -> Generator[Step]:
        """Run a request over a segment, keep time and say how far it is."""
        parameters = {"max_tokens": max(1, len(forced)), **parameters}
        phase, done = "prefill", segment.held
        with closing(self.engine.run(self.ids[: segment.stop].tolist(), **parameters)) as steps:
            for step in steps:
                self.busy[phase] += step.seconds
                if phase == "decode":
                    self.tokens["decode"] += len(step.tokens)
                    done += len(step.tokens)
                elif step.output is None:
                    done = min(done + self.engine.chunk, segment.stop)
                else:
                    self.tokens["prefill"] += segment.stop - int(step.output.num_cached_tokens or 0)
                    done = segment.stop
                yield step
                self.job.check()
                self.job.progress(phase, min(done, self.n), self.n)
                phase = phase if step.output is None else "decode"

    def _forced(self, segment: Segment) -> list[int]:
        """The ids to force: the tokens up to `end`, and the one after them, whose row the last one's pass gives."""
        if segment.stop == segment.end:
            return []
        return self.ids[segment.stop : segment.end + 1].tolist()

    # Whole logits, read as they pass ------------------------------------------------------------------------------

    def _by_logits(self, segment: Segment, cached: bool) -> None:
        tap = self.engine.tap
        assert tap is not None
        forced = self._forced(segment)
        parameters: dict[str, Any] = {"prompt_logprobs": 0, "skip_reading_prefix_cache": not cached}
        if forced:
            parameters |= {"logprobs": 0, "extra_args": {KEY: forced}}
        pending: list[torch.Tensor] = []
        position, since = segment.stop, time.perf_counter()
        with closing(self._steps(segment, forced, parameters)) as steps:
            for step in steps:
                for first, logits in tap.prompt:
                    again = max(0, segment.held + 1 - first)  # rows of tokens that are run again to complete a block
                    self._send_logits(first + again, logits[again:])
                if step.output is None:
                    continue
                self._compare_prompt(step, segment)
                if not forced:
                    continue
                self._compare_sampled(step, position + len(pending), forced[position + len(pending) - segment.stop])
                pending.append(tap.sampled[-1])
                if step.output.finished or time.perf_counter() - since >= FLUSH_SECONDS:
                    self._send_logits(position, torch.cat(pending))
                    position, pending, since = position + len(pending), [], time.perf_counter()
        self._compare()

    def _send_logits(self, first: int, logits: torch.Tensor) -> None:
        """Rows of logits (m, V) that predict the tokens from position `first` on."""
        for low, high in self._blocks(first, len(logits)):
            block, targets = logits[low - first : high - first], torch.from_numpy(self.ids[low:high].astype(np.int64))
            targets = targets.to(block.device)
            if self.request.record:
                began = time.perf_counter()
                rows = record_rows(block, targets, low, self.request.trace_seed, self.vocabulary)
            else:
                trace = self.job.trace(low, high)
                began = time.perf_counter()
                rows = lane_rows(block, targets, trace, self._seconds(), self.vocabulary)
            kept = np.where(np.isfinite(rows["logprob"]) & (rows["valid"] == 1), rows["logprob"], np.nan)
            if block.shape[1] > self.vocabulary:
                lost = lost_mass(block, targets, rows, self.vocabulary)
                self.lost.append(lost)
                kept = kept + np.log1p(-lost)
            self.read[low:high] = kept
            self.rows_seconds += time.perf_counter() - began
            self._send(low, rows)

    def _compare_prompt(self, step: Step, segment: Segment) -> None:
        flat = step.output.prompt_logprobs
        if flat is None or not len(flat):
            return
        low = max(int(step.output.num_cached_tokens or 0), segment.held) + 1
        if low < segment.stop:
            self._reported(low, named(flat, low, segment.stop).target)

    def _compare_sampled(self, step: Step, position: int, forced: int) -> None:
        if step.tokens != [forced]:
            raise EngineError(f"vLLM took tokens {step.tokens} where {forced} was forced", where="vllm")
        self._reported(position, named(step.output.outputs[0].logprobs, 0, 1).target)

    def _reported(self, first: int, logprobs: NDArray[np.float32]) -> None:
        self.reported[first : first + len(logprobs)] = logprobs

    def _compare(self) -> None:
        """Raises EngineError where the logits that were read are not those behind vLLM's own log-probabilities."""
        gap = np.nan_to_num(np.abs(self.reported - self.read), nan=0.0)  # NaN: rows before `first`, and invalid ones
        worst = int(gap.argmax())
        if gap[worst] > TOLERANCE:
            mine, theirs = self.read[worst], self.reported[worst]
            raise EngineError(
                f"the logits read at position {worst} give {mine:.4f}, vLLM reports {theirs:.4f}",
                where="vllm",
                next=USE_TOP,
            )

    # What vLLM names ----------------------------------------------------------------------------------------------

    def _by_names(self, segment: Segment, cached: bool) -> None:
        forced = self._forced(segment)
        count, wide = (-1, self.vocabulary) if self.way == "whole" else (self.best, self.best)
        entries = (segment.end - segment.held) * wide
        if entries > MOST_ENTRIES:
            raise ConfigurationError(
                f"{segment.end - segment.held:,} positions of {wide:,} log-probabilities are"
                f" {entries * ENTRY_BYTES / 1e9:.0f} GB of Python lists in vLLM",
                where="vllm",
                next="Use logprobs=256, or a shorter session.",
            )
        parameters: dict[str, Any] = {"prompt_logprobs": count, "skip_reading_prefix_cache": not cached}
        trace: Arrays | None = None
        if self.way == "ids":
            trace = self.job.trace(self.request.first, self.n)
            parameters |= {
                "prompt_logprob_token_ids": trace_ids(trace),
                "prompt_logprob_start": self.request.first - 1,
            }
        if forced and self.engine.v2:  # its replay does not go together with prompt log-probabilities
            self._answered(segment, [], parameters, None)
            self._answered(segment, forced, {"logprobs": count, "trace_decode_token_ids": forced}, None)
            return
        if forced:
            parameters |= {"logprobs": count, "extra_args": {KEY: forced}}
        self._answered(segment, forced, parameters, trace)

    def _answered(self, segment: Segment, forced: list[int], parameters: dict[str, Any], trace: Arrays | None) -> None:
        """Run one request and send the rows of all that it names; `trace` holds the ids asked for from `first` on."""
        parts: list[Named] = []
        with closing(self._steps(segment, forced, parameters)) as steps:
            for step in steps:
                if step.output is None:
                    continue
                flat = step.output.prompt_logprobs
                if flat is not None and len(flat):
                    low = segment.held + 1
                    found = named(flat, low, segment.stop)
                    if trace is None:
                        self._send_names(low, found)
                    else:
                        self._send_ids(low, found, trace, step.output.prompt_token_id_logprobs)
                if forced:
                    taken, expected = step.tokens, forced[len(parts) : len(parts) + len(step.tokens)]
                    if taken != expected:
                        raise EngineError(f"vLLM took tokens {taken} where {expected} were forced", where="vllm")
                    sampled = step.output.outputs[0].logprobs
                    parts += [named(sampled, index, index + 1) for index in range(len(taken))]
        if parts:
            self._send_names(segment.stop, joined(parts))

    def _blocks(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """The positions that rows are wanted of, among `count` from `first` on, in blocks."""
        begin, end = max(first, self.request.first), min(first + count, self.n)
        for low in range(begin, end, BLOCK):
            yield low, min(low + BLOCK, end)

    def _send_names(self, first: int, found: Named) -> None:
        for low, high in self._blocks(first, len(found.target)):
            part = found.cut(low - first, high - first)
            reference = None if self.request.record else self.job.trace(low, high)
            began = time.perf_counter()
            if self.way == "whole":
                rows = self._whole(low, part, reference)
            else:
                assert reference is not None
                real = part.ids < self.vocabulary  # the others are padding of the logits
                ids, logprobs = (
                    np.where(real, part.ids, np.int32(-1)),
                    np.where(real, part.logprobs, -np.float32("inf")),
                )
                top = Top(ids, logprobs, part.target, part.rank)
                rows = bounded_rows(reference, top, self._seconds(), self.vocabulary, self.ids[low:high])
            self.rows_seconds += time.perf_counter() - began
            self._send(low, rows)

    def _send_ids(self, first: int, found: Named, trace: Arrays, scores: NDArray[np.float32] | None) -> None:
        if scores is None or len(scores) != len(trace["k"]):
            raise EngineError("vLLM gave no log-probabilities of the trace's ids", where="vllm", next=USE_TOP)
        began, wanted = time.perf_counter(), self.request.first
        rows = named_rows(trace, scores, found.cut(wanted - first, self.n - first), self._seconds())
        self.rows_seconds += time.perf_counter() - began
        for low, high in self._blocks(first, len(found.target)):
            self._send(low, cut("rows", rows, low - wanted, high - wanted))

    def _whole(self, low: int, part: Named, reference: Arrays | None) -> Arrays:
        """Every id's log-probability, put in the order of ids, in the place of logits."""
        width = part.ids.shape[1]
        logits = torch.full((len(part.ids), max(width, int(part.ids.max(initial=0)) + 1)), -torch.inf)
        logits.scatter_(1, torch.from_numpy(part.ids.astype(np.int64)), torch.from_numpy(part.logprobs))
        targets = torch.from_numpy(self.ids[low : low + len(part.ids)].astype(np.int64))
        if self.request.record:
            return record_rows(logits, targets, low, self.request.trace_seed, self.vocabulary)
        assert reference is not None
        return lane_rows(logits, targets, reference, self._seconds(), self.vocabulary)

    def _send(self, first: int, rows: Arrays) -> None:
        self.sent += len(rows["logprob"])
        self.job.rows(first, rows)

    def _seconds(self) -> float:
        return sum(self.busy.values()) + self.rows_seconds
