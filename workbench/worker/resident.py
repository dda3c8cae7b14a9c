"""This process's resident memory at its peak, without any library."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

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


def trim_heap() -> None:
    """Give memory that was freed back to the system, where the C library keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
