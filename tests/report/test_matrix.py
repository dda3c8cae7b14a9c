from __future__ import annotations

from tests.ui.states import make_state
from workbench.report.matrix import matrix, matrix_text


def test_the_reference_and_every_lane_stand_against_each_other() -> None:
    state = make_state()
    facts = matrix(state)
    count = len(facts["lanes"])
    assert count == 1 + sum(lane.record.kind == "lane" and len(lane.rows) > 0 for lane in state.lanes)
    assert len(facts["pairs"]) == count * (count - 1) // 2
    text = matrix_text(facts)
    assert len(text.splitlines()) == 2 + count
    assert "%" in text
