from __future__ import annotations

from pathlib import Path

import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.state import SessionState


def measured(ask: Ask) -> SessionState:
    experiment = Experiment(ask, lambda line: None)
    try:
        experiment.prepare()
        experiment.start()
        assert experiment.wait(600)
    finally:
        experiment.close()
    assert ask.output is not None
    with SavedSession.open(ask.output) as saved:
        state = load_state(saved)
    assert {lane.record.status for lane in state.lanes} == {"done"}, [lane.record.reason for lane in state.lanes]
    return state


@pytest.mark.slow
def test_the_embedded_models_bf16_reference_is_itself_exactly_and_lanes_repeat_bit_for_bit(
    smollm2: Path, tmp_path: Path
) -> None:
    base = Configuration(model=str(smollm2))
    lanes = (base, parse_spec("transformers:kv=int4", base))
    first = measured(Ask("dice", base, lanes, tmp_path / "a.wbs"))
    second = measured(Ask("dice", base, lanes[1:], tmp_path / "b.wbs"))
    assert len(first.lanes[1].rows) == len(first.stream["ids"]) - 1
    for name in ("kl", "kl_low", "tv"):
        assert not first.lanes[1].rows.column(name).any()
    assert first.lanes[2].rows.column("kl").max() > 0.1
    for name in ("kl", "kl_low", "tv", "rank", "logprob", "top_ids", "top_logprobs"):
        one, two = first.lanes[2].rows.column(name), second.lanes[1].rows.column(name)
        assert one.tobytes() == two.tobytes()


@pytest.mark.slow
def test_the_embedded_models_decode_path_equals_its_prefill_path_in_fp32(smollm2: Path, tmp_path: Path) -> None:
    base = Configuration(model=str(smollm2), weights="fp32", kv="fp32")
    state = measured(Ask("dice", base, (), tmp_path / "c.wbs", floor=True))
    assert state.floor is not None
    decode = next(row for row in state.floor["rows"] if row["name"] == "decode path")
    assert decode["n"] == min(256, int(state.stream["generated"].sum()))
    assert 0 <= decode["kl_mean"] < 1e-8
    assert decode["flips"] == 0
