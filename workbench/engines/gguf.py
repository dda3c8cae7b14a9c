"""The header of a GGUF file, read with the standard library: is it whole, what architecture, which quantization.

Layout: `GGUF`, u32 version, u64 tensors, u64 metadata entries, the entries, one description per tensor, aligned data.
Checked before the engine's process is asked to convert it, so that a damaged file is named in a second.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
TOKENS = "tokenizer.ggml.tokens"
_BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
}  # fmt: skip
"""Tensor type → name, weights a block, bytes a block; other types are named by number and their size is not checked."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says of itself; `quantization` is the type of most of its tensor elements."""

    version: int
    architecture: str
    quantization: str
    tensors: int
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])  # scalars and texts; arrays by their length
    tokens: tuple[str, ...] = ()  # the vocabulary as it is written there, by id


def read_gguf(path: Path) -> GGUFHeader:
    """Read and check a GGUF header and that the file holds all its tensors. Raises ModelError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except ValueError as error:  # an empty file cannot be mapped
        raise _damaged(path, "the file is empty") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise _damaged(self.path, f"it begins with {self.data[:4]!r}, not with b'GGUF'")
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            order = " (it may be big-endian)" if version & 0xFFFF == 0 and version else ""
            raise _damaged(self.path, f"version {version}{order}; versions 2 and 3 can be read")
        tensors, entries = self.scalar("<Q"), self.scalar("<Q")
        if max(tensors, entries) > len(self.data) // 8:
            raise _damaged(
                self.path, f"{tensors:,} tensors and {entries:,} entries cannot stand in {len(self.data):,} bytes"
            )
        metadata: dict[str, Any] = {}
        vocabulary: tuple[str, ...] = ()
        for _ in range(entries):
            key, kind = self.text(), self.scalar("<I")
            if key == TOKENS and kind == _ARRAY:
                vocabulary = self.texts()
                metadata[key] = len(vocabulary)
            else:
                metadata[key] = self.value(kind)
        elements: Counter[str] = Counter()
        extents: list[int] = []
        for _ in range(tensors):
            name = self.text()
            dimensions = self.scalar("<I")
            if dimensions > 8:
                raise _damaged(self.path, f"tensor {name!r:.60} has {dimensions} dimensions")
            count = 1
            for _ in range(dimensions):
                count *= self.scalar("<Q")
            kind, offset = self.scalar("<I"), self.scalar("<Q")
            label, block, size = _BLOCKS.get(kind, (f"type {kind}", 1, 0))
            elements[label] += count
            extents.append(offset + count // block * size)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _damaged(self.path, f"alignment {alignment!r}")
        end = -(-self.at // alignment) * alignment + max(extents, default=0)
        if end > len(self.data):
            raise _damaged(self.path, f"it has {len(self.data):,} bytes, its tensors need {end:,}")
        architecture = str(metadata.get("general.architecture", ""))
        if not architecture or not tensors:
            raise _damaged(self.path, "it names no architecture" if tensors else "it holds no tensors")
        most = max(elements, key=lambda name: elements[name])
        return GGUFHeader(version, architecture, most, tensors, metadata, vocabulary)

    def scalar(self, form: str) -> Any:
        size = struct.calcsize(form)
        if self.at + size > len(self.data):
            raise _damaged(self.path, f"its header ends at byte {len(self.data):,}")
        value = struct.unpack_from(form, self.data, self.at)[0]
        self.at += size
        return value

    def text(self) -> str:
        return self.raw(self.scalar("<Q")).decode("utf-8", "backslashreplace")

    def texts(self) -> tuple[str, ...]:
        """An array of texts; one of anything else is damaged."""
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner != _STRING or count > len(self.data) // 8:
            raise _damaged(self.path, f"its vocabulary is {count:,} values of type {inner}")
        return tuple(self.text() for _ in range(count))

    def raw(self, length: int) -> bytes:
        if self.at + length > len(self.data):
            raise _damaged(self.path, f"a text of {length:,} bytes at byte {self.at:,} runs past the end")
        self.at += length
        return self.data[self.at - length : self.at]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 4:
            raise _damaged(self.path, f"unknown value type {kind} at byte {self.at:,}")
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner in _SCALARS:
            self.raw(struct.calcsize(_SCALARS[inner]) * count)
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return count


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(
        f"not a whole GGUF file: {what}", where=str(path), next="It is cut off or damaged: fetch it again."
    )
