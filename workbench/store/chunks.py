"""The rows of a saved session, on the thread that owns its connection: open chunks in memory, the others on disk."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from workbench.errors import SavedSessionError
from workbench.protocol.columns import count_rows, cut, join
from workbench.protocol.wire import Arrays
from workbench.store.columns import CHUNK_ROWS, DamagedChunkError, checksum, decode, encode
from workbench.store.contents import Chunk, Contents, Key
from workbench.store.file import transaction

OPEN_SECONDS = 5.0
DECODED_CHUNKS = 8
LAST = (1 << 63) - 1


@dataclass(slots=True)
class _OpenChunk:
    """Rows not yet in the file: consecutive, from `first` on; `due` is when they are written at the latest."""

    first: int
    stop: int
    parts: list[Arrays]
    due: float


@dataclass(slots=True)
class ChunkTable:
    """Rows by lane, kind and position. One thread only; raises SavedSessionError for what cannot be done."""

    connection: sqlite3.Connection
    contents: Contents
    path: Path
    damage: list[str]
    clock: Callable[[], float]
    _open: dict[Key, _OpenChunk] = field(default_factory=dict[Key, _OpenChunk])
    _decoded: OrderedDict[int, Arrays] = field(default_factory=OrderedDict[int, Arrays])

    def append(self, key: Key, first: int, rows: int, arrays: Arrays) -> None:
        """Add rows; they are written once they fill a chunk, or by `write_due`."""
        chunk = self._open.get(key)
        if chunk is not None and chunk.stop != first:
            self._store(key)
            chunk = None
        if first < 0 or first + rows > LAST or key[0] not in self.contents.lanes or self._overlaps(key, first, rows):
            raise SavedSessionError(
                f"lane {key[0]} cannot take {rows} {key[1]} rows at {first}: no such lane, or rows are there already",
                where=str(self.path),
            )
        if chunk is None:
            chunk = self._open[key] = _OpenChunk(first, first, [], self.clock() + OPEN_SECONDS)
        chunk.parts.append(arrays)
        chunk.stop += rows
        if chunk.stop - chunk.first >= CHUNK_ROWS:
            self._store(key, whole_chunks=True)

    def write_due(self) -> float | None:
        """Write the open chunks whose time has come; the seconds until the next one's, None where there is none."""
        for key in [key for key, chunk in self._open.items() if chunk.due <= self.clock()]:
            self._store(key)
        if not self._open:
            return None
        return max(0.0, min(chunk.due for chunk in self._open.values()) - self.clock())

    def write_all(self) -> None:
        """Write the open chunks."""
        for key in list(self._open):
            self._store(key)

    def write_lane(self, lane_id: int) -> None:
        """Write the open chunks of a lane."""
        for key in [key for key in self._open if key[0] == lane_id]:
            self._store(key)

    def write(self, key: Key, first: int, rows: int, arrays: Arrays) -> None:
        """Write rows at once, in chunks of their own."""
        with transaction(self.connection, self.path):
            new = [
                self._insert(key, first + start, cut(key[1], arrays, start, min(start + CHUNK_ROWS, rows)))
                for start in range(0, rows, CHUNK_ROWS)
            ]
        self.contents.add(key, new)

    def copy(self, chunks: Iterable[tuple[Key, Chunk, bytes]]) -> None:
        """Write chunks of another file as they are, in one transaction."""
        new: list[tuple[Key, Chunk]] = []
        with transaction(self.connection, self.path):
            for key, chunk, data in chunks:
                new.append((key, self._insert_data(key, chunk.first, chunk.rows, data)))
        for key, chunk in new:
            self.contents.add(key, [chunk])

    def delete(self, lane_id: int, kind: str | None) -> None:
        """Forget a lane's rows, of one kind or of all."""
        for key in [key for key in self._open if key[0] == lane_id and kind in (None, key[1])]:
            del self._open[key]
        with transaction(self.connection, self.path):
            self.contents.delete(self.connection, lane_id, kind)
        self._decoded.clear()

    def places(self, key: Key) -> list[tuple[int, int]]:
        """(first, rows) of each chunk, the open one included, in order."""
        places = [(chunk.first, chunk.rows) for chunk in self.contents.chunks.get(key, [])]
        if (waiting := self._open.get(key)) is not None:
            places.append((waiting.first, waiting.stop - waiting.first))
            places.sort()
        return places

    def read(self, key: Key, first: int, stop: int) -> Arrays:
        """The rows of the positions `first` to `stop`; only the chunks they stand in are read."""
        parts: list[Arrays] = []
        position = first
        while position < stop:
            begin, end, arrays = self._rows_at(key, position)
            parts.append(cut(key[1], arrays, position - begin, min(stop, end) - begin))
            position = end
        return parts[0] if len(parts) == 1 else join(key[1], parts)

    def raw(self, key: Key, chunk: Chunk) -> bytes:
        """A chunk's bytes as they stand in the file, checked. Raises DamagedChunkError."""
        try:
            row = self.connection.execute("SELECT data FROM chunks WHERE id = ?", (chunk.id,)).fetchone()
        except (sqlite3.Error, MemoryError) as error:
            raise DamagedChunkError(f"a chunk of {key[1]} rows cannot be read: {error}") from error
        if row is None or not isinstance(row[0], bytes) or checksum(*key, chunk.first, chunk.rows, row[0]) != chunk.crc:
            raise DamagedChunkError(f"a chunk of {key[1]} rows is not what was written")
        return row[0]

    def _rows_at(self, key: Key, position: int) -> tuple[int, int, Arrays]:
        """First position, stop and rows of the chunk that holds a position."""
        stored = self.contents.chunks.get(key, [])
        place = bisect_right(stored, position, key=lambda chunk: chunk.first) - 1
        if place >= 0 and position < stored[place].stop:
            return stored[place].first, stored[place].stop, self._chunk(key, stored[place])
        waiting = self._open.get(key)
        if waiting is None or not waiting.first <= position < waiting.stop:
            raise SavedSessionError(f"lane {key[0]} has no {key[1]} row at {position}", where=str(self.path))
        if len(waiting.parts) > 1:
            waiting.parts = [join(key[1], waiting.parts)]
        return waiting.first, waiting.stop, waiting.parts[0]

    def _chunk(self, key: Key, chunk: Chunk) -> Arrays:
        if (arrays := self._decoded.get(chunk.id)) is not None:
            self._decoded.move_to_end(chunk.id)
            return arrays
        try:
            arrays = decode(key[1], chunk.rows, self.raw(key, chunk))
        except DamagedChunkError as error:
            self._lose(key, chunk, error)
        self._decoded[chunk.id] = arrays
        while len(self._decoded) > DECODED_CHUNKS:
            self._decoded.popitem(last=False)
        return arrays

    def _lose(self, key: Key, chunk: Chunk, error: DamagedChunkError) -> NoReturn:
        sentence = self.contents.lose(key, chunk)
        self.damage.append(sentence)
        raise DamagedChunkError(
            sentence, where=str(self.path), next="Run the lane again to measure it anew."
        ) from error

    def _overlaps(self, key: Key, first: int, rows: int) -> bool:
        stored = self.contents.chunks.get(key, [])
        after = bisect_right(stored, first + rows - 1, key=lambda chunk: chunk.first)
        return after > 0 and stored[after - 1].stop > first

    def _store(self, key: Key, whole_chunks: bool = False) -> None:
        """Write the open chunk of a lane; with `whole_chunks`, keep what does not fill one."""
        chunk = self._open[key]
        arrays = join(key[1], chunk.parts)
        rows = chunk.stop - chunk.first
        taken = rows - rows % CHUNK_ROWS if whole_chunks else rows
        self.write(key, chunk.first, taken, cut(key[1], arrays, 0, taken))
        del self._open[key]
        if taken < rows:
            # Copied, so that the few rows left over do not keep all of `arrays` alive.
            rest = {name: np.array(array) for name, array in cut(key[1], arrays, taken, rows).items()}
            self._open[key] = _OpenChunk(chunk.first + taken, chunk.stop, [rest], self.clock() + OPEN_SECONDS)

    def _insert(self, key: Key, first: int, arrays: Arrays) -> Chunk:
        return self._insert_data(key, first, count_rows(key[1], arrays), encode(key[1], arrays))

    def _insert_data(self, key: Key, first: int, rows: int, data: bytes) -> Chunk:
        crc = checksum(*key, first, rows, data)
        for lost in self.contents.lost_in(key, first, first + rows):
            self.connection.execute("DELETE FROM chunks WHERE id = ?", (lost.id,))
        cursor = self.connection.execute(
            "INSERT INTO chunks (lane, kind, first, n, crc, data) VALUES (?, ?, ?, ?, ?, ?)",
            (*key, first, rows, crc, data),
        )
        return Chunk(first, rows, cursor.lastrowid or 0, crc, len(data))
