from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.config.lane import parse_spec
from workbench.errors import Cancelled, ConfigurationError, LogitsFileError
from workbench.protocol.events import Score, Windows
from workbench.protocol.logits_file import HEADER, LogitsFile, windows_of
from workbench.worker import windows
from workbench.worker.windows import Running, run_windows

FP32 = "transformers:weights=fp32,kv=fp32"
WINDOW = 24


@pytest.fixture
def job(recorder):
    class Job(recorder):
        def __init__(self, checks: int = -1) -> None:
            super().__init__(checks=checks)
            self.pieces: list[tuple[int, dict[str, np.ndarray]]] = []

        def window_rows(self, first, arrays):
            self.pieces.append((first, arrays))

        def column(self, name):
            position = 0
            for first, arrays in self.pieces:
                assert first == position
                position += len(arrays[name])
            return np.concatenate([arrays[name] for _, arrays in self.pieces])

    return Job


@pytest.fixture
def tokens(stream):
    return windows_of(stream, WINDOW)


def expected(loaded, folder, tokens):
    """ln q of each row, from whole windows in one pass."""
    parts = []
    for window in tokens:
        model = loaded(folder)
        with torch.inference_mode():
            logits = model.forward(window, WINDOW).double()
        parts.append(torch.log_softmax(logits, 1)[WINDOW // 2 : WINDOW - 1].numpy())
    return np.concatenate(parts)


def record(backend, job, path: Path, tokens: np.ndarray, spec: str, source: Path):
    backend.start(parse_spec(spec), source, WINDOW, job())
    made = job()
    return made, backend.windows(Windows(1, str(path), True, {"tokens": tokens}), made)


def score(backend, job, path: Path, spec: str, source: Path):
    backend.start(parse_spec(spec), source, WINDOW, job())
    found = job()
    return found, backend.windows(Windows(2, str(path)), found)


@pytest.mark.parametrize("cut", [(128, 512), (5, 512), (128, 7)])
def test_a_recorded_file_holds_the_second_half_of_each_window_from_an_empty_cache(
    backend, job, tiny, loaded, tokens, tmp_path, monkeypatch, cut
):
    at_once, chunk = cut
    monkeypatch.setattr(windows, "ROWS_AT_ONCE", at_once)
    path = tmp_path / "base.kld"
    made, stats = record(backend, job, path, tokens, f"{FP32},chunk={chunk}", tiny)
    truth = expected(loaded, tiny, tokens)
    with LogitsFile(path) as file:
        assert np.array_equal(file.tokens(0, len(tokens)), tokens)
        rows = file.read_rows(0, file.shape.rows)
        high = truth > truth.max(1, keepdims=True) - 15.9
        assert np.abs(rows.logprobs - truth)[high].max() <= rows.scale.max() / 2 + 1e-5
    targets = tokens[:, WINDOW // 2 + 1 :].reshape(-1)
    assert np.allclose(made.column("nll"), -truth[np.arange(len(targets)), targets], atol=1e-5)
    assert (stats["tokens"], stats["rows"], stats["bos"]) == (tokens.size, len(targets), None)
    assert backend.loaded.cache.length == 0


def test_a_lane_is_scored_against_the_rows_of_the_file(backend, job, tiny_llama, loaded, tokens, tmp_path):
    path = tmp_path / "base.kld"
    record(backend, job, path, tokens, FP32, tiny_llama)
    again, _ = score(backend, job, path, FP32, tiny_llama)
    assert np.abs(again.column("kl")).max() < 2e-4
    assert again.column("same").all()
    found, stats = score(backend, job, path, "transformers:weights=fp32,kv=int4", tiny_llama)
    with LogitsFile(path) as file:
        p = file.read_rows(0, file.shape.rows).logprobs.astype("f8")
    targets = tokens[:, WINDOW // 2 + 1 :].reshape(-1)
    assert np.allclose(found.column("nll_base"), -p[np.arange(len(p)), targets], atol=1e-5)
    assert found.column("kl").mean() > 1e-3
    assert stats["kv_cache_bytes"] > 0
    assert stats["peak_memory_bytes"] > 0
    assert {"forward_seconds", "rows_seconds", "file_seconds"} <= stats.keys()


def test_scoring_goes_on_as_before_after_windows(backend, job, tiny_llama, tokens, stream, tmp_path):
    path = tmp_path / "base.kld"
    record(backend, job, path, tokens, FP32, tiny_llama)
    plain, after = job(), job()
    backend.start(parse_spec(FP32), tiny_llama, 128, job())
    backend.score(Score(1, 1, True, arrays={"ids": stream}), plain)
    backend.windows(Windows(2, str(path)), job())
    backend.score(Score(3, 1, True, arrays={"ids": stream}), after)
    assert np.array_equal(plain.joined("trace")["logprob"], after.joined("trace")["logprob"])


def test_the_token_that_a_tokenizer_puts_in_front_takes_the_first_place_of_each_window(
    job, tiny_llama, loaded, tokens, tmp_path
):
    path = tmp_path / "base.kld"
    model = loaded(tiny_llama)
    running = Running(model, lambda block: block.detach().numpy(), 300, 128, 512, 1, 17)
    with torch.inference_mode():
        run_windows(Windows(1, str(path), True, {"tokens": tokens}), running, job())
    fronted = tokens.copy()
    fronted[:, 0] = 17
    truth = expected(loaded, tiny_llama, fronted)
    with LogitsFile(path) as file:
        assert np.array_equal(file.tokens(0, len(tokens)), tokens)
        rows = file.read_rows(0, file.shape.rows)
        assert np.abs(rows.logprobs - truth)[truth > truth.max(1, keepdims=True) - 15.9].max() < 2e-4


def test_a_file_of_another_vocabulary_or_of_windows_that_do_not_fit_is_refused(
    backend, job, tiny_llama, tokens, tmp_path
):
    path = tmp_path / "base.kld"
    record(backend, job, path, tokens % 299, FP32, tiny_llama)
    backend.start(parse_spec(FP32), tiny_llama, WINDOW - 1, job())
    with pytest.raises(ConfigurationError, match="windows of 24 tokens do not fit a context of 23"):
        backend.windows(Windows(1, str(path)), job())
    with pytest.raises(ConfigurationError, match="windows of tokens are needed"):
        backend.windows(Windows(1, str(path), True), job())
    data = path.read_bytes()
    header = HEADER.pack(b"_logits_", WINDOW, 299, len(tokens))
    path.write_bytes(header + data[HEADER.size :])  # 299 ids take as much room as 300
    with pytest.raises(ConfigurationError, match="distributions over 299 ids, and this model's logits have 300"):
        backend.windows(Windows(1, str(path)), job())


def test_a_row_whose_probabilities_do_not_add_up_is_named(backend, job, tiny_llama, tokens, tmp_path):
    path = tmp_path / "base.kld"
    record(backend, job, path, tokens, FP32, tiny_llama)
    with LogitsFile(path) as file:
        shape = file.shape
    data = bytearray(path.read_bytes())
    at = shape.rows_at + 13 * 2 * shape.row_codes + 8
    data[at : at + 600] = struct.pack("<300H", *[65535] * 300)
    path.write_bytes(data)
    with pytest.raises(
        LogitsFileError, match=r"row 13 \(window 2\) holds no distribution: its probabilities add up to"
    ):
        score(backend, job, path, FP32, tiny_llama)


def test_a_cancelled_run_stops_between_passes(backend, job, tiny_llama, tokens, tmp_path):
    backend.start(parse_spec(FP32), tiny_llama, WINDOW, job())
    given_up = job(checks=3)
    with pytest.raises(Cancelled):
        backend.windows(Windows(1, str(tmp_path / "base.kld"), True, {"tokens": tokens}), given_up)
    assert 0 < len(given_up.pieces) < len(tokens)


def test_a_model_that_computes_no_numbers_makes_no_file(job, tiny_llama, loaded, tokens, tmp_path):
    model = loaded(tiny_llama)
    running = Running(model, lambda block: np.full(block.shape, np.nan, "f4"), 300, 128, 512, 1, None)
    with pytest.raises(LogitsFileError, match="logits in window 1 are no numbers"), torch.inference_mode():
        run_windows(Windows(1, str(tmp_path / "base.kld"), True, {"tokens": tokens}), running, job())


def test_llama_cpp_writes_what_transformers_reads_and_the_other_way_round(backend, job, tiny, tokens, tmp_path):
    pytest.importorskip("llama_cpp")
    from workbench.worker.backends.llamacpp import make
    from workbench.worker.llama.convert import write_folder

    gguf, spec = tmp_path / "tiny.gguf", "llamacpp:weights=F32,kv=f32,fa=off,threads=1"
    write_folder(tiny, gguf, "F32", lambda done, total: None)
    llama = make()
    try:
        _, stats = record(llama, job, tmp_path / "theirs.kld", tokens, spec, gguf)
        assert stats["bos"] is None
        record(backend, job, tmp_path / "ours.kld", tokens, FP32, tiny)
        for found, _ in (
            score(backend, job, tmp_path / "theirs.kld", FP32, tiny),
            score(llama, job, tmp_path / "ours.kld", spec, gguf),
        ):
            assert np.abs(found.column("kl")).max() < 2e-4
            assert found.column("same").all()
    finally:
        llama.release()
    with LogitsFile(tmp_path / "ours.kld") as ours, LogitsFile(tmp_path / "theirs.kld") as theirs:
        codes = [file.read_rows(0, file.shape.rows).codes.astype(int) for file in (ours, theirs)]
    assert np.abs(codes[0] - codes[1]).max() <= 2
