"""An experiment behind a screen: prepared and run on a thread of its own, its narration kept as one line.

Opening a lane, cancelling and retrying return at once; what goes wrong becomes the message, never an exception in the
screen's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from workbench.config import axes
from workbench.config.lane import Configuration
from workbench.errors import WorkbenchError
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask
from workbench.store.state import SessionState


class LiveRunner:
    """Runs what was asked and what the screens add. `state` is None until the session is rendered."""

    missing = ""

    def __init__(self, ask: Ask) -> None:
        self.message = "preparing"
        self.state: SessionState | None = None
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 1
        self._lock = threading.Lock()
        self._experiment = Experiment(ask, self._say)
        self._thread = threading.Thread(target=self._serve, name="experiment", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is still being prepared, requested, queued or run."""
        with self._lock:
            if self._pending:
                return True
        return self.state is not None and self._experiment.scheduler.busy

    def open_lane(self, configuration: Configuration) -> int | None:
        """Queue a lane and return its id; None where it is refused, the reason being the message."""
        if self.state is None:
            self.message = "the session is still being prepared"
            return None
        try:
            axes.check(configuration)
            return self._experiment.add_lane(configuration).record.id
        except WorkbenchError as error:
            self.message = str(error)
            return None

    def cancel(self, lane_id: int) -> None:
        """Stop a queued or running lane."""
        if self.state is not None:
            self._experiment.cancel(lane_id)

    def retry(self, lane_id: int) -> None:
        """Run a lane again that did not finish."""
        if self.state is not None:
            self._request(lambda: self._experiment.retry(lane_id))

    def close(self) -> None:
        """Stop everything; waits for the engine processes and the file, not for a download."""
        self._requests.put(None)
        self._experiment.close()

    def _request(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._pending += 1
        self._requests.put(work)

    def _serve(self) -> None:
        work: Callable[[], None] | None = self._begin
        while work is not None:
            try:
                work()
            except (WorkbenchError, OSError) as error:
                self.message = str(error)
            finally:
                with self._lock:
                    self._pending -= 1
            work = self._requests.get()

    def _begin(self) -> None:
        self.state = self._experiment.prepare()
        self._experiment.start()

    def _say(self, line: str) -> None:
        self.message = line
