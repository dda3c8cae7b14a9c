from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import ConfigurationError
from workbench.run.calibration import LENGTH, SHARED, WINDOWS, calibration, grams, unshared
from workbench.session.script import load_session
from workbench.session.template import Renderer, render


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> Renderer:
    return Renderer.load(smollm2)


def holds(windows: np.ndarray, ids: np.ndarray) -> bool:
    return any(np.isin(grams(window), grams(ids)).any() for window in windows)


def test_the_demo_is_the_start_of_the_long_sample_and_none_of_it_is_calibrated_on(renderer: Renderer) -> None:
    demo = render(load_session("demo"), renderer).stream["ids"]
    made = calibration((), renderer, demo, "lane")
    assert made.windows.shape == (WINDOWS, LENGTH)
    assert holds(render(load_session("refactor-long"), renderer).stream["ids"][None, :9000], demo)
    assert not holds(made.windows, demo)
    assert made.facts["sessions"] == ["refactor-long", "dice"]
    assert made.facts["left_out_tokens"] >= len(demo)
    assert calibration((), renderer, None, "lane").hash == made.hash  # the demo is always left out of the samples


def test_the_session_under_study_is_refused_as_its_own_calibration_text(renderer: Renderer) -> None:
    dice = render(load_session("dice"), renderer).stream["ids"]
    with pytest.raises(ConfigurationError, match="not the session under study"):
        calibration(("dice",), renderer, dice, "lane")
    assert len(calibration(("dice",), renderer, None, "lane").windows) > 0


def test_a_short_session_gives_shorter_windows(renderer: Renderer, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    text = " ".join(f"line {number} of the text" for number in range(40))
    path.write_text(
        json.dumps({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "so"}]})
    )
    made = calibration((str(path),), renderer, None, "lane")
    assert 64 <= made.windows.shape[1] < LENGTH
    assert made.facts["length"] == made.windows.shape[1]


def test_spans_leave_out_every_token_of_a_shared_run() -> None:
    ids = np.arange(200, dtype=np.int32)
    known = np.unique(grams(ids[50 : 50 + SHARED + 3]))
    assert unshared(ids, known) == [(0, 50), (50 + SHARED + 3, 200)]
    assert unshared(ids, np.zeros(0, np.uint64)) == [(0, 200)]
    assert unshared(ids, np.unique(grams(ids))) == []
