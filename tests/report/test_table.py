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
