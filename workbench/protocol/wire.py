"""Frames: one JSON header and raw little-endian arrays, over a pipe or in a file.

A frame is `u32 header length, u64 body length, header, body`, all little-endian. The header is a JSON object whose key
`arrays` lists `[name, dtype, shape]` in the order in which the arrays' bytes follow. Only numpy's fixed-width numeric
dtypes travel; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

_LENGTHS = struct.Struct("<IQ")
_DTYPES = frozenset({"<i1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "|b1"})
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 34


class WireError(ValueError):
    """Bytes that are not a frame: wrong lengths, unknown dtype, or a stream that ended inside one."""


def pack(header: dict[str, Any], arrays: Arrays | None = None) -> bytes:
    """One frame as bytes. Raises WireError for an array whose dtype does not travel."""
    described: list[list[Any]] = []
    chunks: list[bytes] = []
    for name, array in (arrays or {}).items():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        if little.dtype.str not in _DTYPES:
            raise WireError(f"array {name!r} has dtype {array.dtype}, which does not travel")
        described.append([name, little.dtype.str, list(array.shape)])
        chunks.append(little.tobytes())
    head = json.dumps({**header, "arrays": described}, ensure_ascii=False, separators=(",", ":")).encode()
    body = b"".join(chunks)
    return b"".join((_LENGTHS.pack(len(head), len(body)), head, body))


def unpack(data: bytes | memoryview) -> tuple[dict[str, Any], Arrays]:
    """The header and the arrays of one whole frame; arrays are read-only views of `data`."""
    if len(data) < _LENGTHS.size:
        raise WireError(f"a frame needs {_LENGTHS.size} bytes, here are {len(data)}")
    head_length, body_length = _LENGTHS.unpack_from(data)
    if len(data) != _LENGTHS.size + head_length + body_length:
        raise WireError(f"frame lengths {head_length} + {body_length} do not match {len(data)} bytes")
    view = memoryview(data)
    return _decode(view[_LENGTHS.size : _LENGTHS.size + head_length], view[_LENGTHS.size + head_length :])


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], Arrays] | None:
    """The next frame, or None where the stream ends between two frames. Raises WireError inside one."""
    lengths = stream.read(_LENGTHS.size)
    if not lengths:
        return None
    if len(lengths) < _LENGTHS.size:
        raise WireError("the stream ended inside a frame's lengths")
    head_length, body_length = _LENGTHS.unpack(lengths)
    if head_length > MAX_HEADER_BYTES or body_length > MAX_BODY_BYTES:
        raise WireError(f"frame lengths {head_length} + {body_length} are beyond the limits: not a frame")
    head, body = _read_exactly(stream, head_length), _read_exactly(stream, body_length)
    return _decode(memoryview(head), memoryview(body))


def write_frame(stream: IO[bytes], header: dict[str, Any], arrays: Arrays | None = None) -> None:
    """Write one frame and flush it."""
    stream.write(pack(header, arrays))
    stream.flush()


def _read_exactly(stream: IO[bytes], length: int) -> bytes:
    parts: list[bytes] = []
    missing = length
    while missing:
        part = stream.read(missing)
        if not part:
            raise WireError("the stream ended inside a frame")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decode(head: memoryview, body: memoryview) -> tuple[dict[str, Any], Arrays]:
    try:
        header: Any = json.loads(bytes(head))
        described = header.pop("arrays")
        arrays: Arrays = {}
        offset = 0
        for name, dtype, shape in described:
            if dtype not in _DTYPES or any(not isinstance(side, int) or side < 0 for side in shape):
                raise WireError(f"array {name!r} is described as {dtype} {shape}, which does not travel")
            count = 1
            for side in shape:
                count *= side
            flat = np.frombuffer(body, dtype=dtype, count=count, offset=offset)
            arrays[str(name)] = flat.reshape(shape)
            offset += flat.nbytes
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WireError(f"not a frame: {error}") from error
    if offset != len(body):
        raise WireError(f"the arrays take {offset} bytes, the body has {len(body)}")
    return header, arrays
