"""llama.cpp base files from the command line to the engine's process and back, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.cli import main
from workbench.config.lane import parse_spec
from workbench.errors import ConfigurationError, InvalidLaneError, LogitsFileError
from workbench.protocol.logits_file import LogitsFile, LogitsWriter, encode_rows
from workbench.run import windows
from workbench.session.tokenizer import Tokenizer

pytest.importorskip("llama_cpp")

LANE = "llamacpp:model={},weights={},kv=f32,fa=off,threads=1"
TEXT = "Run number 1, please. <|im_end|> is text here: it said ok.\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["logits", *arguments]) == 0
    return capsys.readouterr().out


def test_a_text_is_recorded_shown_and_scored(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lane = str(tmp_path / "base.kld"), LANE.format(tiny_folder, "F32")
    made = run(capsys, "record", str(text), "-o", base, "--lane", lane, "--window", "64", "--windows", "9")
    assert "9 of 64 tokens, 279 rows, from token 32" in made
    assert "perplexity" in made
    assert {path.name for path in tmp_path.iterdir()} == {"base.kld", "text.txt", "home"}
    with LogitsFile(Path(base)) as file:
        written = file.tokens(0, 9).reshape(-1)
        tokenizer = Tokenizer.load(tiny_folder)
        assert b"".join(tokenizer.tokens_bytes(written.tolist())) == TEXT.encode()[: len(written)]
        assert not np.isin(written, list(tokenizer.special)).any()
    facts = json.loads(run(capsys, "show", base, "--json"))
    assert (facts["window"], facts["windows"], facts["vocabulary"], facts["rows"]) == (64, 9, 258, 279)
    assert "258" in run(capsys, "show", base)
    same = json.loads(run(capsys, "score", base, "--lane", lane, "--json"))
    assert abs(same["statistics"]["kl"]["mean"]) < 1e-4
    assert same["statistics"]["same_top"]["rate"] == 1
    assert same["effective"]["weights"]["scheme"] == "F32"
    assert same["stats"]["rows"] == 279
    table = run(capsys, "score", base, "--lane", LANE.format(tiny_folder, "Q8_0"))
    for words in ("Mean    KLD", "99.9 %  KLD", "RMS     Δp", "Same top p", "over 9 windows (CR1)", "weights Q8_0"):
        assert words in table
    other = json.loads(
        run(capsys, "score", base, "--lane", f"transformers:model={tiny_folder},weights=fp32,kv=fp32", "--json")
    )
    assert abs(other["statistics"]["kl"]["mean"]) < 1e-4


def test_a_session_is_recorded_with_its_control_tokens(
    tiny_folder: Path, tiny_session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lane = tmp_path / "base.kld", LANE.format(tiny_folder, "F32")
    run(capsys, "record", str(tiny_session), "-o", str(base), "--lane", lane, "--windows", "2", "--json")
    with LogitsFile(base) as file:
        assert file.shape.window == 512
        assert np.isin(file.tokens(0)[0], list(Tokenizer.load(tiny_folder).special)).any()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["logits", *arguments]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lane = ["-o", str(tmp_path / "base.kld")], ["--lane", LANE.format(tiny_folder, "F32")]
    said = refused(["record", str(text), *out, "--lane", "vllm:weights=bf16"], capsys)
    assert "vllm gives no whole distributions" in said
    assert "windows run as prefill" in refused(["record", str(text), *out, "--lane", "llamacpp:path=decode"], capsys)
    assert "make no window of 5,000" in refused(["record", str(text), *out, *lane, "--window", "5000"], capsys)
    assert "8 tokens or more" in refused(["record", str(text), *out, *lane, "--window", "4"], capsys)
    assert "cannot be read as UTF-8" in refused(["record", str(tmp_path / "none.txt"), *out, *lane], capsys)
    assert not (tmp_path / "base.kld").exists()
    assert main(["logits", "show", str(text)]) == 1
    assert "is not a llama.cpp file" in capsys.readouterr().err


def even_file(path: Path, vocabulary: int, tokens: np.ndarray, peak: float = 0.0) -> LogitsFile:
    """A file whose every row gives the token that followed `peak` nats more than each other."""
    writer = LogitsWriter(path, tokens, vocabulary)
    half = writer.shape.first
    for window in tokens:
        logits = np.zeros((writer.shape.rows_each, vocabulary), "f4")
        logits[np.arange(len(logits)), window[half + 1 :]] = peak
        codes = np.empty((len(logits), writer.shape.row_codes), "<u2")
        encode_rows(logits, codes)
        writer.append(codes)
    writer.finish()
    return LogitsFile(path)


def test_a_file_of_another_vocabulary_or_another_tokenizer_gets_its_own_answer(
    tiny_folder: Path, tmp_path: Path
) -> None:
    def ignore(*_: object) -> None:
        pass

    lane = parse_spec(LANE.format(tiny_folder, "F32"))
    rng = np.random.default_rng(5)
    small = even_file(tmp_path / "small.kld", 200, rng.integers(0, 200, (2, 32)))
    with small, pytest.raises(ConfigurationError, match="over 200 ids, and this model's logits have 258"):
        windows.score(small.path, small.shape, lane, ignore, ignore)
    permuted = even_file(tmp_path / "permuted.kld", 258, rng.integers(0, 256, (2, 64)), 6.0)
    with permuted, pytest.raises(InvalidLaneError, match="blind guessing among 258 ids"):
        windows.score(permuted.path, permuted.shape, lane, ignore, ignore)
    with permuted.path.open("r+b") as file:
        file.seek(permuted.shape.rows_at)
        file.write(b"\xff" * 8)
    with pytest.raises(LogitsFileError, match=r"row 0 \(window 1\) holds no distribution: scale nan"):
        windows.score(permuted.path, permuted.shape, lane, ignore, ignore)


def test_a_gguf_file_is_run_as_it_is(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    from workbench.worker.llama.convert import write_folder

    gguf = tmp_path / "tiny.gguf"
    write_folder(tiny_folder, gguf, "F32", lambda done, total: None)
    lane = parse_spec(LANE.format(gguf, "file"))
    tokens = np.arange(96, dtype=np.int32).reshape(2, 48)
    ran = windows.record(tmp_path / "base.kld", tokens, lane, lambda _: None, lambda *_: None)
    assert ran.effective["weights"]["scheme"] == "F32"
    assert ran.rows["nll"].shape == (46,)
    with pytest.raises(ConfigurationError, match="there is no such file"):
        missing = parse_spec(LANE.format(tmp_path / "none.gguf", "file"))
        windows.record(tmp_path / "more.kld", tokens, missing, lambda _: None, lambda *_: None)
    assert not (tmp_path / "more.kld").exists()
