"""Engines that are lost in the middle of a lane: killed, or their interpreter gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.config.settings import keep_engine
from workbench.errors import WorkbenchError
from workbench.paths import config_dir
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask


@pytest.fixture
def base(tiny_folder: Path) -> Configuration:
    return Configuration(model=str(tiny_folder), weights="fp32", kv="fp32", chunk=256)


@pytest.fixture
def experiment(base: Configuration, tiny_session: Path, tmp_path: Path) -> Experiment:
    return Experiment(Ask(str(tiny_session), base, (), tmp_path / "run.wbs"), print)


def test_a_killed_llama_cpp_leaves_its_rows_and_goes_on_where_it_stopped(
    experiment: Experiment, base: Configuration
) -> None:
    state = experiment.prepare()
    try:
        experiment.start()
        assert experiment.wait(120)
        spec = parse_spec("llamacpp:weights=F32,kv=f32,fa=off,path=decode", base)
        lane = experiment.add_lane(spec)
        deadline = time.monotonic() + 120
        while len(lane.rows) < 40:
            assert lane.record.status in ("queued", "running"), lane.record.reason
            assert time.monotonic() < deadline
        for pid in experiment.scheduler.engine_pids():
            os.kill(pid, signal.SIGKILL)
        assert experiment.wait(60)
        kept = len(lane.rows)
        assert lane.record.status == "failed"
        assert "SIGKILL" in lane.record.reason
        experiment.retry(lane.record.id)
        assert experiment.wait(120)
        assert lane.record.status == "done", lane.record.reason
        assert lane.record.stats["resumed_from"] == kept + 1
        assert len(lane.rows) == len(state.stream["ids"]) - 1 and lane.rows.column("valid").all()
        assert lane.rows.column("kl").max() < 1e-6
    finally:
        experiment.close()


def test_an_interpreter_that_is_gone_is_named_and_nothing_else_is_taken_in_its_place(
    experiment: Experiment, base: Configuration, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    keep_engine(config_dir() / "settings.toml", "llamacpp", str(python))
    experiment.prepare()
    try:
        experiment.start()
        lane = experiment.add_lane(parse_spec("llamacpp:weights=F32", base))
        assert experiment.wait(120)
        assert lane.record.status == "done", lane.record.reason
        python.unlink()
        with pytest.raises(WorkbenchError, match="cannot be run") as refused:
            experiment.add_lane(parse_spec("llamacpp:weights=F32,kv=q8_0", base))
        assert str(python) in str(refused.value)
    finally:
        experiment.close()
