"""Chunks: up to 1,024 whole rows of one kind as bytes, and back.

A chunk is a wire frame (`protocol.wire.pack`) of its columns, compressed by zstd with the content checksum on. Columns
of more than one byte a value are byte-shuffled first (all lowest bytes, then the next ones, ...), since ids use few of
their high bytes and log-probabilities share their exponents.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from workbench.errors import SavedSessionError
from workbench.protocol.columns import KINDS, Column, count_rows
from workbench.protocol.wire import Arrays, WireError, pack, unpack

CHUNK_ROWS = 1024
LEVEL = 3
MAX_CHUNK_BYTES = 1 << 28
"""A chunk that claims to be larger than this once decompressed is taken for damaged, not for memory to allocate."""


class DamagedChunkError(SavedSessionError):
    """A stored chunk is not what was written: its checksum, kind, columns or number of rows do not match."""


def encode(kind: str, arrays: Arrays) -> bytes:
    """The bytes of whole rows of a kind. Raises WireError where they are not whole rows."""
    rows = count_rows(kind, arrays)
    shuffled = {name: _shuffle(arrays[name]) for name in KINDS[kind]}
    frame = pack({"kind": kind, "rows": rows}, shuffled)
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True).compress(frame)


def decode(kind: str, rows: int, data: bytes) -> Arrays:
    """The `rows` rows of `encode`, as read-only arrays. Raises DamagedChunkError."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_CHUNK_BYTES:
            raise DamagedChunkError("a chunk's size is not believable")
        header, packed = unpack(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
        if header.get("kind") != kind or header.get("rows") != rows:
            raise DamagedChunkError(
                f"a chunk of {rows} {kind} rows holds {header.get('rows')} {header.get('kind')} rows"
            )
        arrays: Arrays = {}
        for name, column in KINDS[kind].items():
            there = name if name in packed or not column.since else column.since
            arrays[name] = _restore(column, packed[there])
        if count_rows(kind, arrays) != rows:
            raise DamagedChunkError(f"a chunk of {rows} {kind} rows holds another number of them")
    except (zstandard.ZstdError, WireError, ValueError, KeyError) as error:
        raise DamagedChunkError(f"a chunk of {kind} rows is damaged: {error}") from error
    return arrays


def absent(kind: str, rows: int) -> Arrays:
    """Rows of a kind without ragged columns that stand for positions not measured or lost: NaN, −1, rank 0, valid 0."""
    arrays: Arrays = {}
    for name, column in KINDS[kind].items():
        shape = (rows, column.width) if column.width else (rows,)
        fill: Any = float("nan") if column.dtype == "<f4" else 0 if name in ("valid", "ties", "rank") else -1
        arrays[name] = np.full(shape, fill, column.dtype)
    return arrays


def checksum(*parts: int | str | bytes) -> int:
    """CRC-32 of a row's fields, each with its length: what SQLite itself does not check when a bit flips."""
    crc = 0
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc


def _shuffle(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.itemsize == 1:
        return array
    plain = np.ascontiguousarray(array)
    return plain.reshape(-1).view(np.uint8).reshape(-1, plain.dtype.itemsize).T


def _restore(column: Column, packed: NDArray[Any]) -> NDArray[Any]:
    dtype = np.dtype(column.dtype)
    if dtype.itemsize == 1:
        return packed
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[0] != dtype.itemsize:
        raise DamagedChunkError(f"a column of {column.dtype} is stored as {packed.dtype} {packed.shape}")
    flat = np.ascontiguousarray(packed.T).reshape(-1).view(dtype)
    flat.flags.writeable = False
    return flat.reshape(-1, column.width) if column.width else flat
