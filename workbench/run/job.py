"""One lane on one engine process: start, score with the trace fed ahead, decode a little, say what really ran."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from workbench.config.lane import Configuration, from_json
from workbench.engines.process import EngineProcess
from workbench.errors import Cancelled, ConfigurationError, EngineError
from workbench.protocol import events
from workbench.protocol.events import Event
from workbench.protocol.wire import Arrays
from workbench.store.hub import Hub
from workbench.store.state import LaneState

DECODE_TOKENS = 128
"""Greedy tokens after the context, so that decode speed is measured, not inferred."""
FEED_AHEAD = 4096
"""Positions of the trace that are sent ahead of the rows that came back: bounds memory in the engine."""
CANCEL_GRACE_SECONDS = 10.0
_jobs = itertools.count(1)
_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True, slots=True)
class Work:
    """What a lane does: the stream's ids (int32), and how they are scored.

    `first` is the first position that is measured; `record` makes the trace; `single` (uint8) marks the tokens that
    `path=decode` feeds one at a time; the first `reuse_prefix` positions are run in a pass of their own and their KV
    cache is used again; `context_limit` is the model's.
    """

    ids: np.ndarray[Any, np.dtype[np.int32]]
    model_path: str
    context_limit: int
    first: int = 1
    record: bool = False
    trace_seed: int = 0
    single: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    reuse_prefix: int = 0
    decode_tokens: int = DECODE_TOKENS


@dataclass(slots=True)
class Job:
    """One lane's run. `stop` is set by the user; `feed(first)` gives the trace's pieces from a position on."""

    lane: LaneState
    work: Work
    hub: Hub
    engine: EngineProcess
    feed: Callable[[int], Iterator[tuple[int, Arrays]]] | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run the lane to its end. Raises EngineError, ConfigurationError or Cancelled; what was measured stays."""
        lane_id = self.lane.record.id
        configuration = from_json(self.lane.record.configuration)
        self.hub.update(lane_id, status="running", reason="")
        context, keep = self._room(configuration.ctx)
        started = self._request(
            events.Start(next(_jobs), configuration.to_json(), self.work.model_path, context), events.Started
        )
        check_effective(configuration, started.effective)
        manifest = {**self.lane.record.manifest, **started.effective, "requested": configuration.to_line()}
        self.hub.update(lane_id, manifest=manifest)
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
            generated = self._request(events.Generate(next(_jobs), self.work.decode_tokens, keep), events.Generated)
            peaks = [part.get("peak_memory_bytes") or 0 for part in (scored.stats, generated.stats)]
            stats["decode"] = {**generated.stats, "from": keep if keep >= 0 else len(self.work.ids)}
            stats["peak_memory_bytes"] = max(peaks) or None
        self.hub.update(lane_id, stats=stats, manifest={**manifest, "finished": time.time()})

    def _reuse(self) -> str:
        return f"prefix of {self.work.reuse_prefix}" if self.work.reuse_prefix else "none"

    def _room(self, asked: int) -> tuple[int, int]:
        """Positions the cache must hold (`asked` where not 0), and where the decode sample starts (-1: at the end)."""
        n, extra = len(self.work.ids), self.work.decode_tokens
        limit = min(asked or self.work.context_limit, self.work.context_limit)
        if n + extra <= limit:
            return asked or n + extra, -1
        return max(n, limit), max(1, limit - extra)

    def _score(self, configuration: Configuration, first: int) -> events.Scored:
        work = self.work
        if work.reuse_prefix:
            self._request(
                events.Score(next(_jobs), work.reuse_prefix, True, arrays={"ids": work.ids[: work.reuse_prefix]}),
                events.Scored,
                discard=True,
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
            return self._request(request, events.Scored)
        pieces = self.feed(first)
        fed = first

        def feed_ahead(position: int) -> None:
            nonlocal fed
            while fed < position + FEED_AHEAD:
                piece = next(pieces, None)
                if piece is None:
                    return
                self.engine.send(events.Feed(request.job, piece[0], piece[1]))
                fed = piece[0] + len(piece[1]["logprob"])

        return self._request(request, events.Scored, progressed=feed_ahead, start=first)

    def _request(
        self,
        request: events.Start | events.Score | events.Generate,
        answer: type[_E],
        *,
        progressed: Callable[[int], None] | None = None,
        start: int = 0,
        discard: bool = False,
    ) -> _E:
        """Send a request and hand what comes back to the hub until its answer is there."""
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
                    if event.job != request.job or (discard and not isinstance(event, events.Progress)):
                        continue
                    self.hub.receive(self.lane.record.id, event)
                    if progressed and isinstance(event, events.Rows):
                        progressed(event.first + len(next(iter(event.arrays.values()))))
                case _ if isinstance(event, answer):
                    return event
                case _:
                    continue  # Ready, or the late answer of a cancelled request


def check_effective(configuration: Configuration, effective: dict[str, Any]) -> None:
    """Raise ConfigurationError where an engine accepted a setting and runs another."""
    axes = ["weights", "kv", "attn", *(["threads"] if configuration.threads else [])]
    for axis in axes:
        ran: Any = effective.get(axis)
        if isinstance(ran, dict):
            ran = ran.get("scheme")  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        if ran != getattr(configuration, axis):
            raise ConfigurationError(
                f"the engine was asked for {axis}={getattr(configuration, axis)} and runs {ran}",
                where=f"lane {configuration.to_line()}",
                next="The lane is refused: its numbers would not be about what it says.",
            )


def _as_error(event: events.Failed, engine: EngineProcess) -> Exception:
    if event.kind == "cancelled":
        return Cancelled(event.what, where=event.where)
    if event.kind == "refused":
        return ConfigurationError(event.what, where=event.where, next=event.next)
    return EngineError(event.what, where=event.where, next=event.next, log_tail=engine.log_tail())
