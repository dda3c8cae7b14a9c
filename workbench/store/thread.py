"""A thread that owns what only one thread may touch; the others hand it functions, and wait for them or go on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

MAX_WAITING = 256
"""Functions handed over and not yet run; beyond it `post` waits, so that a slow disk does not fill the memory."""


class OwnThread:
    """Runs functions one after another. `tick` runs before each wait and returns how long to wait at most (None: until
    there is something to do); it must not raise."""

    def __init__(self, name: str, tick: Callable[[], float | None]) -> None:
        self._tick = tick
        self._waiting: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function there and return what it returns, or raise what it raises."""
        return self.post(function).result()

    def post(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function there, after those handed over before."""
        future: Future[Result] = Future()
        self._waiting.put((future, function))
        return future

    def stop(self) -> None:
        """End the thread once it has run what it was handed."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                item = self._waiting.get(timeout=self._tick())
            except queue.Empty:
                continue
            if item is None:
                return
            future, function = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # Without this, an idle thread would keep the last rows it was handed alive.
            del item, future, function
