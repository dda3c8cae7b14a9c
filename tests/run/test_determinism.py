from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.cli import main
from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError
from workbench.protocol.columns import ROWS
from workbench.protocol.events import Progress, Rows, Tokens
from workbench.report.compare import compare
from workbench.report.conditions import notes
from workbench.run.determinism import Repeats, Take, sentence
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.state import Columns

N, STEPS = 40, 6


def rows() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shape = {name: (N, column.width) if column.width else (N,) for name, column in ROWS.items()}
    made = {name: rng.normal(size=shape[name]).astype(column.dtype) for name, column in ROWS.items()}
    made["logprob"][7] = np.nan
    return made


def continuation() -> dict[str, Any]:
    return {
        "ids": np.arange(STEPS, dtype="<i4"),
        "logprobs": np.linspace(-1, 0, STEPS).astype("<f4"),
        "seconds": np.zeros(STEPS, "<f4"),
    }


class Engine:
    """Gives the same rows and tokens at every run, but for what `spoil` does to run `number` (1: the first repeat)."""

    def __init__(self, **spoil: Any) -> None:
        self.spoil, self.passes, self.decodes = spoil, 0, 0
        self.heard: list[str] = []

    def score(self, take: Take) -> None:
        self.passes += 1
        made = rows()
        made["seconds"] += self.passes
        if "rows" in self.spoil:
            self.spoil["rows"](self.passes, made)
        take(Progress(1, "prefill", 1, 2))
        stop = self.spoil.get("stop", N)
        take(Rows(1, 1, {name: array[:25] for name, array in made.items()}))
        take(Rows(1, 26, {name: array[25:stop] for name, array in made.items()}))

    def generate(self, take: Take) -> None:
        self.decodes += 1
        made = continuation()
        made["seconds"] += self.decodes
        if "tokens" in self.spoil:
            self.spoil["tokens"](self.decodes, made)
        take(Tokens(1, 0, {name: array[:4] for name, array in made.items()}))
        take(Tokens(1, 4, {name: array[4:] for name, array in made.items()}))

    def repeats(self, runs: int, together: str = "") -> dict[str, Any]:
        stored = Columns("rows", 1)
        stored.append(1, rows())
        first = continuation()

        def hear(progress: Progress) -> None:
            self.heard.append(progress.phase)

        return Repeats(runs, stored, first, together, self.score, self.generate, hear).run()


def test_the_same_bits_are_the_same_whatever_the_clock_says_and_not_a_number_included() -> None:
    engine = Engine()
    fact = engine.repeats(3)
    assert fact["prefill"] == {"identical": True, "first_position": None, "positions_that_differ": 0}
    assert fact["decode"] == fact["prefill_decode"] == {"identical": True, "first_step": None}
    assert (engine.passes, engine.decodes) == (2, 4)
    assert engine.heard == ["run 2 of 3: prefill", "run 3 of 3: prefill"]
    assert sentence(fact, "prefill").startswith("3 runs are bit-identical (prefill, decode on the same KV cache")


def test_one_bit_in_the_last_run_is_found_at_its_position() -> None:
    def spoil(number: int, made: dict[str, Any]) -> None:
        if number == 2:
            made["top_logprobs"].view("<u4")[[11, 30], 3] ^= 1

    fact = Engine(rows=spoil).repeats(3)
    assert fact["prefill"] == {"identical": False, "first_position": 12, "positions_that_differ": 2}
    assert fact["decode"]["identical"]
    assert sentence(fact, "prefill") == "3 runs are not bit-identical: prefill differs at 2 positions, first at 12"
    assert Engine(rows=spoil).repeats(2)["prefill"]["identical"]


def test_a_decode_that_varies_on_one_cache_is_told_from_prefill() -> None:
    def spoil(number: int, made: dict[str, Any]) -> None:
        if number > 1:  # the first repeat is of a forced pass and a decode
            made["ids"][3:] += 1

    fact = Engine(tokens=spoil).repeats(2)
    assert fact["prefill"]["identical"] and fact["prefill_decode"]["identical"]
    assert fact["decode"] == {"identical": False, "first_step": 3}
    assert "same KV cache differs from step 3" in sentence(fact, "prefill")


def test_a_cache_that_prefill_left_otherwise_shows_in_both_together_alone() -> None:
    def spoil(number: int, made: dict[str, Any]) -> None:
        made["logprobs"][5] += 1e-3

    fact = Engine(tokens=spoil).repeats(2)
    assert fact["prefill"]["identical"] and fact["decode"]["identical"]
    assert fact["prefill_decode"] == {"identical": False, "first_step": 5}


def test_a_row_that_does_not_come_again_is_one_that_differs() -> None:
    fact = Engine(stop=38).repeats(2)
    assert fact["prefill"] == {"identical": False, "first_position": 39, "positions_that_differ": 2}


def test_where_the_cache_is_not_kept_decode_alone_is_not_claimed() -> None:
    fact = Engine().repeats(2, "the engine keeps none")
    assert fact["decode"] is None and fact["prefill_decode"]["identical"]
    said = sentence(fact, "decode")
    assert said == (
        "2 runs are bit-identical (decode path, then decode); decode was not repeated alone: the engine keeps none"
    )


@pytest.fixture
def ask(tiny_folder: Path, tiny_session: Path, tmp_path: Path) -> Ask:
    base = Configuration(model=str(tiny_folder), weights="bf16", chunk=256)
    lanes = (parse_spec("transformers:kv=int8", base), parse_spec("transformers:kv=int4,kv_window=64", base))
    return Ask(str(tiny_session), base, lanes, tmp_path / "run.wbs", repeat=3)


def ran(ask: Ask, said: list[str]) -> dict[str, Any]:
    experiment = Experiment(ask, said.append)
    try:
        experiment.prepare()
        experiment.start()
        assert experiment.wait(120)
    finally:
        experiment.close()
    assert ask.output is not None
    with SavedSession.open(ask.output) as saved:
        return compare(load_state(saved))


def test_lanes_that_are_repeated_are_proven_bit_identical_and_the_file_says_so(ask: Ask) -> None:
    comparison = ran(ask, [])
    plain, window = comparison["lanes"]
    assert [lane["status"] for lane in comparison["lanes"]] == ["done", "done"]
    assert plain["determinism"] == {
        "runs": 3,
        "prefill": {"identical": True, "first_position": None, "positions_that_differ": 0},
        "decode": {"identical": True, "first_step": None},
        "decode_reason": None,
        "prefill_decode": {"identical": True, "first_step": None},
    }
    assert window["determinism"]["decode"] is None and "cut back" in window["determinism"]["decode_reason"]
    assert window["determinism"]["prefill_decode"]["identical"]
    assert plain["decode_tps"] > 0 and plain["n"] > 100
    assert any(line.startswith("kv int8: 3 runs are bit-identical") for line in notes(comparison))
    said: list[str] = []
    again = ran(replace(ask, lanes=(ask.lanes[0],), repeat=2), said)
    assert again["lanes"][0]["determinism"]["runs"] == 3


@pytest.mark.slow
def test_a_llama_cpp_lane_is_repeated_too(ask: Ask) -> None:
    lane = parse_spec("llamacpp:weights=F32,kv=f16", ask.reference)
    comparison = ran(replace(ask, lanes=(lane,), repeat=2), [])
    (found,) = comparison["lanes"]
    assert found["status"] == "done", found["reason"]
    assert found["determinism"]["runs"] == 2
    for path in ("prefill", "decode", "prefill_decode"):
        assert found["determinism"][path]["identical"], found["determinism"]


@pytest.mark.slow
def test_no_lane_means_the_reference_and_fewer_than_one_run_is_refused(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ask.reference.to_line()
    command = ["run", str(ask.session), "--reference", line, "-o", str(ask.output), "--json", "--repeat"]
    assert main([*command, "0"]) == 2
    assert "--repeat 0 is below 1" in capsys.readouterr().err
    assert main([*command, "2"]) == 0
    (lane,) = json.loads(capsys.readouterr().out)["lanes"]
    assert lane["configuration"] == line and lane["determinism"]["prefill"]["identical"]


@pytest.mark.slow
def test_a_lane_that_was_done_before_is_said_not_to_be_repeated(ask: Ask) -> None:
    once = replace(ask, lanes=ask.lanes[:1], repeat=1)
    assert ran(once, [])["lanes"][0]["determinism"] is None
    said: list[str] = []
    assert ran(replace(once, repeat=2), said)["lanes"][0]["determinism"] is None
    assert any("is not repeated" in line for line in said)


def test_a_lane_with_a_drafter_is_not_repeated(ask: Ask) -> None:
    drafted = parse_spec("vllm:draft=ngram,width=4", ask.reference)
    with pytest.raises(ConfigurationError, match="drafter"):
        Experiment(replace(ask, lanes=(drafted,)), lambda line: None)
