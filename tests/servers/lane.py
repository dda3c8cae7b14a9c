"""What tests of the server backend share: a session of ids, its reference trace, and a backend in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.servers import truth
from workbench.config.lane import from_json
from workbench.errors import Cancelled
from workbench.protocol.columns import cut, join
from workbench.protocol.events import Generate, Score
from workbench.protocol.wire import Arrays
from workbench.worker.backends.server import ServerBackend, make
from workbench.worker.bounded import Top, bounded_rows
from workbench.worker.host_scoring import record_rows

N = 100
IDS: list[int] = np.random.default_rng(3).integers(0, truth.VOCABULARY, N).tolist()


def reference() -> Arrays:
    """The trace of a model near the server's."""
    noise = np.random.default_rng(1).normal(0, 0.2, (N - 1, truth.VOCABULARY))
    logits = (truth.rows(IDS) + noise).astype(np.float32)
    return record_rows(logits, np.array(IDS[1:]), 1, 7, truth.VOCABULARY)


TRACE = reference()


def expected(k: int, first: int = 1) -> Arrays:
    """Rows from the server's true distributions, cut at its `k` best; the stream's token is known beside."""
    values, targets = truth.rows(IDS, first), np.array(IDS[first:])
    ids = np.array([truth.best(row, k) for row in values], "<i4")
    at = np.arange(len(values))
    own = values[at, targets].astype("<f4")
    shown = np.take_along_axis(values, ids, 1).astype("<f4")
    top = Top(ids, shown, own, np.zeros(len(ids), "<i4"))
    return bounded_rows(cut("trace", TRACE, first - 1, N - 1), top, 0.0, truth.VOCABULARY, targets)


def make_folder(folder: Path) -> Path:
    """What the backend needs of a model: how many ids there are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": truth.VOCABULARY}))
    vocab = {f"t{i}": i for i in range(truth.VOCABULARY)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return folder


class Recorder:
    """A job in this process: keeps what was sent, feeds the trace, may be cancelled."""

    number = 1

    def __init__(self) -> None:
        self.sent: list[tuple[int, Arrays]] = []
        self.batches: list[tuple[int, Arrays]] = []
        self.cancelled = False
        self.on_rows: Callable[[int], None] = lambda stop: None

    def check(self) -> None:
        if self.cancelled:
            raise Cancelled("cancelled")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Nothing to keep."""

    def rows(self, first: int, arrays: Arrays) -> None:
        self.sent.append((first, arrays))
        self.on_rows(first + len(arrays["kl"]))

    def tokens(self, first: int, arrays: Arrays) -> None:
        self.batches.append((first, arrays))

    def trace(self, first: int, stop: int) -> Arrays:
        return cut("trace", TRACE, first - 1, stop - 1)

    def joined(self) -> tuple[int, Arrays]:
        """All rows as one, having come in order without a gap, and the first's position."""
        position = self.sent[0][0]
        for first, arrays in self.sent:
            assert first == position
            position += len(arrays["kl"])
        return self.sent[0][0], join("rows", [arrays for _, arrays in self.sent])

    def generated(self) -> Arrays:
        """All tokens as one."""
        return join("continuation", [arrays for _, arrays in self.batches])


class Lane:
    """A backend, a job and the folder, driven as the request loop does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend: ServerBackend = make()
        self.job = Recorder()

    def configuration(self, url: str, **keys: Any) -> Any:
        path = keys.pop("path", "prefill")
        values = {"engine": "server", "path": path, "extra": {"url": url, "timeout": "5", **keys}}
        return from_json(values)

    def start(self, url: str, context: int = 128, **keys: Any) -> dict[str, Any]:
        return self.backend.start(self.configuration(url, **keys), self.folder, context, self.job)  # type: ignore[arg-type]

    def score(self, first: int = 1, ids: list[int] | None = None, **keys: Any) -> dict[str, Any]:
        path = self.backend.configuration.path
        arrays = {"ids": np.array(ids or IDS, "<i4")}
        return self.backend.score(Score(1, first, keys.pop("record", False), path=path, arrays=arrays), self.job)  # type: ignore[arg-type]

    def generate(self, count: int = 12, context: int = 40, **keys: Any) -> dict[str, Any]:
        request = Generate(2, count, arrays={"ids": np.array(IDS[:context], "<i4")}, **keys)
        return self.backend.generate(request, self.job)  # type: ignore[arg-type]


class Clock:
    """Time that passes only while somebody sleeps; `at` calls back once when that time has come."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []
        self.calls: list[tuple[float, Callable[[], None]]] = []
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        patch.setattr("workbench.worker.servers.connection.time", fake)

    def at(self, when: float, call: Callable[[], None]) -> None:
        self.calls.append((when, call))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)
        due = [call for when, call in self.calls if when <= self.now]
        self.calls = [item for item in self.calls if item[0] > self.now]
        for call in due:
            call()
