"""Lanes queue here and run as memory allows; engines that can be used again stay loaded between lanes.

`parallel` lanes run at once while their memory estimates fit what is free; by default one after another, because lanes
that share a machine's cores spoil each other's speed. A lane that fails leaves its reason; the others go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from workbench.config.lane import Configuration, from_json
from workbench.engines.process import EngineProcess
from workbench.errors import Cancelled, ConfigurationError, EngineError, InvalidLaneError, WorkbenchError
from workbench.protocol.wire import Arrays
from workbench.run.checks import no_effect
from workbench.run.job import Job, Work
from workbench.run.memory import Shape, check_fits, estimate_bytes, free_bytes
from workbench.store.hub import Hub
from workbench.store.state import LaneState, Status

INVALID_SHARE = 0.001
"""More excluded positions than this mark a lane invalid."""


@dataclass(slots=True)
class Task:
    """A queued lane: its work, its model's shape, its feed, and what to do when it has ended."""

    lane: LaneState
    work: Work
    shape: Shape
    feed: Callable[[int], Iterator[tuple[int, Arrays]]] | None = None
    after: Callable[[LaneState], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    needed: int = 0


@dataclass(frozen=True, slots=True)
class _Idle:
    """An engine that waits with its weights loaded: what they are, and the memory its last lane was estimated at."""

    key: tuple[object, ...]
    engine: EngineProcess
    held: int


class Scheduler:
    """Owns the queue and the engine processes. `python(engine)` names the interpreter that runs an engine."""

    def __init__(self, hub: Hub, python: Callable[[str], str], parallel: int = 1) -> None:
        self._hub = hub
        self._python = python
        self._queue: deque[Task] = deque()
        self._running: dict[int, Task] = {}
        self._engines: dict[int, EngineProcess] = {}
        self._idle: list[_Idle] = []
        self._change = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"lanes-{slot}", daemon=True) for slot in range(max(1, parallel))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether a lane is queued or running."""
        with self._change:
            return bool(self._queue or self._running)

    def submit(self, task: Task) -> None:
        """Queue a lane; one whose estimate is beyond what is free fails at once, with the numbers."""
        configuration = from_json(task.lane.record.configuration)
        try:
            positions = max(len(task.work.ids) + task.work.decode_tokens, configuration.ctx)
            task.needed = estimate_bytes(configuration, task.shape, positions)
            check_fits(configuration, task.needed, self._total())
        except WorkbenchError as error:
            self._mark(task, "failed", str(error))
            self._end(task)
            return
        self._mark(task, "queued")
        with self._change:
            self._queue.append(task)
            self._change.notify_all()

    def cancel(self, lane_id: int) -> None:
        """Take a lane out of the queue, or stop it where it runs."""
        with self._change:
            waiting = next((task for task in self._queue if task.lane.record.id == lane_id), None)
            if waiting is not None:
                self._queue.remove(waiting)
                self._change.notify_all()
            elif lane_id in self._running:
                self._running[lane_id].stop.set()
        if waiting is not None:
            self._mark(waiting, "cancelled", "cancelled before it began")
            self._end(waiting)

    def holds(self, lane_id: int) -> bool:
        """Whether a lane is queued or running here."""
        with self._change:
            return lane_id in self._running or any(task.lane.record.id == lane_id for task in self._queue)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or running; False when `timeout` seconds passed first."""
        with self._change:
            return self._change.wait_for(lambda: not self._queue and not self._running, timeout)

    def engine_pids(self) -> list[int]:
        """The process ids of the engines that run or wait."""
        with self._change:
            return [engine.pid for engine in (*self._engines.values(), *(item.engine for item in self._idle))]

    def close(self) -> None:
        """Stop everything and end every engine process."""
        with self._change:
            self._closing = True
            self._queue.clear()
            for task in self._running.values():
                task.stop.set()
            self._change.notify_all()
        for thread in self._threads:
            thread.join(timeout=15)
        with self._change:  # a lane that did not stop in time has its engine ended under it
            engines = [*self._engines.values(), *(item.engine for item in self._idle)]
            self._idle.clear()
        for engine in engines:
            engine.stop()

    def _total(self) -> int | None:
        """What is free now and what our own engines, running or idle, will give back."""
        free = free_bytes()
        with self._change:
            held = [*(task.needed for task in self._running.values()), *(item.held for item in self._idle)]
        return None if free is None else free + sum(held)

    def _serve(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closing or self._next_fits())
                if self._closing:
                    return
                task = self._queue.popleft()
                self._running[task.lane.record.id] = task
            try:
                self._run(task)
            except Exception as error:  # the boundary: a thread that ended here would leave the queue waiting for ever
                self._mark(task, "failed", f"{type(error).__name__}: {error}")
            finally:
                with self._change:
                    del self._running[task.lane.record.id]
                    self._change.notify_all()

    def _next_fits(self) -> bool:
        if not self._queue:
            return False
        free = free_bytes()
        return not self._running or free is None or self._queue[0].needed <= free

    def _run(self, task: Task) -> None:
        lane_id = task.lane.record.id
        engine: EngineProcess | None = None
        answered = False  # whether the engine is done with the lane, so that another one may have it
        configuration = from_json(task.lane.record.configuration)
        try:
            engine = self._engine(configuration)
            with self._change:
                self._engines[lane_id] = engine
            Job(task.lane, task.work, self._hub, engine, task.feed, task.stop).run()
            answered = True
            self._finish(task)
        except Cancelled as error:
            answered = True
            self._mark(task, "cancelled", error.what)
        except InvalidLaneError as error:
            self._mark(task, "invalid", str(error))
        except EngineError as error:
            answered = True
            tail = "\n".join(error.log_tail)
            self._mark(task, "failed", f"{error}\n{tail}" if tail else str(error))
        except (WorkbenchError, OSError, ValueError) as error:
            answered = isinstance(error, ConfigurationError)
            self._mark(task, "failed", str(error))
        finally:
            with self._change:
                self._engines.pop(lane_id, None)
            if engine is not None:
                self._give_back(task, configuration, engine, answered)
        self._end(task)

    def _mark(self, task: Task, status: Status, reason: str = "") -> None:
        """Set a lane's status; where the file cannot take it, it stands in memory, and closing the file says so."""
        with contextlib.suppress(WorkbenchError):
            self._hub.update(task.lane.record.id, status=status, reason=reason)

    @staticmethod
    def _end(task: Task) -> None:
        if task.after is not None:
            task.after(task.lane)

    def _finish(self, task: Task) -> None:
        rows = task.lane.rows
        lost = rows.column("valid") == 0
        written = self._hub.state.stream["generated"][rows.first : rows.stop] == 1
        status, reason = "done", ""
        for where, bad, total in (("", lost, len(rows)), ("assistant ", lost & written, int(written.sum()))):
            if (count := int(bad.sum())) > INVALID_SHARE * total:
                status = "invalid"
                reason = f"{count} of {total} {where}positions hold non-finite values: more than {INVALID_SHARE:.1%}"
        same = no_effect(task.lane, self._hub.state.shown) if task.lane.record.kind == "lane" else ""
        stats = {**task.lane.record.stats, **({"no_effect": same} if same else {})}
        self._hub.update(task.lane.record.id, status=status, reason=reason, stats=stats)

    def _engine(self, configuration: Configuration) -> EngineProcess:
        """An idle engine with these weights, else a new one; idle ones with other weights are ended first."""
        python = self._python(configuration.engine)
        key = (*configuration.weights_key(), python)
        with self._change:
            others = [item for item in self._idle if item.key != key or not item.engine.alive]
            fitting = [item for item in self._idle if item not in others]
            self._idle = fitting[1:]
        for item in others:
            item.engine.stop()
        return fitting[0].engine if fitting else EngineProcess(python, configuration.engine)

    def _give_back(self, task: Task, configuration: Configuration, engine: EngineProcess, answered: bool) -> None:
        key = (*configuration.weights_key(), self._python(configuration.engine))
        with self._change:
            keep = answered and engine.alive and not self._closing
            if keep:
                self._idle.append(_Idle(key, engine, task.needed))
        if not keep:
            engine.stop()
