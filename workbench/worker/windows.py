"""The windows of a llama.cpp base file, run as llama-perplexity runs them: each from an empty KV cache, and rows for
its second half. Logits stay here: a row becomes a handful of numbers, or goes into the file that is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError, LogitsFileError
from workbench.protocol.events import Windows
from workbench.protocol.logits_file import LogitsFile, LogitsWriter, Shape
from workbench.protocol.wire import Arrays
from workbench.worker.window_rows import compared, recorded

ROWS_AT_ONCE = 128
"""Rows of logits that exist at once. llama.cpp holds them twice, so that more cost memory: 48 MB for 49,152 ids. Fewer
cost time: with 64, passes over a Q4_K_M model take 7 % longer."""
ROWS_READ = 32
"""Rows of the file in memory at once."""
MASS_SLACK = 1e-3

Floats = NDArray[np.float32]


class Model(Protocol):
    """What the windows need of a loaded model; see `worker.forcing.Model`."""

    def forward(self, ids: NDArray[Any], keep: int) -> Any: ...
    def truncate(self, length: int) -> Any: ...


class Report(Protocol):
    """What they need of a job; `worker.channel.Job` is one."""

    def check(self) -> None: ...
    def progress(self, phase: str, done: int, total: int) -> None: ...
    def window_rows(self, first: int, arrays: Arrays) -> None: ...


@dataclass(frozen=True, slots=True)
class Running:
    """A model that runs windows: logits of `width` ids, passes of at most `chunk` tokens, a cache of `context` tokens.

    `host` gives a block of logits as float32 in this process's memory; `threads` work on it. `bos` takes the place of
    each window's first token where the tokenizer puts one in front, as llama-perplexity has it.
    """

    model: Model
    host: Callable[[Any], Floats]
    width: int
    context: int
    chunk: int
    threads: int
    bos: int | None


def run_windows(request: Windows, running: Running, report: Report) -> dict[str, Any]:
    """Answer a request; returns the statistics of `Scored`. Raises LogitsFileError, ConfigurationError."""
    path = Path(request.path)
    run = _Run(running, report)
    with ThreadPoolExecutor(max(1, running.threads)) as run.pool:
        if not request.record:
            with LogitsFile(path) as file:
                _check(file.shape, running, str(path))
                run.score(file)
        else:
            tokens = request.arrays.get("tokens")
            if tokens is None or tokens.ndim != 2:
                raise ConfigurationError("windows of tokens are needed", where="windows")
            _check(Shape(tokens.shape[1], running.width, tokens.shape[0]), running, str(path))
            writer = LogitsWriter(path, tokens, running.width)
            try:
                run.record(writer, tokens)
                writer.finish()
            finally:
                writer.close()
    return {**run.stats, "bos": running.bos, "chunk": running.chunk, "rows_at_once": ROWS_AT_ONCE}


def _check(shape: Shape, running: Running, where: str) -> None:
    if shape.vocabulary != running.width:
        raise ConfigurationError(
            f"it holds distributions over {shape.vocabulary:,} ids, and this model's logits have {running.width:,}",
            where=where,
            next="Only a model with the same vocabulary can be compared with it.",
        )
    if shape.window > running.context:
        raise ConfigurationError(
            f"its windows of {shape.window:,} tokens do not fit a context of {running.context:,}", where=where
        )


class _Run:
    """The loops. `stats` counts seconds of the engine's passes, of our rows, and of reading or writing the file."""

    pool: ThreadPoolExecutor

    def __init__(self, running: Running, report: Report) -> None:
        self.running, self.report = running, report
        self.stats: dict[str, Any] = dict.fromkeys(("forward_seconds", "rows_seconds", "file_seconds"), 0.0)
        self.stats |= {"tokens": 0, "rows": 0}

    def score(self, file: LogitsFile) -> None:
        """Compare every row of a file."""
        shape = file.shape
        memory = np.empty((ROWS_READ, shape.row_codes), "<u2")
        for window in range(shape.windows):
            tokens = file.tokens(window)[0]
            for at, logits in self._blocks(tokens, shape):
                first = window * shape.rows_each + at - shape.first
                began = time.perf_counter()
                base = file.read_rows(first, len(logits), memory)
                read = time.perf_counter()
                targets = tokens[at + 1 : at + 1 + len(logits)]
                rows = compared(logits, base, targets, self.pool, self.running.threads)
                _check_mass(rows["mass"], base.least, first, shape, str(file.path))
                self.stats["file_seconds"] += read - began
                self._emit(first, rows, read)
            self.report.progress("windows", window + 1, shape.windows)

    def record(self, writer: LogitsWriter, windows: NDArray[Any]) -> None:
        """Write every row of a file."""
        shape = writer.shape
        memory = np.empty((ROWS_READ, shape.row_codes), "<u2")
        for window, tokens in enumerate(windows):
            for at, logits in self._blocks(tokens, shape):
                first = window * shape.rows_each + at - shape.first
                began = time.perf_counter()
                codes = memory[: len(logits)]
                targets = tokens[at + 1 : at + 1 + len(logits)]
                rows = recorded(logits, targets, codes, self.pool, self.running.threads, writer.clamp)
                if not np.isfinite(rows["nll"]).all():
                    raise LogitsFileError(
                        f"the model's logits in window {window + 1:,} are no numbers: no file can be made of them",
                        where=str(writer.path),
                        next="Use another weights, kv or attn.",
                    )
                self._emit(first, rows, began)
                began = time.perf_counter()
                writer.append(codes)
                self.stats["file_seconds"] += time.perf_counter() - began
            self.report.progress("windows", window + 1, shape.windows)

    def _blocks(self, tokens: NDArray[Any], shape: Shape) -> Iterator[tuple[int, Floats]]:
        """(position, logits after the tokens from there on) of a window's second half, at most ROWS_READ at once; they
        stay until the next ones are asked for.

        The last token's row, which predicts what is in no window, is computed as llama-perplexity does, so that passes
        are the same, and left out.
        """
        ids = tokens.copy()
        if self.running.bos is not None:
            ids[0] = self.running.bos
        self.running.model.truncate(0)
        start = 0
        while start < shape.window:
            self.report.check()
            begin = max(start, shape.first)  # of what rows are wanted
            stop = min(start + self.running.chunk, begin + ROWS_AT_ONCE, shape.window)
            began = time.perf_counter()
            block = self.running.model.forward(ids[start:stop], max(1, stop - begin))
            logits = self.running.host(block) if stop > begin else None
            self.stats["forward_seconds"] += time.perf_counter() - began
            self.stats["tokens"] += stop - start
            if logits is not None:
                last = min(stop, shape.window - 1)
                for at in range(begin, last, ROWS_READ):
                    yield at, logits[at - begin : min(at + ROWS_READ, last) - begin]
            start = stop

    def _emit(self, first: int, rows: Arrays, began: float) -> None:
        self.stats["rows_seconds"] += time.perf_counter() - began
        self.stats["rows"] += len(rows["nll"])
        self.report.window_rows(first, rows)


def _check_mass(mass: NDArray[np.float64], least: Floats, first: int, shape: Shape, where: str) -> None:
    """Raise LogitsFileError for a row whose probabilities do not add up; ids at the clamp may add what they hold."""
    bad = np.flatnonzero(~(np.abs(mass - 1) <= MASS_SLACK + shape.vocabulary * np.exp(least.astype(np.float64))))
    if len(bad):
        row = first + int(bad[0])
        raise LogitsFileError(
            f"row {row:,} (window {row // shape.rows_each + 1:,}) holds no distribution: its probabilities add up to"
            f" {mass[bad[0]]:.4g}",
            where=where,
            next="The file is damaged. Make it again.",
        )
