"""One lane on one engine process: start, score with the trace fed ahead, decode a little, say what really ran."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from workbench.config.lane import Configuration, from_json
from workbench.engines.process import EngineProcess
from workbench.errors import Cancelled, ConfigurationError, EngineError
from workbench.metrics.divergence import HEAD_AND_SAMPLES
from workbench.protocol import events
from workbench.protocol.columns import CONTINUATION
from workbench.protocol.events import Event
from workbench.protocol.wire import Arrays
from workbench.run.checks import GATE_POSITIONS, check_effective, check_predictions, check_tokens, differences
from workbench.run.determinism import Repeats, Take
from workbench.store.hub import Hub
from workbench.store.state import LaneState

DECODE_TOKENS = 128
"""Greedy tokens after the context, so that decode speed is measured, not inferred."""
FEED_AHEAD = 4096
"""Positions of the trace that are sent ahead of the rows that came back: bounds memory in the engine."""
CANCEL_GRACE_SECONDS = 10.0
NO_CACHE = ("vllm", "server")
"""Engines that keep no context of ours between two requests."""
TWO_RUNS = "divergence without the drafter, acceptance and speed with it"
_jobs = itertools.count(1)
_E = TypeVar("_E", bound=Event)


Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What a lane does: the stream's ids (int32), and how they are scored.

    `weights` gives the path that the engine loads and facts for the manifest, and may take its time; `first` is the
    first position that is measured; `record` makes the trace; `single` (uint8) marks the tokens that `path=decode`
    feeds one at a time; the first `reuse_prefix` positions are run in a pass of their own and their KV cache is used
    again; `context_limit` is the model's. Where `text` is given, the engine's own tokenizer must make `text_ids` of it.
    A lane is run `repeat` times in all, the later ones to compare them with the first bit by bit.
    """

    ids: np.ndarray[Any, np.dtype[np.int32]]
    weights: Callable[[Tell], tuple[Path, dict[str, Any]]]
    context_limit: int
    first: int = 1
    record: bool = False
    trace_seed: int = 0
    single: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    reuse_prefix: int = 0
    decode_tokens: int = DECODE_TOKENS
    text: str = ""
    text_ids: np.ndarray[Any, np.dtype[np.int32]] | None = None
    repeat: int = 1


@dataclass(slots=True)
class Job:
    """One lane's run. `stop` is set by the user; `feed(first)` gives the trace's pieces from a position on."""

    lane: LaneState
    work: Work
    hub: Hub
    engine: EngineProcess
    feed: Callable[[int], Iterator[tuple[int, Arrays]]] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    _vocabulary: int = 0
    _believed: bool = False

    def run(self) -> None:
        """Run the lane to its end; what was measured stays.

        Raises EngineError, ConfigurationError, InvalidLaneError or Cancelled.
        """
        lane_id = self.lane.record.id
        configuration = from_json(self.lane.record.configuration)
        self.hub.update(lane_id, status="running", reason="")
        path, made = self.work.weights(self._tell)
        if self.work.text:
            self._check_reading(configuration, path)
        context, keep = self._room(configuration.ctx)
        # Log-probabilities under speculation are wrong in some engines and unchecked in others.
        plain = replace(configuration, draft="none", width=0)
        started = self._start(plain, path, context)
        # The session's own notes, on how it was rendered, stand under "notes" already.
        effective = {"engine_notes" if name == "notes" else name: value for name, value in started.effective.items()}
        self._vocabulary = int(effective.get("vocabulary") or 0)
        manifest = {**self.lane.record.manifest, **made, **effective, "requested": configuration.to_line()}
        if differs := differences(plain, effective):
            manifest["differs"] = differs
        self.hub.update(lane_id, manifest=manifest, estimator=effective.get("estimator") or HEAD_AND_SAMPLES)
        check_effective(plain, effective)
        missing = self.hub.missing(lane_id, self.work.first)
        first = missing[0][0] if missing else len(self.work.ids)
        scored = self._score(configuration, first)
        stats: dict[str, Any] = {**self.lane.record.stats, **scored.stats, "load_seconds": started.load_seconds}
        if first > self.work.first:
            stats["resumed_from"] = first
        cut = {key: value for key, value in scored.stats.items() if key.startswith("padding_mass")}
        rule = "the tokenizer's ids" + (", logits beyond them cut" if cut else "")
        manifest.update(vocabulary_rule=rule, cache_reuse=self._reuse(), **cut)
        self.hub.update(lane_id, stats=stats, manifest=manifest)
        if self.work.decode_tokens and len(self.lane.continuation) == 0:
            if configuration != plain:
                drafted = self._start(configuration, path, context)
                check_effective(configuration, drafted.effective)
                manifest.update(draft=drafted.effective.get("draft"), runs=TWO_RUNS)
                self.hub.update(lane_id, manifest=manifest)
            stats = self._decode(configuration, keep, stats)
            self.hub.update(lane_id, stats=stats)
        if self.work.repeat > 1 and self.lane.record.kind == "lane":
            stats["determinism"] = self._repeat(configuration, keep, effective.get("kv") or {})
        self.hub.update(lane_id, stats=stats, manifest={**manifest, "finished": time.time()})

    def _start(self, configuration: Configuration, path: Path, context: int) -> events.Started:
        request = events.Start(next(_jobs), configuration.to_json(), str(path), context)
        return self._request(request, events.Started)

    def _decode(self, configuration: Configuration, keep: int, stats: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens after the context, so that speed and acceptance are measured."""
        ids = self.work.ids[: keep if keep >= 0 else None]
        generated = self._request(self._sample(configuration, keep), events.Generated)
        peaks = [part.get("peak_memory_bytes") or 0 for part in (stats, generated.stats)]
        decode = {**generated.stats, "from": len(ids)}
        return {**stats, "decode": decode, "peak_memory_bytes": max(peaks) or None}

    def _sample(self, configuration: Configuration, keep: int) -> events.Generate:
        ids = self.work.ids[: keep if keep >= 0 else None]
        # An engine that was not scored just now, or keeps no cache between requests, gets the context with the request.
        brought = {"ids": ids} if configuration.engine in NO_CACHE or configuration.draft != "none" else {}
        return events.Generate(next(_jobs), self.work.decode_tokens, len(ids), arrays=brought)

    def _repeat(self, configuration: Configuration, keep: int, kv: dict[str, Any]) -> dict[str, Any]:
        """Run the lane again, and say whether it gave the same bits."""
        reason = ""
        if configuration.engine in NO_CACHE:
            reason = "the engine keeps no KV cache between requests"
        elif not kv.get("cuts_exactly", True):
            reason = "this KV cache is not the same again once it was cut back"
        stored = {name: self.lane.continuation.column(name) for name in CONTINUATION}
        return Repeats(
            self.work.repeat,
            self.lane.rows,
            stored,
            reason,
            lambda take: self._score(configuration, self.work.first, take),
            lambda take: self._request(self._sample(configuration, keep), events.Generated, take=take),
            self._hear,
        ).run()

    def _check_reading(self, configuration: Configuration, path: Path) -> None:
        """Compare how the engine itself tokenises the prompt with the session's ids. Raises ConfigurationError."""
        assert self.work.text_ids is not None
        request = events.Inspect(next(_jobs), configuration.to_json(), str(path), text=self.work.text)
        theirs = self._request(request, events.Inspected)
        if len(theirs.arrays["ids"]):
            check_tokens(self.work.text_ids, theirs.arrays["ids"], configuration.engine, self.hub.token_bytes)
            checked = "equal to the engine's own"
        else:
            checked = "the engine cannot say"
        manifest = {**self.lane.record.manifest, "tokens_checked": checked}
        self.hub.update(self.lane.record.id, manifest=manifest)

    def _tell(self, phase: str, done: int, total: int) -> None:
        """Progress of what happens before the engine has the lane; raises Cancelled where the user stops it."""
        if self.stop.is_set():
            raise Cancelled("cancelled", where=self.lane.record.name)
        self.hub.receive(self.lane.record.id, events.Progress(0, phase, done, total))

    def _hear(self, event: events.Rows | events.Tokens | events.Progress) -> None:
        """Hand an event of the engine to the hub."""
        self.hub.receive(self.lane.record.id, event)
        if isinstance(event, events.Rows):
            self._check_rows()

    def _check_rows(self) -> None:
        """The sanity gate, once, as soon as there are enough rows."""
        if not self._believed and self.lane.record.kind == "lane" and len(self.lane.rows) >= GATE_POSITIONS:
            check_predictions(self.lane, self.hub.state.reference, self._vocabulary)
            self._believed = True

    def _reuse(self) -> str:
        return f"prefix of {self.work.reuse_prefix}" if self.work.reuse_prefix else "none"

    def _room(self, asked: int) -> tuple[int, int]:
        """Positions the cache must hold (`asked` where not 0), and where the decode sample starts (-1: at the end)."""
        n, extra = len(self.work.ids), self.work.decode_tokens
        limit = min(asked or self.work.context_limit, self.work.context_limit)
        if n + extra <= limit:
            return asked or n + extra, -1
        return max(n, limit), max(1, limit - extra)

    def _score(self, configuration: Configuration, first: int, take: Take | None = None) -> events.Scored:
        work = self.work
        if work.reuse_prefix:
            self._request(
                events.Score(next(_jobs), work.reuse_prefix, True, arrays={"ids": work.ids[: work.reuse_prefix]}),
                events.Scored,
                take=lambda event: self._hear(event) if isinstance(event, events.Progress) else None,
            )
        request = events.Score(
            next(_jobs),
            first,
            work.record,
            path=configuration.path,
            trace_seed=work.trace_seed,
            reuse=work.reuse_prefix,
            arrays={"ids": work.ids, **({} if work.single is None else {"single": work.single})},
        )
        if self.feed is None:
            return self._request(request, events.Scored, take=take)
        pieces = self.feed(first)
        fed = first
        # vLLM names the trace's ids in its requests, so it needs them all before the first row comes.
        ahead = FEED_AHEAD if configuration.engine != "vllm" else len(work.ids)

        def feed_ahead(position: int) -> None:
            nonlocal fed
            while fed < position + ahead:
                piece = next(pieces, None)
                if piece is None:
                    return
                self.engine.send(events.Feed(request.job, piece[0], piece[1]))
                fed = piece[0] + len(piece[1]["logprob"])

        return self._request(request, events.Scored, progressed=feed_ahead, start=first, take=take)

    def _request(
        self,
        request: events.Inspect | events.Start | events.Score | events.Generate,
        answer: type[_E],
        *,
        progressed: Callable[[int], None] | None = None,
        start: int = 0,
        take: Take | None = None,
    ) -> _E:
        """Send a request and hand what comes back to the hub, or to `take`, until its answer is there."""
        self.engine.send(request)
        if progressed:
            progressed(start)
        asked_to_stop: float | None = None
        while True:
            if self.stop.is_set() and asked_to_stop is None:
                self.engine.send(events.Cancel(request.job))
                asked_to_stop = time.monotonic()
            if asked_to_stop is not None and time.monotonic() - asked_to_stop > CANCEL_GRACE_SECONDS:
                self.engine.kill()
                raise Cancelled("cancelled; the engine did not answer and was ended", where=self.lane.record.name)
            event = self.engine.receive(timeout=0.25)
            match event:
                case None:
                    continue
                case events.Failed():
                    raise _as_error(event, self.engine)
                case events.Rows() | events.Tokens() | events.Progress():
                    if event.job != request.job:
                        continue
                    (take or self._hear)(event)
                    if progressed and isinstance(event, events.Rows):
                        progressed(event.first + len(next(iter(event.arrays.values()))))
                case _ if isinstance(event, answer):
                    return event
                case _:
                    continue  # Ready, or the late answer of a cancelled request


def _as_error(event: events.Failed, engine: EngineProcess) -> Exception:
    if event.kind == "cancelled":
        return Cancelled(event.what, where=event.where)
    if event.kind == "refused":
        return ConfigurationError(event.what, where=event.where, next=event.next)
    return EngineError(event.what, where=event.where, next=event.next, log_tail=engine.log_tail())
