from __future__ import annotations

import numpy as np
import pytest

from workbench.metrics.speed import decode_rates, decode_tps, tokens_per_second


def test_median_rate_ignores_one_stall() -> None:
    seconds = np.arange(200) * 0.01
    seconds[100:] += 5
    assert decode_tps(seconds) == pytest.approx(100)
    assert len(decode_rates(seconds)) == 184


def test_the_first_tokens_time_only_starts_the_clock() -> None:
    assert decode_tps(5.0 + 0.1 * np.arange(40)) == pytest.approx(10, rel=1e-9)
    assert decode_tps(np.array([5.0, 5.5])) == pytest.approx(2)


def test_a_short_run_is_one_window_and_a_single_token_has_no_rate() -> None:
    assert decode_tps(np.array([1.0, 1.5, 2.0])) == pytest.approx(2)
    assert decode_tps(np.array([1.0])) is None
    assert decode_tps(np.zeros(0)) is None
    assert decode_tps(np.ones(5)) is None


def test_tokens_over_no_time_is_unknown() -> None:
    assert tokens_per_second(512, 2.0) == 256
    assert tokens_per_second(512, 0.0) is None
