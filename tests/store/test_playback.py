from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.store.samples import equal, make_rows, record, write_session
from workbench.errors import SavedSessionError
from workbench.protocol.columns import cut, join
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.trace import feed, margins

ROOT = Path(__file__).parents[2]


def ruin(path: Path, lane: int, kind: str, first: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute(
        "UPDATE chunks SET data = substr(data, 1, length(data) - 9) WHERE lane = ? AND kind = ? AND first = ?",
        (lane, kind, first),
    )
    connection.commit()
    connection.close()


def test_lost_chunks_stand_as_absent_rows_and_are_named(path: Path) -> None:
    write_session(path, n=3001)
    ruin(path, 1, "trace", 1025)
    ruin(path, 2, "rows", 1)
    with SavedSession.open(path) as saved:
        state = load_state(saved)
        reference, lane, other = state.lanes
        assert len(reference.rows) == len(lane.rows) == len(other.rows) == 3000
        assert not reference.rows.column("valid")[1024:2048].any()
        assert reference.entropy is not None
        assert np.isnan(reference.entropy[1024:2048]).all()
        assert np.isnan(margins(reference.rows)[1024:2048]).all()
        assert np.isnan(lane.rows.column("kl")[:1024]).all()
        assert np.array_equal(lane.rows.column("kl")[1024:], make_rows("rows", 3000)["kl"][1024:])
        assert len(state.damage) == 2
        trace = make_rows("trace", 3000)
        assert equal(state.trace(1000, 1100), cut("trace", trace, 999, 1024))
        assert equal(state.trace(1500, 1501), join("trace", []))
        assert equal(state.trace(0, 1), join("trace", []))
        with pytest.raises(SavedSessionError, match="no row at 1025"):
            list(feed(saved, 1, 1))


def test_the_trace_is_fed_from_any_position_in_order(path: Path) -> None:
    write_session(path, n=3001)
    trace = make_rows("trace", 3000)
    with SavedSession.open(path) as saved:
        pieces = list(feed(saved, 1, 500))
        assert [first for first, _ in pieces] == [500, 1025, 2049]
        assert equal(join("trace", [arrays for _, arrays in pieces]), cut("trace", trace, 499, 3000))
        assert [first for first, _ in feed(saved, 1, 500, 600)] == [500]
        with pytest.raises(SavedSessionError, match="no row at 3001"):
            list(feed(saved, 1, 2900, 3100))


def test_an_empty_session_loads(path: Path) -> None:
    with SavedSession.create(path, {}) as saved:
        saved.add_lane(record())
        state = load_state(saved)
        assert state.title == path.stem
        assert state.reference is None
        assert len(state.stream["ids"]) == len(state.lanes[0].rows) == 0
        assert len(state.trace(1, 5)["k"]) == 0


def test_replay_needs_no_tokenizer_template_engine_or_screen(path: Path) -> None:
    write_session(path)
    code = (
        "import sys\n"
        "from workbench.store.playback import load_state\n"
        "from workbench.store.saved import SavedSession\n"
        "from workbench.store import exporters, hub\n"
        "with SavedSession.open(sys.argv[1]) as saved: load_state(saved)\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'jinja2', 'textual') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
