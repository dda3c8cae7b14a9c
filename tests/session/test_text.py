from __future__ import annotations

import base64
import json
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.session.text import TAB, PieceDecoder, harmless, pieces, plain


def shown(*tokens: bytes) -> list[str]:
    return pieces(range(len(tokens)), lambda identity: tokens[identity])


def acts_on_a_terminal(text: str) -> list[str]:
    categories = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return [letter for letter in text if unicodedata.category(letter) in categories and letter != "\n"]


def test_controls_and_escapes_become_symbols() -> None:
    assert harmless("\x1b[31mred\x1b[0m\x07\x7f\r\n") == "␛[31mred␛[0m␇␡␍\n"
    assert harmless("\x9b2J\x85") == "⟨U+009B⟩2J⟨U+0085⟩"
    assert harmless("a\tb") == f"a{TAB}b"


def test_what_hides_or_reorders_is_named() -> None:
    assert harmless("file\u202egnp.exe") == "file⟨U+202E⟩gnp.exe"
    assert harmless("a\u200bb\u200dc\ufeffd\ufe0f\U000e0067") == "a⟨ZWSP⟩b⟨ZWJ⟩c⟨BOM⟩d⟨VS16⟩⟨U+E0067⟩"
    assert harmless("\ud800\ue000\u3164") == "⟨U+D800⟩⟨U+E000⟩⟨U+3164⟩"


def test_ordinary_text_of_any_script_stays() -> None:
    for text in (
        "plain [bold]markup[/bold] {{ x }}",
        "é naïve",
        "你好，世界。",
        "नमस्ते நி",
        "한글",
        "שלום مرحبا",
        "🎉",
        "\u3000",
    ):
        assert harmless(text) == text


def test_marks_piled_on_a_letter_are_cut_to_two() -> None:
    assert harmless("Z\u0351\u036b\u0343a\u0301") == "Z\u0351\u036b⟨U+0343⟩a\u0301"


def test_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    euro = "€".encode()
    assert shown(b"a" + euro[:2], euro[2:] + b"b") == ["a⟨e2 82⟩", "€b"]
    assert shown(euro[:1], euro[1:2], euro[2:]) == ["⟨e2⟩", "⟨82⟩", "€"]
    assert shown(euro[:2], b"x") == ["⟨e2 82⟩", "x"]
    assert shown(b"\xff\xfea", b"\x80") == ["⟨ff fe⟩a", "⟨80⟩"]
    assert shown(b"", b"a") == ["", "a"]
    assert shown(b"e", "\u0301".encode()) == ["e", "◌\u0301"]


def test_plain_text_keeps_everything() -> None:
    data = [b"\x1b[0m \xf0\x9f", b"\x8e\x89 \xff"]
    assert plain([0, 1], lambda identity: data[identity]) == "\x1b[0m 🎉 ⟨ff⟩"


@settings(deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_no_bytes_are_lost_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    ends = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    decoder = PieceDecoder()
    text = "".join(decoder.piece(data[a:b]) for a, b in pairwise(ends))
    assert acts_on_a_terminal(text) == []
    if "\ufffd".encode() not in data:
        assert "\ufffd" not in text


@settings(deadline=None)
@given(st.text(max_size=60))
def test_nothing_that_acts_on_a_terminal_gets_through(text: str) -> None:
    assert acts_on_a_terminal(harmless(text)) == []
    assert harmless(harmless(text)) == harmless(text)


def test_edge_cases_are_harmless_whole_and_byte_by_byte(shared: Path) -> None:
    rich_cells = pytest.importorskip("rich.cells")
    count = 0
    for line in (shared / "data/tokenizer/edge_cases.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        case = json.loads(line)
        data = (
            base64.b64decode(case["bytes_b64"])
            if "bytes_b64" in case
            else case["text"].encode("utf-8", "surrogatepass")
        )
        text = "".join(shown(*(bytes([byte]) for byte in data)))
        for out in (text, *([harmless(case["text"])] if "text" in case else [])):
            assert acts_on_a_terminal(out) == [], case["id"]
            for row in out.split("\n"):
                assert rich_cells.cell_len(row) == sum(rich_cells.cell_len(letter) for letter in row), case["id"]
        if "bytes_b64" in case:
            assert "\ufffd" not in text
        count += 1
    assert count > 50
