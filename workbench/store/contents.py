"""What a saved session holds besides the rows themselves, in memory: session, facts, lane records, the index of chunks.

Each row of the small tables carries a checksum, and the totals of the last clean close are kept, so that a bit flip
shows as damage and not as another number or as rows that were never there.
"""

from __future__ import annotations

import json
import sqlite3
from bisect import insort
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from workbench.errors import SavedSessionError
from workbench.protocol.columns import KINDS
from workbench.store.columns import checksum
from workbench.store.file import scan
from workbench.store.schema import put_json
from workbench.store.state import LaneRecord

Key = tuple[int, str]
"""Lane id (0: the session's own) and kind of rows (`protocol.columns.KINDS`)."""


class Chunk(NamedTuple):
    """Where a chunk stands: its first position, number of rows, row id, checksum and size in bytes."""

    first: int
    rows: int
    id: int
    crc: int
    size: int

    @property
    def stop(self) -> int:
        """The position after its last."""
        return self.first + self.rows


@dataclass(slots=True)
class Contents:
    """See the module; `chunks` are in order and never overlap, `lost` are those found damaged."""

    session: dict[str, Any] = field(default_factory=dict[str, Any])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    lanes: dict[int, LaneRecord] = field(default_factory=dict[int, LaneRecord])
    chunks: dict[Key, list[Chunk]] = field(default_factory=dict[Key, list[Chunk]])
    lost: dict[Key, list[Chunk]] = field(default_factory=dict[Key, list[Chunk]])
    totals: dict[str, int] = field(default_factory=dict[str, int])
    tokens_checked: bool = False

    def add(self, key: Key, new: list[Chunk]) -> None:
        """Index chunks that were written."""
        stored = self.chunks.setdefault(key, [])
        for chunk in new:
            insort(stored, chunk)

    def lose(self, key: Key, chunk: Chunk) -> str:
        """Take a damaged chunk out of the index and say what is lost."""
        self.chunks[key] = [item for item in self.chunks[key] if item.id != chunk.id]
        self.lost.setdefault(key, []).append(chunk)
        what = f"{key[1]} rows {chunk.first:,} to {chunk.stop - 1:,}"
        return f"{_owner(key)}: {what} are damaged and left out."

    def lost_in(self, key: Key, first: int, stop: int) -> list[Chunk]:
        """Damaged chunks that rows from `first` to `stop` replace; they are no longer lost."""
        hit = [chunk for chunk in self.lost.get(key, []) if chunk.first < stop and chunk.stop > first]
        if hit:
            self.lost[key] = [chunk for chunk in self.lost[key] if chunk not in hit]
        return hit

    def put_lane(self, connection: sqlite3.Connection, record: LaneRecord) -> None:
        """Write a lane's record."""
        text = json.dumps(asdict(record), ensure_ascii=False)
        connection.execute(
            "INSERT OR REPLACE INTO lanes (id, record, crc) VALUES (?, ?, ?)",
            (record.id, text, checksum(record.id, text)),
        )
        # A new mapping, since `lanes()` may be iterating over the old one on another thread.
        self.lanes = {**self.lanes, record.id: record}

    def delete(self, connection: sqlite3.Connection, lane_id: int, kind: str | None) -> None:
        """Delete a lane's chunks, of one kind or of all."""
        for one in KINDS if kind is None else (kind,):
            connection.execute("DELETE FROM chunks WHERE lane = ? AND kind = ?", (lane_id, one))
            self.chunks.pop((lane_id, one), None)
            self.lost.pop((lane_id, one), None)
        self.write_totals(connection)

    def write_totals(self, connection: sqlite3.Connection) -> None:
        """Note how much there is of everything, for the next one who opens the file to compare."""
        totals = {f"{lane} {kind}": sum(chunk.rows for chunk in stored) for (lane, kind), stored in self.chunks.items()}
        totals["lanes"] = len(self.lanes)
        totals["facts"] = len(self.facts)
        totals["tokens"] = int(connection.execute("SELECT count(*) FROM tokens").fetchone()[0])
        put_json(connection, "meta", "totals", totals)
        self.totals = totals

    def tokens(self, connection: sqlite3.Connection, damage: list[str]) -> dict[int, bytes]:
        """Every token's bytes; tokens whose checksum fails are left out, and their number is added to `damage`."""
        found: dict[int, bytes] = {}
        problems: list[str] = []
        for number, data, crc in scan(connection, "tokens", "bytes, crc", problems):
            whole = isinstance(data, bytes) and checksum(number, data) == crc
            found.update({number: data} if whole else {})
        missing = max(self.totals.get("tokens", 0), _count(connection, "tokens")) - len(found)
        if missing > 0:
            problems.append(f"The text of at least {missing:,} token ids is lost.")
        if not self.tokens_checked:
            damage.extend(problems)
        self.tokens_checked = True
        return found


def load(connection: sqlite3.Connection, path: Path, damage: list[str]) -> Contents:
    """Everything but the rows and the tokens; what is damaged is left out and named in `damage`.

    Raises SavedSessionError where nothing at all can be read, or where whole rows hold what workbench never writes.
    """
    try:
        return _load(connection, path, damage)
    except (ValueError, TypeError) as error:
        raise SavedSessionError(f"holds what no saved session holds: {error}", where=str(path)) from error


def _load(connection: sqlite3.Connection, path: Path, damage: list[str]) -> Contents:
    contents = Contents(facts=_pairs(connection, "facts", damage))
    meta = _pairs(connection, "meta", damage)
    if isinstance(session := meta.get("session"), dict):
        contents.session = cast("dict[str, Any]", session)
    if isinstance(totals := meta.get("totals"), dict):
        contents.totals = {str(key): int(value) for key, value in cast("dict[str, int]", totals).items()}
    contents.lanes = _lanes(connection, damage)
    contents.chunks = _index(connection, damage)
    if damage and not (contents.session or contents.lanes or contents.chunks):
        raise SavedSessionError("nothing in it can be read", where=str(path), next="It is damaged beyond use.")
    if "session" not in meta:
        damage.append("The session's own text is lost.")
    present = {
        f"{lane} {kind}": sum(chunk.rows for chunk in stored) for (lane, kind), stored in contents.chunks.items()
    }
    present |= {"lanes": len(contents.lanes), "facts": len(contents.facts)}
    for name, total in contents.totals.items():
        if name != "tokens" and present.get(name, 0) < total:
            lane, _, kind = name.rpartition(" ")
            what = f"{_owner((int(lane), kind))}: {{}} {kind} rows" if lane else f"{{}} {kind}"
            damage.append(f"{what.format(f'{total - present.get(name, 0):,} of {total:,}')} are missing.")
    return contents


def _pairs(connection: sqlite3.Connection, table: str, damage: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _, key, text, crc in scan(connection, table, "key, value, crc", damage):
        if isinstance(key, str) and isinstance(text, str) and checksum(key, text) == crc:
            found[key] = json.loads(text)
        else:
            damage.append(f"An entry of {table} is damaged and left out.")
    return found


def _lanes(connection: sqlite3.Connection, damage: list[str]) -> dict[int, LaneRecord]:
    known = {item.name for item in fields(LaneRecord)}
    lanes: dict[int, LaneRecord] = {}
    for number, text, crc in scan(connection, "lanes", "record, crc", damage):
        if isinstance(text, str) and checksum(number, text) == crc:
            values: dict[str, Any] = json.loads(text)
            lanes[number] = LaneRecord(**{key: value for key, value in values.items() if key in known})
        else:
            damage.append(f"The record of lane {number} is damaged and left out.")
    return lanes


def _index(connection: sqlite3.Connection, damage: list[str]) -> dict[Key, list[Chunk]]:
    """Chunks in order; what is not believable is left out. `length` of a blob does not read it."""
    index: dict[Key, list[Chunk]] = {}
    bad = 0
    for row in scan(connection, "chunks", "lane, kind, first, n, crc, length(data)", damage):
        number, lane, kind, first, rows, crc, size = row
        whole = all(isinstance(value, int) for value in (lane, first, rows, crc, size))
        if whole and kind in KINDS and first >= 0 and rows > 0 and first + rows < 1 << 63:
            index.setdefault((lane, kind), []).append(Chunk(first, rows, number, crc, size))
        else:
            bad += 1
    for key, stored in index.items():
        stored.sort()
        kept: list[Chunk] = []
        for chunk in stored:
            if kept and chunk.first < kept[-1].stop:
                bad += 1
            else:
                kept.append(chunk)
        index[key] = kept
    if bad:
        damage.append(f"{bad:,} chunks of rows have a damaged place and are left out.")
    return index


def _count(connection: sqlite3.Connection, table: str) -> int:
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.Error:
        return 0


def _owner(key: Key) -> str:
    return f"Lane {key[0]}" if key[0] else "The session"
