"""Text to calibrate quantized weights on: windows of sessions as the model reads them, none of it under study.

A method that is calibrated on the text it is then tested on looks better than it is. Windows that hold 32 tokens in a
row of the session under study are left out, and so are those of the demo session where the samples are used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError
from workbench.session.script import load_session
from workbench.session.template import Renderer, render

SAMPLES = ("refactor-long", "dice")
"""The sample sessions used where none is named."""
DEMO = "demo"
WINDOWS = 32
LENGTH = 512
LEAST = 64
"""A shorter window says nothing about a context."""
SHARED = 32
"""Tokens in a row that make two texts the same text."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`windows` (n, length) int32: token ids; `facts` say for a manifest whose they are and what was left out."""

    windows: NDArray[np.int32]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def hash(self) -> str:
        """sha256 of the windows as little-endian int32, with their shape; "" for none."""
        if not len(self.windows):
            return ""
        shape = str(self.windows.shape).encode()
        return hashlib.sha256(shape + np.ascontiguousarray(self.windows, "<i4").tobytes()).hexdigest()


NONE = Calibration(np.zeros((0, 0), np.int32))
"""Of a scheme that reads no text."""


def calibration(
    sessions: tuple[str, ...], renderer: Renderer, studied: NDArray[np.int32] | None, where: str
) -> Calibration:
    """Windows of these sessions (SPECs; the samples where empty), spread evenly, without what `studied` (n,) holds.

    Raises SessionError, and ConfigurationError where too little text is left.
    """
    named = sessions or SAMPLES
    ids = [render(load_session(spec), renderer).stream["ids"] for spec in named]
    apart = [studied] if studied is not None else []
    if not sessions:
        apart.append(render(load_session(DEMO), renderer).stream["ids"])
    known = np.unique(np.concatenate([grams(part) for part in apart])) if apart else np.zeros(0, np.uint64)
    spans = [(number, *span) for number, part in enumerate(ids) for span in unshared(part, known)]
    left_out = sum(map(len, ids)) - sum(stop - start for _, start, stop in spans)
    longest = max((stop - start for _, start, stop in spans), default=0)
    length = min(LENGTH, longest)
    if length < LEAST:
        raise ConfigurationError(
            f"{', '.join(named)} hold {longest} tokens in a row to calibrate on that are not the session under study",
            where=where,
            next="Name another session: w_calibration=FILE.json in a lane, --calibrate FILE.json for quantize.",
        )
    starts = _spread([(number, start, stop - length + 1) for number, start, stop in spans if stop - start >= length])
    windows = np.stack([ids[number][start : start + length] for number, start in starts]).astype(np.int32)
    found = Calibration(windows)
    return Calibration(
        windows,
        {
            "sessions": list(named),
            "windows": len(windows),
            "length": length,
            "sha256": found.hash,
            "left_out_tokens": left_out,
            "left_out": f"text that holds {SHARED} tokens in a row of the session under study"
            + ("" if sessions else " or of the demo"),
        },
    )


def grams(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """A hash of each SHARED tokens in a row, (n − SHARED + 1,): a polynomial of the ids modulo 2^64."""
    count = max(0, len(ids) - SHARED + 1)
    total = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(SHARED):
            total = (
                total * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count].astype(np.uint64) + np.uint64(1)
            )
    return total


def unshared(ids: NDArray[np.int32], known: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """The spans [start, stop) of tokens that belong to no gram of `known` (sorted)."""
    free = np.ones(len(ids) + 2, bool)
    free[[0, -1]] = False
    for start in np.flatnonzero(np.isin(grams(ids), known)):
        free[start + 1 : start + 1 + SHARED] = False
    edges = np.flatnonzero(np.diff(free.astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _spread(spans: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Up to WINDOWS places (session, start), evenly over all starts that the spans allow."""
    total = sum(stop - start for _, start, stop in spans)
    chosen: list[tuple[int, int]] = []
    for place in np.unique(np.linspace(0, total - 1, WINDOWS).astype(int)):
        for number, start, stop in spans:
            if place < stop - start:
                chosen.append((number, start + int(place)))
                break
            place -= stop - start
    return chosen
