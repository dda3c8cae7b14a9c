"""The tensors of a safetensors folder, mapped, read with numpy alone."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ModelError

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_HEADER = 100 << 20
FETCH_AGAIN = "Run `workbench models verify`, or fetch the model again."


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor in a file: `dtype` F32, F16 or BF16, and where its bytes are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> NDArray[Any]:
        """The values as they are stored, mapped; bf16 as uint16."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, STORED[self.dtype])
        return np.memmap(self.path, STORED[self.dtype], "r", self.offset, self.shape)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors by name. Raises ModelError where files are missing, damaged or of another dtype."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("there is no safetensors file", where=str(folder), next=FETCH_AGAIN)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= _read_header(file)
        except (OSError, ValueError, KeyError, TypeError, struct.error, AttributeError) as error:
            raise ModelError(f"the file is damaged: {error}", where=str(file), next=FETCH_AGAIN) from error
    return tensors


def _read_header(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER, size - 8):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        entries: dict[str, Any] = json.loads(file.read(length))
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
        if dtype not in STORED:
            raise ValueError(f"tensor {name} is of type {dtype}; known: {', '.join(STORED)}")
        if min(shape, default=0) < 0 or end - begin != math.prod(shape) * np.dtype(STORED[dtype]).itemsize:
            raise ValueError(f"tensor {name} has {end - begin:,} bytes for a shape of {shape}")
        if begin < 0 or 8 + length + end > size:
            raise ValueError(f"tensor {name} ends beyond the file's {size:,} bytes")
        tensors[name] = Tensor(path, dtype, shape, 8 + length + begin)
    return tensors
