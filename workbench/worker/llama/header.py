"""A GGUF file before it is loaded: is it whole, its metadata and its tensors, read by llama.cpp's own parser.

The parser answers damage with an error. Loading such a file can end the process instead: a tensor beyond the end of a
mapped file is a bus error. So every file is read here first.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import ModelError
from workbench.worker.llama.binding import function
from workbench.worker.llama.log import Log

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip
_C_TYPES: dict[str, Any] = {
    "u8": ctypes.c_uint8, "i8": ctypes.c_int8, "u16": ctypes.c_uint16, "i16": ctypes.c_int16, "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32, "f32": ctypes.c_float, "bool": ctypes.c_bool, "u64": ctypes.c_uint64, "i64": ctypes.c_int64,
    "f64": ctypes.c_double,
}  # fmt: skip
_POINTER = ctypes.c_void_p
DAMAGED = "It is cut off or damaged: fetch it again."


class _Params(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class Header:
    """`metadata` holds scalars and texts, of arrays their length; `tensors` counts tensors by type, `bytes` bytes."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, int]
    bytes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def dominant(self) -> str:
        """The type that most bytes are of."""
        return max(self.bytes, key=lambda name: self.bytes[name])

    @property
    def quantized(self) -> bool:
        """Whether any tensor is of another type than a float."""
        return bool(self.tensors.keys() - {"F32", "F16", "BF16", "F64"})


def read_header(path: Path, log: Log) -> Header:
    """Read and check. Raises ModelError where the file is missing, damaged or shorter than its tensors."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if magic != b"GGUF":
        raise ModelError(f"not a GGUF file: it begins with {magic!r}", where=str(path), next=DAMAGED)
    log.begin()
    opened = function("gguf_init_from_file", _POINTER, ctypes.c_char_p, _Params)
    file = opened(str(path).encode(), _Params(True, None))
    if not file:
        raise ModelError(f"not a whole GGUF file: {log.complaint()}", where=str(path), next=DAMAGED)
    try:
        return _checked(file, path, size)
    finally:
        function("gguf_free", None, _POINTER)(file)


def _checked(file: Any, path: Path, size: int) -> Header:
    start = function("gguf_get_data_offset", ctypes.c_size_t, _POINTER)(file)
    offset = function("gguf_get_tensor_offset", ctypes.c_size_t, _POINTER, ctypes.c_int64)
    length = function("gguf_get_tensor_size", ctypes.c_size_t, _POINTER, ctypes.c_int64)
    kind = function("gguf_get_tensor_type", ctypes.c_int, _POINTER, ctypes.c_int64)
    name = function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    count = function("gguf_get_n_tensors", ctypes.c_int64, _POINTER)(file)
    tensors: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    end = start
    for index in range(count):
        word = name(kind(file, index)).decode().upper()
        tensors[word] += 1
        stored[word] += length(file, index)
        end = max(end, start + offset(file, index) + length(file, index))
    if end > size:
        raise ModelError(
            f"not a whole GGUF file: it has {size:,} bytes, its tensors need {end:,}", where=str(path), next=DAMAGED
        )
    metadata = _metadata(file)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture or not count:
        raise ModelError("the GGUF file names no architecture or holds no tensors", where=str(path), next=DAMAGED)
    return Header(architecture, metadata, dict(tensors), dict(stored))


def _metadata(file: Any) -> dict[str, Any]:
    key = function("gguf_get_key", ctypes.c_char_p, _POINTER, ctypes.c_int64)
    kind = function("gguf_get_kv_type", ctypes.c_int, _POINTER, ctypes.c_int64)
    text = function("gguf_get_val_str", ctypes.c_char_p, _POINTER, ctypes.c_int64)
    length = function("gguf_get_arr_n", ctypes.c_size_t, _POINTER, ctypes.c_int64)
    found: dict[str, Any] = {}
    for index in range(function("gguf_get_n_kv", ctypes.c_int64, _POINTER)(file)):
        name, type_number = key(file, index).decode("utf-8", "replace"), kind(file, index)
        if type_number == _STRING:
            found[name] = text(file, index).decode("utf-8", "replace")
        elif type_number == _ARRAY:
            found[name] = length(file, index)
        elif type_number in _SCALARS:
            word = _SCALARS[type_number]
            found[name] = function(f"gguf_get_val_{word}", _C_TYPES[word], _POINTER, ctypes.c_int64)(file, index)
    return found
