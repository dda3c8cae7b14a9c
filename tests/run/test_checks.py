from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.config.lane import parse_spec
from workbench.errors import ConfigurationError, InvalidLaneError
from workbench.protocol.columns import KINDS
from workbench.run.checks import (
    check_effective,
    check_predictions,
    check_tokens,
    differences,
    first_difference,
    no_effect,
)
from workbench.store.state import Columns, LaneRecord, LaneState

VOCABULARY = 1000


def lane(spec: str = "llamacpp:", n: int = 300, flips: float = 0.0, nll: float = 2.0, seed: int = 0) -> LaneState:
    random = np.random.default_rng(seed)
    rows: dict[str, Any] = {
        name: np.zeros((n, item.width) if item.width else n, item.dtype) for name, item in KINDS["rows"].items()
    }
    rows["valid"][:] = 1
    rows["rank"] = np.where(np.arange(n) < flips * n, 2, 1).astype("<i4")
    random.shuffle(rows["rank"])
    rows["logprob"] = (-nll + random.normal(0, 0.1, n)).astype("<f4")
    rows["top_logprobs"] = random.normal(-3, 1, (n, 4)).astype("<f4")
    columns = Columns("rows", 1)
    columns.append(1, rows)
    record = LaneRecord(1, spec, "lane", parse_spec(spec).to_json(), status="done")
    return LaneState(record, columns, Columns("continuation", 0))


@pytest.mark.parametrize(
    ("spec", "effective", "says"),
    [
        ("vllm:attn=CPU_ATTN", {"weights": "bf16", "kv": "auto", "attn": "CPU_ATTN", "chunk": 512}, []),
        ("vllm:kv=fp8", {"weights": "bf16", "kv": "fp8", "attn": "CPU_ATTN", "chunk": 512}, []),
        ("llamacpp:weights=file", {"weights": "Q4_1", "kv": "f16", "attn": "on"}, []),
        (
            "vllm:attn=FLASHINFER",
            {"weights": "bf16", "kv": "auto", "attn": "CPU_ATTN"},
            ["attn: asked for FLASHINFER, runs CPU_ATTN"],
        ),
        (
            "llamacpp:kv=q8_0",
            {"weights": "BF16", "kv": None, "attn": "on"},
            ["kv: asked for q8_0, cannot be read back"],
        ),
        (
            "vllm:chunk=256",
            {"weights": "bf16", "kv": "auto", "attn": "CPU_ATTN", "chunk": 2048},
            ["chunk: asked for 256, runs 2048"],
        ),
        ("server:url=http://x", {"weights": "served", "kv": "served", "attn": "served", "chunk": None}, []),
    ],
)
def test_what_runs_is_compared_with_what_was_asked_for(spec: str, effective: dict[str, Any], says: list[str]) -> None:
    assert differences(parse_spec(spec), effective) == says
    if says:
        with pytest.raises(InvalidLaneError, match="Nothing was measured"):
            check_effective(parse_spec(spec), effective)


def test_nonsense_is_invalid_and_damage_is_not() -> None:
    good = lane()
    check_predictions(lane(flips=0.6), good, VOCABULARY)
    check_predictions(lane(flips=0.95, n=255), good, VOCABULARY)
    with pytest.raises(InvalidLaneError, match="of the top tokens differ"):
        check_predictions(lane(flips=0.95), good, VOCABULARY)
    with pytest.raises(InvalidLaneError, match=r"blind guessing among 1,000 ids gives 6\.91"):
        check_predictions(lane(nll=7.5), good, VOCABULARY)


def test_a_text_that_the_reference_cannot_predict_either_says_nothing_about_a_lane() -> None:
    check_predictions(lane(nll=7.5), lane(nll=7.4), VOCABULARY)


def test_a_setting_that_changed_not_one_bit_had_no_effect() -> None:
    plain = lane("vllm:")
    same = lane("vllm:weights=fp16")
    assert no_effect(same, [plain, same]) == "vllm:"
    assert no_effect(lane("vllm:weights=fp16", seed=1), [plain]) == ""
    assert no_effect(lane("vllm:attn=CPU_ATTN"), [plain]) == "", "auto may well be what was chosen"
    assert no_effect(lane("vllm:weights=checkpoint"), [plain]) == "", "the folder may well hold what the other names"
    assert no_effect(lane("vllm:draft=ngram,lookup_max=3"), [plain]) == "", "divergence is measured without it"
    assert no_effect(lane("vllm:kv_space=2"), [plain]) == "", "room is no setting of the numerics"
    assert no_effect(lane("llamacpp:"), [plain]) == "", "another engine"
    unfinished = lane("vllm:")
    unfinished.record = replace(unfinished.record, status="failed")
    assert no_effect(same, [unfinished]) == ""


def test_other_tokens_are_refused_with_the_first_difference() -> None:
    ours = np.array([1, 2, 3], "<i4")
    check_tokens(ours, ours.copy(), "x", lambda token: b"t%d" % token)
    assert first_difference(ours, ours) is None
    for theirs, says in (
        ([1, 9, 3], "token 1 is 9 't9', ours is 2 't2'"),
        ([1, 2], "token 2 is the end, ours is 3 't3'"),
        ([0, 1, 2, 3], r"token 0 is 0 't0', ours is 1 't1' \(4 and 3 tokens\)"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            check_tokens(ours, np.array(theirs, "<i4"), "x", lambda token: b"t%d" % token)
