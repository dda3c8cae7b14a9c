from __future__ import annotations

import numpy as np
import pytest

from workbench.metrics.pairs import Side, pair_summary


def side(first: int, top: list[int], logprob: float = -1.0, invalid: tuple[int, ...] = ()) -> Side:
    valid = np.ones(len(top), bool)
    valid[list(invalid)] = False
    return Side(first, np.array(top, np.int32), np.full(len(top), logprob, np.float32), valid)


GENERATED = np.array([0, 0, 1, 1, 0, 1, 1, 1], np.uint8)


def test_flips_count_the_assistants_tokens_and_the_first_difference_any() -> None:
    pair = pair_summary(side(1, [1, 2, 3, 4, 5, 6, 7]), side(1, [9, 2, 3, 4, 5, 9, 9], -1.5), GENERATED)
    assert (pair["n"], pair["flips"], pair["flip_rate"]) == (5, 2, 0.4)
    assert (pair["first_difference"], pair["first_flip"]) == (1, 6)
    assert pair["logprob_difference"] == pytest.approx(0.5)


def test_only_positions_that_both_measured_and_hold_numbers_count() -> None:
    pair = pair_summary(side(1, [1, 2, 3, 4, 5, 6, 7]), side(3, [9, 4, 5, 6], invalid=(0,)), GENERATED)
    assert (pair["n"], pair["flips"], pair["first_difference"]) == (2, 0, None)
    assert pair_summary(side(1, [1]), side(5, [1]), GENERATED)["flip_rate"] is None


def test_a_lane_is_itself() -> None:
    same = side(1, [1, 2, 3, 4, 5, 6, 7])
    pair = pair_summary(same, same, GENERATED)
    assert (pair["flips"], pair["first_difference"], pair["logprob_difference"]) == (0, None, 0.0)
