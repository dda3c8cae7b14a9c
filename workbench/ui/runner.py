"""What the screens ask of whoever runs lanes; a replay has no runner, or one that says what is missing."""

from __future__ import annotations

from typing import Protocol

from workbench.config.lane import Configuration
from workbench.store.state import SessionState


class Runner(Protocol):
    """Runs lanes on threads and processes of its own. Methods return at once and none raises for a lane's failure.

    The app reads the attributes 20 times a second while `busy` is true, and not at all otherwise; every request below
    must therefore make `busy` true before it returns, when it leads to work.
    """

    @property
    def state(self) -> SessionState | None:
        """The session and its lanes; None while it is still loading."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `state` or `message` may still change without a request."""
        ...

    @property
    def message(self) -> str:
        """What is being done now (`fetching smollm2-135m 42%`), or what went wrong; may be empty."""
        ...

    @property
    def missing(self) -> str:
        """Why lanes cannot be run here, what is missing and how to get it; empty where they can."""
        ...

    def open_lane(self, configuration: Configuration) -> int | None:
        """Queue a lane and give its id, which `state.lanes` then holds; None where refused (`message` says why)."""
        ...

    def cancel(self, lane_id: int) -> None:
        """Stop a queued or running lane; what it measured stays."""
        ...

    def retry(self, lane_id: int) -> None:
        """Run a failed, cancelled or finished lane again; rows that are there are kept where they may be."""
        ...

    def close(self) -> None:
        """End every engine process and write what is unwritten; called once, after the terminal is given back."""
        ...
