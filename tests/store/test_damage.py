from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.store.samples import equal, make_rows, write_session
from workbench.errors import SavedSessionError
from workbench.protocol.columns import count_rows, cut
from workbench.protocol.wire import Arrays
from workbench.store.columns import DamagedChunkError
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession

ROOT = Path(__file__).parents[2]
KINDS_OF_LANES = [(0, "stream"), (1, "trace"), (2, "rows"), (3, "rows"), (2, "continuation"), (3, "continuation")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole.wbs"
    write_session(path, n=1500)
    return path


Found = dict[object, object]


def small_things(saved: SavedSession) -> Found:
    found: Found = {("fact", key): value for key, value in saved.facts.items()}
    found |= {("session", key): value for key, value in saved.session.items()}
    found |= {("lane", lane.id): lane for lane in saved.lanes()}
    return found | {("token", number): data for number, data in saved.tokens().items()}


@dataclass
class Original:
    small: Found
    rows: dict[tuple[int, str], tuple[int, Arrays]]

    @classmethod
    def of(cls, path: Path) -> Original:
        with SavedSession.open(path) as saved:
            rows = {key: (saved.spans(*key)[0][0], saved.read(*key, *_whole(saved, key))) for key in KINDS_OF_LANES}
            return cls(small_things(saved), rows)

    def check(self, saved: SavedSession) -> bool:
        found = small_things(saved)
        assert [key for key, value in found.items() if self.small.get(key) != value] == []
        missing = len(self.small) - len(found)
        for key, (start, original) in self.rows.items():
            missing += count_rows(key[1], original)
            for first, arrays in saved.pieces(*key):
                rows = count_rows(key[1], arrays)
                assert equal(arrays, cut(key[1], original, first - start, first - start + rows))
                missing -= rows
        return missing == 0


def _whole(saved: SavedSession, key: tuple[int, str]) -> tuple[int, int]:
    ((first, rows),) = saved.spans(*key)
    return first, first + rows


def check_nothing_is_silently_wrong(path: Path, original: Original) -> str:
    """How the file opened: `whole`, `damaged` or `refused`."""
    before = path.read_bytes()
    try:
        with SavedSession.open(path) as saved:
            complete = original.check(saved)
            assert complete or saved.damage, "something is lost without a word"
            state = load_state(saved)
            assert len(state.lanes) == len(saved.lanes())
            outcome = "damaged" if saved.damage else "whole"
    except SavedSessionError as error:
        assert str(path) in str(error)
        outcome = "refused"
    assert path.read_bytes() == before
    return outcome


def test_a_file_cut_at_any_length_opens_as_far_as_it_is_whole_or_is_refused_by_name(
    whole: Path, tmp_path: Path
) -> None:
    original = Original.of(whole)
    data = whole.read_bytes()
    lengths = [0, 1, 15, 16, 99, 100, 512, 4095, 4096, 4097, len(data) - 1, len(data) - 4096]
    lengths += [random.Random(1).randrange(len(data)) for _ in range(20)]
    path = tmp_path / "cut.wbs"
    outcomes: dict[str, int] = {}
    for length in lengths:
        path.write_bytes(data[:length])
        outcome = check_nothing_is_silently_wrong(path, original)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["damaged"] > 10
    assert "whole" not in outcomes


@pytest.mark.parametrize("part", range(4))
def test_a_flipped_bit_is_never_another_number(whole: Path, tmp_path: Path, part: int) -> None:
    original = Original.of(whole)
    data = whole.read_bytes()
    rng = random.Random(part)
    # The header, the heads of pages (where the trees' own structure stands), and anywhere.
    places = [rng.randrange(108 * 8) for _ in range(40)]
    places += [rng.randrange(len(data) // 4096) * 4096 * 8 + rng.randrange(64 * 8) for _ in range(60)]
    places += [rng.randrange(len(data) * 8) for _ in range(40)]
    path = tmp_path / "flipped.wbs"
    outcomes: dict[str, int] = {}
    for place in places:
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        outcome = check_nothing_is_silently_wrong(path, original)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert set(outcomes) == {"whole", "damaged", "refused"}


def test_a_page_of_noise_loses_what_stood_there_and_no_more(whole: Path, tmp_path: Path) -> None:
    original = Original.of(whole)
    data = whole.read_bytes()
    path = tmp_path / "noise.wbs"
    for page in range(1, len(data) // 4096, 7):
        noise = random.Random(page).randbytes(4096)
        path.write_bytes(data[: page * 4096] + noise + data[(page + 1) * 4096 :])
        check_nothing_is_silently_wrong(path, original)


def test_a_damaged_chunk_is_named_left_out_and_measured_again(path: Path) -> None:
    write_session(path, n=3001)
    rows = make_rows("rows", 3000)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE chunks SET data = zeroblob(100) WHERE lane = 2 AND kind = 'rows' AND first = 1025")
    connection.commit()
    connection.close()
    with SavedSession.open(path) as saved:
        assert saved.damage == []
        with pytest.raises(DamagedChunkError, match="Lane 2: rows rows 1,025 to 2,048 are damaged"):
            saved.read(2, "rows", 1500, 1501)
        assert saved.spans(2, "rows") == [(1, 1024), (2049, 952)]
        assert len(saved.damage) == 1
        with pytest.raises(SavedSessionError, match="no rows row at 1500"):
            saved.read(2, "rows", 1500, 1501)
    with SavedSession.open(path, write=True) as saved:
        assert len(list(saved.pieces(2, "rows"))) == 2
        saved.append(2, "rows", 1025, cut("rows", rows, 1024, 2048))
        assert equal(saved.read(2, "rows", 1, 3001), rows)
    with SavedSession.open(path) as saved:
        assert saved.verify() == []


def test_a_damaged_file_is_not_written_to(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.wbs"
    path.write_bytes(whole.read_bytes()[:-5000])
    with pytest.raises(SavedSessionError, match="open it for reading"):
        SavedSession.open(path, write=True)
    connection = sqlite3.connect(shutil.copy(whole, tmp_path / "facts.wbs"))
    connection.execute("UPDATE facts SET value = '1'")
    connection.commit()
    connection.close()
    with pytest.raises(SavedSessionError, match="will not be written to"):
        SavedSession.open(tmp_path / "facts.wbs", write=True)
    assert not list(tmp_path.glob("*.lock"))


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (a)")
    connection.commit()
    connection.close()
    files = {
        other: "not a saved session",
        tmp_path / "text.wbs": "not a database",
        tmp_path / "empty.wbs": "not a saved session",
        tmp_path / "none.wbs": "no such file",
        tmp_path: "is a folder",
    }
    (tmp_path / "text.wbs").write_text("hello\n" * 1000)
    (tmp_path / "empty.wbs").touch()
    before = other.read_bytes(), (tmp_path / "text.wbs").read_bytes()
    for path, words in files.items():
        for write in (False, True):
            with pytest.raises(SavedSessionError, match=words):
                SavedSession.open(path, write=write)
    assert before == (other.read_bytes(), (tmp_path / "text.wbs").read_bytes())


def test_a_read_only_folder(whole: Path) -> None:
    # Root may write everywhere, so the reading process becomes somebody else, who cannot enter pytest's own folders.
    probe = (
        "import os, sys; from workbench.store.saved import SavedSession\n"
        "os.geteuid() or os.setuid(65534)\n"
        "saved = SavedSession.open(sys.argv[1]); print(saved.spans(1, 'trace'), saved.damage)"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copy(whole, folder / "plain.wbs")
        code = _writer("saved.flush(); os.kill(os.getpid(), signal.SIGKILL)")
        subprocess.run([sys.executable, "-c", code, str(folder / "killed.wbs")], cwd=ROOT, check=False)
        for leftover in ("killed.wbs-shm", "killed.wbs.lock"):
            (folder / leftover).unlink()
        for item in folder.iterdir():
            item.chmod(0o444)
        folder.chmod(0o555)
        try:
            for name, words in (("plain.wbs", "[(1, 1499)] []"), ("killed.wbs", "copy both to a writable folder")):
                command = [sys.executable, "-c", probe, str(folder / name)]
                said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
                assert words in said.stdout, said.stderr
        finally:
            folder.chmod(0o755)


def _writer(end: str) -> str:
    return (
        "import os, signal, sys\n"
        "from tests.store.samples import make_rows, record\n"
        "from workbench.store.saved import SavedSession\n"
        "saved = SavedSession.create(sys.argv[1], {'title': 'x'})\n"
        "saved.set_stream(make_rows('stream', 3001))\n"
        "lane = saved.add_lane(record())\n"
        "saved.append(lane.id, 'rows', 1, make_rows('rows', 3000))\n"
        "saved.spans(lane.id, 'rows')\n" + end
    )


def test_a_killed_writer_loses_its_open_chunk_only_and_the_next_one_goes_on(path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _writer("os.kill(os.getpid(), signal.SIGKILL)"), str(path)], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    rows = make_rows("rows", 3000)
    with SavedSession.open(path) as saved:
        assert saved.damage == []
        assert saved.spans(1, "rows") == [(1, 2048)]
        assert equal(saved.read(1, "rows", 1, 2049), cut("rows", rows, 0, 2048))
    with SavedSession.open(path, write=True) as saved:
        saved.append(1, "rows", 2049, cut("rows", rows, 2048, 3000))
        assert equal(saved.read(1, "rows", 1, 3001), rows)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
