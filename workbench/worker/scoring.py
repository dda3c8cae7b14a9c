"""Rows of logits to compact rows: a reference's trace, and a lane measured against one.

The work over the vocabulary happens on the logits' device in small blocks of rows; only heads, samples and sums leave
it. What a trace and a lane have in common is computed by the same operations on blocks of the same shape, so a lane
whose logits equal the reference's bit by bit reads exactly the trace's numbers, and its divergence is exactly 0.

A row's numbers depend on its own logits and position alone, not on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import EngineError
from workbench.metrics.divergence import Compact, estimate
from workbench.protocol.columns import ROWS, TRACE, dense, join
from workbench.protocol.wire import Arrays
from workbench.worker.passes import (
    SAMPLES,
    K,
    S,
    best,
    blocks,
    draw,
    head_sizes,
    mask_tail,
    moments,
    some_blocks,
    uniforms,
    wide,
)

_BEST = 4  # ids that a lane keeps of its own distribution


def record_rows(logits: Tensor, targets: Tensor, first_position: int, trace_seed: int, vocab: int) -> Arrays:
    """Trace rows (columns of `protocol.columns.TRACE`) of n consecutive positions from `first_position` on.

    `logits` (n, V) are raw, of any float dtype; `targets` (n,) are the stream's tokens at these positions; ids from
    `vocab` on are padding and left out (see `lost_mass`). Rows with non-finite logits have valid 0, k 0 and s 0.
    Raises EngineError for targets outside the vocabulary.
    """
    logits = _shared(logits, targets, vocab)
    if not len(logits):
        return join("trace", [])
    chance = torch.from_numpy(uniforms(first_position, len(logits), trace_seed)).to(wide(logits)).to(logits.device)
    parts: list[tuple[Tensor, ...]] = []
    spare = torch.empty(0)
    for rows, scratch in blocks(logits):
        if not spare.numel():  # the first block is the largest; fresh memory for each would cost more than the sums
            spare = scratch.new_empty((2, *scratch.shape))
        lowest = scratch.flatten(1).amin(1)
        ids, head = best(scratch, min(K, logits.shape[1]), logits.shape[1])
        mass, entropy = moments(scratch, head[:, 0], spare[:, : len(scratch)])
        k = head_sizes(head, mass).clamp_(max=logits.shape[1])
        missing = torch.arange(K, device=k.device) >= k[:, None]
        ids = torch.where(missing, ids[:, :1], ids)
        tail_peak, sums = mask_tail(scratch, ids)
        drawn = draw(scratch, sums, chance[rows]).clamp_(max=logits.shape[1] - 1)
        parts.append((lowest, entropy, k, ids, head.masked_fill_(missing, -torch.inf), tail_peak, sums.sum(-1), drawn))
    lowest, entropy, k, ids, head, tail_peak, tail_sum, samples = _to_numpy(parts)
    side = _side(head, tail_peak, tail_sum)
    values = _at(logits, np.concatenate((samples, targets.cpu().numpy()[:, None]), 1))
    logprobs = _float32(values - side.lse[:, None])
    valid = np.isfinite(lowest) & np.isfinite(side.lse) & np.isfinite(entropy)
    below = np.exp(side.tail)[:, None] < np.array([limit for limit, _ in SAMPLES])
    s = np.where(valid, np.array([count for _, count in SAMPLES])[below.argmax(1)], 0)
    k = np.where(valid, k, 0)
    in_head, in_samples = np.arange(K) < k[:, None], np.arange(S) < s[:, None]
    return _columns(
        TRACE,
        valid,
        {
            "logprob": logprobs[:, -1],
            "lse": side.lse,
            "entropy": np.maximum(entropy, 0),
            "tail": side.tail,
            "ties": _ties(logits, ids[:, 0], head, valid),
            "valid": valid,
            "k": k,
            "s": s,
        },
    ) | {
        "head_ids": ids[in_head].astype(np.int32),
        "head_logprobs": side.head[in_head],
        "sample_ids": samples[in_samples].astype(np.int32),
        "sample_logprobs": logprobs[:, :-1][in_samples],
    }


def lane_rows(logits: Tensor, targets: Tensor, trace: Arrays, seconds: float, vocab: int) -> Arrays:
    """A lane's rows (columns of `protocol.columns.ROWS`) against the `trace` rows of the same n positions.

    `logits` (n, V), `targets` (n,) and `vocab` as for `record_rows`; `seconds` since scoring began goes with each row.
    valid is 0 where either side's logits were non-finite or q is 0 where p > 0: kl, kl_low, tv and tv_high are then 0
    and rank is 1; what the lane itself predicts is kept where its own logits were finite. Raises EngineError for
    targets outside the vocabulary and for a trace of another length or a larger vocabulary.
    """
    logits = _shared(logits, targets, vocab)
    n = len(logits)
    if len(trace["k"]) != n:
        raise EngineError(f"{n} rows of logits cannot be compared with {len(trace['k'])} rows of a trace")
    if not n:
        return join("rows", [])
    heads, samples = _padded(trace, "head_ids", K, 0), _padded(trace, "sample_ids", S, 0)
    if min(heads.min(), samples.min()) < 0 or max(heads.max(), samples.max()) >= logits.shape[1]:
        raise EngineError(
            f"the trace names token ids outside the {logits.shape[1]} that this model has logits for",
            next="Use a reference of a model with the same vocabulary.",
        )
    # A row without a head (invalid in the trace) masks id 0 as its head, so that its own sums stay whole.
    missing = np.arange(K) >= np.maximum(trace["k"], 1)[:, None]
    heads = np.where(missing, heads[:, :1], heads)
    masked = torch.from_numpy(heads).to(logits.device, torch.int64)
    parts: list[tuple[Tensor, ...]] = []
    for rows, scratch in blocks(logits):
        lowest = scratch.flatten(1).amin(1)
        own_ids, own = best(scratch, min(_BEST, logits.shape[1]), logits.shape[1], _BEST)
        tail_peak, sums = mask_tail(scratch, masked[rows])
        parts.append((lowest, own_ids, own, tail_peak, sums.sum(-1)))
    lowest, own_ids, own, tail_peak, tail_sum = _to_numpy(parts)
    values = _at(logits, np.concatenate((heads, samples, targets.cpu().numpy()[:, None]), 1))
    side = _side(np.where(missing, -np.inf, values[:, :K]), tail_peak, tail_sum)
    logprobs = _float32(values - side.lse[:, None])
    finite = np.isfinite(lowest) & np.isfinite(side.lse)
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
            "top_ids": own_ids,
            "top_logprobs": _float32(own - side.lse[:, None]),
            "ties": _ties(logits, own_ids[:, 0], own, finite),
        },
    )
    measured = {"kl": distance.kl, "kl_low": distance.kl_low, "tv": distance.tv, "tv_high": distance.tv, "valid": valid}
    rank = _ranks(logits, heads[:, 0], valid & (own_ids[:, 0] != heads[:, 0]))
    rows_columns = _columns(ROWS, valid, measured) | own_columns
    rows_columns |= {"rank": rank, "seconds": np.full(n, seconds, np.float32)}
    return {name: rows_columns[name] for name in ROWS}


def lost_mass(logits: Tensor, targets: Tensor, rows: Arrays, vocab: int) -> NDArray[np.float64]:
    """Probability (n,) that each row's softmax over all logits puts on padding ids from `vocab` on; NaN where invalid.

    `rows` are what `record_rows` or `lane_rows` gave for the same logits; only the padding is read again.
    """
    if logits.shape[1] <= vocab:
        return np.zeros(len(logits))
    values = _at(logits, targets.cpu().numpy()[:, None])[:, 0]
    padding = logits[:, vocab:].float().logsumexp(-1).cpu().numpy().astype(np.float64)
    with np.errstate(all="ignore"):
        kept = values - rows["logprob"]
        return np.where(rows["valid"] == 1, np.exp(padding - np.logaddexp(padding, kept)), np.nan)


def _shared(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    logits = logits.detach()[:, :vocab]
    if len(targets) != len(logits):
        raise EngineError(f"{len(targets)} targets for {len(logits)} rows of logits")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise EngineError(
            f"the stream holds token {int(targets.max())}, the model has logits for {logits.shape[1]} ids",
            next="Render the session with this model's own tokenizer.",
        )
    return logits


def _at(logits: Tensor, ids: NDArray[Any]) -> NDArray[np.float64]:
    """The logits of each row at its ids, (n, m)."""
    chosen = logits.gather(1, torch.from_numpy(ids.astype(np.int64)).to(logits.device))
    return chosen.float().cpu().numpy().astype(np.float64)


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


def _ties(logits: Tensor, first: NDArray[Any], top: NDArray[Any], counted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many ids beside `first` (n,) share the largest logit, at most 255.

    Read from the `top` logits (n, m) where they tell; counted rows in which all of them are equal are searched whole.
    """
    ties = (top == top[:, :1]).sum(1) - 1
    open_ended = counted & (ties + 1 >= np.isfinite(top).sum(1))
    for rows in some_blocks(logits, open_ended):
        block, here = logits[rows].float(), rows.numpy(force=True)
        ties[here] = (block == block.gather(1, _column(first[here], logits))).sum(1).cpu().numpy() - 1
    return np.minimum(ties, 255)


def _ranks(logits: Tensor, ids: NDArray[Any], flipped: NDArray[np.bool_]) -> NDArray[np.int32]:
    """1 + the number of ids that come before `ids` (n,) in each flipped row; 1 elsewhere."""
    ranks = np.ones(len(ids), np.int32)
    order = torch.arange(logits.shape[1], device=logits.device)
    for rows in some_blocks(logits, flipped):
        block, here = logits[rows].float(), rows.numpy(force=True)
        mine = _column(ids[here], logits)
        value = block.gather(1, mine)
        before = (block > value).sum(1) + ((block == value) & (order < mine)).sum(1)
        ranks[here] = 1 + before.cpu().numpy()
    return ranks


def _column(ids: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(like.device)[:, None]


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


def _to_numpy(parts: list[tuple[Tensor, ...]]) -> list[NDArray[Any]]:
    return [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]


def _float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return values.astype(np.float32)
