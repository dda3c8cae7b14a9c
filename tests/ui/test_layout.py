from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from workbench.ui.layout import Layout
from workbench.ui.pieces import Pieces, TokenText


def laid_out(tokens: list[str], width: int, breaks: bytes = b"", batches: tuple[int, ...] = ()) -> Layout:
    data = [token.encode() for token in tokens]
    text = TokenText(Pieces(), lambda token: data[token])
    layout = Layout(text, width, breaks)
    ids = np.arange(len(tokens), dtype=np.int32)
    start = 0
    for stop in (*batches, len(tokens)):
        text.extend(ids[start:stop])
        layout.extend()
        start = stop
    return layout


def rows(layout: Layout) -> list[str]:
    return ["".join(part.text for part in layout.parts(row)) for row in range(len(layout))]


def test_lines_break_at_words_and_the_space_stays_behind():
    layout = laid_out(["The", " block", " is", " re", "leased", " twice"], 12)
    assert rows(layout) == ["The block is ", "released ", "twice"]
    assert [layout.row_of(token) for token in range(6)] == [0, 0, 0, 1, 1, 2]


def test_line_feeds_end_rows_and_blank_lines_stay():
    layout = laid_out(["a", "\n\n", "b", "\n"], 10)
    assert rows(layout) == ["a", "", "b"]
    assert [layout.row_of(token) for token in range(4)] == [0, 0, 2, 2]


def test_a_token_wider_than_the_pane_is_broken_and_wide_characters_are_never_cut():
    layout = laid_out(["x", "缓存" * 4, "y"], 5)
    assert rows(layout) == ["x", "缓存", "缓存", "缓存", "缓存y"]
    assert layout.row_of(1) == 1


def test_a_message_begins_a_row():
    layout = laid_out(["a", "b", "c"], 10, breaks=bytes([1, 0, 1]))
    assert rows(layout) == ["ab", "c"]
    assert layout.begins(1)


def test_no_text_is_one_empty_row():
    assert rows(laid_out([], 10)) == [""]


TOKENS = st.lists(st.text(st.sampled_from("ab \n缓-"), min_size=1, max_size=9), max_size=40)


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.integers(2, 15), st.integers(0, 40))
def test_rows_hold_all_text_once_fit_the_width_and_do_not_depend_on_batches(tokens, width, cut):
    layout = laid_out(tokens, width)
    shown = rows(layout)
    assert "".join(shown) == "".join(tokens).replace("\n", "")
    assert all(cell_len(row.rstrip(" ")) <= width for row in shown)
    assert rows(laid_out(tokens, width, batches=(min(cut, len(tokens)),))) == shown
    for token in range(len(tokens)):
        assert token in [part.token for part in layout.parts(layout.row_of(token))]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_very_narrow_panes_still_make_progress(width):
    layout = laid_out(["hello", " 缓", "\n", "x"], width)
    assert "".join(rows(layout)) == "hello 缓x"
