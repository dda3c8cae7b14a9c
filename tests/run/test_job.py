from __future__ import annotations

from typing import Any

import pytest

from workbench.config.lane import parse_spec
from workbench.errors import InvalidLaneError
from workbench.run.checks import check_effective

LANE = parse_spec("transformers:weights=int8,kv=int4,attn=eager,threads=2")
RAN: dict[str, Any] = {"weights": {"scheme": "int8"}, "kv": {"scheme": "int4"}, "attn": "eager", "threads": 2}


def test_an_engine_that_runs_what_was_asked_passes() -> None:
    check_effective(LANE, RAN)
    check_effective(parse_spec("transformers:weights=int8,kv=int4,attn=eager"), RAN)


@pytest.mark.parametrize(
    ("axis", "ran"),
    [("weights", {"scheme": "bf16"}), ("kv", {"scheme": "bf16"}), ("attn", "sdpa"), ("threads", 1), ("kv", None)],
)
def test_an_engine_that_took_a_setting_and_runs_another_is_marked_invalid(axis: str, ran: object) -> None:
    with pytest.raises(InvalidLaneError, match=f"{axis}: asked for"):
        check_effective(LANE, {**RAN, axis: ran})
