from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.metrics.acceptance import acceptance, from_average, from_histogram

steps = st.lists(st.integers(0, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), min_size=1, max_size=40)


def test_the_length_counts_the_bonus_and_slots_are_conditional() -> None:
    found = acceptance([3, 4, 4, 4], [0, 0, 4, 2])
    assert found["pooled"] == found["per_request"] == 10 / 4
    assert found["rate"] == 6 / 15
    assert found["by_slot"] == [2 / 4, 2 / 2, 1 / 2, 1 / 1]
    assert found["histogram"] == [2, 0, 1, 0, 1]
    assert found["source"] == "steps"


@given(steps)
def test_a_histogram_of_full_steps_says_what_the_steps_say(pairs: list[tuple[int, int]]) -> None:
    accepted = [a for _, a in pairs]
    ordered = acceptance([8] * len(accepted), accepted)
    counted = from_histogram(ordered["histogram"], 8 * len(accepted))
    for name in ("pooled", "rate", "steps", "histogram", "by_slot"):
        assert counted[name] == ordered[name]
    assert counted["accepted"] is None


@given(steps)
def test_committed_tokens_lie_between_one_a_step_and_all_that_was_drafted(pairs: list[tuple[int, int]]) -> None:
    found = acceptance([d for d, _ in pairs], [a for _, a in pairs])
    assert 1 <= found["pooled"] <= 1 + max(d for d, _ in pairs)
    assert all(rate is None or 0 <= rate <= 1 for rate in found["by_slot"])


def test_no_steps_have_no_length() -> None:
    assert acceptance([], [])["pooled"] is None
    assert from_histogram([])["pooled"] is None


def test_what_cannot_be_is_refused() -> None:
    for drafted, accepted in (([1], [2]), ([1, 2], [1]), ([1], [-1])):
        with pytest.raises(ValueError, match="do not fit"):
            acceptance(drafted, accepted)
    with pytest.raises(ValueError, match="histogram"):
        from_histogram([1, -1])
    for length in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="at least"):
            from_average(length)
    assert from_average(3.5)["pooled"] == 3.5
