"""Themes: one TOML file each, read into a frozen palette; a file that cannot be used is listed with its reason.

name = "harbour"
dark = true
divergence = ["#…", "#…", "#…", "#…", "#…"]      KL levels 0 to 4, luminance moving away from the background
[colours]                                        the names of `Palette`, each "#rrggbb"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from workbench.errors import ConfigurationError

LEVELS = 5
DEFAULT_THEME = "harbour"
MAX_BYTES = 64_000  # a theme is under 2 kB; anything large is not one

_HEX = re.compile(r"#[0-9a-fA-F]{6}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one theme, each `#rrggbb`; `divergence` holds the five KL levels."""

    name: str
    dark: bool
    divergence: tuple[str, str, str, str, str]
    background: str
    surface: str  # the cursor's row, chips, dialogs
    rule: str  # lines between things; decoration, never text
    text: str  # numbers and titles
    muted: str  # labels and hints
    context: str  # text that the model did not write
    accent: str  # the active lane, the cursor, keys
    user: str
    tool: str
    warning: str
    error: str


COLOURS: tuple[str, ...] = tuple(
    item.name for item in fields(Palette) if item.name not in ("name", "dark", "divergence")
)


def parse_theme(text: str, where: str = "theme") -> Palette:
    """The palette of a theme file's text. Raises ConfigurationError naming the field."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets numbers and nesting beyond Python's limits through
        raise ConfigurationError(f"not TOML: {error}", where=where) from error
    name, dark, steps, colours = (data.get(key) for key in ("name", "dark", "divergence", "colours"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            "name must be lower-case letters, digits and hyphens", where=where, next='Such as name = "harbour".'
        )
    if not isinstance(dark, bool):
        raise ConfigurationError("dark must be true or false", where=where)
    if not isinstance(steps, list) or len(cast("list[Any]", steps)) != LEVELS:
        raise ConfigurationError(f"divergence must be a list of {LEVELS} colours", where=where)
    if not isinstance(colours, dict):
        raise ConfigurationError("the table [colours] is missing", where=where, next=f"It holds {', '.join(COLOURS)}.")
    table = cast("dict[str, Any]", colours)
    if missing := [key for key in COLOURS if key not in table]:
        raise ConfigurationError(f"[colours] lacks {', '.join(missing)}", where=where)
    if unknown := sorted(table.keys() - set(COLOURS)) + sorted(data.keys() - {"name", "dark", "divergence", "colours"}):
        raise ConfigurationError(f"unknown key {', '.join(unknown)}", where=where, next=f"Known: {', '.join(COLOURS)}.")
    levels = [_colour(value, f"divergence[{index}]", where) for index, value in enumerate(cast("list[Any]", steps))]
    return Palette(
        name=name,
        dark=dark,
        divergence=(levels[0], levels[1], levels[2], levels[3], levels[4]),
        **{key: _colour(table[key], key, where) for key in COLOURS},
    )


def read_theme(path: Path) -> Palette:
    """The palette of a theme file. Raises ConfigurationError for a file that cannot be read or used."""
    try:
        data = read_start(path)
        if len(data) > MAX_BYTES:
            raise ConfigurationError(f"larger than {MAX_BYTES} bytes: not a theme", where=str(path))
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot be read: {error}", where=str(path)) from error
    return parse_theme(text, where=str(path))


def read_start(path: Path) -> bytes:
    """A file's first bytes, one more than a theme or settings may have; never a pipe or a device, which would wait."""
    if path.exists() and not path.is_file():
        raise OSError("not a file")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def load_themes(folders: Iterable[Path]) -> tuple[dict[str, Palette], list[ConfigurationError]]:
    """Every usable theme of the folders by name (later folders win), and the reason for each that is not usable."""
    themes: dict[str, Palette] = {}
    refused: list[ConfigurationError] = []
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            try:
                palette = read_theme(path)
            except ConfigurationError as error:
                refused.append(error)
            else:
                themes[palette.name] = palette
    return themes, refused


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, 0 to 1 (WCAG 2 definition, sRGB)."""
    channels = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2 definition); 4.5 is the bar for text."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def blend(colour: str, onto: str, amount: float) -> str:
    """`colour` laid over `onto` with opacity `amount` (0 to 1), as `#rrggbb`."""
    mixed = (round(int(colour[i : i + 2], 16) * amount + int(onto[i : i + 2], 16) * (1 - amount)) for i in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _colour(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ConfigurationError(f"{field} must be a colour written #rrggbb", where=where)
    return value.lower()
