from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.store.samples import write_session
from workbench.errors import ConfigurationError, SavedSessionError
from workbench.store import parquet
from workbench.store.exporters import FIELDS, export_rows
from workbench.store.parquet import write_parquet
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.state import SessionState


@pytest.fixture
def state(path: Path) -> SessionState:
    write_session(path, n=1501)
    with SavedSession.open(path) as saved:
        return load_state(saved)


def test_the_rows_are_those_of_the_other_formats_in_groups(
    state: SessionState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 1000)
    target = tmp_path / "rows.parquet"
    count = write_parquet(state, target)
    file = pyarrow.parquet.ParquetFile(target)
    wanted = list(export_rows(state))
    assert count == file.metadata.num_rows == len(wanted)
    assert file.metadata.num_row_groups == math.ceil(count / 1000)
    assert tuple(file.schema_arrow.names) == FIELDS
    for row, other in zip(file.read().to_pylist()[::97], wanted[::97], strict=True):
        for name in FIELDS:
            assert row[name] == (
                pytest.approx(other[name], rel=1e-6) if isinstance(other[name], float) else other[name]
            )


def test_what_cannot_be_written_leaves_nothing(
    state: SessionState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SavedSessionError, match="cannot be written"):
        write_parquet(state, tmp_path / "none" / "rows.parquet")
    monkeypatch.setattr(importlib, "import_module", _missing)
    with pytest.raises(ConfigurationError, match="needs the package pyarrow"):
        write_parquet(state, tmp_path / "rows.parquet")
    assert not list(tmp_path.glob("*rows.parquet*"))


def _missing(name: str, *_: Any) -> Any:
    raise ImportError(name)
