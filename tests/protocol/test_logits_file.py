from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import LogitsFileError
from workbench.protocol.logits_file import (
    CLAMP,
    HEADER,
    LEVELS,
    MAGIC,
    WIDE_CLAMP,
    LogitsFile,
    LogitsWriter,
    Shape,
    clamp_of,
    encode_rows,
    pieces,
    row_ranges,
    windows_of,
)

VOCABULARY = 301  # odd: a row ends in a code of no id


def made(path: Path, clamp: float = CLAMP, spread: float = 6.0, windows: int = 3, window: int = 12) -> np.ndarray:
    rng = np.random.default_rng(1)
    shape = Shape(window, VOCABULARY, windows)
    logits = (rng.normal(size=(shape.rows, VOCABULARY)) * spread).astype("f4")
    writer = LogitsWriter(path, rng.integers(0, VOCABULARY, (windows, window)), VOCABULARY, clamp)
    rows = np.empty((shape.rows, shape.row_codes), "<u2")
    encode_rows(logits, rows, clamp)
    writer.append(rows[:4])
    writer.append(rows[4:])
    writer.finish()
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype("f8")
    peak = wide.max(1, keepdims=True)
    return wide - peak - np.log(np.exp(wide - peak).sum(1, keepdims=True))


@pytest.mark.parametrize("clamp", [CLAMP, WIDE_CLAMP])
def test_rows_read_back_within_half_a_step_and_ids_below_the_clamp_at_the_bound(tmp_path, clamp):
    path = tmp_path / "base.kld"
    logits = made(path, clamp)
    exact = log_softmax(logits)
    with LogitsFile(path) as file:
        rows = file.read_rows(0, file.shape.rows)
        stored = rows.logprobs.astype("f8")
        bound = exact.max(1, keepdims=True) - clamp
        step = rows.scale[:, None] / 2 + 4e-6
        assert np.all(np.abs(stored - exact)[exact >= bound] <= np.broadcast_to(step, exact.shape)[exact >= bound])
        below = exact < bound
        assert below.any()
        assert np.all(rows.codes[below] == 0)
        assert np.allclose(rows.least, (exact.max(1) - clamp), atol=4e-6)
        assert clamp_of(row_ranges(file)) == clamp
    assert path.stat().st_size == file.shape.bytes


def test_rows_that_reach_no_clamp_do_not_say_which_it_was(tmp_path):
    made(tmp_path / "base.kld", spread=0.5)
    with LogitsFile(tmp_path / "base.kld") as file:
        assert clamp_of(row_ranges(file)) is None


def test_header_tokens_and_rows_lie_where_llama_perplexity_puts_them(tmp_path):
    path = tmp_path / "base.kld"
    made(path)
    data = path.read_bytes()
    assert data[:20] == b"_logits_" + struct.pack("<Iii", 12, VOCABULARY, 3)
    tokens = np.frombuffer(data, "<i4", 36, 20).reshape(3, 12)
    row_bytes = 2 * (302 + 4)
    assert len(data) == 20 + 4 * 36 + 15 * row_bytes
    with LogitsFile(path) as file:
        assert np.array_equal(file.tokens(0, 3), tokens)
        assert np.array_equal(file.tokens(2), tokens[2:])
        row = file.read_rows(7, 1)
        at = 20 + 4 * 36 + 7 * row_bytes
        assert struct.unpack_from("<ff", data, at) == (row.scale[0], row.least[0])
        assert np.array_equal(np.frombuffer(data, "<u2", VOCABULARY, at + 8), row.codes[0])
        assert (file.shape.first, file.shape.rows_each) == (6, 5)
        into = np.empty((9, file.shape.row_codes), "<u2")
        assert np.array_equal(file.read_rows(3, 4, into).codes, file.read_rows(3, 4).codes)
        with pytest.raises(IndexError):
            file.read_rows(14, 2)
        with pytest.raises(IndexError):
            file.tokens(3)


def test_an_even_distribution_is_one_level(tmp_path):
    writer = LogitsWriter(tmp_path / "even.kld", np.zeros((1, 4), "i4"), VOCABULARY)
    row = np.empty((1, writer.shape.row_codes), "<u2")
    assert encode_rows(np.full((1, VOCABULARY), 3, "f4"), row)[0] == pytest.approx(3 + np.log(VOCABULARY), abs=1e-5)
    writer.append(row)
    writer.finish()
    with LogitsFile(tmp_path / "even.kld") as file:
        assert np.allclose(file.read_rows(0, 1).logprobs, -np.log(VOCABULARY), atol=1e-6)


def test_a_sparse_file_beyond_2_31_elements_and_4_gib_reads_its_last_row_exactly(tmp_path):
    shape = Shape(512, 151_936, 60)
    assert shape.rows * shape.vocabulary > 1 << 31
    assert shape.bytes > 1 << 32
    path = tmp_path / "huge.kld"
    logits = np.random.default_rng(2).normal(size=(1, shape.vocabulary)).astype("f4") * 4
    row = np.empty((1, shape.row_codes), "<u2")
    encode_rows(logits, row)
    tokens = np.arange(512, dtype="<i4") + 1000
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, shape.window, shape.vocabulary, shape.windows))
        file.seek(shape.rows_at - tokens.nbytes)
        file.write(tokens.tobytes())
        file.truncate(shape.bytes)
        file.seek(shape.bytes - row.nbytes)
        file.write(row.tobytes())
    with LogitsFile(path) as file:
        assert file.shape == shape
        assert np.array_equal(file.tokens(shape.windows - 1)[0], tokens)
        last = file.read_rows(shape.rows - 1, 1)
        assert np.array_equal(last.codes[0], row[0, 4 : 4 + shape.vocabulary])
        assert np.array_equal(np.array([last.scale[0], last.least[0]], "<f4").view("<u2"), row[0, :4])
        with pytest.raises(LogitsFileError, match=r"row 15,298 \(window 60\) holds no distribution: scale 0, least 0"):
            file.read_rows(shape.rows - 2, 2)


def test_tokens_are_checked_in_every_part_of_the_file(tmp_path):
    path = tmp_path / "base.kld"
    made(path)
    data = bytearray(path.read_bytes())
    for value in (VOCABULARY, -1):
        struct.pack_into("<i", data, 20 + 4 * 35, value)
        path.write_bytes(data)
        with pytest.raises(LogitsFileError, match="tokens outside its vocabulary of 301"):
            LogitsFile(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], r"is cut off: 3 windows of 12 tokens and 301 ids need 9,344 bytes.*14 of 15 rows"),
        (lambda data: data[:100], r"is cut off.*\(0 of 15 rows\)"),
        (lambda data: data + b"\0", "is too long"),
        (lambda data: data[:19], "is not a llama.cpp file"),
        (lambda data: b"", "is not a llama.cpp file"),
        (lambda data: b"_logit2_" + data[8:], "is not a llama.cpp file"),
        (lambda data: b"GGUF" + data[4:], "is not a llama.cpp file"),
        (lambda data: data[:12] + struct.pack("<i", 303) + data[16:], "is cut off"),
        (lambda data: data[:12] + struct.pack("<i", -301) + data[16:], "header is not possible"),
        (lambda data: data[:8] + struct.pack("<I", 0xFFFFFFFF) + data[12:], "header is not possible"),
        (lambda data: data[:16] + struct.pack("<i", 0) + data[20:], "header is not possible"),
        (lambda data: data[:16] + struct.pack("<i", 0x7FFFFFFF) + data[20:], r"need [\d,]{16,} bytes"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_when_it_is_opened(tmp_path, change, words):
    path = tmp_path / "base.kld"
    made(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LogitsFileError, match=words) as error:
        LogitsFile(path)
    assert error.value.where == str(path)
    assert error.value.next


@pytest.mark.parametrize(
    ("scale", "least"),
    [
        (float("nan"), -20),
        (1e-4, float("nan")),
        (float("inf"), -20),
        (-1e-4, -3),
        (2e-4, -12),
        (2e-4, -30),
        (0, -3),
        (0, 0),
    ],
)
def test_a_row_that_cannot_be_a_distribution_is_named(tmp_path, scale, least):
    path = tmp_path / "base.kld"
    made(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<ff", data, 20 + 4 * 36 + 7 * 612, scale, least)
    path.write_bytes(data)
    with LogitsFile(path) as file:
        file.read_rows(0, 7)
        with pytest.raises(LogitsFileError, match=r"row 7 \(window 2\) holds no distribution"):
            file.read_rows(4, 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_make_rows_that_are_refused(tmp_path, bad):
    writer = LogitsWriter(tmp_path / "base.kld", np.zeros((1, 4), "i4"), VOCABULARY)
    row = np.empty((1, writer.shape.row_codes), "<u2")
    logits = np.zeros((1, VOCABULARY), "f4")
    logits[0, 17] = bad
    encode_rows(logits, row)
    writer.append(row)
    writer.finish()
    with LogitsFile(tmp_path / "base.kld") as file, pytest.raises(LogitsFileError, match="holds no distribution"):
        file.read_rows(0, 1)


def test_a_file_that_shrinks_while_it_is_read_is_said_so(tmp_path):
    path = tmp_path / "base.kld"
    made(path)
    with LogitsFile(path) as file:
        with path.open("r+b") as again:
            again.truncate(2000)
        with pytest.raises(LogitsFileError, match="became shorter"):
            file.read_rows(0, 15)


def test_what_cannot_be_opened_or_made_is_said_with_its_path(tmp_path):
    with pytest.raises(LogitsFileError, match="cannot be read: No such file"):
        LogitsFile(tmp_path / "none.kld")
    with pytest.raises(LogitsFileError, match="cannot be read"):
        LogitsFile(tmp_path)
    with pytest.raises(LogitsFileError, match="cannot be written"):
        LogitsWriter(tmp_path / "no" / "folder.kld", np.zeros((1, 4), "i4"), 5)
    for tokens in (np.zeros((1, 2), "i4"), np.zeros((0, 4), "i4"), np.full((1, 4), 5), np.full((1, 4), -1)):
        with pytest.raises(LogitsFileError, match="cannot be made of"):
            LogitsWriter(tmp_path / "base.kld", tokens, 5)


def test_a_writer_that_was_given_too_few_rows_leaves_no_whole_file(tmp_path):
    path = tmp_path / "base.kld"
    writer = LogitsWriter(path, np.zeros((2, 6), "i4"), 5)
    row = np.empty((3, writer.shape.row_codes), "<u2")
    encode_rows(np.zeros((3, 5), "f4"), row)
    writer.append(row)
    with pytest.raises(ValueError, match="no rows of this file"):
        writer.append(row)
    with pytest.raises(LogitsFileError, match="3 of 4 rows were written"):
        writer.finish()
    with pytest.raises(LogitsFileError, match="cut off"):
        LogitsFile(path)


def test_windows_are_whole_and_their_rows_come_in_pieces():
    assert windows_of(np.arange(25), 12).shape == (2, 12)
    assert windows_of(np.arange(11), 12).shape == (0, 12)
    assert list(pieces(Shape(12, 5, 3), 2)) == [(0, 2), (2, 2), (4, 1)]
    assert LEVELS == 0xFFFF
