from __future__ import annotations

from typing import Any

import pytest

from workbench.config.lane import parse_spec
from workbench.store.effective import (
    acceptance,
    engine_words,
    logits_words,
    named_only,
    sentences,
    settings,
    without_effect,
)
from workbench.store.state import LaneRecord


def record(name: str, spec: str, kind: Any = "lane", **values: Any) -> LaneRecord:
    return LaneRecord(1, name, kind, parse_spec(spec).to_json(), **values)


def shown(spec: str, **manifest: Any) -> dict[str, str]:
    found = settings(parse_spec(spec).to_json(), manifest)
    return {name: setting.text for name, setting in found.items()}


def test_a_setting_says_what_ran_and_what_was_asked_where_that_is_another_word() -> None:
    ran: dict[str, Any] = {"weights": {"scheme": "Q8_0"}, "kv": "q8_0", "attn": "on", "device": "cpu", "threads": 2}
    found = shown("llamacpp:weights=Q8_0,kv=q8_0,fa=auto", engine="llamacpp", chunk=512, **ran)
    assert found == {
        "weights": "Q8_0", "kv": "q8_0", "attn": "auto → on", "draft": "none", "device": "cpu", "threads": "2",
        "chunk": "512",
    }  # fmt: skip
    assert shown("vllm:attn=FLASHINFER", engine="vllm", attn="CPU_ATTN")["attn"] == "FLASHINFER → CPU_ATTN"


def test_what_cannot_be_read_back_is_never_a_copy_of_what_was_asked() -> None:
    found = shown("vllm:kv=fp8,attn=auto", engine="vllm", weights=None, kv=None, attn=None, device=None, chunk=None)
    assert found["kv"] == "fp8 (?)" and found["attn"] == "?"
    assert found["device"] == found["threads"] == found["chunk"] == "?"


def test_before_an_engine_has_started_there_is_only_what_was_asked() -> None:
    found = shown("vllm:kv=fp8")
    assert found["kv"] == "fp8" and found["attn"] == "auto"
    assert settings({"engine": "of a newer version"}, {})["kv"].ran == ""


def test_a_drafter_is_awaited_until_its_own_run() -> None:
    spec = "vllm:draft=ngram"
    assert shown(spec, engine="vllm", weights="bf16")["draft"] == "ngram"
    assert shown(spec, engine="vllm", draft=None)["draft"] == "ngram (?)"
    assert shown("server:url=http://h", engine="server", draft="eagle3")["draft"] == "none → eagle3"


def test_engines_and_what_they_give_have_short_names() -> None:
    assert engine_words({"engine": "llamacpp", "version": "0.3.36"}) == "llamacpp 0.3.36"
    assert engine_words({"engine": "server", "dialect": "vllm", "version": "0.32.0"}) == "server vllm 0.32.0"
    assert engine_words({}, {"engine": "vllm"}) == "vllm"
    assert (named_only({"logits": "top-256"}), named_only({"logits": "full"})) == (256, None)
    assert [logits_words({"logits": kind}) for kind in ("full", "top-20", "trace ids", "other", None)] == [
        "whole distributions", "its own top 20 only", "at the trace's ids", "other", "",
    ]  # fmt: skip
    assert sentences({"differs": "one"}, "differs") == ["one"] and sentences({"notes": None}, "notes") == []


@pytest.mark.parametrize(
    ("spec", "twin", "says"),
    [
        ("transformers:kv=int8", "bf16", "the reference although kv differs: the setting had no effect"),
        ("transformers:kv=int8", "reference", "the reference although kv differs: the setting had no effect"),
        ("transformers:kv=int8,kv_group=8", "other", "other although weights, kv and kv_group differ: the settings"),
        ("vllm:kv=fp8,draft=ngram,width=3", "bf16", "although engine, kv and attn differ"),
        ("transformers:kv=int8", "gone", "gone although a setting differs: it had no effect"),
    ],
)
def test_a_lane_without_effect_names_its_twin_and_what_differs(spec: str, twin: str, says: str) -> None:
    reference = record("bf16", "transformers", "reference")
    other = record("other", "transformers:weights=int8")
    floor = record(twin, "transformers:chunk=8", "floor")
    mine = record("mine", spec, stats={"no_effect": twin})
    assert says in without_effect(mine, [floor, reference, other, mine])
    assert without_effect(other, [reference, mine]) == ""


def test_acceptance_is_read_from_the_decode_sample() -> None:
    assert acceptance({"decode": {"acceptance": {"pooled": 2.0}}}) == {"pooled": 2.0}
    assert acceptance({"decode": None}) == acceptance({}) == {}
