from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError, SavedSessionError, SessionError
from workbench.protocol.events import Rows
from workbench.report.compare import compare
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask, ask_again
from workbench.run.reference import reference_key
from workbench.run.scheduler import Task
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.state import LaneState, SessionState


@pytest.fixture
def ask(tiny_folder: Path, tiny_session: Path, tmp_path: Path) -> Ask:
    base = Configuration(model=str(tiny_folder), weights="fp32", kv="fp32", chunk=256)
    lanes = (parse_spec("transformers:kv=int8", base), parse_spec("transformers:kv=int4", base))
    return Ask(str(tiny_session), base, lanes, tmp_path / "run.wbs")


def ran(ask: Ask, said: list[str] | None = None) -> dict[str, Any]:
    """Run to the end and give what the file says afterwards."""
    experiment = Experiment(ask, (said if said is not None else []).append)
    try:
        experiment.prepare()
        experiment.start()
        assert experiment.wait(120)
        live = compare(experiment.state)
    finally:
        experiment.close()
    assert ask.output is not None
    with SavedSession.open(ask.output) as saved:
        replayed = compare(load_state(saved))
    assert replayed == live
    return replayed


def lane_of(state: SessionState, name: str) -> LaneState:
    return next(lane for lane in state.lanes if lane.record.name == name)


def test_a_run_measures_every_lane_and_replays_to_the_same_numbers_without_the_model(ask: Ask) -> None:
    comparison = ran(ask)
    assert comparison["reference"]["status"] == "done"
    int8, int4 = comparison["lanes"]
    assert [int8["name"], int4["name"]] == ["kv int8", "kv int4"]
    for lane in (int8, int4):
        assert lane["status"] == "done", lane["reason"]
        assert lane["n"] == comparison["reference"]["headline_positions"] > 100
        assert lane["kl"]["lower_bound_mean"] <= lane["kl"]["mean"] * (1 + 1e-6)
        assert lane["decode_tps"] > 0
        assert lane["prefill_tps"] > 0
        assert lane["manifest"]["kv"]["scheme"] == lane["configuration"].rpartition("kv=")[2].partition(",")[0]
        assert set(lane["by_role"]) >= {"system", "user", "tool_result", "content"}
    assert 0 < int8["kl"]["mean"] < int4["kl"]["mean"]
    assert lane["estimator"] == "head+tail samples"
    assert lane["mode"] == "forced"


@pytest.mark.slow
def test_the_reference_scored_as_a_lane_diverges_nowhere_and_twice_is_bit_identical(ask: Ask) -> None:
    again = replace(ask, lanes=(ask.reference, ask.lanes[1]))
    ran(again)
    assert ask.output is not None
    other = replace(again, output=ask.output.with_name("other.wbs"))
    ran(other)
    assert other.output is not None
    with SavedSession.open(ask.output) as first, SavedSession.open(other.output) as second:
        one, two = load_state(first), load_state(second)
        assert not lane_of(one, "reference again").rows.column("kl").any()
        for name in ("kl", "tv", "rank", "top_logprobs", "top_ids"):
            left, right = lane_of(one, "kv int4").rows.column(name), lane_of(two, "kv int4").rows.column(name)
            assert left.tobytes() == right.tobytes()


@pytest.mark.slow
def test_a_second_run_reuses_the_cached_reference_and_says_so(ask: Ask) -> None:
    first = ran(replace(ask, floor=True))
    said: list[str] = []
    assert ask.output is not None
    second = ran(replace(ask, output=ask.output.with_name("second.wbs"), floor=True), said)
    assert any("reusing the cached trace" in line for line in said)
    assert second["floor"] == first["floor"]
    assert first["floor"]["value"] is not None
    assert second["reference"]["reused_from"] == first["reference"]["reference_key"]
    assert not any(line == "reference: recording" for line in said)
    assert [lane["kl"] for lane in second["lanes"]] == [lane["kl"] for lane in first["lanes"]]


@pytest.mark.slow
def test_another_chunk_size_does_not_reuse_the_reference(ask: Ask) -> None:
    ran(ask)
    said: list[str] = []
    assert ask.output is not None
    changed = replace(ask, reference=replace(ask.reference, chunk=128), lanes=(), output=ask.output.with_name("b.wbs"))
    ran(changed, said)
    assert "reference: recording" in said


@pytest.mark.slow
def test_an_engine_that_is_killed_fails_its_lane_and_a_rerun_resumes_what_is_missing(ask: Ask) -> None:
    slow = replace(ask, lanes=(replace(ask.lanes[0], path="decode"), ask.lanes[1]))
    experiment = Experiment(slow, lambda line: None)
    state = experiment.prepare()
    experiment.start()
    killed = False
    while not experiment.wait(0.02):
        lane = next((lane for lane in state.lanes if lane.record.path == "decode"), None)
        if lane is not None and len(lane.rows) > 300 and not killed:
            (engine,) = experiment.scheduler.engine_pids()
            os.kill(engine, signal.SIGKILL)
            killed = True
    assert killed
    broken = lane_of(state, "kv int8 · path decode")
    kept = len(broken.rows)
    assert broken.record.status == "failed"
    assert "SIGKILL" in broken.record.reason
    assert 300 < kept < len(state.stream["ids"]) - 1
    assert lane_of(state, "kv int4").record.status == "done"
    experiment.close()
    assert slow.output is not None
    whole = ran(ask_again(slow.output))
    assert [lane["status"] for lane in whole["lanes"]] == ["done", "done"]
    with SavedSession.open(slow.output) as saved:
        resumed = next(lane for lane in saved.lanes() if lane.name == broken.record.name)
        assert 1 < resumed.stats["resumed_from"] <= kept + 1
        rows = load_state(saved).lanes[1].rows
        assert rows.column("valid").all()


@pytest.mark.slow
def test_a_cancelled_lane_stops_and_the_next_one_runs(ask: Ask) -> None:
    slow = replace(ask, lanes=(replace(ask.lanes[0], path="decode"), ask.lanes[1]))
    experiment = Experiment(slow, lambda line: None)
    state = experiment.prepare()
    experiment.start()
    cancelled = False
    while not experiment.wait(0.02):
        lane = next((lane for lane in state.lanes if lane.record.path == "decode"), None)
        if lane is not None and len(lane.rows) > 0 and not cancelled:
            experiment.cancel(lane.record.id)
            cancelled = True
    assert lane_of(state, "kv int8 · path decode").record.status == "cancelled"
    assert lane_of(state, "kv int4").record.status == "done"
    experiment.close()


def test_the_floor_of_an_exact_reference_is_its_rounding_and_marks_nothing(ask: Ask) -> None:
    comparison = ran(replace(ask, floor=True))
    floor = comparison["floor"]
    names = [row["name"] for row in floor["rows"]]
    assert names[0] == "repeat"
    assert {"decode path", "chunk 192"} <= set(names)
    assert any(name.startswith("prefix reuse") for name in names)
    assert any(name.startswith("attention") for name in names)
    repeat = floor["rows"][0]
    assert repeat["kl_mean"] == 0
    decode = next(row for row in floor["rows"] if row["name"] == "decode path")
    assert decode["n"] > 100
    assert 0 <= decode["kl_mean"] < 1e-8
    assert 0 <= floor["value"] < 1e-6
    assert [lane["at_floor"] for lane in comparison["lanes"]] == [False, False]


@pytest.mark.slow
def test_a_file_of_another_session_is_refused_and_left_alone(ask: Ask, tiny_session: Path, tmp_path: Path) -> None:
    ran(replace(ask, lanes=()))
    assert ask.output is not None
    before = ask.output.read_bytes()
    other = tmp_path / "other.json"
    other.write_text(tiny_session.read_text().replace("You run commands.", "You do not."))
    with pytest.raises(SavedSessionError, match="another session"):
        Experiment(replace(ask, session=str(other)), lambda line: None).prepare()
    assert ask.output.read_bytes() == before
    with pytest.raises(SavedSessionError, match="other weights"):
        Experiment(replace(ask, reference=replace(ask.reference, chunk=128), lanes=()), lambda line: None).prepare()
    assert ask.output.read_bytes() == before


def test_a_refused_lane_is_refused_before_anything_loads(ask: Ask) -> None:
    with pytest.raises(ConfigurationError, match="cannot do kv=q8_0"):
        Experiment(replace(ask, lanes=(replace(ask.reference, kv="q8_0"),)), lambda line: None)
    assert ask.output is not None
    assert not ask.output.exists()


@pytest.mark.slow
def test_a_session_longer_than_the_context_is_refused_with_the_numbers_or_cut_where_asked(ask: Ask) -> None:
    short = replace(ask.reference, ctx=700)
    with pytest.raises(SessionError, match="700"):
        Experiment(replace(ask, reference=short, lanes=()), lambda line: None).prepare()
    said: list[str] = []
    comparison = ran(replace(ask, reference=short, lanes=(), fit=True), said)
    assert comparison["reference"]["scored_positions"] < 700
    assert any("cut at a turn boundary" in line for line in said)
    assert any("cut at a turn boundary" in note for note in comparison["reference"]["notes"])


@pytest.mark.slow
def test_columns_of_a_lane_hold_the_stream_in_order(ask: Ask) -> None:
    ran(ask)
    assert ask.output is not None
    with SavedSession.open(ask.output) as saved:
        state = load_state(saved)
        n = len(state.stream["ids"])
        assert all(len(lane.rows) == n - 1 for lane in state.lanes)
        trace = state.trace(1, n)
        assert len(trace["k"]) == n - 1
        assert np.array_equal(trace["logprob"], state.lanes[0].rows.column("logprob"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("transformers:kv=int8,ctx=100", "ctx=100 is too small for the session's"),
        ("transformers:kv=int8,ctx=100000", "beyond the model's context of 4,096"),
        ("transformers:kv=int8,kv_group=7", "kv_group=7 does not divide the head size 32"),
        ("transformers:kv=int8,kv_group=x", "kv_group=x is not a number"),
        ("transformers:kv_group=16", "kv_group=16 has no effect on kv="),
        ("transformers:temperature=0.7", "temperature=0.7 would have no effect"),
    ],
)
def test_what_a_lane_would_ignore_or_cannot_do_is_refused_before_there_is_a_file(
    ask: Ask, spec: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Experiment(replace(ask, lanes=(parse_spec(spec, ask.reference),)), lambda line: None).prepare()
    assert ask.output is not None
    assert not ask.output.exists()


def test_a_lane_given_twice_is_queued_once(ask: Ask) -> None:
    experiment = Experiment(replace(ask, lanes=(ask.lanes[0], ask.lanes[0])), lambda line: None)
    try:
        state = experiment.prepare()
        submitted: list[int] = []
        submit = experiment.scheduler.submit

        def counted(task: Task) -> None:
            submitted.append(task.lane.record.id)
            submit(task)

        experiment.scheduler.submit = counted
        experiment.start()
        assert experiment.wait(120)
        assert sorted(submitted) == sorted(lane.record.id for lane in state.lanes)
    finally:
        experiment.close()


def test_a_file_that_cannot_be_written_fails_the_lanes_and_the_run_ends(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise SavedSessionError("cannot be written: database or disk is full")

    experiment = Experiment(ask, lambda line: None)
    state = experiment.prepare()
    submit = experiment.scheduler.submit

    def submit_full(task: Task) -> None:  # the disk fills once the lanes are there
        monkeypatch.setattr(SavedSession, "append", full)
        monkeypatch.setattr(SavedSession, "update_lane", full)
        submit(task)

    experiment.scheduler.submit = submit_full
    experiment.start()
    assert experiment.wait(60)
    assert {lane.record.status for lane in state.lanes} == {"failed"}
    assert "disk is full" in state.lanes[0].record.reason
    assert all("there is no reference" in lane.record.reason for lane in state.lanes[1:])
    experiment.close()


def test_a_lane_that_was_broken_off_leaves_the_next_one_a_working_engine(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment(ask, lambda line: None)
    state = experiment.prepare()
    receive = experiment.hub.receive

    def broken(lane_id: int, event: Any) -> None:
        if isinstance(event, Rows) and lane_id == lane_of(state, "kv int8").record.id:
            raise ValueError("rows that cannot be taken")
        receive(lane_id, event)

    monkeypatch.setattr(experiment.hub, "receive", broken)
    experiment.start()
    assert experiment.wait(120)
    assert lane_of(state, "kv int8").record.status == "failed"
    assert lane_of(state, "kv int4").record.status == "done"
    experiment.close()


def test_a_reference_that_cannot_be_cached_is_used_all_the_same(ask: Ask, home: Path) -> None:
    (home / "data").mkdir(parents=True)
    (home / "data" / "traces").write_text("in the way")
    said: list[str] = []
    comparison = ran(replace(ask, lanes=ask.lanes[:1]), said)
    assert comparison["lanes"][0]["status"] == "done"
    assert any("not kept for later runs" in line for line in said)


def test_a_reference_cancelled_before_it_began_fails_what_waits_for_it(ask: Ask) -> None:
    experiment = Experiment(ask, lambda line: None)
    state = experiment.prepare()
    monkeypatched = experiment.scheduler._next_fits  # pyright: ignore[reportPrivateUsage]
    experiment.scheduler._next_fits = lambda: False  # pyright: ignore[reportPrivateUsage]
    experiment.start()
    experiment.cancel(state.lanes[0].record.id)
    experiment.scheduler._next_fits = monkeypatched  # pyright: ignore[reportPrivateUsage]
    assert experiment.wait(10)
    assert [lane.record.status for lane in state.lanes] == ["cancelled", "failed", "failed"]
    experiment.close()


def test_an_empty_file_as_left_by_a_kill_is_begun_anew(ask: Ask) -> None:
    assert ask.output is not None
    ask.output.touch()
    experiment = Experiment(replace(ask, lanes=()), lambda line: None)
    assert len(experiment.prepare().stream["ids"]) > 100
    experiment.close()


def test_another_thread_setting_or_processor_set_does_not_share_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: set[str] = set()
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        keys.add(reference_key(Configuration(), {"weights": "w"}, {}))
    assert len(keys) == 2
