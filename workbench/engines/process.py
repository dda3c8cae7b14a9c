"""An engine process: started, fed and stopped; its frames come out as events, its noise goes to a log file.

The child runs in its own session, reaches our code through a folder that holds only `workbench/`, and ends when its
request pipe closes. Requests are written by a thread of their own, so a busy child never blocks the caller.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from workbench.errors import EngineError
from workbench.paths import logs_dir, worker_path
from workbench.protocol import events, wire
from workbench.protocol.events import Event, Request

LOG_TAIL_LINES = 12
SPIN_COUNT = "20000"
"""How long GNU OpenMP's threads spin before they sleep. Two threads on two cores, int4 KV at 8,000 tokens: 2.8 tokens/s
when they sleep at once (PASSIVE), 9.5 with this, and on a busy core 9.0, where endless spinning collapses."""
_ids = itertools.count(1)


class EngineProcess:
    """One child that speaks `protocol.events`. Every method may be called from any thread."""

    def __init__(self, python: str, backend: str, log: Path | None = None) -> None:
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_ids)}"
        self.log_path = log or logs_dir() / f"{backend}-{stamp}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.backend = backend
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended = False
        try:
            with self.log_path.open("ab") as log_file:
                self._child = subprocess.Popen(
                    [python, "-P", "-m", "workbench.worker", backend],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    env=_environment(self.log_path),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"cannot start {python}: {error}", where=backend) from error
        for target, name in ((self._write, "writer"), (self._read, "reader")):
            threading.Thread(target=target, name=f"{backend}-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def send(self, request: Request) -> None:
        """Queue a request; what cannot be delivered shows as the end of `receive`."""
        self._outbox.put(request)

    def receive(self, timeout: float | None = None) -> Event | None:
        """The next event, or None when `timeout` seconds passed. Raises EngineError once the process has ended."""
        if self._ended:
            raise self._death()
        try:
            event = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if event is None:
            self._ended = True
            raise self._death()
        return event

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> tuple[str, ...]:
        """The last lines of the child's log."""
        try:
            with self.log_path.open("rb") as log_file:
                log_file.seek(0, os.SEEK_END)
                log_file.seek(max(0, log_file.tell() - 64 * 1024))
                text = log_file.read().decode("utf-8", "replace")
        except OSError:
            return ()
        return tuple(text.splitlines()[-lines:])

    def stop(self, grace: float = 3.0) -> None:
        """End the child: ask, then close its requests, then kill its process group after `grace` seconds."""
        self._outbox.put(events.Stop())
        self._outbox.put(None)
        try:
            self._child.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the child's whole process group at once."""
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._child.kill()
        self._child.wait()

    def _write(self) -> None:
        pipe = self._child.stdin
        assert pipe is not None
        # A dead child shows as a broken pipe here, also when the pipe is closed; the reader reports the death.
        with contextlib.suppress(BrokenPipeError), pipe:
            while (request := self._outbox.get()) is not None:
                wire.write_frame(pipe, *events.encode(request))

    def _read(self) -> None:
        pipe = self._child.stdout
        assert pipe is not None
        with pipe:
            try:
                while (frame := wire.read_frame(pipe)) is not None:
                    self._inbox.put(events.decode(*frame))  # pyright: ignore[reportArgumentType]
            except wire.WireError as error:
                self._inbox.put(events.Failed(0, "failed", f"the engine sent what is not an event: {error}"))
        self._inbox.put(None)
        self._outbox.put(None)
        # Helpers that the child started must not outlive it, however it ended; until it is reaped its number stays its.
        with contextlib.suppress(OSError):
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()  # reaped also where nobody asks any more

    def _death(self) -> EngineError:
        try:
            code = self._child.wait(2)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._child.returncode
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return EngineError(
            f"the {self.backend} engine process {how}",
            where=f"pid {self.pid}",
            next=f"Its log: {self.log_path}",
            log_tail=self.log_tail(),
        )


def _environment(log: Path) -> dict[str, str]:
    """The child's environment: only our package on its path, its log, and threads that soon sleep while they wait."""
    environment: dict[str, Any] = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
    }
    environment["PYTHONPATH"] = str(worker_path())
    environment["WORKBENCH_LOG"] = str(log)
    environment["PYTHONUNBUFFERED"] = "1"
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return environment
