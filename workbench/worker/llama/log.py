"""What llama.cpp says while it works: kept for reading back what runs, and written to the engine's log."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable

from workbench.worker.llama.binding import api

DEBUG, WARNING, ERROR, CONTINUED = 1, 3, 4, 5
KEPT_LINES = 2000
_MEMORY = re.compile(
    r"bad_alloc|out of memory|(failed|unable) to allocate|cannot allocate|not enough (memory|space)", re.IGNORECASE
)


class Log:
    """The lines since `begin()`. llama.cpp has one callback for the process, so there is one Log."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=KEPT_LINES)
        self._part, self._level = "", 0
        self.listener: Callable[[str], None] | None = None
        self._callback = api.llama_log_callback(self._receive)  # kept: the library calls it as long as we live
        api.llama_log_set(self._callback, None)

    def begin(self) -> None:
        """Forget what was said."""
        self._lines.clear()

    @property
    def lines(self) -> list[str]:
        """Whole lines of every level but debug, in order."""
        return [line for _, line in self._lines]

    def complaint(self, count: int = 3) -> str:
        """The last errors, or where there are none the last warnings or lines, as one line."""
        lines = list(self._lines)
        for level in (ERROR, WARNING, 0):
            if found := [line for at, line in lines if at >= level]:
                return "; ".join(found[-count:])
        return "it says nothing"

    def says_memory(self) -> bool:
        """Whether an error among the lines is about memory."""
        return any(level >= ERROR and _MEMORY.search(line) for level, line in self._lines)

    def _receive(self, level: int, text: bytes, _: object) -> None:
        if level != CONTINUED:
            self._end()
            self._level = level
        self._part += text.decode("utf-8", "replace")
        if self._part.endswith("\n"):
            self._end()

    def _end(self) -> None:
        part, self._part = self._part.strip(), ""
        if not part.strip(".") or self._level == DEBUG:
            return
        for line in part.splitlines():
            self._lines.append((self._level, line))
            sys.stderr.write(f"{line}\n")
            if self.listener is not None:
                self.listener(line)
        sys.stderr.flush()
