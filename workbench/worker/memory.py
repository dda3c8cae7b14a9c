"""The most memory a job took, by the best counter that the platform has."""

from __future__ import annotations

import torch

from workbench.worker.resident import peak_bytes, reset_peak, trim_heap


class PeakMemory:
    """Counts from `reset()` on. `kind` is `device` (CUDA), or `rss`: this process's resident memory.

    Where the kernel offers no reset (not Linux), the RSS peak is that of the process's whole life.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "device" if device.type == "cuda" else "rss"

    def reset(self) -> None:
        """Begin a new count."""
        if self.kind == "device":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak()

    def read(self) -> int:
        """Bytes at the peak."""
        if self.kind == "device":
            return int(torch.cuda.max_memory_allocated(self.device))
        return peak_bytes()


def return_freed() -> None:
    """Give freed memory back to the system: glibc kept 500 MB of it after quantizing a model of 135M weights."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says, in any of its ways, that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, which torch's go on from for pages; its type where there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
