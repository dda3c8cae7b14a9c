"""The child's end of the two pipes: a reader thread, what it keeps for the running job, and the death watch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

from workbench.errors import Cancelled
from workbench.protocol.columns import count_rows, cut, join
from workbench.protocol.events import (
    Cancel,
    Event,
    Failed,
    Feed,
    Progress,
    Request,
    Rows,
    Stop,
    Tokens,
    WindowRows,
    decode,
    encode,
)
from workbench.protocol.wire import Arrays, WireError, pack, read_frame

PARENT_POLL_SECONDS = 0.5
STOP_SECONDS = 1.0
REQUESTS = frozenset(
    {"Probe", "Inspect", "Start", "Score", "Feed", "Generate", "Windows", "Convert", "Quantize", "Cancel", "Stop"}
)


def leave(code: int) -> None:
    """End this process at once, and with it the helpers it may have started, where it leads a process group."""
    if code and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


class Channel:
    """Requests in, events out. Jobs are numbered upwards. Sending is safe from any thread."""

    def __init__(self, requests: BinaryIO, events: BinaryIO) -> None:
        self._requests, self._events = requests, events
        self._parent = os.getppid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self._fed: dict[int, list[tuple[int, Arrays]]] = {}  # job: pieces of the trace, in order
        self._finished = -1

    def watch(self) -> None:
        """Start the reader thread and the death watch."""
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    def send(self, event: Event) -> None:
        """Write one event. A reader that is gone ends the process."""
        data = memoryview(pack(*encode(event)))
        try:
            with self._sending:
                self._events.write(data)
                self._events.flush()
        except OSError:
            leave(1)

    def next(self) -> Request:
        """The next request that is not for the running job; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox)
            return self._inbox.popleft()

    def finish(self, job: int) -> None:
        """The job is answered: forget what was kept for it and ignore what still comes."""
        with self._changed:
            self._finished = max(self._finished, job)
            self._fed = {key: value for key, value in self._fed.items() if key > job}
            self._cancelled = {key for key in self._cancelled if key > job}

    def is_cancelled(self, job: int) -> bool:
        """Whether a Cancel for the job has come."""
        return job in self._cancelled

    def take(self, job: int, first: int, stop: int) -> Arrays:
        """Trace rows of the positions `first` to `stop`, waited for; what lies before `stop` is then dropped.

        Pieces come in order, of any size. Raises Cancelled.
        """
        with self._changed:
            pieces = self._fed.setdefault(job, [])
            while True:
                if job in self._cancelled:
                    raise Cancelled("cancelled while waiting for the reference's trace")
                parts, reached = [], first
                for start, arrays in pieces:
                    end = start + count_rows("trace", arrays)
                    if reached < stop and start <= reached < end:
                        parts.append(cut("trace", arrays, reached - start, min(end, stop) - start))
                        reached = min(end, stop)
                if reached >= stop:
                    pieces[:] = [(a, x) for a, x in pieces if a + len(x["logprob"]) > stop]
                    return join("trace", parts)
                self._changed.wait()

    def _read(self) -> None:
        while True:
            try:
                frame = read_frame(self._requests)
            except (WireError, OSError) as error:
                self.send(
                    Failed(0, "failed", f"the request stream is broken: {error}", "engine process", "Start it again.")
                )
                leave(3)
                return
            if frame is None:
                leave(1)
                return
            if frame[0].get("type") == "Stop":
                # A pass in progress is not waited for; nor is the end of the stream, which often comes right behind.
                threading.Timer(STOP_SECONDS, os._exit, (0,)).start()
                self._keep(Stop())
                return
            try:
                name = frame[0].get("type")
                if name not in REQUESTS:
                    raise WireError(f"{name!r} is not a request")
                self._keep(decode(*frame))  # pyright: ignore[reportArgumentType]
            except (WireError, ValueError, TypeError) as error:
                job = frame[0].get("job")
                self.send(Failed(job if isinstance(job, int) else 0, "failed", f"not a request: {error}", "frame"))

    def _keep(self, request: Request) -> None:
        if isinstance(request, Feed):
            count_rows("trace", request.arrays)
        elif not isinstance(request, Stop) and not isinstance(request.job, int):
            raise WireError(f"job must be a number, not {request.job!r}")
        with self._changed:
            if isinstance(request, Cancel):
                if request.job > self._finished:
                    self._cancelled.add(request.job)
            elif isinstance(request, Feed):
                if request.job > self._finished:
                    self._fed.setdefault(request.job, []).append((request.first, request.arrays))
            else:
                self._inbox.append(request)
            self._changed.notify_all()

    def _watch_parent(self) -> None:
        # The pipe's end can be held open by another child of the parent; a changed parent cannot.
        while os.getppid() == self._parent:
            time.sleep(PARENT_POLL_SECONDS)
        leave(1)


@dataclass(frozen=True, slots=True)
class Job:
    """What a backend sees of a request that it works on: where to report, and whether to go on."""

    number: int
    channel: Channel

    def check(self) -> None:
        """Raises Cancelled once the user gave the job up; call it between chunks and tokens."""
        if self.channel.is_cancelled(self.number):
            raise Cancelled("cancelled")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report how far the job is."""
        self.channel.send(Progress(self.number, phase, done, total))

    def rows(self, first: int, arrays: Arrays) -> None:
        """Send scored rows from position `first` on."""
        self.channel.send(Rows(self.number, first, arrays))

    def window_rows(self, first: int, arrays: Arrays) -> None:
        """Send rows of a base file from its row `first` on."""
        self.channel.send(WindowRows(self.number, first, arrays))

    def tokens(self, first: int, arrays: Arrays) -> None:
        """Send generated tokens from the `first`-th on."""
        self.channel.send(Tokens(self.number, first, arrays))

    def trace(self, first: int, stop: int) -> Arrays:
        """The reference's rows of these positions, once they are fed."""
        return self.channel.take(self.number, first, stop)
