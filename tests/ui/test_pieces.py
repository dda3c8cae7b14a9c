from __future__ import annotations

import numpy as np
from rich.cells import cell_len

from workbench.session.regions import Role
from workbench.ui.pieces import ASSISTANT, BROKEN, SYSTEM, TOOL, USER, Pieces, TokenText, message_kinds, quoted


def texts(*tokens: bytes, batches: tuple[int, ...] = ()) -> list[str]:
    pieces = Pieces()
    text = TokenText(pieces, lambda token: tokens[token])
    ids = np.arange(len(tokens), dtype=np.int32)
    start = 0
    for stop in (*batches, len(tokens)):
        text.extend(ids[start:stop])
        start = stop
    return [pieces.texts[index] for index in text.indices]


def test_a_character_in_pieces_is_drawn_by_its_last_token_whether_or_not_they_come_together():
    tokens = (b"a", b"\xf0\x9f", b"\x8e", b"\x89", b"b")
    expected = ["a", "⟨f0 9f⟩", "⟨8e⟩", "🎉", "b"]
    assert texts(*tokens) == expected
    assert texts(*tokens, batches=(2, 3)) == expected


def test_bytes_that_are_no_utf8_are_shown_as_bytes_and_never_as_a_replacement_character():
    shown = texts(b"\xff", b"ok", b"\xf0\x9f", b"x", b"\x89", batches=(1, 3))
    assert "\ufffd" not in "".join(shown)
    assert shown[1] == "ok" and shown[3] == "x"
    assert shown[4] == "⟨89⟩"


def test_a_token_without_bytes_is_shown_by_its_id():
    assert texts(b"a", b"") == ["a", "⟨1⟩"]


def test_widths_are_cells_and_broken_pieces_are_marked():
    pieces = Pieces()
    wide, broken, word = pieces.add("已缓存"), pieces.add("a\n"), pieces.add(" word")
    assert pieces.widths[wide] == cell_len("已缓存") == 6
    assert pieces.widths[broken] == BROKEN
    assert (pieces.spaced[word], pieces.spaced[wide]) == (True, False)
    assert pieces.add(" word") == word


def test_quoted_keeps_to_one_line_and_shows_bytes_of_parts():
    assert "\n" not in quoted(b"\n\n", 1)
    assert quoted(b"\xf0\x9f", 1) == "⟨f0 9f⟩"
    assert quoted(b"", 7) == "⟨7⟩"
    assert "\x1b" not in quoted(b"\x1b[2J", 1)


def test_kinds_follow_the_messages_and_fall_back_on_roles():
    roles = np.array([Role.SYSTEM, Role.USER, Role.CONTENT, Role.TOOL_RESULT, Role.STRUCTURE], np.uint8)
    assert message_kinds(roles, np.zeros(5, np.int32), []).tolist() == [SYSTEM, USER, ASSISTANT, TOOL, ASSISTANT]
    names = ["developer", "user", "assistant", "tool"]
    messages = np.array([0, 1, 2, 3, -1], np.int32)
    assert message_kinds(roles, messages, names).tolist() == [SYSTEM, USER, ASSISTANT, TOOL, ASSISTANT]
    roles = np.array([Role.STRUCTURE, Role.SYSTEM, Role.STRUCTURE, Role.USER, Role.STRUCTURE], np.uint8)
    messages = np.array([-1, -1, -1, 1, -1], np.int32)
    assert message_kinds(roles, messages, names).tolist() == [SYSTEM, SYSTEM, SYSTEM, USER, ASSISTANT]
