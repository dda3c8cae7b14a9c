"""Signals that end a command as ctrl+c does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and a lost terminal end what runs here as ctrl+c does: children ended, files whole."""
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
