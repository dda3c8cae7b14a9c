from __future__ import annotations

import random
from pathlib import Path

import pytest

from workbench.config.theme import COLOURS, contrast, load_themes, luminance, parse_theme, read_theme
from workbench.errors import ConfigurationError

THEMES = Path(__file__).resolve().parents[2] / "themes"


@pytest.fixture(params=sorted(path.name for path in THEMES.glob("*.toml")))
def palette(request):
    return read_theme(THEMES / request.param)


def test_every_theme_that_ships_can_be_read():
    themes, refused = load_themes([THEMES])
    assert refused == []
    assert {"harbour", "paper"} <= themes.keys()
    assert {palette.dark for palette in themes.values()} == {True, False}


def test_text_stands_off_its_background_by_at_least_four_and_a_half(palette):
    text = {name: getattr(palette, name) for name in COLOURS if name not in ("background", "surface", "rule")}
    text |= {f"divergence {level}": colour for level, colour in enumerate(palette.divergence)}
    ratios = {name: contrast(colour, palette.background) for name, colour in text.items()}
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_the_text_that_stands_on_the_cursor_row_stays_readable(palette):
    shown = [palette.text, palette.muted, *palette.divergence]
    assert min(contrast(colour, palette.surface) for colour in shown) >= 4.5


def test_divergence_moves_away_from_the_background_with_every_step(palette):
    steps = [contrast(colour, palette.background) for colour in palette.divergence]
    assert steps == sorted(steps)
    assert len({round(luminance(colour), 3) for colour in palette.divergence}) == 5


def test_divergence_runs_from_blue_to_orange_and_never_through_green_or_red(palette):
    channels = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in palette.divergence]
    assert all(blue > red for red, _, blue in channels[:2])
    assert all(red > green > blue for red, green, blue in channels[2:])


def test_truncated_and_bit_flipped_files_are_a_named_error_or_a_whole_palette(tmp_path):
    whole = (THEMES / "harbour.toml").read_bytes()
    generator = random.Random(3)
    for number in range(300):
        data = bytearray(whole[: generator.randrange(len(whole))] if number % 2 else whole)
        if data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path = tmp_path / "damaged.toml"
        path.write_bytes(bytes(data))
        try:
            palette = read_theme(path)
        except ConfigurationError as error:
            assert str(path) in str(error)
        else:
            assert len(palette.divergence) == 5


def test_a_bad_theme_is_listed_with_its_reason_and_the_others_load(tmp_path):
    (tmp_path / "good.toml").write_bytes((THEMES / "paper.toml").read_bytes())
    (tmp_path / "bad.toml").write_text('name = "bad"\ndark = true\ndivergence = ["#000000"]\n')
    (tmp_path / "large.toml").write_bytes(b"#" * 100_000)
    themes, refused = load_themes([tmp_path, tmp_path / "absent"])
    assert list(themes) == ["paper"]
    assert ["list of 5" in str(refused[0]), "larger than" in str(refused[1])] == [True, True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("#0f151c", "blue"), "background must be a colour"),
        (('name = "harbour"', 'name = "\\u001b[2J"'), "name must be"),
        (("dark = true", 'dark = "yes"'), "dark must be"),
        (('accent = "#5ab0f2"\n', ""), "lacks accent"),
        (("[colours]", "[colors]"), "[colours] is missing"),
        (("[colours]", "[colours]\nglow = '#ffffff'"), "unknown key glow"),
    ],
)
def test_what_is_wrong_with_a_theme_is_said(change, reason):
    text = (THEMES / "harbour.toml").read_text().replace(*change)
    with pytest.raises(ConfigurationError, match="(?s)" + reason.replace("[", r"\[")):
        parse_theme(text, "mine.toml")
