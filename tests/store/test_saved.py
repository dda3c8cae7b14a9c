from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.samples import Clock, equal, make_rows, record, write_session
from workbench.errors import SavedSessionError
from workbench.protocol.columns import cut, join
from workbench.protocol.wire import WireError
from workbench.store.chunks import OPEN_SECONDS
from workbench.store.saved import SavedSession
from workbench.store.schema import APPLICATION_ID

ROOT = Path(__file__).parents[2]


def test_everything_comes_back_and_one_file_is_left(path: Path) -> None:
    write_session(path, n=3000)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    with SavedSession.open(path) as saved:
        assert saved.session == {"title": "A session", "messages": [{"role": "user"}]}
        assert saved.facts == {"tokenizer_hash": "ab12"}
        assert equal(saved.stream(), make_rows("stream", 3000))
        assert [(lane.id, lane.kind) for lane in saved.lanes()] == [(1, "reference"), (2, "lane"), (3, "lane")]
        assert saved.lanes()[1].stats == {"peak_memory_bytes": 123_456_789}
        assert equal(saved.read(1, "trace", 1, 3000), make_rows("trace", 2999))
        assert equal(saved.read(3, "rows", 1, 3000), make_rows("rows", 2999, 1))
        assert equal(saved.read(3, "continuation", 0, 64), make_rows("continuation", 64, 1))
        assert saved.tokens()[299] == b"<299>"
        assert saved.spans(1, "trace") == [(1, 2999)]
        assert saved.verify() == []
        assert saved.read_only
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_the_file_names_itself_and_is_in_no_write_ahead_mode_once_closed(path: Path) -> None:
    write_session(path)
    data = path.read_bytes()
    assert int.from_bytes(data[68:72], "big") == APPLICATION_ID
    assert data[18:20] == b"\x01\x01"


def test_ragged_rows_are_read_from_any_place_across_chunks(path: Path) -> None:
    trace = make_rows("trace", 3000)
    write_session(path, n=3001)
    with SavedSession.open(path) as saved:
        for first, stop in [(1, 2), (1020, 1030), (1025, 1026), (2049, 3001), (500, 2900), (77, 77)]:
            assert equal(saved.read(1, "trace", first, stop), cut("trace", trace, first - 1, stop - 1))


def test_appends_of_any_size_fill_chunks_of_1024_rows(path: Path) -> None:
    rows = make_rows("rows", 5000)
    with SavedSession.create(path, {}) as saved:
        lane = saved.add_lane(record())
        first = 0
        for size in (1, 3, 700, 512, 2000, 1, 1783):
            saved.append(lane.id, "rows", 1 + first, cut("rows", rows, first, first + size))
            first += size
        assert [chunk.rows for chunk in saved.chunks(lane.id, "rows")] == [1024] * 4
        assert saved.spans(lane.id, "rows") == [(1, 5000)]
        assert equal(saved.read(lane.id, "rows", 1, 5001), rows)
        assert equal(join("rows", [piece for _, piece in saved.pieces(lane.id, "rows")]), rows)


def test_an_open_chunk_is_written_after_five_seconds_and_not_before(path: Path, clock: Clock) -> None:
    with SavedSession.create(path, {}, clock=clock) as saved:
        lane = saved.add_lane(record())
        saved.append(lane.id, "rows", 1, make_rows("rows", 10))
        assert saved.spans(lane.id, "rows") == [(1, 10)]
        clock.now += OPEN_SECONDS - 0.1
        saved.append(lane.id, "rows", 11, make_rows("rows", 10))
        assert saved.chunks(lane.id, "rows") == []
        clock.now += 0.2
        saved.spans(lane.id, "rows")  # any call lets the file's thread look at the clock before it waits again
        assert [chunk.rows for chunk in saved.chunks(lane.id, "rows")] == [20]
        with SavedSession.open(path) as reader:
            assert reader.spans(lane.id, "rows") == [(1, 20)]
        assert saved.spans(lane.id, "rows") == [(1, 20)]


def test_a_lane_that_is_done_has_all_its_rows_in_the_file(path: Path) -> None:
    with SavedSession.create(path, {}) as saved:
        lane = saved.add_lane(record(status="running"))
        saved.append(lane.id, "rows", 1, make_rows("rows", 10))
        saved.update_lane(replace(lane, status="done"))
        with SavedSession.open(path) as reader:
            assert reader.lanes()[0].status == "done"
            assert reader.spans(lane.id, "rows") == [(1, 10)]


def test_gaps_are_seen_in_the_spans_and_reading_across_them_fails(path: Path) -> None:
    with SavedSession.create(path, {}) as saved:
        lane = saved.add_lane(record())
        saved.append(lane.id, "rows", 1, make_rows("rows", 100))
        saved.append(lane.id, "rows", 501, make_rows("rows", 100))
        saved.append(lane.id, "rows", 301, make_rows("rows", 100))
        assert saved.spans(lane.id, "rows") == [(1, 100), (301, 100), (501, 100)]
        with pytest.raises(SavedSessionError, match="no rows row at 101"):
            saved.read(lane.id, "rows", 90, 110)


def test_positions_beyond_32_bits(path: Path) -> None:
    first = (1 << 40) + 5
    rows = make_rows("rows", 2000)
    with SavedSession.create(path, {}) as saved:
        lane = saved.add_lane(record())
        saved.append(lane.id, "rows", first, rows)
    with SavedSession.open(path) as saved:
        assert saved.spans(lane.id, "rows") == [(first, 2000)]
        assert equal(saved.read(lane.id, "rows", first + 1999, first + 2000), cut("rows", rows, 1999, 2000))


def test_rows_that_are_there_are_not_written_over(path: Path) -> None:
    saved = SavedSession.create(path, {})
    lane = saved.add_lane(record())
    saved.append(lane.id, "rows", 1, make_rows("rows", 2000))
    saved.append(lane.id, "rows", 900, make_rows("rows", 10))
    with pytest.raises(SavedSessionError, match="there already"):
        saved.flush()
    with pytest.raises(SavedSessionError, match="there already"):
        saved.append(lane.id, "rows", 2001, make_rows("rows", 10))
    with pytest.raises(SavedSessionError, match="there already"):
        saved.close()
    with SavedSession.open(path, write=True) as saved:
        assert equal(saved.read(lane.id, "rows", 1, 2001), make_rows("rows", 2000))


def test_rows_of_no_lane_or_of_the_wrong_shape_are_refused(path: Path) -> None:
    saved = SavedSession.create(path, {})
    with pytest.raises(WireError):
        saved.append(1, "rows", 1, make_rows("continuation", 3))
    saved.append(7, "rows", 1, make_rows("rows", 3))
    with pytest.raises(SavedSessionError, match="no such lane"):
        saved.close()


def test_deleted_rows_are_gone_and_can_be_measured_again(path: Path) -> None:
    write_session(path)
    with SavedSession.open(path, write=True) as saved:
        saved.read(2, "rows", 1, 500)
        saved.delete_rows(2, "rows")
        assert saved.spans(2, "rows") == []
        assert saved.spans(2, "continuation") == [(0, 64)]
        saved.append(2, "rows", 1, make_rows("rows", 5, 9))
        saved.delete_rows(3)
        assert equal(saved.read(2, "rows", 1, 6), make_rows("rows", 5, 9))
    with SavedSession.open(path) as saved:
        assert saved.damage == []
        assert saved.spans(2, "rows") == [(1, 5)]
        assert saved.spans(3, "rows") == saved.spans(3, "continuation") == []


def test_the_stream_is_set_once(path: Path) -> None:
    with SavedSession.create(path, {}) as saved:
        saved.set_stream(make_rows("stream", 2500))
        saved.set_stream(make_rows("stream", 2500))
        with pytest.raises(SavedSessionError, match="another token stream"):
            saved.set_stream(make_rows("stream", 2499))
        assert equal(saved.stream(), make_rows("stream", 2500))


def test_a_second_reference_is_refused(path: Path) -> None:
    with SavedSession.create(path, {}) as saved:
        saved.add_lane(record("reference"))
        with pytest.raises(SavedSessionError, match="a reference already"):
            saved.add_lane(record("reference"))


def test_facts_tokens_and_records_are_kept_at_once(path: Path) -> None:
    saved = SavedSession.create(path, {"title": "x"}, {"a": 1})
    lane = saved.add_lane(record())
    saved.set_fact("a", [1, None, "é"])
    saved.set_fact("floor", {"value": 1e-6, "rows": []})
    saved.add_tokens({5: b"\xf0\x9f", 6: b""})
    saved.add_tokens({5: b"another"})
    with SavedSession.open(path) as reader:
        assert reader.facts == {"a": [1, None, "é"], "floor": {"value": 1e-6, "rows": []}}
        assert reader.tokens() == {5: b"\xf0\x9f", 6: b""}
        assert reader.lanes() == [lane]
        with pytest.raises(SavedSessionError, match="open for reading"):
            reader.set_fact("a", 2)
        with pytest.raises(SavedSessionError, match="open for reading"):
            reader.append(lane.id, "rows", 1, make_rows("rows", 1))
    with pytest.raises(SavedSessionError, match="no lane 9"):
        saved.update_lane(replace(record(), id=9))
    with pytest.raises(SavedSessionError, match="stored as JSON"):
        saved.set_fact("b", {1, 2})
    saved.close()
    saved.close()
    with pytest.raises(SavedSessionError, match="is closed"):
        saved.spans(1, "rows")


def test_what_is_there_is_not_created_again(path: Path) -> None:
    path.touch()
    write_session(path)
    with pytest.raises(SavedSessionError, match="is there already"):
        SavedSession.create(path, {})
    with SavedSession.open(path) as saved:
        assert saved.facts


def test_a_file_that_nothing_was_written_to_keeps_every_byte(path: Path) -> None:
    write_session(path)
    before = path.read_bytes()
    with SavedSession.open(path, write=True) as saved:
        assert saved.verify() == []
    assert path.read_bytes() == before


def test_a_second_writer_is_refused_by_name_and_readers_are_not(path: Path) -> None:
    with SavedSession.create(path, {}) as saved:
        lane = saved.add_lane(record())
        saved.append(lane.id, "rows", 1, make_rows("rows", 1024))
        with pytest.raises(SavedSessionError, match=f"written by process {os.getpid()} on ."):
            SavedSession.open(path, write=True)
        code = (
            "import sys; from workbench.store.saved import SavedSession, SavedSessionError\n"
            "try: SavedSession.open(sys.argv[1], write=True)\n"
            "except SavedSessionError as error: print(error)"
        )
        said = subprocess.run(
            [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"process {os.getpid()} on" in said.stdout
        with SavedSession.open(path) as reader:
            assert reader.spans(lane.id, "rows") == [(1, 1024)]
    with SavedSession.open(path, write=True) as saved:
        saved.set_fact("second", True)


def test_a_file_that_somebody_still_reads_is_closed_and_read_on(path: Path) -> None:
    saved = SavedSession.create(path, {})
    lane = saved.add_lane(record())
    saved.append(lane.id, "rows", 1, make_rows("rows", 2000))
    saved.flush()
    reader = SavedSession.open(path)
    saved.close()
    assert equal(reader.read(lane.id, "rows", 1, 2001), make_rows("rows", 2000))
    reader.close()
    with SavedSession.open(path) as reader:
        assert equal(reader.read(lane.id, "rows", 1, 2001), make_rows("rows", 2000))
    with SavedSession.open(path, write=True) as saved:
        assert saved.spans(lane.id, "rows") == [(1, 2000)]
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_write_that_fails_is_raised_by_the_next_call_and_by_close(path: Path) -> None:
    saved = SavedSession.create(path, {})
    lane = saved.add_lane(record())
    table = saved._table

    def full(*_: object) -> None:
        raise SavedSessionError("cannot be written: database or disk is full")

    original, table.__class__.write = table.__class__.write, full  # type: ignore[method-assign]
    try:
        saved.append(lane.id, "rows", 1, make_rows("rows", 1024))
        with pytest.raises(SavedSessionError, match="disk is full"):
            saved.set_fact("a", 1)
    finally:
        table.__class__.write = original  # type: ignore[method-assign]
    with pytest.raises(SavedSessionError, match="disk is full"):
        saved.close()
    # The rows were still in memory, and the disk has room again at the end.
    with SavedSession.open(path) as saved:
        assert saved.spans(lane.id, "rows") == [(1, 1024)]


def test_many_threads_read_while_one_writes(path: Path) -> None:
    rows = make_rows("rows", 20_000)
    wrong: list[int] = []
    with SavedSession.create(path, {}) as saved:
        lane = saved.add_lane(record())
        saved.append(lane.id, "rows", 1, cut("rows", rows, 0, 100))
        done = threading.Event()

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not done.is_set():
                _, count = saved.spans(lane.id, "rows")[0]
                first = int(rng.integers(1, count))
                got = saved.read(lane.id, "rows", first, first + 1)
                if not equal(got, cut("rows", rows, first - 1, first)):
                    wrong.append(first)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for reader in readers:
            reader.start()
        for first in range(100, 20_000, 100):
            saved.append(lane.id, "rows", 1 + first, cut("rows", rows, first, first + 100))
        saved.flush()
        done.set()
        for reader in readers:
            reader.join()
        assert wrong == []
        assert equal(saved.read(lane.id, "rows", 1, 20_001), rows)


def test_a_copied_reference_is_the_same(path: Path, tmp_path: Path) -> None:
    write_session(path, n=2600)
    with SavedSession.create(tmp_path / "other.wbs", {}) as saved:
        saved.add_lane(record())
        copied = saved.copy_reference(path)
        assert (copied.id, copied.kind, copied.name) == (2, "reference", "bf16")
        assert saved.lanes()[0] == copied
        with pytest.raises(SavedSessionError, match="a reference already"):
            saved.copy_reference(path)
    with SavedSession.open(tmp_path / "other.wbs") as saved, SavedSession.open(path) as original:
        assert equal(saved.read(2, "trace", 1, 2600), original.read(1, "trace", 1, 2600))
        assert equal(saved.stream(), original.stream())
        assert saved.tokens() == original.tokens()
        assert saved.verify() == []


def test_a_reference_of_another_stream_or_none_is_not_copied(path: Path, tmp_path: Path) -> None:
    write_session(path)
    with SavedSession.create(tmp_path / "other.wbs", {}) as saved:
        saved.set_stream(make_rows("stream", 9))
        with pytest.raises(SavedSessionError, match="another token stream"):
            saved.copy_reference(path)
        with pytest.raises(SavedSessionError, match="from itself"):
            saved.copy_reference(saved.path)
        assert saved.lanes() == []
    with (
        SavedSession.create(tmp_path / "third.wbs", {}) as saved,
        pytest.raises(SavedSessionError, match="has no reference"),
    ):
        saved.copy_reference(tmp_path / "other.wbs")


def test_names_with_odd_characters_are_plain_names(tmp_path: Path) -> None:
    path = tmp_path / "50%20?mode=memory#é.wbs"
    write_session(path)
    assert path.stat().st_size > 0
    with SavedSession.open(path) as saved:
        assert saved.tokens()


def test_the_index_serves_other_tools_too(path: Path) -> None:
    write_session(path)
    connection = sqlite3.connect(path)
    plan = connection.execute(
        "EXPLAIN QUERY PLAN SELECT data FROM chunks WHERE lane = 1 AND kind = 'trace' AND first <= 500"
        " ORDER BY first DESC LIMIT 1"
    ).fetchall()
    connection.close()
    assert "SEARCH chunks USING INDEX chunks_place" in plan[0][3]
