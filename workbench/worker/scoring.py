"""Rows of logits to compact rows: a reference's trace, and a lane measured against one. The torch implementation.

The work over the vocabulary happens on the logits' device in small blocks of rows; only heads, samples and sums leave
it. What a trace and a lane have in common is computed by the same operations on blocks of the same shape, so a lane
whose logits equal the reference's bit by bit reads exactly the trace's numbers, and its divergence is exactly 0.

A row's numbers depend on its own logits and position alone, not on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.protocol.columns import join
from workbench.protocol.wire import Arrays
from workbench.worker.compact import (
    BEST,
    K,
    Measured,
    Recorded,
    check_targets,
    lane_columns,
    lost_share,
    trace_columns,
    uniforms,
    wanted,
)
from workbench.worker.passes import best, blocks, draw, head_sizes, mask_tail, moments, some_blocks, wide


def record_rows(logits: Tensor, targets: Tensor, first_position: int, trace_seed: int, vocab: int) -> Arrays:
    """Trace rows (columns of `protocol.columns.TRACE`) of n consecutive positions from `first_position` on.

    `logits` (n, V) are raw, of any float dtype; `targets` (n,) are the stream's tokens at these positions; ids from
    `vocab` on are padding and left out (see `lost_mass`). Rows with non-finite logits have valid 0, k 0 and s 0.
    Raises EngineError for targets outside the vocabulary.
    """
    logits, stream = _shared(logits, targets, vocab)
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
    return trace_columns(Recorded(*_to_numpy(parts)), stream, _Reader(logits))


def lane_rows(logits: Tensor, targets: Tensor, trace: Arrays, seconds: float, vocab: int) -> Arrays:
    """A lane's rows (columns of `protocol.columns.ROWS`) against the `trace` rows of the same n positions.

    `logits` (n, V), `targets` (n,) and `vocab` as for `record_rows`; `seconds` since scoring began goes with each row.
    valid is 0 where either side's logits were non-finite or q is 0 where p > 0: kl, kl_low, tv and tv_high are then 0
    and rank is 1; what the lane itself predicts is kept where its own logits were finite. Raises EngineError for
    targets outside the vocabulary and for a trace of another length or a larger vocabulary.
    """
    logits, stream = _shared(logits, targets, vocab)
    want = wanted(trace, len(logits), logits.shape[1])
    if not len(logits):
        return join("rows", [])
    masked = torch.from_numpy(want.heads).to(logits.device, torch.int64)
    parts: list[tuple[Tensor, ...]] = []
    for rows, scratch in blocks(logits):
        lowest = scratch.flatten(1).amin(1)
        own_ids, own = best(scratch, min(BEST, logits.shape[1]), logits.shape[1], BEST)
        tail_peak, sums = mask_tail(scratch, masked[rows])
        parts.append((lowest, own_ids, own, tail_peak, sums.sum(-1)))
    return lane_columns(Measured(*_to_numpy(parts)), want, stream, trace, seconds, _Reader(logits))


def lost_mass(logits: Tensor, targets: Tensor, rows: Arrays, vocab: int) -> NDArray[np.float64]:
    """Probability (n,) that each row's softmax over all logits puts on padding ids from `vocab` on; NaN where invalid.

    `rows` are what `record_rows` or `lane_rows` gave for the same logits; only the padding is read again.
    """
    if logits.shape[1] <= vocab:
        return np.zeros(len(logits))
    values = _Reader(logits).at(targets.cpu().numpy()[:, None])[:, 0]
    return lost_share(values, logits[:, vocab:].float().logsumexp(-1).cpu().numpy().astype(np.float64), rows)


class _Reader:
    """`compact.Reader` of a tensor."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def at(self, ids: NDArray[Any]) -> NDArray[np.float64]:
        chosen = self.logits.gather(1, torch.from_numpy(ids.astype(np.int64)).to(self.logits.device))
        return chosen.float().cpu().numpy().astype(np.float64)

    def equal(self, ids: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
        counts: list[Tensor] = []
        for rows in some_blocks(self.logits, chosen):
            block = self.logits[rows].float()
            counts.append((block == block.gather(1, self._column(ids, rows))).sum(1))
        return torch.cat(counts).cpu().numpy()

    def before(self, ids: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
        order = torch.arange(self.logits.shape[1], device=self.logits.device)
        counts: list[Tensor] = []
        for rows in some_blocks(self.logits, chosen):
            block, mine = self.logits[rows].float(), self._column(ids, rows)
            value = block.gather(1, mine)
            counts.append((block > value).sum(1) + ((block == value) & (order < mine)).sum(1))
        return torch.cat(counts).cpu().numpy()

    def _column(self, ids: NDArray[Any], rows: Tensor) -> Tensor:
        return torch.from_numpy(ids[rows.numpy(force=True)].astype(np.int64)).to(self.logits.device)[:, None]


def _shared(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, NDArray[Any]]:
    logits, stream = logits.detach()[:, :vocab], targets.cpu().numpy()
    check_targets(len(logits), stream, logits.shape[1])
    return logits, stream


def _to_numpy(parts: list[tuple[Tensor, ...]]) -> list[NDArray[Any]]:
    return [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
