"""The saved session: one SQLite file that holds a session, its token stream, its lanes and all that was measured.

Rows are kept in chunks of up to 1,024 positions of one lane; an open chunk stays in memory until it is full or 5 s old,
so a kill loses at most that. Every call may come from any thread and runs on the file's own. Appends do not wait: what
fails in one is raised by the next writing call and by `close`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from workbench.errors import SavedSessionError
from workbench.protocol.columns import count_rows, join
from workbench.protocol.wire import Arrays
from workbench.store.chunks import LAST, ChunkTable
from workbench.store.columns import DamagedChunkError, checksum
from workbench.store.contents import Chunk, Contents, Key, load
from workbench.store.file import (
    close_writing,
    create_file,
    in_write_ahead,
    open_reading,
    open_writing,
    transaction,
    write_ahead,
)
from workbench.store.lock import WriterLock
from workbench.store.schema import put_json
from workbench.store.state import LaneRecord
from workbench.store.thread import OwnThread

Result = TypeVar("Result")

STREAM_KEY: Key = (0, "stream")


class SavedSession:
    """See the module. `damage` says, a sentence each, what a damaged file lost; it can grow while rows are read.

    Every method raises SavedSessionError where the file cannot do what it is asked, or is closed.
    """

    def __init__(self, path: Path, write: Callable[[], sqlite3.Connection] | None, clock: Callable[[], float]) -> None:
        """Use `create` or `open`. `write` opens the connection where the file is to be written."""
        self.path = path
        self.damage: list[str] = []
        self._lock = WriterLock(path) if write else None
        self._failure: SavedSessionError | None = None
        self._closed = False
        self._rows: ChunkTable | None = None
        self._writing = False
        self._thread = OwnThread(f"saved {path.name}", self._tick)
        try:
            self._table = self._thread.call(lambda: self._open(write, clock))
        except BaseException:
            self._thread.stop()
            if self._lock:
                self._lock.release()
            raise

    @classmethod
    def create(
        cls,
        path: str | Path,
        session: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """A new file, open for writing; `session` is the session's JSON object, `facts` what else is known of it."""
        place = Path(path).resolve()
        return cls(place, lambda: create_file(place, dict(session), dict(facts or {})), clock)

    @classmethod
    def open(cls, path: str | Path, write: bool = False, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """A file that is there. For reading it is opened as far as it is whole and never written to; for writing it
        must be whole, and nobody else may be writing it."""
        place = Path(path).resolve()
        return cls(place, (lambda: open_writing(place)) if write else None, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def read_only(self) -> bool:
        """Whether it was opened for reading."""
        return self._lock is None

    @property
    def session(self) -> dict[str, Any]:
        """The session's JSON object; empty where it was lost."""
        return self._contents.session

    @property
    def facts(self) -> dict[str, Any]:
        """A copy of the facts: hashes, notes, the noise floor."""
        return dict(self._contents.facts)

    def set_fact(self, key: str, value: Any) -> None:
        """Set one fact to a JSON value."""
        self._write(lambda: self._set_fact(key, value))

    def set_stream(self, arrays: Arrays) -> None:
        """Set the token stream (columns of `protocol.columns.STREAM`) all lanes share; it can be set once."""
        rows = count_rows("stream", arrays)
        self._write(lambda: self._set_stream(rows, arrays))

    def stream(self) -> Arrays:
        """The token stream; what follows a damaged part is left out and named in `damage`."""
        parts: list[Arrays] = []
        stop = 0
        for first, arrays in self.pieces(0, "stream"):
            if first != stop:
                break
            parts.append(arrays)
            stop += len(arrays["ids"])
        return join("stream", parts)

    def add_lane(self, record: LaneRecord) -> LaneRecord:
        """Add a lane; its id is given here, whatever `record` says. Only one can be the reference."""
        return self._write(lambda: self._add_lane(record))

    def lanes(self) -> list[LaneRecord]:
        """The records, the reference first, then by id."""
        return sorted(self._contents.lanes.values(), key=lambda lane: (lane.kind != "reference", lane.id))

    def update_lane(self, record: LaneRecord) -> None:
        """Replace the record of the lane `record.id`; unless it still runs, its rows are in the file before that."""
        self._write(lambda: self._update_lane(record))

    def append(self, lane_id: int, kind: str, first: int, arrays: Arrays) -> None:
        """Add rows from position `first` on (64-bit) without waiting. `arrays` must not change afterwards.

        Raises WireError where they are not whole rows. Rows at positions the lane already has fail.
        """
        rows = count_rows(kind, arrays)
        self._require_writable()

        def add() -> None:
            if self._failure is None:
                try:
                    self._begin_writing()
                    self._table.append((lane_id, kind), first, rows, arrays)
                except SavedSessionError as error:
                    self._failure = error

        if rows:
            self._post(add)

    def read(self, lane_id: int, kind: str, first: int, stop: int) -> Arrays:
        """The rows of the positions `first` to `stop`, `stop` left out; they may be read-only views.

        Raises SavedSessionError where one of them is not there, DamagedChunkError where it was and is damaged.
        """
        return self._call(lambda: self._table.read((lane_id, kind), first, stop))

    def pieces(self, lane_id: int, kind: str, first: int = 0, stop: int = LAST) -> Iterator[tuple[int, Arrays]]:
        """(first position, rows) chunk by chunk, from `first` to `stop`, as stored when the iteration began.

        Damaged chunks are left out and named in `damage`.
        """
        for begin, rows in self._call(lambda: self._table.places((lane_id, kind))):
            low, high = max(begin, first), min(begin + rows, stop)
            if low >= high:
                continue
            try:
                yield low, self.read(lane_id, kind, low, high)
            except DamagedChunkError:
                continue

    def spans(self, lane_id: int, kind: str) -> list[tuple[int, int]]:
        """(first, number) of each run of consecutive positions that are there, in order."""
        spans: list[tuple[int, int]] = []
        for first, rows in self._call(lambda: self._table.places((lane_id, kind))):
            if spans and sum(spans[-1]) == first:
                spans[-1] = spans[-1][0], spans[-1][1] + rows
            else:
                spans.append((first, rows))
        return spans

    def chunks(self, lane_id: int, kind: str) -> list[Chunk]:
        """The chunks in the file, in order, with their size in bytes."""
        return self._call(lambda: list(self._contents.chunks.get((lane_id, kind), [])))

    def delete_rows(self, lane_id: int, kind: str | None = None) -> None:
        """Forget a lane's rows, of one kind or of all."""
        self._write(lambda: self._table.delete(lane_id, kind))

    def add_tokens(self, tokens: Mapping[int, bytes]) -> None:
        """Add the bytes of token ids; ids that are known keep theirs."""
        rows = [(number, data, checksum(number, data)) for number, data in tokens.items()]
        self._write(lambda: self._insert_tokens(rows))

    def tokens(self) -> dict[int, bytes]:
        """The bytes of every token id that occurs."""
        return self._call(lambda: self._contents.tokens(self._table.connection, self.damage))

    def verify(self) -> list[str]:
        """Read all there is and return what is damaged, a sentence each; empty where the file is whole."""
        keys = self._call(lambda: list(self._contents.chunks))
        for lane_id, kind in keys:
            for _ in self.pieces(lane_id, kind):
                pass
        self.tokens()
        return list(self.damage)

    def flush(self) -> None:
        """Write the open chunks now."""
        self._write(lambda: self._table.write_all())

    def copy_reference(self, source: str | Path, *, tokens: bool = True) -> LaneRecord:
        """Take over another file's stream, tokens and reference lane with its rows; the lane comes whole or not at all.
        Without `tokens` the bytes of its token ids stay behind.

        Raises SavedSessionError where that file is
        damaged or has none, or where this one has a reference or another stream.
        """
        if Path(source).resolve() == self.path:
            raise SavedSessionError("cannot take the reference from itself", where=str(self.path))
        with SavedSession.open(source) as other:
            return self._write(lambda: self._copy_reference(other, tokens))

    def close(self) -> None:
        """Write what is open, leave one file behind, let the next writer in. Raises what an append failed with."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.call(self._finish)
        finally:
            self._thread.stop()
            if self._lock:
                self._lock.release()

    def _call(self, function: Callable[[], Result]) -> Result:
        return self._post(function).result()

    def _post(self, function: Callable[[], Result]) -> Future[Result]:
        if self._closed:
            raise SavedSessionError("is closed", where=str(self.path))
        return self._thread.post(function)

    def _write(self, function: Callable[[], Result]) -> Result:
        """A writing call: it comes after the appends before it and fails where one of them failed."""
        self._require_writable()

        def run() -> Result:
            if self._failure is not None:
                raise self._failure
            self._begin_writing()
            return function()

        return self._call(run)

    def _require_writable(self) -> None:
        if self._lock is None:
            raise SavedSessionError("is open for reading", where=str(self.path), next="Open it for writing.")
        if self._failure is not None:
            raise self._failure

    @property
    def _contents(self) -> Contents:
        return self._table.contents

    # What follows runs on the file's own thread.

    def _open(self, write: Callable[[], sqlite3.Connection] | None, clock: Callable[[], float]) -> ChunkTable:
        connection = write() if write else open_reading(self.path, self.damage)
        try:
            contents = load(connection, self.path, self.damage)
            if write and self.damage:
                raise SavedSessionError(
                    f"is damaged and will not be written to: {self.damage[0]}",
                    where=str(self.path),
                    next="Open it for reading, and write to another file.",
                )
        except BaseException:
            connection.close()
            raise
        self._writing = write is not None and in_write_ahead(connection)
        self._rows = ChunkTable(connection, contents, self.path, self.damage, clock)
        return self._rows

    def _begin_writing(self) -> None:
        """Only the first write changes the file: one that was opened for writing and closed again stays as it was."""
        if not self._writing:
            write_ahead(self._table.connection, self.path)
            self._writing = True

    def _tick(self) -> float | None:
        if self._failure is not None or self._rows is None:
            return None
        try:
            return self._rows.write_due()
        except SavedSessionError as error:
            self._failure = error
            return None

    def _set_fact(self, key: str, value: Any) -> None:
        with transaction(self._table.connection, self.path) as connection:
            put_json(connection, "facts", key, value)
        self._contents.facts = {**self._contents.facts, key: value}

    def _set_stream(self, rows: int, arrays: Arrays) -> None:
        if not (there := sum(rows for _, rows in self._table.places(STREAM_KEY))):
            self._table.write(STREAM_KEY, 0, rows, arrays)
            return
        old = self._table.read(STREAM_KEY, 0, there)
        if there != rows or not all(np.array_equal(old[name], arrays[name]) for name in arrays):
            raise SavedSessionError(
                "has another token stream",
                where=str(self.path),
                next="Write another file for another session or template.",
            )

    def _add_lane(self, record: LaneRecord) -> LaneRecord:
        self._refuse_second_reference(record)
        return self._put_lane(replace(record, id=max(self._contents.lanes, default=0) + 1))

    def _update_lane(self, record: LaneRecord) -> None:
        if record.id not in self._contents.lanes:
            raise SavedSessionError(f"has no lane {record.id}", where=str(self.path))
        if record.status not in ("queued", "running"):
            self._table.write_lane(record.id)
        self._put_lane(record)

    def _put_lane(self, record: LaneRecord) -> LaneRecord:
        with transaction(self._table.connection, self.path) as connection:
            self._contents.put_lane(connection, record)
        return record

    def _refuse_second_reference(self, record: LaneRecord) -> None:
        if record.kind == "reference" and any(lane.kind == "reference" for lane in self._contents.lanes.values()):
            raise SavedSessionError("has a reference already", where=str(self.path))

    def _insert_tokens(self, rows: list[tuple[int, bytes, int]]) -> None:
        with transaction(self._table.connection, self.path) as connection:
            connection.executemany("INSERT OR IGNORE INTO tokens (id, bytes, crc) VALUES (?, ?, ?)", rows)

    def _copy_reference(self, other: SavedSession, with_tokens: bool) -> LaneRecord:
        reference = next((lane for lane in other.lanes() if lane.kind == "reference"), None)
        stream, tokens = other.stream(), other.tokens() if with_tokens else {}
        if reference is None or other.damage:
            raise SavedSessionError(
                "has no reference" if reference is None else f"is damaged: {other.damage[0]}",
                where=str(other.path),
                next="Record the reference anew.",
            )
        self._refuse_second_reference(reference)
        self._set_stream(len(stream["ids"]), stream)
        self._insert_tokens([(number, data, checksum(number, data)) for number, data in tokens.items()])
        record = replace(reference, id=max(self._contents.lanes, default=0) + 1)
        with transaction(self._table.connection, self.path):
            self._table.copy(
                ((record.id, kind), chunk, other.raw(reference.id, kind, chunk))
                for kind in ("trace", "continuation")
                for chunk in other.chunks(reference.id, kind)
            )
            return self._put_lane(record)

    def raw(self, lane_id: int, kind: str, chunk: Chunk) -> bytes:
        """A chunk's bytes as stored, checked. Raises DamagedChunkError."""
        return self._call(lambda: self._table.raw((lane_id, kind), chunk))

    def _finish(self) -> None:
        table = self._table
        if not self._writing:
            table.connection.close()
            return
        try:
            table.write_all()
            with transaction(table.connection, self.path) as connection:
                self._contents.write_totals(connection)
        finally:
            close_writing(table.connection, self.path)
        if self._failure is not None:
            raise self._failure
