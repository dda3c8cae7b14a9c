"""Forced scoring by a server: pieces of the stream become rows, after the server has shown that it repeats itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.errors import ConfigurationError
from workbench.protocol.events import Score
from workbench.protocol.wire import Arrays
from workbench.worker.bounded import Top, bounded_rows
from workbench.worker.forcing import BLOCK, Report
from workbench.worker.host_scoring import lane_rows
from workbench.worker.servers.base import Dialect, Whole

MOST_DIFFERENCE = 0.5
MOST_SINGLE = 4.0
"""Nats, of the mean and of one token. The same prompt scored again differs by rounding, hundredths of a nat a token and
seldom one; what comes from a stale cache differs by several."""


@dataclass(slots=True)
class Scoring:
    """One Score request. `check_identity()` raises where another server answers after a loss."""

    dialect: Dialect
    request: Score
    report: Report
    best: int
    step: int
    vocabulary: int
    losses: Callable[[], int]
    check_identity: Callable[[], None]

    def run(self) -> dict[str, Any]:
        """Send the rows, piece by piece; returns the statistics of `Scored`."""
        ids: list[int] = self.request.arrays["ids"].tolist()
        phase = self.dialect.paths[0]
        pieces = list(self.dialect.pieces(self.request.first, len(ids), self.step))  # refuses before anything is run
        checks = check_repeats(self.dialect, ids, self.best) if pieces else {}
        if pieces:
            self.dialect.prepare(ids[: self.request.first - 1])
        began = time.perf_counter()
        busy = rows_seconds = 0.0
        run = 0
        for first, stop in pieces:
            self.report.check()
            losses, since = self.losses(), time.perf_counter()
            scored = self.dialect.score(ids[:stop], first, self.best)
            if self.losses() != losses:
                self.check_identity()
            busy += time.perf_counter() - since
            run += stop if phase == "prefill" else stop - first
            since = time.perf_counter()
            for low in range(first, stop, BLOCK):
                high = min(low + BLOCK, stop)
                trace = self.report.trace(low, high)
                targets = np.array(ids[low:high])
                part = cut_scored(scored, low - first, high - first)
                self.report.rows(low, self._rows(part, targets, trace, time.perf_counter() - began))
            rows_seconds += time.perf_counter() - since
            self.report.progress(phase, stop, len(ids))
        decode = phase == "decode"
        return {
            "prefill_tokens": 0 if decode else run,
            "prefill_seconds": 0.0 if decode else busy,
            "decode_tokens": run if decode else 0,
            "decode_seconds": busy if decode else 0.0,
            "rows_seconds": rows_seconds,
            "requests": len(pieces) if not decode else run,
            "checks": checks,
        }

    def _rows(self, scored: Top | Whole, targets: np.ndarray[Any, Any], trace: Arrays, seconds: float) -> Arrays:
        if isinstance(scored, Top):
            return bounded_rows(trace, scored, seconds, self.vocabulary, targets)
        return lane_rows(scored, targets, trace, seconds, self.vocabulary)


def check_repeats(dialect: Dialect, ids: list[int], best: int) -> dict[str, Any]:
    """Score a short prompt, a longer one that begins alike, and half of the short one's rows again.

    The last has another history than the first: its rows' prefix is in a cache now, or just not. Raises
    ConfigurationError where the same rows contradict each other, as with log-probabilities from a stale cache.
    """
    short, long = (min(length, len(ids)) for length in dialect.probe_lengths)
    if short < 2:
        return {}
    half = max(1, short // 2)
    first = dialect.score(ids[:short], 1, best)
    longer = cut_scored(dialect.score(ids[:long], 1, best), 0, short - 1)
    again = dialect.score(ids[:short], half, best)
    found: dict[str, Any] = {"rows": short - 1}
    for name, begin, other in (("again", half, again), ("longer", 1, longer)):
        mean, most, where = difference(cut_scored(first, begin - 1, short - 1), other)
        found |= {f"{name}_mean": mean, f"{name}_max": most}
        if not (mean <= MOST_DIFFERENCE and most <= MOST_SINGLE):
            row, a, b = where
            raise ConfigurationError(
                f"the server contradicts itself: the same prompt scored twice differs by {mean:.2f} nats a token"
                f" (token {begin + row}: {a:.3f} and {b:.3f})",
                where=f"server, {short} tokens scored {'twice' if name == 'again' else 'alone and in a longer prompt'}",
                next=f"Its log-probabilities may come from a stale cache. {dialect.stale_advice}",
            )
    return found


def difference(one: Top | Whole, other: Top | Whole) -> tuple[float, float, tuple[int, float, float]]:
    """Mean and largest |Δ ln q| a row of what both name there, and the worst row with both values.

    A row is compared at its first side's best id, and at the stream's token where both name it. A best id that the
    other side does not name at all counts with the other side's least named value: it is at least that far.
    """
    rows: list[tuple[float, float, float]] = []
    a, b = _as_top(one), _as_top(other)
    for i in range(len(a.ids)):
        pairs = [(float(a.logprobs[i, 0]), _at(b, i, int(a.ids[i, 0])))]
        if np.isfinite(a.target[i]) and np.isfinite(b.target[i]):
            pairs.append((float(a.target[i]), float(b.target[i])))
        rows.append(max(((abs(x - y), x, y) for x, y in pairs), key=lambda item: np.nan_to_num(item[0], nan=np.inf)))
    deltas = np.array([row[0] for row in rows])
    worst = int(np.nan_to_num(deltas, nan=np.inf).argmax())
    return float(deltas.mean()), float(deltas.max()), (worst, rows[worst][1], rows[worst][2])


def cut_scored(scored: Top | Whole, start: int, stop: int) -> Top | Whole:
    """Rows `start` to `stop` of what a server scored."""
    if isinstance(scored, Top):
        return Top(
            scored.ids[start:stop], scored.logprobs[start:stop], scored.target[start:stop], scored.rank[start:stop]
        )
    return scored[start:stop]


def _at(top: Top, row: int, token: int) -> float:
    found = top.ids[row] == token
    named = top.logprobs[row][top.ids[row] >= 0]
    return float(top.logprobs[row][found][0] if found.any() else named.min(initial=np.inf) if len(named) else np.nan)


def _as_top(scored: Top | Whole) -> Top:
    if isinstance(scored, Top):
        order = np.argsort(-np.where(scored.ids >= 0, scored.logprobs, -np.inf), axis=1, kind="stable")
        return _ordered(scored, order)
    lse = np.logaddexp.reduce(scored.astype(np.float64), axis=1, keepdims=True)
    logprobs = (scored - lse).astype("<f4")
    ids = np.broadcast_to(np.arange(scored.shape[1]), scored.shape)
    whole = Top(ids.astype("<i4"), logprobs, np.full(len(scored), np.nan, "<f4"), np.zeros(len(scored), "<i4"))
    return _ordered(whole, np.argsort(-logprobs, axis=1, kind="stable"))


def _ordered(top: Top, order: np.ndarray[Any, Any]) -> Top:
    return replace(top, ids=np.take_along_axis(top.ids, order, 1), logprobs=np.take_along_axis(top.logprobs, order, 1))
