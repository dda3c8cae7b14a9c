"""What this machine computes on, seen without loading any library: enough to refuse what it cannot do."""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path
from typing import Literal

Accelerator = Literal["cuda", "rocm", "mps", "cpu"]


@cache
def accelerator() -> Accelerator:
    """The kind of accelerator whose driver is loaded here; `cpu` where there is none."""
    if Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists():
        return "cuda"
    if Path("/dev/kfd").exists():
        return "rocm"
    return "mps" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"
