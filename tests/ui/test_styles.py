from __future__ import annotations

import itertools

import pytest
from rich.segment import Segment
from textual.color import Color
from textual.filter import Monochrome, NoColor

from tests.ui.harness import THEMES, opened
from tests.ui.states import make_state
from workbench.ui.measures import FLIP, KIND_SHIFT
from workbench.ui.pieces import USER
from workbench.ui.styles import flip_style, ink, level_style, textual_theme

PALETTES = list(THEMES.values())


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_without_colour_the_five_levels_and_the_flip_all_differ(palette):
    styles = [level_style(palette, level, plain=True) for level in range(5)] + [flip_style(palette, 1)]
    ground = Color.parse(palette.background)
    grey = [Monochrome().apply([Segment("x", style)], ground)[0].style for style in styles]
    for first, second in itertools.combinations(grey, 2):
        assert first != second
    bare = [NoColor().apply([Segment("x", style)], ground)[0].style for style in styles]
    attributes = [(s.dim, s.underline, s.bold, s.reverse) for s in bare]
    # Level 4 has bold like level 3, and a ground of its own, which greys keep and no colour at all cannot.
    assert len(set(attributes)) >= 5
    assert grey[3].bgcolor != grey[4].bgcolor


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_greys_are_monotone_over_the_levels(palette):
    ground = Color.parse(palette.background)
    steps = [Monochrome().apply([Segment("x", level_style(palette, level))], ground)[0].style for level in range(5)]
    values = [style.color.triplet.red for style in steps]
    assert values == sorted(values, reverse=not palette.dark)


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_every_code_has_a_style_and_context_is_never_reversed(palette):
    tokens = ink(palette).tokens
    assert len(tokens) == 2 * FLIP
    assert not any(tokens[level | USER << KIND_SHIFT].reverse for level in range(7))
    assert all(tokens[level | FLIP].reverse for level in range(5))


def test_the_levels_are_variables_of_the_textual_theme():
    theme = textual_theme(THEMES["harbour"])
    assert [theme.variables[f"divergence-{level}"] for level in range(5)] == list(THEMES["harbour"].divergence)


async def test_no_color_is_obeyed_and_the_screen_still_draws(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(state=make_state()) as (app, _):
        assert app.no_color
        assert app.desk.ink.tokens[0].dim
        assert "reference" in app.export_screenshot()
