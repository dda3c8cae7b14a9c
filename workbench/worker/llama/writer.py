"""A GGUF file written from metadata and tensors, one tensor at a time; it appears whole or not at all.

Layout: `GGUF`, u32 version, u64 tensors, u64 entries, the entries, one description per tensor, data aligned at 32.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ModelError

ALIGNMENT = 32
F32, F16, BF16 = 0, 1, 30  # ggml types
SIZES = {F32: 4, F16: 2, BF16: 2}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write: its shape as numpy has it (GGUF lists it the other way round) and ggml's type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: Callable[[], NDArray[Any]]  # of that shape, in the type's own storage (bf16 as uint16)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return int(np.prod(self.shape)) * SIZES[self.kind]


@dataclass(frozen=True, slots=True)
class U32:
    """An unsigned number in the metadata, where most numbers are unsigned; other values go by their Python type."""

    value: int


def write_gguf(
    target: Path, metadata: dict[str, Any], tensors: Sequence[Planned], progress: Callable[[int, int], None]
) -> None:
    """Write `target`. `progress(done, total)` counts tensors and may raise. Raises ModelError where it cannot write."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(b"".join(_head(metadata, tensors)))
            _pad(file)
            for done, tensor in enumerate(tensors, 1):
                data = tensor.data()
                if data.shape != tensor.shape or data.nbytes != tensor.nbytes:
                    raise ModelError(f"tensor {tensor.name} is {data.shape}, not {tensor.shape}", where=str(target))
                file.write(np.ascontiguousarray(data).data)
                _pad(file)
                progress(done, len(tensors))
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        raise ModelError(f"cannot be written: {error.strerror or error}", where=str(target)) from error
    finally:
        Path(name).unlink(missing_ok=True)


def _head(metadata: dict[str, Any], tensors: Sequence[Planned]) -> Iterator[bytes]:
    yield struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        yield _text(key)
        kind = _kind(value)
        yield struct.pack("<I", kind)
        yield from _value(kind, value)
    offset = 0
    for tensor in tensors:
        yield _text(tensor.name)
        yield struct.pack("<I", len(tensor.shape))
        yield struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        yield struct.pack("<IQ", tensor.kind, offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _kind(value: Any) -> int:
    for known, kind in ((bool, _BOOL), (U32, _U32), (int, _I32), (float, _F32), (str, _STRING), (list, _ARRAY)):
        if isinstance(value, known):
            return kind
    raise TypeError(f"{type(value).__name__} has no place in metadata")


def _value(kind: int, value: Any) -> Iterator[bytes]:
    if kind == _STRING:
        yield _text(value)
    elif kind == _ARRAY:
        inner = _kind(value[0]) if value else _STRING
        yield struct.pack("<IQ", inner, len(value))
        for item in value:
            yield from _value(inner, item)
    elif kind == _U32:
        yield struct.pack("<I", value.value)
    else:
        yield struct.pack({_I32: "<i", _F32: "<f", _BOOL: "<?"}[kind], value)


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
