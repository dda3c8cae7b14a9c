from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from workbench.cli import main
from workbench.errors import SavedSessionError
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession

GONE_SECONDS = 2.0


def rows_on_disk(path: Path) -> int:
    """Rows of the decode-path lane that another process would find in the file now."""
    if not path.exists():
        return 0
    try:
        with SavedSession.open(path) as saved:
            lane = next((lane for lane in saved.lanes() if lane.path == "decode"), None)
            return sum(n for _, n in saved.spans(lane.id, "rows")) if lane else 0
    except SavedSessionError:  # its tables are being made this moment; the caller's deadline ends a longer wait
        return 0


@pytest.mark.slow
def test_killing_the_app_ends_its_engine_and_leaves_a_file_that_opens_and_resumes(
    tiny_folder: Path, tiny_session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "killed.wbs"
    run = [
        "run", str(tiny_session), "--model", str(tiny_folder), "--reference", "transformers:weights=fp32,kv=fp32",
        "--lane", "transformers:weights=fp32,kv=int8,path=decode", "-o", str(path),
    ]  # fmt: skip
    app = subprocess.Popen(
        [sys.executable, "-m", "workbench", *run], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while rows_on_disk(path) == 0:
        assert app.poll() is None
        assert time.monotonic() < deadline
    children = psutil.Process(app.pid).children(recursive=True)
    assert children
    os.kill(app.pid, signal.SIGKILL)
    app.wait()
    _, alive = psutil.wait_procs(children, timeout=GONE_SECONDS)
    assert not alive
    with SavedSession.open(path) as saved:
        assert not saved.verify()
        state = load_state(saved)
    kept = len(state.lanes[1].rows)
    assert kept > 0
    assert main(run) == 0
    with SavedSession.open(path) as saved:
        lane = saved.lanes()[1]
        assert lane.status == "done"
        assert lane.stats["resumed_from"] == kept + 1
        assert load_state(saved).lanes[1].rows.column("valid").all()
    assert "saved:" in capsys.readouterr().out
