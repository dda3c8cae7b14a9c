"""Opening a saved session's SQLite file, healthy or damaged, for reading or for writing, and closing it again."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.errors import SavedSessionError
from workbench.store.schema import APPLICATION_ID, MIGRATIONS, migrate, put_json, user_version

BUSY_SECONDS = 5.0
MAX_VALUE_BYTES = 1 << 28
MAX_MISSES = 5_000
"""Row ids probed in vain before the rest of a damaged table is given up: more than one lost page of the tree of chunks
can hide."""


def create_file(path: Path, session: dict[str, Any], facts: dict[str, Any]) -> sqlite3.Connection:
    """A new file with its tables, open for writing. Raises SavedSessionError where something is there already."""
    if path.exists() and (not path.is_file() or path.stat().st_size > 0):
        raise SavedSessionError(
            "is there already", where=str(path), next="Choose another name, or remove it, or open it for writing."
        )
    try:
        connection = _connect(path, "mode=rwc")
    except sqlite3.Error as error:
        raise SavedSessionError(f"cannot be created: {error}", where=str(path)) from error
    try:
        # One transaction before write-ahead mode: a kill within it leaves an empty file, which may be created again.
        with transaction(connection, path):
            migrate(connection)
            put_json(connection, "meta", "session", session)
            for key, value in facts.items():
                put_json(connection, "facts", key, value)
    except sqlite3.Error as error:
        connection.close()
        raise SavedSessionError(f"cannot be created: {error}", where=str(path)) from error
    except SavedSessionError:
        connection.close()
        raise
    return connection


def open_writing(path: Path) -> sqlite3.Connection:
    """A healthy file of this format or an older one, which is brought up to date. Raises SavedSessionError."""
    _require_file(path)
    connection: sqlite3.Connection | None = None
    try:
        connection = _connect(path, "mode=rw")
        _identify(connection, path)
        found = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        migrate(connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise SavedSessionError(
            f"cannot be opened for writing: {error}",
            where=str(path),
            next="Where it is damaged, open it for reading: what is whole can still be seen and exported.",
        ) from error
    except SavedSessionError:
        if connection is not None:
            connection.close()
        raise
    return connection


def open_reading(path: Path, damage: list[str]) -> sqlite3.Connection:
    """A file as far as it is whole, never written to; what is lost is added to `damage`. Raises SavedSessionError."""
    _require_file(path)
    try:
        try:
            connection = _open_as("mode=ro", path, damage)
        except sqlite3.OperationalError as error:
            # A folder that cannot be written has no place for the shared memory of write-ahead logging.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            wal = path.with_name(path.name + "-wal")
            connection = _open_as("mode=ro&immutable=1", path, damage)
            if wal.exists() and wal.stat().st_size > 0:
                damage.append(f"What stands only in {wal.name} cannot be read here; copy both to a writable folder.")
    except sqlite3.Error as error:
        raise SavedSessionError(
            f"cannot be read as a saved session: {error}",
            where=str(path),
            next="It is damaged or another kind of file.",
        ) from error
    if user_version(connection) == max(MIGRATIONS):
        return connection
    # An older format is brought up to date in a copy in memory: reading never writes to the file.
    try:
        copy = sqlite3.connect(":memory:", isolation_level=None)
        connection.backup(copy)
        migrate(copy)
    except sqlite3.Error as error:
        raise SavedSessionError(
            f"of an older format, cannot be brought up to date: {error}", where=str(path)
        ) from error
    finally:
        connection.close()
    return copy


def write_ahead(connection: sqlite3.Connection, path: Path) -> None:
    """Go over to write-ahead logging, where readers and the writer do not wait for each other."""
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as error:
        raise SavedSessionError(f"cannot be written: {error}", where=str(path)) from error


def in_write_ahead(connection: sqlite3.Connection) -> bool:
    """Whether the file is in write-ahead mode, as one is whose writer was killed."""
    return connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Generator[sqlite3.Connection]:
    """All or nothing; may stand within another one. Raises SavedSessionError for what SQLite raises."""
    try:
        connection.execute("SAVEPOINT writing")
        try:
            yield connection
            connection.execute("RELEASE writing")
        except BaseException:
            # A full disk may have ended the transaction already.
            if connection.in_transaction:
                connection.execute("ROLLBACK TO writing")
                connection.execute("RELEASE writing")
            raise
    except sqlite3.Error as error:
        raise SavedSessionError(
            f"cannot be written: {error}", where=str(path), next="Check the disk's free space and its health."
        ) from error


def close_writing(connection: sqlite3.Connection, path: Path) -> None:
    """Close so that the one file holds everything; it stays in write-ahead mode while others have it open."""
    try:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        try:
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
    except sqlite3.Error as error:
        raise SavedSessionError(f"cannot be closed: {error}", where=str(path)) from error
    finally:
        connection.close()


def scan(connection: sqlite3.Connection, table: str, columns: str, damage: list[str]) -> Iterator[tuple[Any, ...]]:
    """(row id, the columns ...) of every row that can be read, by row id; parts of a damaged table are stepped over."""
    last = -(1 << 63)
    misses = 0
    while True:
        try:
            for row in connection.execute(
                f"SELECT rowid, {columns} FROM {table} WHERE rowid > ? ORDER BY rowid", (last,)
            ):
                if not isinstance(row[0], int) or row[0] <= last:
                    raise sqlite3.DatabaseError("rows out of order")
                last, misses = row[0], misses and 1
                yield row
            break
        except (sqlite3.Error, MemoryError) as error:
            misses += 1
            if misses > MAX_MISSES or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:
                break
            last = max(last, 0) + 1
    if misses:
        damage.append(f"Part of the table of {table} cannot be read.")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None, cached_statements=64
    )
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _open_as(mode: str, path: Path, damage: list[str]) -> sqlite3.Connection:
    connection = _connect(path, mode)
    try:
        try:
            _identify(connection, path)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            # SQLite refuses a file that is shorter than its header says, except to those who repair it.
            connection.execute("PRAGMA writable_schema = ON")
            _identify(connection, path)
            damage.append("The file is shorter than when it was written.")
    except BaseException:
        connection.close()
        raise
    return connection


def _identify(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise SavedSessionError(
            "is not a saved session", where=str(path), next="Saved sessions are made by workbench run."
        )
    version = user_version(connection)
    if version > max(MIGRATIONS):
        raise SavedSessionError(
            f"was written by a newer workbench (file format {version}; this one knows {max(MIGRATIONS)})",
            where=str(path),
            next="Update workbench to open it.",
        )
    if version < 1:
        raise SavedSessionError(f"has the unknown file format {version}", where=str(path), next="It is damaged.")


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise SavedSessionError("is a folder", where=str(path), next="Name a file.")
    if not path.is_file():
        raise SavedSessionError("there is no such file", where=str(path), next="Check the path.")
