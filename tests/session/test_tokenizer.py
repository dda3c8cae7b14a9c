from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ModelError
from workbench.session.tokenizer import Tokenizer


def added(identity: int, content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": identity, "content": content, **plain, **flags}


def metaspace_folder(folder: Path, **flags: bool) -> Path:
    """A BPE of the sentencepiece kind: blanks as ▁, bytes as <0xNN>, the control token in the vocabulary too."""
    words = ["<unk>", "</s>", "▁", "a", "b", "▁a", "<", "/", "s", ">", *(f"<0x{byte:02X}>" for byte in range(256))]
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [added(0, "<unk>"), added(1, "</s>", **flags)],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "vocab": {word: index for index, word in enumerate(words)}, "merges": [["▁", "a"]],
            "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, "dropout": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder


def test_bytes_of_each_kind_of_token(tmp_path: Path, tiny_tokenizer: Path) -> None:
    pieces = Tokenizer.load(metaspace_folder(tmp_path))
    assert pieces.ends == {1}
    assert [pieces.token_bytes(identity) for identity in (1, 2, 5, 10 + 0xE2)] == [b"</s>", b" ", b" a", b"\xe2"]
    assert pieces.token_bytes(pieces.vocabulary) == pieces.token_bytes(-1) == b""
    ids = pieces.encode("a€</s> a").ids.tolist()
    assert b"".join(pieces.tokens_bytes(ids)).decode() == " a€</s> a"
    letters = Tokenizer.load(tiny_tokenizer)
    text = "é\x00 \U0001f389</s>"
    assert b"".join(letters.tokens_bytes(letters.encode(text).ids.tolist())).decode() == text


def test_a_literal_in_data_is_letters_and_its_surroundings_stay_as_they_were(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(metaspace_folder(tmp_path))
    text = "a</s>b a</s>a</s>b"
    plain, encoded = tokenizer.encode(text), tokenizer.encode(text, [(6, 13)])  # the middle one
    assert plain.ids.tolist().count(1) == 3
    assert encoded.kept_as_text == 1
    assert b"".join(tokenizer.tokens_bytes(encoded.ids.tolist())).decode() == " " + text
    assert [int(start) for start, identity in zip(encoded.starts, encoded.ids, strict=True) if identity == 1] == [1, 13]


def test_blanks_that_a_control_token_takes_along_do_not_make_it_data(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(metaspace_folder(tmp_path, lstrip=True, rstrip=True))
    text = "b  </s>  b"
    encoded = tokenizer.encode(text, [(0, 3), (7, 10)])
    assert encoded.kept_as_text == 0
    assert 1 in encoded.ids.tolist()


def test_a_literal_that_straddles_a_messages_edge_is_letters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(metaspace_folder(tmp_path))
    assert tokenizer.encode("b</s>b", [(0, 3)]).kept_as_text == 1
    assert tokenizer.encode("b</s>b", [(0, 1), (5, 6)]).kept_as_text == 0


def test_the_hash_names_the_table_of_bytes(tmp_path: Path) -> None:
    first = Tokenizer.load(metaspace_folder(tmp_path)).hash
    assert Tokenizer.load(metaspace_folder(tmp_path)).hash == first
    assert Tokenizer.load(metaspace_folder(tmp_path, special=False)).hash != first


def test_damaged_tokenizer_files_are_named(tiny_tokenizer: Path, tmp_path: Path) -> None:
    whole = (tiny_tokenizer / "tokenizer.json").read_bytes()
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match=r"tokenizer\.json: the file is missing"):
        Tokenizer.load(tmp_path)
    dice = random.Random(1)
    for _ in range(40):
        path.write_bytes(whole[: dice.randrange(len(whole))])
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    for content in ("[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}'):
        path.write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    path.write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.load(tmp_path).encode("a")
