"""Rows of logits against rows of a llama.cpp base file, exactly and over the whole vocabulary, in numpy.

numpy lets go of the interpreter within a pass over a block of rows, so that threads share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.protocol.logits_file import CLAMP, KL_FLOOR, Raw, Row, encode_rows
from workbench.protocol.wire import Arrays

Floats = NDArray[np.float32]
Span = Callable[[int, int], None]

BLOCK_IDS = 1 << 18
"""Ids of one block of rows. Two threads with three float32 arrays of so many each take 0.10 ms a row of 49,152 ids; one
with blocks that fit a cache of 2 MB takes 0.16, and two with such blocks spend more on waiting for the interpreter."""


def compared(logits: Floats, base: Row, targets: NDArray[Any], pool: ThreadPoolExecutor, threads: int) -> Arrays:
    """Columns of n rows: logits (n, ≥ vocabulary) of the lane, rows of the file, and the tokens (n,) that followed.

    kl: Σ p (ln p − ln q) over ids with ln p > −16, p as stored, as llama-perplexity sums it. kl_whole: the divergence
    Σ p' (ln p' − ln q) of p' = p / Σ p over all ids, never below 0 but for rounding. Both in nats, q the lane's.
    mass: Σ p. nll, nll_base: −ln q and −ln p of the targets. same: 1 where both have the same best id, the lowest of
    equals. Rows with a logit that is NaN or +inf, or with −inf where p > 0, hold NaN in `kl`, `kl_whole` and `nll`.
    """
    n, vocabulary = base.codes.shape
    out: Arrays = {name: np.empty(n) for name in ("kl", "kl_whole", "mass", "nll", "nll_base")}
    out["same"] = np.empty(n, np.uint8)

    def span(low: int, high: int) -> None:
        size = max(1, BLOCK_IDS // vocabulary)
        memory = np.empty((3, size, vocabulary), np.float32)
        with np.errstate(all="ignore"):
            for first in range(low, high, size):
                rows = slice(first, min(first + size, high))
                _compare(logits[rows, :vocabulary], base, rows, targets[rows], memory[:, : rows.stop - first], out)

    _spread(span, n, pool, threads)
    bad = ~(np.isfinite(out["kl"]) & np.isfinite(out["kl_whole"]) & np.isfinite(out["nll"]))
    for name in ("kl", "kl_whole", "nll"):
        out[name][bad] = np.nan
    return out


def _compare(logits: Floats, base: Row, rows: slice, targets: NDArray[Any], memory: Floats, out: Arrays) -> None:
    """One block; `memory` (3, rows, vocabulary) is written over."""
    a, b, counted = memory
    codes, scale, least = base.codes[rows], base.scale[rows], base.least[rows].astype(np.float64)
    here = np.arange(len(codes))
    best = logits.argmax(1)
    top = logits[here, best]
    np.subtract(logits, top[:, None], out=a)
    np.exp(a, out=b)
    log_sum = np.log(_sums(b))
    np.copyto(b, codes)
    np.multiply(b, scale[:, None], out=b)  # ln p − least
    np.subtract(b, a, out=a)
    shift = least + log_sum
    near = shift.astype(np.float32)
    np.add(a, near[:, None], out=a)  # ln p − ln q, but for what float32 leaves of the shift
    np.copyto(counted, b > (KL_FLOOR - least).astype(np.float32)[:, None])
    np.exp(b, out=b)
    unit = np.exp(least)
    mass = unit * _sums(b)
    np.multiply(a, b, out=a)
    rest = (shift - near) * mass
    out["kl"][rows] = unit * np.einsum("ij,ij->i", a, counted) + rest
    out["kl_whole"][rows] = (unit * _sums(a) + rest) / mass - np.log(mass)
    out["mass"][rows] = mass
    out["nll"][rows] = top.astype(np.float64) + log_sum - logits[here, targets]
    out["nll_base"][rows] = -(scale.astype(np.float64) * codes[here, targets] + least)
    out["same"][rows] = best == codes.argmax(1)


def recorded(
    logits: Floats, targets: NDArray[Any], codes: Raw, pool: ThreadPoolExecutor, threads: int, clamp: float = CLAMP
) -> Arrays:
    """Logits (n, vocabulary) as rows of a base file in `codes` (n, row_codes); `nll` (n,) of the targets."""
    nll = np.empty(len(logits))

    def span(low: int, high: int) -> None:
        nll[low:high] = encode_rows(logits[low:high], codes[low:high], clamp)

    _spread(span, len(logits), pool, threads)
    return {"nll": nll - logits[np.arange(len(logits)), targets]}


def _sums(block: Floats) -> NDArray[np.float64]:
    """Σ of each row: numpy adds float32 pairwise, whose error grows with the logarithm of the count only."""
    return block.sum(1).astype(np.float64)


def _spread(span: Span, n: int, pool: ThreadPoolExecutor, threads: int) -> None:
    """Run `span` over n rows on so many threads, this one included."""
    edges = np.linspace(0, n, min(max(1, threads), max(1, n)) + 1).astype(int)
    others = [pool.submit(span, int(a), int(b)) for a, b in pairwise(edges[1:])]
    try:
        span(int(edges[0]), int(edges[1]))
    finally:
        for other in others:
            other.exception()  # waited for, or it would write to memory that is gone
    for other in others:
        other.result()
