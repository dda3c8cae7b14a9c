"""Forced scoring: the stream's tokens run through the model, and each position's logits become rows at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError
from workbench.protocol.events import Generate, Score
from workbench.protocol.wire import Arrays

FLUSH_SECONDS = 0.05
BLOCK = 512


class Model(Protocol):
    """What the loops here and in `generation` need of a loaded model.

    Logits come as blocks of the model's own making: `len(block)` rows that can be sliced, and that stay what they are.
    """

    vocabulary: int

    def forward(self, ids: NDArray[Any], keep: int) -> Any:
        """Run tokens (n,) after what the KV cache holds; a block of the logits of the last `keep` of them."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock can be read."""
        ...

    def joined(self, blocks: list[Any]) -> Any:
        """Consecutive blocks as one."""
        ...

    def record(self, block: Any, targets: NDArray[Any], position: int, seed: int) -> Arrays:
        """Trace rows of a block, from `position` on; `targets` (n,) are the stream's tokens there."""
        ...

    def compare(self, block: Any, targets: NDArray[Any], trace: Arrays, seconds: float) -> Arrays:
        """A lane's rows of a block against the trace of the same positions."""
        ...

    def lost(self, block: Any, targets: NDArray[Any], rows: Arrays) -> NDArray[np.float64] | None:
        """The probability (n,) of ids beyond `vocabulary`, NaN in invalid rows; None where there are no such ids."""
        ...

    def chooser(self, request: Generate) -> Callable[[Any], tuple[int, float]]:
        """What chooses a token from a block's last row, and names its log-probability at temperature 1."""
        ...


class Report(Protocol):
    """What the loops need of a job; `worker.channel.Job` is one."""

    def check(self) -> None: ...
    def progress(self, phase: str, done: int, total: int) -> None: ...
    def rows(self, first: int, arrays: Arrays) -> None: ...
    def tokens(self, first: int, arrays: Arrays) -> None: ...
    def trace(self, first: int, stop: int) -> Arrays: ...


def check_request(request: Score, context: int, width: int, held: Sequence[int]) -> None:
    """Raises ConfigurationError where the request cannot be scored in a cache of `context` tokens that holds `held`."""
    ids, single = request.arrays.get("ids"), request.arrays.get("single")
    if ids is None or ids.ndim != 1 or len(ids) < 2:
        raise ConfigurationError("a stream of at least two ids is needed", where="score")
    if len(ids) > context:
        raise ConfigurationError(
            f"{len(ids)} tokens do not fit a context of {context}", where="score", next="Start with a larger context."
        )
    if int(ids.min()) < 0 or int(ids.max()) >= width:
        raise ConfigurationError(f"ids must lie in 0 to {width - 1}: another model's stream?", where="score")
    if request.path not in ("prefill", "decode") or (single is not None and single.shape != ids.shape):
        raise ConfigurationError("path is prefill or decode, and `single` has one value a token", where="score")
    if request.first < 1:
        raise ConfigurationError(f"rows from position {request.first} on: the first is 1", where="score")
    if not 0 <= request.reuse < len(ids) or list(held[: request.reuse]) != ids[: request.reuse].tolist():
        raise ConfigurationError(f"the KV cache does not hold the {request.reuse} tokens to be reused", where="score")


def tokens_kept(request: Score) -> int:
    """Tokens of the KV cache that are not run again: `reuse`, or none where rows of the reused positions are wanted.

    Those rows need the logits of a pass; run again over the same borders, it gives the same cache and, bit for bit, the
    same rows after it as a cache that was kept.
    """
    return request.reuse if request.first > request.reuse else 0


def passes(single: NDArray[Any] | None, start: int, n: int, chunk: int) -> Iterator[tuple[int, int, bool]]:
    """The token ranges that run together, from `start` to `n`, each (first, stop, whether it is a token on its own).

    A run of other tokens is cut into chunks that begin where the run begins: from an empty cache they are aligned at
    multiples of `chunk`, and only equal borders give equal numerics in bf16.
    """
    while start < n:
        if single is not None and single[start]:
            yield start, start + 1, True
            start += 1
            continue
        stop = min(start + chunk, n)
        if single is not None:
            alone = np.flatnonzero(single[start:stop])
            stop = start + int(alone[0]) if len(alone) else stop
        yield start, stop, False
        start = stop


class Scoring:
    """One Score request on a KV cache of `tokens_kept` tokens. `run()` sends its rows and leaves all n in the cache."""

    def __init__(self, model: Model, request: Score, report: Report, chunk: int) -> None:
        self.model, self.request, self.report, self.chunk = model, request, report, chunk
        self.ids = request.arrays["ids"]
        self.n = len(self.ids)
        self.single = None
        if request.path == "decode":
            self.single = request.arrays.get("single", np.ones(self.n, dtype=np.uint8))
        self.tokens = {"prefill": 0, "decode": 0}
        self.busy = {"prefill": 0.0, "decode": 0.0}
        self.rows_seconds = 0.0
        self.lost: list[NDArray[np.float64]] = []

    def run(self) -> dict[str, Any]:
        """The statistics of `Scored` that scoring itself knows; seconds are of forward passes, our rows' apart."""
        pending: list[Any] = []  # logits of tokens that ran alone, sent together after FLUSH_SECONDS
        begin, since = 0, time.perf_counter()
        kept, reuse = tokens_kept(self.request), self.request.reuse
        before = passes(self.single, kept, reuse, self.chunk)
        for start, stop, alone in chain(before, passes(self.single, reuse, self.n, self.chunk)):
            self.report.check()
            if pending and not alone:
                self._emit(self.model.joined(pending), begin)
                pending = []
            if not pending:
                begin, since = start, time.perf_counter()
            phase = "decode" if alone else "prefill"
            began = time.perf_counter()
            # All logits of a chunk or, where no row needs them, one: fewer would change the numerics of those few.
            wanted = stop > self.request.first - 1
            logits = self.model.forward(self.ids[start:stop], stop - start if wanted else 1)
            self.model.synchronize()
            now = time.perf_counter()
            self.busy[phase] += now - began
            self.tokens[phase] += stop - start
            if alone:
                pending.append(logits)
            elif wanted:
                self._emit(logits, start)
            if not alone or now - since >= FLUSH_SECONDS or stop == self.n:
                if pending:
                    self._emit(self.model.joined(pending), begin)
                    pending = []
                self.report.progress(phase, stop, self.n)
        return {
            "prefill_tokens": self.tokens["prefill"],
            "prefill_seconds": self.busy["prefill"],
            "decode_tokens": self.tokens["decode"],
            "decode_seconds": self.busy["decode"],
            "rows_seconds": self.rows_seconds,
            "chunk": self.chunk,
            **self._padding(),
        }

    def _padding(self) -> dict[str, Any]:
        """The probability that the rows' logits beyond the tokenizer's ids would take, where there are any."""
        if not self.lost:
            return {}
        lost = np.concatenate(self.lost)
        valid = lost[np.isfinite(lost)]
        if not len(valid):
            return {}
        return {"padding_mass_mean": float(valid.mean()), "padding_mass_max": float(valid.max())}

    def _emit(self, logits: Any, begin: int) -> None:
        """Send the rows of a block of logits (m rows) that were computed at the tokens `begin` to `begin` + m."""
        first = max(begin, self.request.first - 1)
        end = min(begin + len(logits), self.n - 1)
        # In blocks, so that the trace needs to be here only so far ahead, and the screen moves.
        for low in range(first, end, BLOCK):
            high = min(low + BLOCK, end)
            rows = self._rows(logits[low - begin : high - begin], low + 1)
            self.report.rows(low + 1, rows)

    def _rows(self, logits: Any, position: int) -> Arrays:
        targets = self.ids[position : position + len(logits)]
        if self.request.record:
            began = time.perf_counter()
            rows = self.model.record(logits, targets, position, self.request.trace_seed)
        else:
            trace = self.report.trace(position, position + len(logits))
            began = time.perf_counter()
            seconds = sum(self.busy.values()) + self.rows_seconds
            rows = self.model.compare(logits, targets, trace, seconds)
        if (lost := self.model.lost(logits, targets, rows)) is not None:
            self.lost.append(lost)
        self.rows_seconds += time.perf_counter() - began
        return rows
