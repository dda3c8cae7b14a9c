from __future__ import annotations

import numpy as np
import pytest

from workbench.metrics.changepoint import MIN_TURNS, leaves_floor

TOKENS = 20


def tokens(levels: list[float], seed: int = 0, spread: float = 0.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KL, turns and positions: turn t has the mean KL levels[t], log-normal about it, and begins at 100 t."""
    noise = np.random.default_rng(seed).normal(0, spread, (len(levels), TOKENS))
    kl = np.array(levels)[:, None] * np.exp(noise - spread**2 / 2)
    turns = np.repeat(np.arange(len(levels)), TOKENS)
    positions = (np.arange(len(levels))[:, None] * 100 + np.arange(TOKENS)).ravel()
    return kl.ravel(), turns, positions


@pytest.mark.parametrize("change", [4, 10, 16])
def test_a_known_change_is_found_within_its_interval(change: int) -> None:
    found = leaves_floor(*tokens([0.001] * change + [0.02] * (20 - change)), 0.004)
    assert found is not None
    assert (found.depth, found.state) == (100 * change, "leaves")
    assert found.low is not None and found.high is not None
    assert found.low <= 100 * change <= found.high
    assert found.share > 0.95


def test_one_turn_on_the_wrong_side_moves_nothing() -> None:
    levels = [0.001] * 10 + [0.02] * 10
    levels[3], levels[15] = 0.02, 0.001
    found = leaves_floor(*tokens(levels), 0.004)
    assert found is not None
    assert found.depth == 1000


def test_never_and_from_the_start_are_told_apart() -> None:
    never, always = (leaves_floor(*tokens([level] * 12), 0.004) for level in (0.001, 0.02))
    assert never is not None and always is not None
    assert (never.depth, never.state, never.share) == (None, "never", 0)
    assert (always.depth, always.low, always.high, always.state, always.share) == (0, 0, 0, "from the start", 1)
    assert never.to_json()["depth"] is None


def test_noise_at_the_level_has_a_wide_interval() -> None:
    levels = np.exp(np.random.default_rng(5).normal(np.log(0.004), 0.8, 20)).tolist()
    found = leaves_floor(*tokens(levels), 0.004)
    assert found is not None
    assert found.high is None or found.low is None or found.high - found.low > 300


def test_few_turns_and_no_floor_give_nothing() -> None:
    assert leaves_floor(*tokens([0.02] * (MIN_TURNS - 1)), 0.004) is None
    assert leaves_floor(*tokens([0.02] * 12), 0.0) is None
