"""llama.cpp's base file of log-probabilities, as `llama-perplexity --kl-divergence-base` writes and reads it.

Little-endian, nothing aligned: `_logits_` · n_ctx u32 · n_vocab i32 · n_chunk i32 · tokens i32 (n_chunk, n_ctx) · rows.
Every window of n_ctx tokens has n_ctx − 1 − n_ctx//2 rows: row r of a window is the distribution after its token
n_ctx//2 + r, which predicts the token behind. A row is `scale` f32 · `least` f32 · codes u16 (n_vocab, filled up with 0
to an even number), and stands for

    ln p(i) = scale · code(i) + least        with scale = (largest − least logit) / 65535

**Two clamps are in use.** The writer lifts logits that lie more than 16 (llama.cpp) or 24 (ik_llama.cpp, since April
2025) below the largest one up to that bound, at code 0. The file does not say which; a row does: 65535 · scale is the
range that it spans, at most the clamp. Rows of both read alike, so what matters is only what code 0 may hide.

**Error of the quantisation.** |δ ln p| ≤ scale/2 ≤ 1.22e-4 (clamp 16) or 1.83e-4 (24), and 2e-6 of float32, for ids
above the bound; ids below it are stored at the bound, so their mass, true or stored, is at most n_vocab · e^least. A
Kullback–Leibler divergence taken from a row is then off by at most scale/2 · (1 + Σ p |ln p/q|), and that of the ids
that the sum leaves out. Log-probabilities above e^−16 enter llama-perplexity's sum, whatever the clamp.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from workbench.errors import LogitsFileError

MAGIC = b"_logits_"
HEADER = struct.Struct("<8sIii")
CLAMP = 16.0
"""How far below the largest logit llama.cpp still tells logits apart."""
WIDE_CLAMP = 24.0
"""The same of ik_llama.cpp since April 2025."""
KL_FLOOR = -16.0
"""llama-perplexity sums a divergence over the ids whose stored ln p lies above this."""
LEVELS = 65535
LEAD = 4  # code places that scale and least take
TOKENS_AT_ONCE = 1 << 20

Raw = NDArray[np.uint16]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that a header names, and what follows from them; everything is counted in Python's whole numbers."""

    window: int
    vocabulary: int
    windows: int

    @property
    def first(self) -> int:
        """The first token of a window after which there is a row."""
        return self.window // 2

    @property
    def rows_each(self) -> int:
        """Rows of a window."""
        return self.window - 1 - self.window // 2

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return self.rows_each * self.windows

    @property
    def row_codes(self) -> int:
        """u16 places of a row."""
        return 2 * ((self.vocabulary + 1) // 2) + LEAD

    @property
    def rows_at(self) -> int:
        """Where the first row begins, in bytes."""
        return HEADER.size + 4 * self.window * self.windows

    @property
    def bytes(self) -> int:
        """The size of a whole file."""
        return self.rows_at + self.rows * self.row_codes * 2


@dataclass(frozen=True, slots=True)
class Row:
    """Rows as they are stored: `scale` and `least` (n,) float32, `codes` (n, vocabulary) uint16, a view."""

    scale: Floats
    least: Floats
    codes: Raw

    @property
    def logprobs(self) -> Floats:
        """ln p (n, vocabulary), float32 as llama-perplexity computes them."""
        return self.scale[:, None] * self.codes.astype(np.float32) + self.least[:, None]


class LogitsFile:
    """A base file that is open for reading. Rows are read where they stand; nothing of the file stays in memory."""

    def __init__(self, path: Path) -> None:
        """Open and check header, size and tokens. Raises LogitsFileError."""
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise LogitsFileError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
        try:
            self.shape = self._checked_shape()
            self._check_tokens()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def tokens(self, window: int, count: int = 1) -> NDArray[np.int32]:
        """Tokens of `count` windows from `window` on, (count, n_ctx), without the BOS that takes the first's place."""
        if not 0 <= window <= window + count <= self.shape.windows:
            raise IndexError(f"windows {window} to {window + count} of {self.shape.windows}")
        wide = self.shape.window
        return self._read(HEADER.size + 4 * wide * window, count * wide, "<i4").reshape(count, wide)

    def read_rows(self, first: int, count: int, out: Raw | None = None) -> Row:
        """`count` rows from row `first` of the file on; into `out` (≥ count, row_codes) where it is given.

        Raises LogitsFileError for a row whose scale and least cannot be those of a distribution.
        """
        if not 0 <= first <= first + count <= self.shape.rows:
            raise IndexError(f"rows {first} to {first + count} of {self.shape.rows}")
        wide = self.shape.row_codes
        memory = np.empty((count, wide), "<u2") if out is None else out[:count]
        self._fill(memory, self.shape.rows_at + 2 * wide * first)
        lead = np.ascontiguousarray(memory[:, :LEAD]).view("<f4")
        scale, least = lead[:, 0].copy(), lead[:, 1].copy()
        good = _is_distribution(scale.astype(np.float64), least.astype(np.float64), self.shape.vocabulary)
        if not good.all():
            row = first + int(np.flatnonzero(~good)[0])
            raise LogitsFileError(
                f"row {row:,} (window {row // self.shape.rows_each + 1:,}) holds no distribution: scale"
                f" {scale[row - first]:g}, least {least[row - first]:g}",
                where=str(self.path),
                next="The file is damaged, or the model that it was made with computed no numbers. Make it again.",
            )
        return Row(scale, least, memory[:, LEAD : LEAD + self.shape.vocabulary])

    def _checked_shape(self) -> Shape:
        """Raises LogitsFileError for what is not such a file, and for a size that is not the one its header makes."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        head = self._file.read(HEADER.size) or b""
        if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
            raise LogitsFileError(
                "is not a llama.cpp file of log-probabilities: it does not begin as one",
                where=str(self.path),
                next="llama-perplexity --kl-divergence-base FILE makes such files, and workbench logits record.",
            )
        shape = Shape(*HEADER.unpack(head)[1:])
        if not (3 <= shape.window <= 1 << 24 and 2 <= shape.vocabulary <= 1 << 24 and shape.windows >= 1):
            raise LogitsFileError(
                f"its header is not possible: windows of {shape.window:,} tokens, a vocabulary of"
                f" {shape.vocabulary:,}, {shape.windows:,} windows",
                where=str(self.path),
                next="The file is damaged.",
            )
        if size == shape.bytes:
            return shape
        held = max(0, size - shape.rows_at) // (2 * shape.row_codes)
        sizes = f"{shape.windows:,} windows of {shape.window:,} tokens and {shape.vocabulary:,} ids"
        says = f"{sizes} need {shape.bytes:,} bytes"
        if size < shape.bytes:
            what = f"is cut off: {says}, and there are {size:,} ({held:,} of {shape.rows:,} rows)"
            advice = "It was not written to its end, or not copied whole. Make it again."
        else:
            what = f"is too long: {says}, and there are {size:,}"
            advice = "Something was written behind it, or its header is damaged."
        raise LogitsFileError(what, where=str(self.path), next=advice)

    def _check_tokens(self) -> None:
        step = max(1, TOKENS_AT_ONCE // self.shape.window)
        for window in range(0, self.shape.windows, step):
            found = self.tokens(window, min(step, self.shape.windows - window))
            if int(found.min()) < 0 or int(found.max()) >= self.shape.vocabulary:
                raise LogitsFileError(
                    f"holds tokens outside its vocabulary of {self.shape.vocabulary:,} ids",
                    where=str(self.path),
                    next="The file is damaged.",
                )

    def _read(self, offset: int, count: int, kind: str) -> NDArray[np.int32]:
        array = np.empty(count, kind)
        self._fill(array, offset)
        return array

    def _fill(self, array: NDArray[Any], offset: int) -> None:
        """Read an array's bytes at a 64-bit offset."""
        view = array.data.cast("B")
        try:
            self._file.seek(offset)
            while len(view):
                got = self._file.readinto(view)
                if not got:
                    raise LogitsFileError("became shorter while it was read", where=str(self.path))
                view = view[got:]
        except OSError as error:
            raise LogitsFileError(f"cannot be read: {error.strerror or error}", where=str(self.path)) from error


class LogitsWriter:
    """A base file that is being written, row by row and in order."""

    def __init__(self, path: Path, tokens: NDArray[np.integer], vocabulary: int, clamp: float = CLAMP) -> None:
        """Write header and tokens (windows, n_ctx). Raises LogitsFileError."""
        windows, window = tokens.shape
        self.path, self.clamp = path, clamp
        self.shape = Shape(window, vocabulary, windows)
        if window < 3 or windows < 1 or int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise LogitsFileError(
                f"cannot be made of {windows} windows of {window} tokens and a vocabulary of {vocabulary}",
                where=str(path),
            )
        self.written = 0
        self._codes = np.zeros((0, self.shape.row_codes), "<u2")
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise LogitsFileError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
        self._put(HEADER.pack(MAGIC, window, vocabulary, windows) + tokens.astype("<i4").tobytes())

    def append(self, codes: Raw) -> None:
        """Add rows as `encode_rows` makes them, (n, row_codes)."""
        if codes.shape[1] != self.shape.row_codes or self.written + len(codes) > self.shape.rows:
            raise ValueError(f"{codes.shape} are no rows of this file after {self.written} of {self.shape.rows}")
        self._put(np.ascontiguousarray(codes, "<u2").data)
        self.written += len(codes)

    def finish(self) -> None:
        """Close a whole file. Raises LogitsFileError where rows are missing or the disk is full."""
        if self.written != self.shape.rows:
            self.close()
            raise LogitsFileError(f"{self.written:,} of {self.shape.rows:,} rows were written", where=str(self.path))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Close what there is, which no reader takes for a whole file."""
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> LogitsFileError:
        return LogitsFileError(
            f"cannot be written: {error.strerror or error}",
            where=str(self.path),
            next=f"The whole file takes {self.shape.bytes:,} bytes.",
        )


def encode_rows(logits: Floats, out: Raw, clamp: float = CLAMP) -> NDArray[np.float64]:
    """Logits (n, vocabulary) as rows in `out` (n, row_codes); returns ln Σ exp(logit) (n,) as the rows use it.

    Rounded where llama-perplexity rounds, in the build that machines with fused multiply-add get: the product that
    becomes a code is not rounded on its own. Its bytes come out then, unless two ways to round e^x in float32 change
    the last place of ln Σ. Logits that are not finite make a row that `LogitsFile` refuses.
    """
    vocabulary = logits.shape[1]
    lse = np.empty(len(logits))
    out[:, LEAD + vocabulary :] = 0
    with np.errstate(all="ignore"):
        for index, row in enumerate(logits):
            largest, smallest = row.max(), row.min()
            smallest = np.maximum(smallest, np.float32(largest - np.float32(clamp)))
            wide = np.subtract(row, largest).astype(np.float64)
            total = np.float32(np.log(np.exp(wide, out=wide).astype(np.float32).sum(dtype=np.float64)))
            scale = np.float32((largest - smallest) / np.float32(LEVELS))
            out[index, :LEAD] = np.array([scale, np.float32(smallest - largest) - total], "<f4").view("<u2")
            lse[index] = np.float64(largest) + np.float64(total)
            codes = out[index, LEAD : LEAD + vocabulary]
            if not scale > 0:
                codes[:] = 0
                continue
            above = np.subtract(row, smallest)
            np.maximum(above, 0, out=above)
            np.multiply(above, np.float64(np.float32(1) / scale), out=wide)
            codes[:] = np.rint(wide, out=wide)
    return lse


def _is_distribution(
    scale: NDArray[np.float64], least: NDArray[np.float64], vocabulary: int, slack: float = 1e-3
) -> NDArray[np.bool_]:
    """Whether rows can be distributions: the best of n ids has a probability of 1/n to 1. Places that were never
    written, all zeros, cannot."""
    even = -np.log(vocabulary)
    best = LEVELS * scale + least
    within = (scale >= 0) & (best <= slack) & (best >= even - slack)  # false for NaN
    return within & ((scale > 0) | (np.abs(least - even) <= slack))


def row_ranges(file: LogitsFile, rows: int = 64) -> NDArray[np.float64]:
    """65535 · scale of at most `rows` rows, spread over the file: what they span, in nats."""
    chosen = np.unique(np.linspace(0, file.shape.rows - 1, min(rows, file.shape.rows)).astype(np.int64))
    return np.array([float(file.read_rows(int(row), 1).scale[0]) * LEVELS for row in chosen])


def clamp_of(ranges: NDArray[np.float64]) -> float | None:
    """The clamp that rows of these ranges were written with; None where none reaches one, or another is in use."""
    largest = float(ranges.max())
    return next((clamp for clamp in (CLAMP, WIDE_CLAMP) if abs(largest - clamp) < 1e-3), None)


def windows_of(ids: NDArray[np.integer], window: int) -> NDArray[np.int32]:
    """Whole windows (windows, n_ctx) of a stream; what is left over at the end is no window, as in llama-perplexity."""
    count = len(ids) // window
    return ids[: count * window].reshape(count, window).astype(np.int32)


def pieces(shape: Shape, most: int) -> Iterator[tuple[int, int]]:
    """(first, count) of a window's rows, at most `most` at once."""
    for first in range(0, shape.rows_each, most):
        yield first, min(most, shape.rows_each - first)
