from __future__ import annotations

from pathlib import Path

import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError
from workbench.report.ladder import RED, ladder_facts, ladder_text
from workbench.run.experiment import Experiment
from workbench.run.ladder import Step, differing, ladder, lanes
from workbench.run.prepare import Ask


def told(steps: list[Step]) -> list[tuple[str, ...]]:
    return [step.axes for step in steps]


def test_one_axis_at_a_time_in_both_orders_and_each_lane_once() -> None:
    start, stop = parse_spec("transformers:"), parse_spec("transformers:weights=int8,kv=int4,kv_group=64,attn=eager")
    forwards, back = ladder(start, stop), ladder(start, stop, backwards=True)
    assert told(forwards) == [("weights",), ("kv",), ("attn",)]
    assert told(back) == [("attn",), ("kv",), ("weights",)]
    assert forwards[-1].stop == back[-1].stop == stop
    assert dict(forwards[1].stop.extra) == {"kv_group": "64"}  # the key goes with its axis
    assert len(lanes(forwards, back)) == 5
    assert not any(step.joint for step in (*forwards, *back))


def test_a_step_that_is_refused_alone_joins_the_next_and_says_why() -> None:
    start, stop = parse_spec("llamacpp:kv=q8_0,fa=on"), parse_spec("llamacpp:kv=f16,fa=off")
    (both,) = ladder(start, stop, backwards=True)  # fa=off cannot read values of q8_0
    assert both.axes == ("attn", "kv")
    assert both.joint and "flash attention" in both.why
    assert told(ladder(start, stop)) == [("kv",), ("attn",)]


def test_another_engine_brings_its_own_words_with_it() -> None:
    steps = ladder(parse_spec("transformers:"), parse_spec("llamacpp:weights=Q4_0"))
    assert told(steps) == [("engine", "weights", "kv", "attn"), ("weights",)]
    assert steps[0].joint and "own words" in steps[0].why


def test_the_same_configuration_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the same"):
        ladder(Configuration(), Configuration())
    assert differing(Configuration(), Configuration(extra=(("kv_group", "32"),))) == ["kv"]


def test_the_steps_of_one_order_add_up_to_the_last_lane(tiny_folder: Path, tiny_session: Path, tmp_path: Path) -> None:
    start = Configuration(model=str(tiny_folder), weights="fp32", kv="fp32", chunk=256)
    stop = parse_spec("transformers:weights=fp32,kv=int4,attn=eager", start)
    orders = [ladder(start, stop), ladder(start, stop, backwards=True)]
    experiment = Experiment(Ask(str(tiny_session), start, lanes(*orders), tmp_path / "x.wbs"), lambda _line: None)
    try:
        state = experiment.prepare()
        experiment.start()
        assert experiment.wait(120)
        facts = ladder_facts(state, orders)
    finally:
        experiment.close()
    totals = [sum(step["kl"] for step in order) for order in facts]
    assert totals[0] == pytest.approx(totals[1]) and totals[0] > 0
    kv = next(step for step in facts[0] if step["axes"] == ["kv"])
    attention = next(step for step in facts[0] if step["axes"] == ["attn"])
    assert kv["kl"] > 10 * abs(attention["kl"])
    assert kv["kl_se"] is not None
    text = ladder_text(facts, colour=True)
    assert RED not in text and "kv" in text
    joint = [{**kv, "axes": ["engine", "kv"], "joint": True, "why": "two words"}]
    assert RED in ladder_text([joint], colour=True)
    assert "more than one variable (two words)" in ladder_text([joint], colour=False)
