"""This process's resident memory at its peak, without any library."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Begin a new count. Where the kernel offers none (not Linux), the peak is that of the process's whole life."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # proc(5): 5 resets the high-water mark of the resident set


def peak_bytes() -> int:
    """The largest resident set since the last reset."""
    if _STATUS.exists():
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def return_large_blocks() -> None:
    """Have every block from 2 MiB on given back to the system when it is freed, where the C library is glibc.

    By itself glibc raises that limit to the largest block it has seen freed, up to 32 MiB: masks and scratch that grow
    with depth then stay in the heap as holes, and the peak counts them on top of what is used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2 << 20)
        mallopt(_TRIM_THRESHOLD, 8 << 20)


def trim_heap() -> None:
    """Give memory that was freed back to the system, where the C library keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
