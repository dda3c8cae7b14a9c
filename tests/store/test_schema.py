from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.store.samples import write_session
from workbench.errors import SavedSessionError
from workbench.store import file
from workbench.store.saved import SavedSession
from workbench.store.schema import MIGRATIONS, Migration, migrate, migration, user_version


def with_a_second_format(applied: list[int]) -> dict[int, Migration]:
    registry = dict(MIGRATIONS)

    @migration(2, registry)
    def _(connection: sqlite3.Connection) -> None:
        applied.append(2)
        connection.execute("CREATE TABLE verdicts (id INTEGER PRIMARY KEY)")
        connection.execute("UPDATE lanes SET crc = crc")

    return registry


def use(registry: dict[int, Migration], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "MIGRATIONS", registry)
    monkeypatch.setattr(file, "migrate", lambda connection: migrate(connection, registry))


def test_migrations_are_numbered_without_a_gap() -> None:
    assert list(MIGRATIONS) == list(range(1, len(MIGRATIONS) + 1))
    with pytest.raises(ValueError, match="cannot follow"):
        migration(len(MIGRATIONS) + 2, dict(MIGRATIONS))(MIGRATIONS[1])


def test_an_older_file_is_brought_up_to_date_once_when_it_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_session(path)
    applied: list[int] = []
    use(with_a_second_format(applied), monkeypatch)
    for _ in range(2):
        with SavedSession.open(path, write=True) as saved:
            assert saved.spans(1, "trace") == [(1, 599)]
    assert applied == [2]
    connection = sqlite3.connect(path)
    assert user_version(connection) == 2
    connection.close()


def test_an_older_file_is_read_through_a_copy_and_stays_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_session(path)
    before = path.read_bytes()
    applied: list[int] = []
    use(with_a_second_format(applied), monkeypatch)
    with SavedSession.open(path) as saved:
        assert saved.verify() == []
        assert saved.spans(1, "trace") == [(1, 599)]
    assert applied == [2]
    assert path.read_bytes() == before


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_session(path)
    registry = dict(MIGRATIONS)

    @migration(2, registry)
    def _(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE lanes")
        connection.execute("no such statement")

    use(registry, monkeypatch)
    with pytest.raises(SavedSessionError, match="syntax error"):
        SavedSession.open(path, write=True)
    monkeypatch.undo()
    with SavedSession.open(path) as saved:
        assert len(saved.lanes()) == 3


@pytest.mark.parametrize("write", [False, True])
def test_a_newer_file_is_refused_with_a_clear_word_and_left_alone(path: Path, write: bool) -> None:
    write_session(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SavedSessionError, match=r"newer workbench \(file format 99; this one knows 1\).*Update"):
        SavedSession.open(path, write=write)
    assert path.read_bytes() == before
