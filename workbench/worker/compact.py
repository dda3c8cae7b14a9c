"""A distribution in its compact form, and the columns made of it: what every implementation of the row work shares.

Two implementations read logits: `scoring` with torch on any device, `host_scoring` with numpy. Each finds best ids, the
tail's sums and the logits at given ids. From there on the numbers are made here, so that both mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.errors import EngineError
from workbench.metrics.divergence import Compact, estimate
from workbench.protocol.columns import ROWS, TRACE, dense
from workbench.protocol.wire import Arrays

HEADS = (8, 16, 32, 64)
HEAD_TAIL = 1e-3
"""K is the smallest of `HEADS` whose tail mass is at most this, else the largest."""

SAMPLES = ((1e-6, 0), (1e-3, 8), (2e-2, 16), (float("inf"), 32))
"""S by the tail mass that it must stay below."""

K = HEADS[-1]
S = SAMPLES[-1][1]

WIDTH = 64
"""Ids of one group: its sum finds the group that a sample falls into."""

VOID = -1e30
"""The logit of ids that are masked or padding: finite, so that 0 · ln 0 stays 0, and exp gives 0."""

BEST = 4
"""Ids that a lane keeps of its own distribution."""


class Reader(Protocol):
    """Single logits of the n rows that were searched."""

    def at(self, ids: NDArray[Any]) -> NDArray[np.float64]:
        """The logits of each row at its ids, (n, m)."""
        ...

    def equal(self, ids: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
        """How many logits of each chosen row are that of the row's id, of `ids` (n,)."""
        ...

    def before(self, ids: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
        """How many ids of each chosen row come before the row's id: larger, or as large and lower."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """Of n rows: the smallest logit, entropy (nats), head size k, the K best ids and logits (−inf from k on), of the
    ids outside the head the largest logit and Σ exp(x − it), and S ids drawn from these."""

    lowest: NDArray[Any]
    entropy: NDArray[Any]
    k: NDArray[Any]
    ids: NDArray[Any]
    head: NDArray[Any]
    tail_peak: NDArray[Any]
    tail_sum: NDArray[Any]
    samples: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of n rows: the smallest logit, the BEST best ids and logits, and the tail outside the trace's head."""

    lowest: NDArray[Any]
    own_ids: NDArray[Any]
    own: NDArray[Any]
    tail_peak: NDArray[Any]
    tail_sum: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ids at which a trace wants a lane's logits: `heads` (n, K), `missing` marking their filling, `samples`."""

    heads: NDArray[np.int32]
    missing: NDArray[np.bool_]
    samples: NDArray[np.int32]


def uniforms(first_position: int, n: int, seed: int) -> NDArray[np.float64]:
    """Uniforms of [0, 1) for each position, (n, S), from Philox keyed by the seed and counted by the position.

    Four 64-bit words come from one counter, so a position owns S / 4 of them, whatever chunk it is drawn in.
    """
    words = np.random.Philox(key=seed, counter=first_position * (S // 4)).random_raw(n * S)
    return (words >> np.uint64(11)).astype(np.float64).reshape(n, S) * 2.0**-53


def check_targets(count: int, targets: NDArray[Any], width: int) -> None:
    """Raises EngineError for targets that are not one id below `width` for each of `count` rows."""
    if len(targets) != count:
        raise EngineError(f"{len(targets)} targets for {count} rows of logits")
    if count and not 0 <= int(targets.min()) <= int(targets.max()) < width:
        raise EngineError(
            f"the stream holds token {int(targets.max())}, the model has logits for {width} ids",
            next="Render the session with this model's own tokenizer.",
        )


def wanted(trace: Arrays, n: int, width: int) -> Wanted:
    """Raises EngineError for a trace of another length than `n` or of ids that are not below `width`."""
    if len(trace["k"]) != n:
        raise EngineError(f"{n} rows of logits cannot be compared with {len(trace['k'])} rows of a trace")
    heads, samples = _padded(trace, "head_ids", K, 0), _padded(trace, "sample_ids", S, 0)
    if n and (min(heads.min(), samples.min()) < 0 or max(heads.max(), samples.max()) >= width):
        raise EngineError(
            f"the trace names token ids outside the {width} that this model has logits for",
            next="Use a reference of a model with the same vocabulary.",
        )
    # A row without a head (invalid in the trace) masks id 0 as its head, so that its own sums stay whole.
    missing = np.arange(K) >= np.maximum(trace["k"], 1)[:, None]
    return Wanted(np.where(missing, heads[:, :1], heads), missing, samples)


def trace_columns(found: Recorded, targets: NDArray[Any], reader: Reader) -> Arrays:
    """Columns of `protocol.columns.TRACE`."""
    side = _side(found.head, found.tail_peak, found.tail_sum)
    values = reader.at(np.concatenate((found.samples, targets[:, None]), 1))
    logprobs = _float32(values - side.lse[:, None])
    valid = np.isfinite(found.lowest) & np.isfinite(side.lse) & np.isfinite(found.entropy)
    below = np.exp(side.tail)[:, None] < np.array([limit for limit, _ in SAMPLES])
    s = np.where(valid, np.array([count for _, count in SAMPLES])[below.argmax(1)], 0)
    k = np.where(valid, found.k, 0)
    in_head, in_samples = np.arange(K) < k[:, None], np.arange(S) < s[:, None]
    return _columns(
        TRACE,
        valid,
        {
            "logprob": logprobs[:, -1],
            "lse": side.lse,
            "entropy": np.maximum(found.entropy, 0),
            "tail": side.tail,
            "ties": _ties(reader, found.ids[:, 0], found.head, valid),
            "valid": valid,
            "k": k,
            "s": s,
        },
    ) | {
        "head_ids": found.ids[in_head].astype(np.int32),
        "head_logprobs": side.head[in_head],
        "sample_ids": found.samples[in_samples].astype(np.int32),
        "sample_logprobs": logprobs[:, :-1][in_samples],
    }


def lane_columns(
    found: Measured, want: Wanted, targets: NDArray[Any], trace: Arrays, seconds: float, reader: Reader
) -> Arrays:
    """Columns of `protocol.columns.ROWS`."""
    n = len(targets)
    values = reader.at(np.concatenate((want.heads, want.samples, targets[:, None]), 1))
    side = _side(np.where(want.missing, -np.inf, values[:, :K]), found.tail_peak, found.tail_sum)
    logprobs = _float32(values - side.lse[:, None])
    finite = np.isfinite(found.lowest) & np.isfinite(side.lse)
    p = Compact(
        _padded(trace, "head_logprobs", K, -np.inf), trace["tail"], _padded(trace, "sample_logprobs", S, -np.inf)
    )
    distance = estimate(p, Compact(side.head, side.tail, logprobs[:, K:-1]), trace["s"].astype(np.int64))
    valid = finite & (trace["valid"] == 1) & ~distance.excluded
    own_columns = _columns(
        ROWS,
        finite,
        {
            "logprob": logprobs[:, -1],
            "top_ids": found.own_ids,
            "top_logprobs": _float32(found.own - side.lse[:, None]),
            "ties": _ties(reader, found.own_ids[:, 0], found.own, finite),
        },
    )
    measured = {"kl": distance.kl, "kl_low": distance.kl_low, "tv": distance.tv, "tv_high": distance.tv, "valid": valid}
    rank = np.ones(n, np.int32)
    flipped = valid & (found.own_ids[:, 0] != want.heads[:, 0])
    if flipped.any():
        rank[flipped] += reader.before(want.heads[:, 0], flipped).astype(np.int32)
    rows_columns = _columns(ROWS, valid, measured) | own_columns
    rows_columns |= {"rank": rank, "seconds": np.full(n, seconds, np.float32)}
    return {name: rows_columns[name] for name in ROWS}


def lost_share(values: NDArray[Any], padding: NDArray[Any], rows: Arrays) -> NDArray[np.float64]:
    """The probability (n,) of the padding, whose logits' log-sum-exp is `padding`; `values` are the targets' logits."""
    with np.errstate(all="ignore"):
        kept = values - rows["logprob"]
        return np.where(rows["valid"] == 1, np.exp(padding - np.logaddexp(padding, kept)), np.nan)


class _Side(NamedTuple):
    """What one distribution is at a head: lse (n,) float64, head (n, K) and tail (n,) log-probabilities in float32."""

    lse: NDArray[np.float64]
    head: NDArray[np.float32]
    tail: NDArray[np.float32]


def _side(head: NDArray[Any], tail_peak: NDArray[Any], tail_sum: NDArray[Any]) -> _Side:
    """Normalise head logits (n, K; −inf where missing) and the tail's sum of exp(x − tail_peak)."""
    with np.errstate(all="ignore"):
        tail = tail_peak.astype(np.float64) + np.log(tail_sum.astype(np.float64))
        head = np.ascontiguousarray(head, np.float64)
        peak = head.max(1)
        lse = np.logaddexp(tail, peak + np.log(np.exp(head - peak[:, None]).sum(1)))
        return _Side(lse, _float32(head - lse[:, None]), _float32(tail - lse))


def _ties(reader: Reader, first: NDArray[Any], top: NDArray[Any], counted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many ids beside `first` (n,) share the largest logit, at most 255.

    Read from the `top` logits (n, m) where they tell; counted rows in which all of them are equal are searched whole.
    """
    ties = (top == top[:, :1]).sum(1) - 1
    open_ended = counted & (ties + 1 >= np.isfinite(top).sum(1))
    if open_ended.any():
        ties[open_ended] = reader.equal(first, open_ended) - 1
    return np.minimum(ties, 255)


def _padded(trace: Arrays, column: str, width: int, fill: Any) -> NDArray[Any]:
    values = dense(trace, column, fill)
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def _columns(kind: dict[str, Any], keep: NDArray[np.bool_], values: dict[str, NDArray[Any]]) -> Arrays:
    """Columns in their stored dtypes, zero in the rows that are not kept."""
    with np.errstate(all="ignore"):
        return {
            name: np.where(keep if value.ndim == 1 else keep[:, None], value, 0).astype(kind[name].dtype)
            for name, value in values.items()
        }


def _float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return values.astype(np.float32)
