from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from rich.cells import cell_len

from workbench.report import table


def lane(name: str, **changes: Any) -> dict[str, Any]:
    bins = [
        {"from": 0, "to": 2000, "n": 300, "kl_mean": 0.001, "flip_rate": 0.01, "entropy_mean": 2.0},
        {"from": 2000, "to": 4000, "n": 400, "kl_mean": 0.004, "flip_rate": 0.03, "entropy_mean": 1.5},
    ]
    plain: dict[str, Any] = {
        "name": name,
        "configuration": "transformers:weights=bf16,kv=int8",
        "status": "done",
        "reason": None,
        "n": 700,
        "excluded": 0,
        "kl": {"mean": 0.00312, "se": 0.0002, "p99": 0.0912},
        "flip_rate": 0.0214,
        "at_floor": False,
        "by_depth": bins,
        "prefill_tps": 512.3,
        "decode_tps": 20.91,
        "peak_memory_bytes": 3 << 29,
        "manifest": {"engine": "transformers"},
    }
    return {**plain, **changes}


def comparison(*lanes: dict[str, Any], floor: float | None = None) -> dict[str, Any]:
    reference = {
        "name": "bf16", "configuration": "transformers:weights=bf16,kv=bf16", "engine": "transformers", "version": "5",
        "device": "cpu", "threads": 2, "chunk": 512, "scored_positions": 8000, "headline_positions": 1400,
        "prefill_tps": 600.0, "decode_tps": 21.5, "peak_memory_bytes": 1 << 30, "model_name": "smollm2-135m",
    }  # fmt: skip
    rows = [] if floor is None else [{"name": "chunk 384", "kl_mean": floor}]
    return {
        "file": "f",
        "session": "s",
        "reference": reference,
        "floor": {"value": floor, "rows": rows},
        "lanes": [*lanes],
    }


def test_the_table_names_its_conditions_and_aligns_its_columns() -> None:
    text = table.text(comparison(lane("kv int8"), lane("kv int4 · 東京", at_floor=True), floor=0.0016))
    lines = text.splitlines()
    assert "8,000 scored positions" in text
    assert "1,400 of them the assistant's" in text
    assert "transformers:weights=bf16,kv=bf16" in text
    rule = next(i for i, line in enumerate(lines) if line.startswith("──"))
    body = lines[rule + 1 : rule + 4]
    assert len({cell_len(line) for line in body}) == 1
    assert "0.00312 ~" in body[2]
    assert "21.5" in body[0]
    assert "noise floor 0.00160" in text


def test_an_unmeasured_floor_is_said() -> None:
    assert "noise floor not measured" in table.text(comparison(lane("kv int8")))


def test_a_failed_lane_keeps_its_reason_and_has_no_invented_numbers() -> None:
    failed = lane(
        "kv int4", status="failed", reason="the engine died\nlog line", kl=None, flip_rate=None, by_depth=None,
        decode_tps=None, prefill_tps=None, peak_memory_bytes=None, at_floor=None,
    )  # fmt: skip
    text = table.text(comparison(lane("kv int8"), failed))
    row = next(line for line in text.splitlines() if line.startswith("kv int4 [failed]"))
    assert row.split() == ["kv", "int4", "[failed]", *["–"] * 9]
    assert "kv int4: failed: the engine died" in text


@pytest.mark.parametrize("form", [table.text, table.markdown])
def test_names_from_files_cannot_move_the_cursor_or_break_the_table(form: Any) -> None:
    text = form(comparison(lane("evil\x1b[2J|\nname")))
    assert "\x1b" not in text
    assert not any(line.startswith("name") for line in text.splitlines())


def test_markdown_has_one_cell_for_every_header() -> None:
    lines = [line for line in table.markdown(comparison(lane("a|b"))).splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_csv_reads_back_with_the_bins_by_their_depth() -> None:
    rows = list(csv.DictReader(io.StringIO(table.csv_text(comparison(lane("a,b"), lane("c"))))))
    assert [row["name"] for row in rows] == ["a,b", "c"]
    assert float(rows[0]["kl.mean"]) == 0.00312
    assert float(rows[0]["by_depth.2000.flip_rate"]) == 0.03


def test_several_files_have_one_header_and_name_their_file() -> None:
    first, second = comparison(lane("a")), comparison(lane("b", differs=["x", "y"], acceptance={"by_slot": [0.9, 0.5]}))
    second["file"] = "g"
    rows = list(csv.DictReader(io.StringIO(table.csv_text(first, second))))
    assert [(row["file"], row["session"], row["name"]) for row in rows] == [("f", "s", "a"), ("g", "s", "b")]
    assert rows[1]["differs"] == "x; y" and rows[1]["acceptance.by_slot.2"] == "0.5"
    assert rows[0]["acceptance.by_slot.2"] == ""


def test_a_bounded_lane_shows_lower_bounds_and_its_interval_and_no_error_of_them() -> None:
    bounded = lane(
        "vllm", estimator="bounded", kl={"mean": None, "lower_bound_mean": 0.0123, "lower_bound_p99": 0.31},
        tv={"low": 0.011, "high": 0.034}, manifest={"logits": "top-256"}, at_floor=None,
    )  # fmt: skip
    text = table.text(comparison(bounded, floor=0.1))
    row = next(line for line in text.splitlines() if line.startswith("vllm  "))
    assert row.split()[1:5] == ["≥0.01230", "–", "≥0.310", "2.1"]
    assert "vllm: bounded (its own top 256 only): TV 0.011–0.034, KL has no upper bound" in text
    assert "≥ a lower bound" in text
    assert "≥" not in table.text(comparison(lane("kv int8")))


def test_marks_stand_at_the_name_and_their_reasons_below() -> None:
    severe = lane("q3", severe=True, kl={"mean": 1.4, "se": 0.1, "p99": 3.0})
    same = lane("kv fp8", no_effect="bf16", no_effect_reason="bit-identical to the reference although kv differs")
    wrong = lane("fi", status="invalid", reason="attn: asked for X, runs Y\nlog", differs=["attn: asked for X, runs Y"])
    text = table.text(comparison(severe, same, wrong | {"at_floor": True}))
    assert "q3 [severe]" in text and "kv fp8 [no effect]" in text and "fi [invalid]" in text
    row = next(line for line in text.splitlines() if line.startswith("fi [invalid]"))
    assert "0.00312 !" in row and "~" not in row
    assert "kv fp8: bit-identical to the reference although kv differs" in text
    assert text.count("attn: asked for X, runs Y") == 1
    assert "severe: mean KL above 1 nat" in text and "! invalid: shown" in text


def test_acceptance_has_a_column_only_where_a_lane_drafts() -> None:
    drafting = lane("spec", acceptance={"pooled": 3.5}, runs="divergence without the drafter")
    text = table.text(comparison(lane("kv int8"), drafting))
    assert "accept" in text.splitlines()[4]
    assert "3.50" in next(line for line in text.splitlines() if line.startswith("spec"))
    assert "spec: two runs: divergence without the drafter" in text
    assert "accept" not in table.text(comparison(lane("kv int8")))


def ran(engine: str, **values: str) -> dict[str, str]:
    usual = {"weights": "bf16", "kv": "bf16", "attn": "sdpa", "draft": "", "device": "cpu", "threads": "2"}
    return {"engine": engine, **usual, "chunk": "512", **values}


@pytest.mark.parametrize("form", [table.text, table.markdown])
def test_what_ran_is_shown_where_engines_or_words_differ(form: Any) -> None:
    shown = comparison(
        lane("kv int8", ran=ran("transformers 5", kv="int8")),
        lane("q4", ran=ran("llamacpp 0.3.36", weights="Q4_K_M", attn="auto → on", kv="?")),
    )
    shown["reference"]["ran"] = ran("transformers 5")
    text = form(shown)
    line = next(line for line in text.splitlines() if "llamacpp 0.3.36" in line)
    assert "Q4_K_M" in line and "auto → on" in line
    assert "draft" not in text
    assert "? the engine cannot read it back" in text
    shown["lanes"].pop()
    assert "what ran" not in form(shown)


def test_versions_are_compared_within_an_engine_only_and_equal_notes_are_merged() -> None:
    other = {"engine": "llamacpp", "version": "0.3.36", "threads": 1, "engine_notes": ["fed in chunks"]}
    own = {"engine": "transformers", "version": "4", "threads": 2}
    text = table.text(comparison(lane("a", manifest=other), lane("b", manifest=other), lane("c", manifest=own)))
    assert "a, b: not under the reference's conditions: threads 1, not 2\n" in text
    assert "a, b: fed in chunks" in text
    assert "c: not under the reference's conditions: version 4, not 5" in text


def test_numbers_that_must_not_be_used_are_marked_and_a_failed_reference_has_no_zero() -> None:
    shown = comparison(lane("kv int8", valid=False, reason="targets and rows are off by one"))
    text = table.text(shown)
    assert "kv int8 [invalid]" in text
    assert "kv int8: invalid: targets and rows are off by one" in text
    shown["reference"] |= {"status": "failed", "reason": "no memory"}
    failed = next(line for line in table.text(shown).splitlines() if line.startswith("bf16 (reference)"))
    assert failed.split()[:4] == ["bf16", "(reference)", "[failed]", "–"]
    assert "bf16: failed: no memory" in table.text(shown)


def test_a_lane_under_other_conditions_than_the_reference_says_so() -> None:
    text = table.text(comparison(lane("kv int8", manifest={"threads": 1, "device": "cpu"})))
    assert "kv int8: not under the reference's conditions: threads 1, not 2" in text
