"""Lanes queue here and run as memory allows; engines that can be used again stay loaded between lanes.

`parallel` lanes run at once while their memory estimates fit what is free; by default one after another, because lanes
that share a machine's cores spoil each other's speed. A lane that fails leaves its reason; the others go on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from workbench.config.lane import Configuration, from_json
from workbench.engines.process import EngineProcess
from workbench.errors import Cancelled, EngineError, WorkbenchError
from workbench.protocol.wire import Arrays
from workbench.run.job import Job, Work
from workbench.run.memory import Shape, check_fits, estimate_bytes, free_bytes
from workbench.store.hub import Hub
from workbench.store.state import LaneState

INVALID_SHARE = 0.001
"""More excluded positions than this mark a lane invalid."""


@dataclass(slots=True)
class Task:
    """A queued lane: its work, its feed, and what to do when it has ended."""

    lane: LaneState
    work: Work
    feed: Callable[[int], Iterator[tuple[int, Arrays]]] | None = None
    after: Callable[[LaneState], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    needed: int = 0


class Scheduler:
    """Owns the queue and the engine processes. `python(engine)` names the interpreter that runs an engine."""

    def __init__(self, hub: Hub, shape: Shape, python: Callable[[str], str], parallel: int = 1) -> None:
        self._hub = hub
        self._shape = shape
        self._python = python
        self._queue: deque[Task] = deque()
        self._running: dict[int, Task] = {}
        self._engines: dict[int, EngineProcess] = {}
        self._idle: list[tuple[tuple[object, ...], EngineProcess]] = []
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
        lane_id = task.lane.record.id
        try:
            task.needed = estimate_bytes(configuration, self._shape, len(task.work.ids) + task.work.decode_tokens)
            check_fits(configuration, task.needed, self._total())
        except WorkbenchError as error:
            self._hub.update(lane_id, status="failed", reason=str(error))
            return
        self._hub.update(lane_id, status="queued", reason="")
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
            self._hub.update(lane_id, status="cancelled", reason="cancelled before it began")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or running; False when `timeout` seconds passed first."""
        with self._change:
            return self._change.wait_for(lambda: not self._queue and not self._running, timeout)

    def engine_pids(self) -> list[int]:
        """The process ids of the engines that run or wait."""
        with self._change:
            return [engine.pid for engine in (*self._engines.values(), *(engine for _, engine in self._idle))]

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
        for _, engine in self._idle:
            engine.stop()
        self._idle.clear()

    def _total(self) -> int | None:
        """What is free now and what our idle engines would give back."""
        free = free_bytes()
        return None if free is None else free + sum(task.needed for task in self._running.values())

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
        configuration = from_json(task.lane.record.configuration)
        try:
            engine = self._engine(configuration)
            self._engines[lane_id] = engine
            Job(task.lane, task.work, self._hub, engine, task.feed, task.stop).run()
        except Cancelled as error:
            self._hub.update(lane_id, status="cancelled", reason=error.what)
        except EngineError as error:
            tail = "\n".join(error.log_tail)
            self._hub.update(lane_id, status="failed", reason=f"{error}\n{tail}" if tail else str(error))
        except (WorkbenchError, OSError, ValueError) as error:
            self._hub.update(lane_id, status="failed", reason=str(error))
        else:
            self._finish(task)
        self._engines.pop(lane_id, None)
        if engine is not None:
            self._give_back(configuration, engine)
        if task.after is not None:
            task.after(task.lane)

    def _finish(self, task: Task) -> None:
        rows = task.lane.rows
        bad = int((rows.column("valid") == 0).sum()) if len(rows) else 0
        if bad > INVALID_SHARE * len(rows):
            reason = f"{bad} of {len(rows)} positions hold non-finite values: more than {INVALID_SHARE:.1%}"
            self._hub.update(task.lane.record.id, status="invalid", reason=reason)
        else:
            self._hub.update(task.lane.record.id, status="done", reason="")

    def _engine(self, configuration: Configuration) -> EngineProcess:
        """An idle engine with these weights, else a new one; idle ones with other weights are ended first."""
        python = self._python(configuration.engine)
        key = (*configuration.weights_key(), python)
        with self._change:
            others = [item for item in self._idle if item[0] != key or not item[1].alive]
            fitting = [item for item in self._idle if item not in others]
            self._idle = fitting[1:]
        for _, engine in others:
            engine.stop()
        return fitting[0][1] if fitting else EngineProcess(python, configuration.engine)

    def _give_back(self, configuration: Configuration, engine: EngineProcess) -> None:
        key = (*configuration.weights_key(), self._python(configuration.engine))
        with self._change:
            keep = engine.alive and not self._closing
            if keep:
                self._idle.append((key, engine))
        if not keep:
            engine.stop()
