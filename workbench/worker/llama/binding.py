"""llama.cpp's library: its names for our words, what it was built with, and the devices it sees."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort's last line is its reason, not a debugger's pages

import llama_cpp
import llama_cpp.llama_cpp
from llama_cpp._ggml import libggml

api: Any = llama_cpp.llama_cpp
"""llama.cpp's functions and structures. Untyped: the binding's annotations do not hold for pointers."""

FILE_TYPES: dict[str, int] = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32,
}  # fmt: skip
"""The schemes of weights by their `llama_ftype`, as `general.file_type` names them."""

KV_TYPES: dict[str, int] = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_0": 6, "q4_0": 2}
"""The types of keys and values by their `ggml_type`; the binding has no constant for bf16."""

ATTENTION: dict[str, int] = {
    "auto": api.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "off": api.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "on": api.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}

VERSION: str = llama_cpp.__version__
"""Of the llama-cpp-python package."""

_GPU_KINDS = (1, 2)  # ggml_backend_dev_type: a GPU of its own, one that shares the host's memory


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml's library that the binding leaves out. Raises AttributeError where the library has none."""
    found = getattr(libggml, name)
    found.restype, found.argtypes = result, list(arguments)
    return found


def build() -> str:
    """llama.cpp's own version, and ggml's version and commit, where they can be read."""
    parts = [f"llama.cpp {_text(api.llama_version())}"]
    for label, name in (("ggml", "ggml_version"), ("commit", "ggml_commit")):
        try:
            parts.append(f"{label} {_text(function(name, ctypes.c_char_p)())}")
        except AttributeError:
            continue
    return ", ".join(parts)


def system_info() -> str:
    """What the library was built with and uses here, as it prints it."""
    return _text(api.llama_print_system_info())


def cpu_features() -> str:
    """The switches that are on in `system_info`."""
    words = [word.split("=") for word in system_info().replace("CPU :", "").split("|")]
    return " ".join(word[0].strip() for word in words if len(word) == 2 and word[1].strip() != "0")


def has_amx() -> bool:
    """Whether llama.cpp would compute quantised weights with AMX here.

    It is never let: GCC 12 takes the instruction that configures the tiles for one that reads 8 bytes of its 64, and
    leaves out the stores to the others. The first pass of more than one token then ends the process.
    """
    return "AMX_INT8" in cpu_features().split()


def devices() -> list[tuple[str, str]]:
    """The name and description of each GPU that the library can use, in its order."""
    count = function("ggml_backend_dev_count", ctypes.c_size_t)
    get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    name = function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    described = function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    found = [get(index) for index in range(count())]
    return [(_text(name(device)), _text(described(device))) for device in found if kind(device) in _GPU_KINDS]


def physical_cores() -> int:
    """Cores that this process may run on, each counted once whatever threads it has; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    here = affinity(0) if affinity is not None else range(os.cpu_count() or 1)
    cores: set[str] = set()
    for cpu in here:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="ascii"))
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace").strip()
