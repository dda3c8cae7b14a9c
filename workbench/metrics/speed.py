"""Tokens per second: the median over moving windows, so that a stall or a first slow step does not set the figure.

Prefill seconds cover the engine's forward passes over the context; decode seconds one token at a time after it. Loading
the weights and running tools belong to neither.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW = 16
"""Tokens in one window."""


def decode_rates(seconds: NDArray[np.floating], window: int = WINDOW) -> NDArray[np.float64]:
    """Tokens/s over each run of `window` tokens, from the times at which tokens were known.

    The first token's time only starts the clock (it comes from the prefill). Fewer than window + 1 tokens make one
    window of what there is; fewer than 2, or times that do not advance, none.
    """
    times = seconds.astype(np.float64)
    width = min(window, len(times) - 1)
    if width < 1:
        return np.zeros(0)
    spans = times[width:] - times[:-width]
    return width / spans[spans > 0]


def decode_tps(seconds: NDArray[np.floating], window: int = WINDOW) -> float | None:
    """The median of `decode_rates`, or None where there is none."""
    rates = decode_rates(seconds, window)
    return float(np.median(rates)) if len(rates) else None


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Plain tokens over seconds, None where no time passed."""
    return tokens / seconds if seconds > 0 else None
