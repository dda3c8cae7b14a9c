"""Passes over the vocabulary, on the logits' device: the best ids, sums, the tail, and samples of it.

Rows come in blocks of float32 scratch (rows, groups, WIDTH). A group's maximum and sum stand for its WIDTH ids, so that
the search for the best and the sampling look closely at a few groups only. On the CPU a block fits the level-2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.worker.compact import HEAD_TAIL, HEADS, VOID, WIDTH, K

CPU_BYTES = 3 << 19  # of float32 in one block
DEVICE_BYTES = 1 << 28


def blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows as float32 scratch (rows, groups, WIDTH), filled up with VOID; the same memory every time."""
    n, vocab = logits.shape
    width = -(-vocab // WIDTH) * WIDTH
    size = _rows_a_block(logits.device, width)
    buffer = torch.empty((min(size, n), width), dtype=torch.float32, device=logits.device)
    for first in range(0, n, size):
        rows = slice(first, min(first + size, n))
        block = buffer[: rows.stop - first]
        block[:, :vocab].copy_(logits[rows])
        block[:, vocab:] = VOID
        yield rows, block.view(len(block), -1, WIDTH)


def some_blocks(logits: Tensor, chosen: NDArray[np.bool_]) -> Iterator[Tensor]:
    """The indices of the chosen rows, as many at a time as fit one block."""
    size = _rows_a_block(logits.device, logits.shape[1])
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
    return iter(rows.split(size) if len(rows) else ())


def best(scratch: Tensor, count: int, vocab: int, width: int = K) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, the lowest id first among equals: ids and logits, both (rows, width).

    Exact in two steps: each of them lies in one of the `count` groups with the largest maxima (the first among equals).
    Missing columns repeat the first id with the logit −inf.
    """
    groups = scratch.shape[1]
    chosen = _by_key(scratch.amax(-1), torch.arange(groups, device=scratch.device), min(count, groups))
    offsets = torch.arange(WIDTH, device=scratch.device)
    candidates = (chosen[..., None] * WIDTH + offsets).flatten(1)
    values = scratch.gather(1, chosen[..., None].expand(-1, -1, WIDTH)).flatten(1)
    ids = _by_key(values, candidates, count).clamp_(max=vocab - 1)
    logits = scratch.flatten(1).gather(1, ids)
    if count == width:
        return ids, logits
    return (
        torch.cat((ids, ids[:, :1].expand(-1, width - count)), 1),
        torch.nn.functional.pad(logits, (0, width - count), value=-torch.inf),
    )


def moments(scratch: Tensor, peak: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Σ exp(x − peak) and the entropy in nats of each row; `spare` (2, rows, groups, WIDTH) is written over."""
    shifted = torch.sub(scratch, peak[:, None, None], out=spare[0])
    weights = torch.exp(shifted, out=spare[1])
    mass = weights.sum(-1).sum(-1, dtype=wide(scratch))
    return mass, mass.log() - weights.mul_(shifted).sum(-1).sum(-1, dtype=mass.dtype) / mass


def head_sizes(head: Tensor, mass: Tensor) -> Tensor:
    """The smallest K of HEADS whose tail mass is at most HEAD_TAIL, else the largest."""
    within = (head - head[:, :1]).to(mass.dtype).exp().cumsum(1) / mass[:, None]
    sizes = torch.tensor(HEADS, device=head.device)
    enough = 1 - within[:, sizes - 1] <= HEAD_TAIL
    enough[:, -1] = True
    return sizes[enough.to(torch.uint8).argmax(1)]


def mask_tail(scratch: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mask `ids` and turn the scratch into exp(x − peak of the rest) in place; the peak and the sums of its groups."""
    scratch.flatten(1).scatter_(1, ids, VOID)
    peak = scratch.flatten(1).amax(1)
    scratch.sub_(torch.where(peak > VOID / 2, peak, 0)[:, None, None]).exp_()
    return peak, scratch.sum(-1).to(wide(scratch))


def draw(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Ids by inverse CDF: the group from the groups' sums, then the id within the group. All (rows, S)."""
    below = 1 - torch.finfo(sums.dtype).eps  # keeps a rounded product under its total, so an id of mass 0 never comes
    edges = sums.cumsum(1)
    aim = uniforms * edges[:, -1:] * below
    group = torch.searchsorted(edges, aim, right=True).clamp_(max=sums.shape[1] - 1)
    left = torch.nn.functional.pad(edges, (1, 0)).gather(1, group)
    share = ((aim - left) / sums.gather(1, group)).clamp_(max=below)
    first = torch.arange(len(sums), device=sums.device)[:, None] * sums.shape[1]
    inner = weights.flatten(0, 1).index_select(0, (first + group).flatten()).to(sums.dtype).cumsum(1)
    aim = share.reshape(-1, 1) * inner[:, -1:] * below
    offset = torch.searchsorted(inner, aim, right=True).clamp_(max=WIDTH - 1)
    return group * WIDTH + offset.view(group.shape)


def wide(tensor: Tensor) -> torch.dtype:
    """What sums over a vocabulary are kept in: float64 wherever the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _by_key(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest values of each row in order, the lowest id first among equals.

    One integer holds a float32, made monotonic, above the id's complement; adding 0 makes −0 equal to 0.
    """
    bits = (values + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32 | (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (keys.topk(count).values & 0xFFFFFFFF)


def _rows_a_block(device: torch.device, width: int) -> int:
    return max(1, (CPU_BYTES if device.type == "cpu" else DEVICE_BYTES) // (4 * width))
