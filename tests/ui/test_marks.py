from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ui.harness import SMALL, WIDE, opened, press, rows_of, text_of
from tests.ui.states import ACCEPTANCE, FakeRunner, engine_state, make_state, rewind
from workbench.config.lane import parse_spec
from workbench.metrics.acceptance import acceptance, from_histogram
from workbench.store.state import LaneRecord
from workbench.ui.board import Board
from workbench.ui.marks import acceptance_words, interval, marks_of, short_configuration, status_of
from workbench.ui.screens.manifest import ManifestScreen


def record(spec: str, kind: Any = "lane", **values: Any) -> LaneRecord:
    return LaneRecord(1, "a name", kind, parse_spec(spec).to_json(), **values)


@pytest.mark.parametrize(
    ("spec", "manifest", "words"),
    [
        ("transformers:weights=int8", {}, "int8 · bf16 kv · sdpa"),
        ("transformers:kv=int4,kv_group=64,path=decode", {}, "bf16 · int4 kv · sdpa · decode · kv_group 64"),
        ("llamacpp:weights=Q4_K_M,kv=q8_0/f16", {}, "llamacpp · Q4_K_M · q8_0/f16 kv · fa auto"),
        ("llamacpp:weights=Q4_K_M", {"engine": "llamacpp", "attn": "on"}, "llamacpp · Q4_K_M · f16 kv · fa on"),
        ("vllm:attn=FLASHINFER,kv_space=2", {"engine": "vllm", "attn": "CPU_ATTN", "kv": None},
         "vllm · bf16 · auto kv · FLASHINFER→CPU_ATTN"),
        ("vllm:weights=fp32", {"engine": "vllm", "attn": "CPU_ATTN", "kv": "bfloat16"}, "vllm · fp32 · bfloat16 kv"),
        ("vllm:draft=draft_model@models/tiny", {}, "vllm · bf16 · auto kv · draft_model"),
        ("server:url=http://user:secret@host:8000/v1", {"engine": "server", "dialect": "sglang"},
         "server sglang · host:8000"),
        ("server:url=https://host/", {"engine": "server", "kv": "fp8", "draft": "eagle3"},
         "server · host · fp8 · eagle3"),
    ],
)  # fmt: skip
def test_a_configuration_in_a_few_words_says_what_ran(spec: str, manifest: dict[str, Any], words: str) -> None:
    assert short_configuration(record(spec, manifest=manifest)) == words


def test_marks_come_with_their_reasons_and_an_invalid_lane_is_not_severe_too() -> None:
    state = engine_state()
    state.lanes[3].rows.column("kl")[:] = 4
    board = Board(state)
    marks = {view.number: {mark.word: mark for mark in marks_of(view, board)} for view in board.views}
    words = {number: list(found) for number, found in marks.items()}
    assert words == {
        1: [], 2: ["bounded"], 3: [], 4: ["invalid"], 5: ["no effect"], 6: ["severe"], 7: ["bounded", "two runs"],
    }  # fmt: skip
    assert marks[4]["invalid"].grave and not marks[6]["severe"].grave
    assert marks[4]["invalid"].why == "attn: asked for FLASHINFER, runs CPU_ATTN"
    assert "top 256 only" in marks[2]["bounded"].why


def test_what_differs_beyond_the_reason_is_a_mark_of_its_own() -> None:
    state = engine_state()
    lane = state.lanes[2]
    lane.record = replace(lane.record, manifest={**lane.record.manifest, "differs": ["kv: asked for a, runs b"]})
    board = Board(state)
    assert [(mark.word, mark.grave) for mark in marks_of(board.views[2], board)] == [("differs", True)]


def test_a_status_is_the_record_s_but_for_a_lane_worse_than_uniform() -> None:
    state = make_state()
    state.lanes[0].record = replace(state.lanes[0].record, manifest={"vocabulary": 64})
    state.lanes[1].rows.column("logprob")[:] = -4.2
    state.lanes[2].rows.column("logprob")[:] = -4.1
    rewind(state.lanes[3], 100)
    board = Board(state)
    assert [status_of(view, board)[0] for view in board.views] == ["done", "invalid", "done", "running"]


def test_acceptance_is_a_figure_with_its_source_or_a_reason() -> None:
    def words(spec: str, status: Any = "done", manifest: dict[str, Any] | None = None, **found: Any):
        stats = {"decode": {"acceptance": found}} if found else {}
        return acceptance_words(record(spec, status=status, stats=stats, manifest=manifest or {}))

    assert words("vllm:draft=ngram", **ACCEPTANCE) == ("3.50", "steps")
    assert words("server:url=http://h", pooled=2, source="average") == ("2.00", "average")
    assert words("transformers:kv=int8") == ("", "no drafter")
    assert words("server:url=http://h") == ("", "no acceptance given")
    assert words("vllm:draft=ngram", "running") == ("", "not counted yet")
    assert words("vllm:draft=ngram") == ("", "acceptance not given")
    assert words("vllm:draft=ngram", **acceptance([], [])) == ("", "nothing drafted")
    assert words("vllm:draft=ngram", **from_histogram([0, 3])) == ("2.00", "histogram")


def test_an_interval_drops_its_leading_zeros_and_no_other_digit() -> None:
    assert interval(0.0114, 0.034) == ".011–.034"
    assert interval(0.1, 1.0) == ".100–1.000"


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_what_a_lane_was_asked_and_what_ran_stand_side_by_side(size: tuple[int, int]) -> None:
    state = engine_state()
    async with opened(size, state=state, runner=FakeRunner(state)) as (app, pilot):
        await press(pilot, "4", "m")
        assert isinstance(app.screen, ManifestScreen)
        assert any({"attn", "FLASHINFER", "CPU_ATTN"} <= {*row.split()} for row in rows_of(app))
        assert "invalid: attn: asked for FLASHINFER" in text_of(app)
        await press(pilot, "j", "k", "m", "7", "m")
        body = "\n".join("".join(s.text for s in row.segments()) for row in app.screen.query_one("#manifest")._rows(90))
        for words in (
            "server vllm 0.32.0", "never ranked by KL", "divergence without the drafter", "? cannot be read back",
            "3.50 tokens a step", "single steps", "100%, 100%, 50%, 0%", "2: 20", "mean of requests 3.50",
        ):  # fmt: skip
            assert words in body
        await press(pilot, "q")
        assert app.screen is app.lanes
