from __future__ import annotations

import csv
import io
import json

from tests.ui.states import ACCEPTANCE, RUNS, engine_state, make_state, set_status
from workbench.report import table
from workbench.report.compare import compare
from workbench.report.transcript import transcript


def test_lanes_of_every_engine_say_what_they_are() -> None:
    state = engine_state(turns=6)
    found = compare(state)
    json.dumps(found, allow_nan=False)
    bounded, plain, invalid, same, severe, server = found["lanes"]
    assert (bounded["estimator"], bounded["logits"], bounded["tv_mean"]) == ("bounded", "top-256", None)
    assert bounded["tv"]["low"] < bounded["tv"]["high"]
    assert bounded["kl"]["mean"] is None and bounded["kl"]["lower_bound_mean"] > 0
    assert plain["ran"]["engine"] == "llamacpp 0.3.36" and plain["ran"]["attn"] == "auto → on"
    assert (invalid["status"], invalid["valid"], invalid["at_floor"]) == ("invalid", False, None)
    assert invalid["differs"] == ["attn: asked for FLASHINFER, runs CPU_ATTN"]
    assert same["no_effect"] == "bf16" and "kv and kv_group differ" in same["no_effect_reason"]
    assert severe["severe"] and severe["valid"] and not plain["severe"]
    assert server["acceptance"] == {key: ACCEPTANCE[key] for key in ("pooled", "per_request", "by_slot", "source")}
    assert server["runs"] == RUNS and server["ran"]["kv"] == "?"
    assert plain["acceptance"] == {"pooled": None, "per_request": None, "by_slot": None, "source": None}
    rows = list(csv.DictReader(io.StringIO(table.csv_text(found))))
    assert [row["ran.engine"] for row in rows][:2] == ["vllm 0.32.0", "llamacpp 0.3.36"]
    assert rows[0]["tv_mean"] == "" and float(rows[0]["tv.high"]) == bounded["tv"]["high"]


def test_a_lane_that_ended_worse_than_uniform_is_invalid_and_not_bad() -> None:
    state = make_state(turns=3)
    set_status(state.lanes[0], "done", manifest={"vocabulary": 64})
    state.lanes[1].rows.column("logprob")[:] = -9
    state.lanes[1].rows.column("kl")[:] = 2
    lane = compare(state)["lanes"][0]
    assert (lane["status"], lane["valid"], lane["severe"]) == ("invalid", False, None)
    assert "worse than uniform" in lane["reason"]
    assert "[invalid]" in table.text(compare(state))


def test_the_transcript_says_what_a_lane_s_figures_are() -> None:
    lines = list(transcript(engine_state(turns=3)))
    head = "\n".join(lines[1:6])
    assert "! engine vllm · kv fp8: bounded" in head
    assert "! engine vllm · attn FLASHINFER: invalid: attn: asked for" in head
    assert "bit-identical to the reference" in head
    flips = [line for line in lines if line.startswith("   ◆")]
    assert flips and all(("KL ≥" in line) == ("engine server" in line or "kv fp8" in line) for line in flips)
