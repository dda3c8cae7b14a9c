"""From a palette to what Textual and Rich need: the theme, and one ready Style for each way to draw a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

from workbench.config.theme import LEVELS, Palette, blend
from workbench.ui.measures import EXCLUDED, FLIP, KIND_SHIFT, UNMEASURED
from workbench.ui.pieces import ASSISTANT, SYSTEM, TOOL, USER


def textual_theme(palette: Palette) -> Theme:
    """The Textual theme of a palette; the KL levels become `$divergence-0` to `$divergence-4`."""
    return Theme(
        name=palette.name,
        dark=palette.dark,
        primary=palette.accent,
        secondary=palette.user,
        accent=palette.accent,
        warning=palette.warning,
        error=palette.error,
        success=palette.user,
        foreground=palette.text,
        background=palette.background,
        surface=palette.surface,
        panel=palette.surface,
        variables={
            **{f"divergence-{level}": colour for level, colour in enumerate(palette.divergence)},
            "rule": palette.rule,
            "muted": palette.muted,
            "block-cursor-background": palette.accent,
            "block-cursor-foreground": palette.background,
            "input-selection-background": f"{palette.accent} 35%",
        },
    )


def level_style(palette: Palette, level: int, *, plain: bool = False) -> Style:
    """One KL level: its colour, and an attribute so that it reads without colour.

    `plain` is for terminals without colour: there level 0 is dim, where in colour its slate already steps back.
    """
    colour = palette.divergence[level]
    ground = blend(colour, palette.background, 0.28) if level == LEVELS - 1 else palette.background
    return Style(
        color=colour,
        bgcolor=ground,
        dim=True if plain and level == 0 else None,
        underline=True if level == 2 else None,
        bold=True if level >= 3 else None,
    )


def flip_style(palette: Palette, level: int) -> Style:
    """A token whose place the lane would have filled with another: its level in reverse video."""
    return Style(
        color=palette.divergence[level],
        bgcolor=palette.background,
        reverse=True,
        underline=True if level == 2 else None,
        bold=True if level >= 3 else None,
    )


@dataclass(frozen=True, slots=True)
class Ink:
    """The styles of one palette. `tokens[code]` draws a token of that code (`workbench.ui.measures`)."""

    palette: Palette
    tokens: tuple[Style, ...]
    marked: tuple[bool, ...]  # by code: whether the style shows on a blank
    dots: tuple[Style, ...]  # by level: blanks that diverged
    text: Style
    strong: Style
    muted: Style
    rule: Style
    accent: Style
    active: Style
    warning: Style
    error: Style
    chip: Style
    cursor: Style
    cursor_away: Style
    row: Style  # laid over the cursor's row
    levels: tuple[Style, ...]
    flip: Style
    margins: tuple[Style, ...]  # by kind of message


@lru_cache(maxsize=16)
def ink(palette: Palette, *, plain: bool = False) -> Ink:
    """Every style that the widgets draw with."""
    ground = palette.background

    def on(
        colour: str, *, bold: bool = False, dim: bool = False, underline: bool = False, strike: bool = False
    ) -> Style:
        flags = {"bold": bold, "dim": dim, "underline": underline, "strike": strike}
        attributes = " ".join(name for name, wanted in flags.items() if wanted)
        return Style.parse(f"{attributes} {colour} on {ground}")

    def context(kind: int) -> str:
        tint = {USER: palette.user, TOOL: palette.context, SYSTEM: palette.context}[kind]
        return blend(tint, palette.context, 0.45)

    tokens: list[Style] = []
    for code in range(2 * FLIP):
        level, kind = code & 7, (code >> KIND_SHIFT) & 3
        if level == EXCLUDED:
            style = on(palette.muted, strike=True)
        elif kind != ASSISTANT:
            # Context is measured too, but only its strong divergence is worth a mark, and a quiet one.
            marked = UNMEASURED > level >= 3
            style = on(context(kind), dim=plain, underline=True) if marked else on(context(kind), dim=plain)
        elif level >= UNMEASURED:
            style = on(palette.text)
        elif code & FLIP:
            style = flip_style(palette, level)
        else:
            style = level_style(palette, level, plain=plain)
        tokens.append(style)
    return Ink(
        palette=palette,
        tokens=tuple(tokens),
        marked=tuple(bool(style.reverse or style.underline or style.bgcolor != tokens[0].bgcolor) for style in tokens),
        dots=tuple(level_style(palette, level) + Style(underline=False) for level in range(LEVELS)),
        text=on(palette.text),
        strong=on(palette.text, bold=True),
        muted=on(palette.muted),
        rule=on(palette.rule),
        accent=on(palette.accent),
        active=on(palette.accent, bold=True),
        warning=on(palette.warning),
        error=on(palette.error),
        chip=Style(color=palette.text, bgcolor=palette.surface),
        cursor=Style(color=ground, bgcolor=palette.accent, bold=True),
        cursor_away=Style(color=palette.text, bgcolor=blend(palette.accent, ground, 0.35)),
        row=Style(bgcolor=palette.surface),
        levels=tuple(level_style(palette, level, plain=plain) for level in range(LEVELS)),
        flip=flip_style(palette, 1),
        margins=(on(palette.accent), on(palette.user), on(palette.tool), on(palette.muted)),
    )
