from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from tests.store.samples import equal, make_rows, write_session
from workbench.protocol.columns import cut
from workbench.store.columns import CHUNK_ROWS, checksum, encode
from workbench.store.saved import SavedSession

PAGE = 4096
PAGES = (1 << 32) // PAGE + 1000


def never_written_up_to_4_gib(path: Path) -> None:
    """Tell SQLite that the file is so long already: what is written next lies behind the hole."""
    with path.open("r+b") as file:
        assert struct.unpack(">H", file.read(100)[16:18]) == (PAGE,)
        file.seek(28)
        file.write(struct.pack(">I", PAGES))
        file.truncate(PAGES * PAGE)


def test_a_sparse_file_whose_counters_pass_32_bits_reads_its_last_row_exactly(path: Path) -> None:
    write_session(path)
    never_written_up_to_4_gib(path)
    rows, begin = make_rows("rows", 2 * CHUNK_ROWS), (1 << 32) - CHUNK_ROWS
    with closing(sqlite3.connect(path)) as connection, connection:
        for number in range(2):  # positions, chunk ids and places in the file
            first = begin + number * CHUNK_ROWS
            data = encode("rows", cut("rows", rows, number * CHUNK_ROWS, (number + 1) * CHUNK_ROWS))
            crc = checksum(2, "rows", first, CHUNK_ROWS, data)
            values = ((1 << 32) + number, 2, "rows", first, CHUNK_ROWS, crc, data)
            connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    assert path.stat().st_size > PAGES * PAGE
    with SavedSession.open(path) as saved:
        assert saved.spans(2, "rows") == [(1, 599), (begin, 2 * CHUNK_ROWS)]
        last = begin + 2 * CHUNK_ROWS - 1
        assert equal(saved.read(2, "rows", last, last + 1), cut("rows", rows, 2 * CHUNK_ROWS - 1, 2 * CHUNK_ROWS))
        assert equal(saved.read(2, "rows", begin, last + 1), rows)
        assert equal(saved.read(1, "trace", 1, 600), make_rows("trace", 599))
        assert [chunk.id for chunk in saved.chunks(2, "rows")][1:] == [1 << 32, (1 << 32) + 1]
        assert saved.verify() == []


def test_totals_beyond_32_bits_come_back_exactly(path: Path) -> None:
    totals = {"prefill_tokens": (1 << 33) + 1, "kv_cache_bytes": (1 << 53) - 1}
    write_session(path)
    with SavedSession.open(path, write=True) as saved:
        lane = saved.lanes()[1]
        lane.stats.update(totals)
        saved.update_lane(lane)
        saved.append(lane.id, "rows", (1 << 40) + 5, make_rows("rows", 3))
    with SavedSession.open(path) as saved:
        assert {name: saved.lanes()[1].stats[name] for name in totals} == totals
        assert saved.spans(lane.id, "rows")[-1] == ((1 << 40) + 5, 3)
