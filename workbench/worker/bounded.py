"""Rows from an engine's own best ids: what a server's top-k allows, which is bounds and no estimate.

The ids that both sides name are compared one by one, everything else as one lump a side: KL(p||q) is at least what that
gives (grouping outcomes never raises it), total variation lies in an interval. There is no upper bound on KL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import EngineError
from workbench.metrics.divergence import Compact, bounded
from workbench.protocol.columns import ROWS, dense
from workbench.protocol.wire import Arrays

MASS_SLACK = 1e-3
"""How far above 1 the named probabilities may sum: servers round to few digits."""
UNRESOLVED = 1e-6
"""A remainder of 1 below this is rounding of float32 log-probabilities."""
_BEST = 4
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Top:
    """What an engine names of n positions: its k best `ids` (n, k), −1 where there are fewer, their natural
    `logprobs` (n, k) of the whole vocabulary, ln q of the stream's token, `target` (n,), NaN where it is not given, and
    that token's `rank` (n,), 0 where it is not given."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    target: NDArray[np.float32]
    rank: NDArray[np.int32]


def bounded_rows(
    trace: Arrays, top: Top, seconds: float, vocabulary: int, targets: NDArray[np.integer] | None = None
) -> Arrays:
    """Rows (columns of `protocol.columns.ROWS`) of n positions against the `trace` rows of the same positions.

    `targets` (n,), the stream's tokens, tighten the bounds where the engine names them beside its best. kl and kl_low
    are the lower bound, tv and tv_high the ends of the interval; rank is the place of the reference's best id among the
    engine's own, one more than it names where it is not there; logprob is NaN where the engine names no value for the
    stream's token. valid is 0 where a row is missing, not finite, or not a distribution. Raises EngineError for ids
    outside the vocabulary.
    """
    n = len(top.ids)
    if len(trace["k"]) != n:
        raise EngineError(f"{n} rows cannot be compared with {len(trace['k'])} rows of a trace")
    if n and int(top.ids.max(initial=-1)) >= vocabulary:
        raise EngineError(
            f"the engine names token {int(top.ids.max())}, the tokenizer has {vocabulary:,}",
            next="It may serve another model.",
        )
    order = np.lexsort((top.ids, -top.logprobs.astype(np.float64)), axis=-1)  # the lowest id first among equals
    order = np.take_along_axis(order, np.argsort(np.take_along_axis(top.ids, order, 1) < 0, axis=1, kind="stable"), 1)
    ids, logprobs = np.take_along_axis(top.ids, order, 1), np.take_along_axis(top.logprobs, order, 1)
    named = ids >= 0
    q = np.where(named, logprobs, -np.inf).astype(np.float64)
    repeated = (np.diff(np.sort(ids, axis=1), axis=1) == 0) & (np.sort(ids, axis=1)[:, 1:] >= 0)
    with np.errstate(all="ignore"):
        mass = np.exp(q).sum(1)
    finite = named.any(1) & ~repeated.any(1) & (np.isfinite(q) | ~named).all(1) & (q <= _slack()).all(1)
    finite &= mass <= 1 + MASS_SLACK
    tokens = np.full(n, -1) if targets is None else targets.astype(np.int64)
    is_target = (ids == tokens[:, None]) & named
    # Beside its best the engine may name the stream's own token; the trace names its head, its samples and that token.
    beside = (tokens >= 0) & np.isfinite(top.target) & ~is_target.any(1)
    q_ids = np.concatenate((ids, np.where(beside, tokens, -1)[:, None]), 1)
    q_all = np.concatenate((q, np.where(beside, top.target, -np.inf)[:, None].astype(np.float64)), 1)
    result = bounded(*_sides(trace, tokens, q_ids, q_all))
    lows = np.stack([result.kl_low, result.tv_low, result.tv_high])
    valid = finite & (trace["valid"] == 1) & np.isfinite(lows).all(0)
    best = dense(trace, "head_ids", -1)[:, :1] if trace["k"].any() else np.full((n, 1), -1)
    place = (ids == best) & named
    rank = np.where(place.any(1), place.argmax(1) + 1, named.sum(1) + 1)
    ties = np.where(finite, (named & (logprobs == logprobs[:, :1])).sum(1) - 1, 0)
    at_target = np.where(is_target.any(1), np.where(is_target, q, -np.inf).max(1, initial=-np.inf), np.nan)
    own = np.where(np.isnan(top.target), at_target, top.target)
    rows: dict[str, NDArray[Any]] = {
        "kl": np.where(valid, lows[0], 0),
        "kl_low": np.where(valid, lows[0], 0),
        "tv": np.where(valid, np.clip(lows[1], 0, 1), 0),
        "tv_high": np.where(valid, np.clip(lows[2], 0, 1), 0),
        "rank": np.where(valid, rank, 1),
        "logprob": np.where(finite, own, 0),
        "top_ids": _four(np.where(finite[:, None], ids, -1), -1),
        "top_logprobs": _four(np.where(finite[:, None], q, -np.inf), -np.inf),
        "ties": np.clip(ties, 0, 255),
        "valid": valid,
        "seconds": np.full(n, seconds),
    }
    return {name: rows[name].astype(column.dtype) for name, column in ROWS.items()}


def _slack() -> float:
    return float(np.log1p(MASS_SLACK))


def _sides(
    trace: Arrays, tokens: NDArray[np.int64], ids: NDArray[Any], log_q: NDArray[np.float64]
) -> tuple[Compact, Compact]:
    """Both sides at the ids (n, m) that both name, and each side's log-mass of all the rest."""
    heads, samples = dense(trace, "head_ids", -2), dense(trace, "sample_ids", -2)
    known = np.concatenate((heads, samples, tokens[:, None]), 1)
    columns = (dense(trace, "head_logprobs", -np.inf), dense(trace, "sample_logprobs", -np.inf))
    values = np.concatenate((*columns, trace["logprob"][:, None]), 1).astype(np.float64)
    log_p, in_head = np.full(ids.shape, -np.inf), np.zeros(ids.shape, bool)
    for row in range(len(ids)):  # a sort and a search a row: all ids against all at once would not fit the memory
        order = np.argsort(known[row], kind="stable")  # an id of the head comes before its sample
        places = order[np.searchsorted(known[row], ids[row], sorter=order).clip(max=len(order) - 1)]
        found = (known[row][places] == ids[row]) & (ids[row] >= 0)
        log_p[row, found] = values[row][places[found]]
        in_head[row] = found & (places < heads.shape[1])
    both = np.isfinite(log_p) & np.isfinite(log_q)
    p, q = np.where(both, log_p, -np.inf), np.where(both, log_q, -np.inf)
    with np.errstate(all="ignore"):
        # From the tail's own mass and not as 1 − the rest, which cancels.
        unnamed = np.exp(columns[0].astype(np.float64)).sum(1) - np.exp(np.where(in_head, p, -np.inf)).sum(1)
        p_rest = np.exp(trace["tail"].astype(np.float64)) + np.maximum(unnamed, 0)
        p_rest = np.maximum(p_rest - np.exp(np.where(in_head, -np.inf, p)).sum(1), _TINY)
        q_rest = 1 - np.exp(q).sum(1)
        # What is left of 1 is rounding below this; the value that adds least keeps the bound a lower one.
        q_rest = np.where(q_rest < UNRESOLVED, np.minimum(p_rest, UNRESOLVED), q_rest)
        return _side(p, p_rest), _side(q, q_rest)


def _side(head: NDArray[np.float64], rest: NDArray[np.float64]) -> Compact:
    return Compact(head, np.log(rest), np.zeros((len(head), 0)))


def _four(values: NDArray[Any], fill: float) -> NDArray[Any]:
    missing = max(0, _BEST - values.shape[1])
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill)[:, :_BEST]
