from __future__ import annotations

from tests.ui.states import make_state
from workbench.report.compare import compare
from workbench.report.depth import depth_text


def test_each_lane_has_a_block_and_says_whether_it_leaves_the_floor() -> None:
    comparison = compare(make_state())
    measured = [lane for lane in comparison["lanes"] if lane["by_depth"]]
    text = depth_text(comparison)
    assert measured
    assert text.count("leaves the floor:") == len(measured)
    assert all(part["turns"] > 0 for lane in measured for part in lane["by_depth"])
    assert depth_text({"lanes": []}) == ""


def test_what_cannot_be_said_is_said_so() -> None:
    part = {
        "from": 0, "to": 2048, "n": 5, "turns": 1, "kl_mean": None, "kl_se": None, "flip_rate": None,
        "flips_beyond_floor": None, "entropy_mean": 0.5, "margin_mean": 1.0,
    }  # fmt: skip
    never = {"depth": None, "low": None, "high": None, "state": "never", "share": 0.02}
    found = {"depth": 900, "low": 300, "high": None, "state": "leaves", "share": 0.9}
    lanes = [
        {"name": f"\x1b[31m{i}", "by_depth": [part], "leaves_floor": v} for i, v in enumerate((None, never, found))
    ]
    text = depth_text({"lanes": lanes})
    assert "cannot be said" in text and "never (2%" in text
    assert "from token 900 on (95 % interval 300 to never)" in text
    assert "\x1b" not in text
