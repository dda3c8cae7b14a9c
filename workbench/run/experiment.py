"""One session, one model, one reference and its lanes, from what was asked to a saved session.

The command line runs an experiment headless; the app runs the same object behind its screens. The trace comes first:
lanes wait until it is recorded, found in the cache, or already in the file that is being resumed.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workbench import __version__
from workbench.config import axes
from workbench.config.lane import Configuration, from_json
from workbench.engines.models import Model
from workbench.errors import ConfigurationError, SavedSessionError, WorkbenchError
from workbench.paths import saved_dir
from workbench.protocol.wire import Arrays
from workbench.run import reference as references
from workbench.run.determinism import check_repeat
from workbench.run.floor import FloorRow, floor_fact, floor_rows
from workbench.run.imported import load_reference, reference_configuration
from workbench.run.job import DECODE_TOKENS, Work
from workbench.run.lane_model import free_name, lane_model
from workbench.run.memory import shape_of
from workbench.run.prepare import (
    NO_LIMIT,
    Ask,
    Say,
    prepare,
    usable_environment,
)
from workbench.run.scheduler import Scheduler, Task
from workbench.run.weights import find_weights
from workbench.store.hub import Hub
from workbench.store.saved import SavedSession
from workbench.store.state import LaneKind, LaneRecord, LaneState, SessionState
from workbench.store.trace import feed


class Experiment:
    """Prepare, start, add lanes, wait, close. `say` gets one line of narration at a time, from any thread."""

    def __init__(self, ask: Ask, say: Say) -> None:
        file = load_reference(ask.reference_file) if ask.reference_file is not None else None
        if file is not None:
            ask = replace(ask, reference=reference_configuration(file, ask.reference.model))
            if ask.floor and "floor" not in file.facts:
                raise ConfigurationError(
                    "the noise floor of a reference from a file is measured where it was recorded",
                    where=f"reference {file.path}",
                    next="Leave --floor out, or ask for a file that was exported with its floor.",
                )
        for configuration in (*(() if file else (ask.reference,)), *ask.lanes):
            axes.check(configuration)
            check_repeat(configuration, ask.repeat)
        self._ask, self._file = ask, file
        self._say = say
        self._lock = threading.RLock()
        self._waiting: list[Task] = []
        self._reused_from = ""

    def prepare(self) -> SessionState:
        """Find the model, render the session, open the file. Raises WorkbenchError; nothing runs yet."""
        self.prepared = prepare(self._ask, self._say, self._file)
        for configuration in (*(() if self._file else (self._ask.reference,)), *self._ask.lanes):
            self._lane_model(configuration)  # a refusal comes before there is a file
        rendered = self.prepared.rendered
        self.key = self._key()
        self._saved = self._open_file()
        self.hub = Hub(self._saved, self.prepared.tokenizer.tokens_bytes)
        if self._reused_from and (reference := self.state.reference) is not None:
            record = reference.record
            self.hub.update(
                record.id,
                stats={**record.stats, "reused": True},
                manifest={**record.manifest, "reused_from": self._reused_from},
            )
            floor = self._file.facts.get("floor") if self._file else references.cached_floor(self.key)
            if floor is not None:
                self.hub.set_floor(floor)
                self._say("floor: reusing what was measured with the trace")
        self.scheduler = Scheduler(
            self.hub,
            lambda engine: usable_environment(engine).python,
            self._ask.parallel,
        )
        written = int(rendered.stream["generated"].sum())
        self._say(f"session: {len(rendered.stream['ids']):,} tokens, {written:,} of them written by the assistant")
        return self.hub.state

    @property
    def state(self) -> SessionState:
        """The live session."""
        return self.hub.state

    def start(self) -> None:
        """Queue the reference (or use the recorded one), the lanes and, where asked, the floor."""
        reference = self.state.reference
        if reference is None:
            reference = self._reference_lane()
        for configuration in self._ask.lanes:
            self.add_lane(configuration)
        if self._ask.floor and self.state.floor is None:
            self.measure_floor()
        if reference.record.status == "done":
            self._release()
        else:
            self._submit_reference(reference)

    def add_lane(self, configuration: Configuration) -> LaneState:
        """Queue one more lane; one of the same configuration is resumed instead, or left to run."""
        axes.check(configuration)
        model = self._lane_model(configuration)
        lane = self._existing("lane", configuration)
        if lane is None:
            lane = self._add("lane", self._free_name(configuration), configuration, model)
        with self._lock:
            held = any(task.lane is lane for task in self._waiting) or self.scheduler.holds(lane.record.id)
        if lane.record.status == "done" and self._ask.repeat > 1 and "determinism" not in lane.record.stats:
            self._say(f"{lane.record.name}: done in an earlier run, so it is not repeated; choose another -o FILE")
        if lane.record.status != "done" and not held:
            self._queue(lane, self._work(configuration, single=self._single(configuration), model=model), model)
        return lane

    def retry(self, lane_id: int) -> None:
        """Run a failed or cancelled lane again; rows that are stored stay."""
        lane = next(lane for lane in self.state.lanes if lane.record.id == lane_id)
        if lane.record.kind == "reference":
            self._submit_reference(lane)
        else:
            self.add_lane(from_json(lane.record.configuration))

    def cancel(self, lane_id: int) -> None:
        """Stop a queued or running lane; what it measured stays."""
        with self._lock:
            waiting = next((task for task in self._waiting if task.lane.record.id == lane_id), None)
            if waiting is not None:
                self._waiting.remove(waiting)
        if waiting is not None:
            self.hub.update(lane_id, status="cancelled", reason="cancelled before it began")
            if waiting.after is not None:
                waiting.after(waiting.lane)
        else:
            self.scheduler.cancel(lane_id)

    def measure_floor(self) -> None:
        """Queue the reference against itself; the floor is set when the last of its rows has ended."""
        rows = floor_rows(self._ask.reference, self.prepared.rendered.stream)
        lanes: list[tuple[FloorRow, LaneState]] = []
        for row in rows:
            lane = next(
                (item for item in self.state.lanes if item.record.kind == "floor" and item.record.name == row.name),
                None,
            )
            lanes.append((row, lane or self._add("floor", row.name, row.configuration, self.prepared.model)))
        open_rows = {lane.record.id for _, lane in lanes if lane.record.status != "done"}

        def after(lane: LaneState) -> None:
            open_rows.discard(lane.record.id)
            if not open_rows:
                self._set_floor(lanes)

        for row, lane in lanes:
            if lane.record.status != "done":
                self._queue(lane, self._floor_work(row), self.prepared.model, after)
        if not open_rows:
            self._set_floor(lanes)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for everything queued; False when `timeout` seconds passed first."""
        return self.scheduler.wait(timeout)

    def close(self) -> None:
        """Stop what runs and close the file."""
        if hasattr(self, "scheduler"):
            self.scheduler.close()
            self.hub.close()
        if hasattr(self, "_saved"):
            self._saved.close()

    def _open_file(self) -> SavedSession:
        session, rendered = self.prepared.session, self.prepared.rendered
        path = self._ask.output or saved_dir() / f"{session.id}-{time.strftime('%Y%m%d-%H%M%S')}.wbs"
        if not path.exists() or (path.is_file() and not path.stat().st_size):
            path.parent.mkdir(parents=True, exist_ok=True)
            saved = SavedSession.create(path, session.to_json(), {**rendered.facts, "title": session.title})
        else:
            with SavedSession.open(path) as held:  # only read: a file that is refused is left as it is
                self._check_resumable(held)
            saved = SavedSession.open(path, write=True)
            self._say(f"resuming {path}")
        try:
            if not saved.lanes():  # new, or its writer was killed before it had begun
                saved.set_stream(rendered.stream)
                if self._file is not None:
                    saved.copy_reference(self._file.path)
                    saved.add_tokens(self._tokens(rendered.stream["ids"]))
                    self._reused_from = self._file.path.name
                elif (found := references.cached(self.key)) is not None:
                    saved.copy_reference(found)
                    self._reused_from = found.stem
                    self._say(f"reference: reusing the cached trace {found.stem}")
        except BaseException:
            with contextlib.suppress(SavedSessionError):  # what closing meets is what went wrong before
                saved.close()
            raise
        return saved

    def _key(self) -> str:
        """What names the trace: where it comes from a file, the key that it was recorded under."""
        if self._file is not None:
            return str(self._file.record.manifest.get("reference_key"))
        assert self.prepared.environment is not None
        versions = self.prepared.environment.versions
        return references.reference_key(self._ask.reference, self.prepared.hashes, versions)

    def _tokens(self, ids: Any) -> dict[int, bytes]:
        known = np.unique(ids).tolist()
        return dict(zip(known, self.prepared.tokenizer.tokens_bytes(known), strict=True))

    def _check_resumable(self, held: SavedSession) -> None:
        """Raise SavedSessionError where a file's trace is not the one that this run would record."""
        keys = [lane.manifest.get("reference_key") for lane in held.lanes() if lane.kind == "reference"]
        what = ""
        ids = held.stream()["ids"]
        begun = len(ids) or held.lanes() or held.damage
        if begun and not np.array_equal(ids, self.prepared.rendered.stream["ids"]):
            what = "this file holds another session or another rendering of it"
        elif keys not in ([], [self.key]):
            what = "this file's reference has other weights, versions, numerics or another processor"
        if what:
            raise SavedSessionError(what, where=str(held.path), next="Choose another -o FILE.")

    def _reference_lane(self) -> LaneState:
        self._say("reference: recording")
        return self._add("reference", self._ask.reference.weights, self._ask.reference, self.prepared.model)

    def _submit_reference(self, reference: LaneState) -> None:
        work = self._work(self._ask.reference, record=True, single=self._single(self._ask.reference))
        self.scheduler.submit(Task(reference, work, shape_of(self.prepared.model.facts), after=self._recorded))

    def _single(self, configuration: Configuration) -> Any:
        """The tokens that run alone: on the decode path those that the assistant wrote."""
        return self.prepared.rendered.stream["generated"] if configuration.path == "decode" else None

    def _recorded(self, reference: LaneState) -> None:
        if reference.record.status == "done":
            try:
                references.keep(self._saved, self.key, {})
                self._say("reference: recorded")
            except (WorkbenchError, OSError) as error:  # the lanes need the trace, not the cache
                self._say(f"reference: recorded, but not kept for later runs: {error}")
            self._release()
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
        reason = f"there is no reference: {reference.record.reason or reference.record.status}"
        for task in waiting:
            with contextlib.suppress(WorkbenchError):  # a file that cannot be written was said by the reference
                self.hub.update(task.lane.record.id, status="failed", reason=reason)

    def _release(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for task in waiting:
            self.scheduler.submit(task)

    def _queue(
        self, lane: LaneState, work: Work, model: Model, after: Callable[[LaneState], None] | None = None
    ) -> None:
        task = Task(lane, work, shape_of(model.facts), self._feed, after)
        reference = self.state.reference
        with self._lock:
            if reference is None or reference.record.status != "done":
                self.hub.update(lane.record.id, status="queued", reason="")
                self._waiting.append(task)
                return
        self.scheduler.submit(task)

    def _feed(self, first: int) -> Iterator[tuple[int, Arrays]]:
        reference = self.state.reference
        assert reference is not None
        return feed(self._saved, reference.record.id, first)

    def _work(
        self,
        configuration: Configuration,
        *,
        record: bool = False,
        first: int = 1,
        single: Any = None,
        reuse_prefix: int = 0,
        decode_tokens: int = DECODE_TOKENS,
        model: Model | None = None,
    ) -> Work:
        chosen, text, text_ids = model or self.prepared.model, "", None
        # transformers reads the very file that we read; a reference without text leaves nothing to read.
        if configuration.engine != "transformers" and self.prepared.rendered.text:
            text = self.prepared.rendered.text
            text_ids = self.prepared.tokenizer.encode(text).ids.astype(np.int32)
        return Work(
            ids=self.prepared.rendered.stream["ids"],
            weights=partial(
                find_weights,
                configuration,
                chosen,
                usable_environment(configuration.engine).python,
                studied=self.prepared.rendered.stream["ids"],
            ),
            context_limit=chosen.facts["context_limit"] or NO_LIMIT,
            first=first,
            record=record,
            trace_seed=references.TRACE_SEED,
            single=single,
            reuse_prefix=reuse_prefix,
            decode_tokens=decode_tokens,
            text=text,
            text_ids=text_ids,
            repeat=self._ask.repeat,
        )

    def _floor_work(self, row: FloorRow) -> Work:
        single = self._single(row.configuration) if row.single is None else row.single
        return self._work(
            row.configuration, first=row.first, single=single, reuse_prefix=row.reuse_prefix, decode_tokens=0
        )

    def _lane_model(self, configuration: Configuration) -> Model:
        """The lane's model. Raises ConfigurationError where it cannot run this lane on the reference's tokens."""
        return lane_model(configuration, self._ask.reference, self.prepared, self._say)

    def _existing(self, kind: LaneKind, configuration: Configuration) -> LaneState | None:
        wanted = configuration.to_json()
        lanes = (lane for lane in self.state.lanes if lane.record.kind == kind)
        return next((lane for lane in lanes if lane.record.configuration == wanted), None)

    def _add(self, kind: LaneKind, name: str, configuration: Configuration, model: Model) -> LaneState:
        record = LaneRecord(
            id=-1,
            name=name,
            kind=kind,
            configuration=configuration.to_json(),
            path="decode" if configuration.path == "decode" else "prefill",
            manifest=self._manifest(configuration, model),
        )
        return self.hub.add_lane(record)

    def _manifest(self, configuration: Configuration, model: Model) -> dict[str, Any]:
        """What is known before the engine starts; the engine's own readings are added when it has."""
        stream = self.prepared.rendered.stream
        return {
            **self.prepared.rendered.facts,
            "workbench": __version__,
            "model_name": model.name,
            "weights_hash": model.facts["weights_hash"],
            "model_notes": model.facts["notes"],
            "versions": usable_environment(configuration.engine).versions,
            "chunk": configuration.chunk,
            "sampling": {"temperature": configuration.temperature, "seed": configuration.seed},
            "scored_positions": len(stream["ids"]) - 1,
            "headline_positions": int(stream["generated"][1:].sum()),
            "direction": "KL(p||q), p the reference, nats",
            "trace_rule": references.TRACE_RULE,
            "trace_seed": references.TRACE_SEED,
            "reference_key": self.key,
            "processor": references.processor(),
            "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
            "started": time.time(),
        }

    def _free_name(self, configuration: Configuration) -> str:
        """What differs from the reference, made unique among the lanes."""
        return free_name(configuration, self._ask.reference, {lane.record.name for lane in self.state.lanes})

    def _set_floor(self, lanes: list[tuple[FloorRow, LaneState]]) -> None:
        done = [(row, lane) for row, lane in lanes if lane.record.status == "done"]
        if len(done) < 2:
            self._say("floor: not measured, its lanes did not finish")
            return
        failed = [row.name for row, lane in lanes if lane.record.status != "done"]
        floor = {**floor_fact(self.state, done), "failed": failed}
        self.hub.set_floor(floor)
        if len(done) < len(lanes):
            return
        try:
            references.keep_floor(self.key, floor)
        except (WorkbenchError, OSError) as error:  # this run needs the floor, not the cache
            self._say(f"floor: measured, but not kept for later runs: {error}")
