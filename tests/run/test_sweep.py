from __future__ import annotations

import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError
from workbench.run import sweep as module
from workbench.run.sweep import sweep


def swept(axis: str, *specs: str) -> tuple[list[str], list[str]]:
    """The values of the axis that became lanes, and what was said of the others."""
    said: list[str] = []
    bases = tuple(parse_spec(spec) for spec in specs)
    lanes = sweep(axis, bases, Configuration(), said.append)
    return [f"{lane.engine} {getattr(lane, axis)}" for lane in lanes], said


def test_every_value_that_can_be_done_is_a_lane_and_the_others_are_named_with_their_reason() -> None:
    lanes, said = swept("attn", "transformers:device=cpu")
    assert lanes == [f"transformers {value}" for value in ("sdpa", "eager", "flex", "sdpa-math", "sdpa-flash")]
    assert any("attn=flash_attention_2" in line and "needs a GPU" in line for line in said)
    assert not any("OWNER" in line for line in said)


def test_the_reference_itself_is_no_lane_and_none_comes_twice() -> None:
    lanes, _ = swept("attn", "transformers:", "transformers:")
    assert "transformers sdpa" not in lanes
    assert len(lanes) == len(set(lanes))


def test_each_base_keeps_what_it_says_besides() -> None:
    lanes, said = swept("kv", "transformers:", "llamacpp:attn=off")
    assert "transformers int2" in lanes and "llamacpp f32" in lanes
    assert any("kv=q8_0" in line and "flash attention" in line for line in said)


def test_an_axis_without_any_lane_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "refusal", lambda _lane: ConfigurationError("no"))
    with pytest.raises(ConfigurationError, match="no lane here"):
        swept("attn", "transformers:")
