from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tests.store.samples import write_session
from workbench.store.lock import WriterLock, held
from workbench.store.playback import load_state, read_state
from workbench.store.saved import SavedSession


def with_statuses(path: Path) -> None:
    write_session(path, lanes=3)
    with SavedSession.open(path, write=True) as saved:
        for record, status in zip(saved.lanes(), ("done", "running", "queued", "failed"), strict=True):
            saved.update_lane(replace(record, status=status, reason="why" if status == "failed" else ""))


def test_lanes_that_ran_when_their_writer_was_killed_are_interrupted_to_a_reader(path: Path) -> None:
    with_statuses(path)
    left = path.with_name(path.name + ".lock")
    left.write_text("process 1 on nowhere\n")  # what a killed writer leaves behind
    with SavedSession.open(path) as saved:
        lanes = read_state(saved).lanes
        assert [lane.record.status for lane in lanes] == ["done", "interrupted", "interrupted", "failed"]
        assert "the run ended before" in lanes[1].record.reason and lanes[3].record.reason == "why"
        assert len(lanes[1].rows) == 599
        assert [lane.record.status for lane in load_state(saved).lanes][1] == "running"  # for who goes on with it
    assert left.exists()


def test_a_file_that_is_being_written_shows_what_runs(path: Path) -> None:
    with_statuses(path)
    with SavedSession.open(path, write=True), SavedSession.open(path) as reader:
        assert [lane.record.status for lane in read_state(reader).lanes][1:3] == ["running", "queued"]
    with SavedSession.open(path) as reader:
        assert read_state(reader).lanes[1].record.status == "interrupted"


def test_to_look_at_a_lock_takes_nothing_from_who_holds_or_wants_it(path: Path) -> None:
    assert not held(path)
    lock = WriterLock(path)
    assert held(path) and held(path)
    lock.release()
    assert not held(path)
    again = WriterLock(path)
    assert held(path)
    again.release()
    assert os.listdir(path.parent) == []
