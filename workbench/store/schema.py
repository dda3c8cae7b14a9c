"""The tables of a saved session and the numbered functions that make them, each applied once.

`crc` columns hold `columns.checksum` of the row's other fields. Chunks of lane 0 are the token stream's.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import SavedSessionError
from workbench.store.columns import checksum

APPLICATION_ID = 0x77627331
"""`wbs1` in the header of the file: what tells a saved session from other SQLite files."""

Migration = Callable[[sqlite3.Connection], None]
MIGRATIONS: dict[int, Migration] = {}


def migration(number: int, registry: dict[int, Migration] = MIGRATIONS) -> Callable[[Migration], Migration]:
    """Register a function that takes a file from format `number` − 1 to `number`; it must not commit."""

    def register(function: Migration) -> Migration:
        if number != len(registry) + 1:
            raise ValueError(f"migration {number} cannot follow {len(registry)}")
        registry[number] = function
        return function

    return register


def migrate(connection: sqlite3.Connection, migrations: Mapping[int, Migration] = MIGRATIONS) -> list[int]:
    """Apply what the file lacks, each in a transaction of its own, and return the numbers that were applied."""
    applied: list[int] = []
    for number in sorted(migrations):
        # A savepoint, so that a new file's tables and first rows can share one transaction.
        connection.execute("SAVEPOINT migration")
        try:
            if user_version(connection) < number:
                migrations[number](connection)
                connection.execute(f"PRAGMA user_version = {number}")
                applied.append(number)
            connection.execute("RELEASE migration")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK TO migration")
                connection.execute("RELEASE migration")
            raise
    return applied


def user_version(connection: sqlite3.Connection) -> int:
    """The file's format number; 0 where nothing was applied yet."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@migration(1)
def first_tables(connection: sqlite3.Connection) -> None:
    """Session and totals, facts, lanes, tokens, chunks."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for table in ("meta", "facts"):
        connection.execute(
            f"CREATE TABLE {table} (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL)",
        )
    connection.execute("CREATE TABLE lanes (id INTEGER PRIMARY KEY, record TEXT NOT NULL, crc INTEGER NOT NULL)")
    connection.execute("CREATE TABLE tokens (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL, crc INTEGER NOT NULL)")
    connection.execute(
        "CREATE TABLE chunks (id INTEGER PRIMARY KEY, lane INTEGER NOT NULL, kind TEXT NOT NULL,"
        " first INTEGER NOT NULL, n INTEGER NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL)"
    )
    connection.execute("CREATE UNIQUE INDEX chunks_place ON chunks (lane, kind, first)")


def put_json(connection: sqlite3.Connection, table: str, key: str, value: Any) -> None:
    """Set a key of `meta` or `facts`. Raises SavedSessionError for what JSON cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise SavedSessionError(f"{key!r} cannot be stored as JSON: {error}") from error
    connection.execute(
        f"INSERT OR REPLACE INTO {table} (key, value, crc) VALUES (?, ?, ?)", (key, text, checksum(key, text))
    )
