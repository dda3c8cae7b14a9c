"""Every error that a user can meet, in one tree; each says what, where and what to do next.

WorkbenchError
├── ConfigurationError   a lane, axis, preset or theme that cannot be used (exit code 2)
├── SessionError         a session file or chat template that cannot be used
├── ModelError           a model that cannot be found, verified, converted or loaded
├── EngineError          an engine process that failed, with the last lines of its log
├── InvalidLaneError     a lane whose numbers must not be used: the engine runs something else, or computes nonsense
├── SavedSessionError    a `.wbs` file that cannot be read or written
├── LogitsFileError      a llama.cpp file of log-probabilities that cannot be read or written
└── Cancelled            the user stopped it
"""

from __future__ import annotations


class WorkbenchError(Exception):
    """What went wrong, where, and what to do next, as one object.

    `what` is a sentence; `where` names the file, field, lane or process; `next` is what the user can do.
    """

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        super().__init__(what, where, next)
        self.what = what
        self.where = where
        self.next = next

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if not self.next:
            return text
        return f"{text} {self.next}" if text.endswith((".", "!", "?")) else f"{text}. {self.next}"


class ConfigurationError(WorkbenchError):
    """A configuration, preset, setting or theme that cannot be used as written."""


class SessionError(WorkbenchError):
    """A session file, its messages, tools or chat template cannot be used."""


class ModelError(WorkbenchError):
    """A model is missing, damaged, unverified or of an unsupported type."""


class EngineError(WorkbenchError):
    """An engine process refused, failed or died; `log_tail` holds the last lines of its log."""

    def __init__(self, what: str, *, where: str = "", next: str = "", log_tail: tuple[str, ...] = ()) -> None:
        super().__init__(what, where=where, next=next)
        self.log_tail = log_tail


class InvalidLaneError(WorkbenchError):
    """A lane that runs something else than it says, or computes nonsense: no statement about quality."""


class SavedSessionError(WorkbenchError):
    """A saved session cannot be created, opened, read or written."""


class LogitsFileError(WorkbenchError):
    """A llama.cpp file of log-probabilities is damaged, of another vocabulary, or cannot be written."""


class Cancelled(WorkbenchError):
    """The user stopped the work."""
