"""Help, made from the table of actions and the constants that drive the colours."""

from __future__ import annotations

from collections.abc import Mapping

from rich.segment import Segment
from textual.geometry import Size

from workbench.ui.actions import ACTIONS, keys_of, rebound
from workbench.ui.board import Desk
from workbench.ui.measures import KL_LEVELS, LEVEL_NAMES
from workbench.ui.screens.dialog import ScrolledDialog
from workbench.ui.widgets.lines import Lines, Row, app_of
from workbench.ui.widgets.notices import wrapped
from workbench.ui.widgets.tokens import GLYPHS

KEY_WIDTH = 13
GROUPS = (("Time", "Cursor"), ("Lanes", "Switcher", "Dialogs", "Application"))

ABOUT = (
    "Every lane scores the reference's own tokens. A token's look says how far the lane's distribution stood from the "
    "reference's there: KL(reference‖lane) in nats. Reverse video is a flip: the lane's most probable token was "
    "another; the inspector names it. Text the model did not write is grey; there only strong divergence is "
    "underlined, and figures leave it out. Means and flip rates are over written tokens; @ names the deepest bin "
    "measured. ≈ floor: within twice what the reference differs from itself. Struck through: excluded, not a finite "
    "divergence."
)
MARKS = (
    "≥ bounded: the engine names its own best tokens only, so KL is at least what stands there, with no upper bound, "
    "total variation (TV) lies in the interval, and a plain token may hide more. invalid: the engine did not do what "
    "was asked; its figures say nothing about quality. no effect: bit-identical to another lane although a setting "
    "differs. severe: mean KL above 1 nat, rightly measured. acc: tokens a verification step commits, the bonus token "
    "included, counted in steps, in a histogram, or the engine's own average."
)


class HelpBody(Lines):
    """The help text, in two columns where there is room."""

    def __init__(self, desk: Desk, chosen: Mapping[str, str], notes: list[str]) -> None:
        super().__init__(desk, id="help")
        self.chosen = chosen
        self.notes = notes

    @property
    def _width(self) -> int:
        return min(124, app_of(self).size.width - 8)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return self._width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(self._width))

    def line(self, y: int, width: int) -> list[Segment]:
        rows = self._rows(width)
        return rows[y] if y < len(rows) else Row(width, self.desk.ink.text).segments()

    def _rows(self, width: int) -> list[list[Segment]]:
        ink = self.desk.ink
        blank = Row(width, ink.text).segments()
        rows = [blank, self._levels(width), self._roles(width), blank]
        for part in (ABOUT, MARKS):
            rows += [Row(width, ink.text).add(text, ink.muted).segments() for text in wrapped(part, width)]
        for note in self.notes:
            rows += [Row(width, ink.text).add(text, ink.warning).segments() for text in wrapped(f"! {note}", width)]
        rows.append(blank)
        if width < 100:
            return rows + self._keys([group for column in GROUPS for group in column], width)
        half = (width - 2) // 2
        left, right = (self._keys(list(column), half) for column in GROUPS)
        empty = Row(half, ink.text).segments()
        for index in range(max(len(left), len(right))):
            pair = [column[index] if index < len(column) else empty for column in (left, right)]
            rows.append(pair[0] + Row(width - 2 * half, ink.text).segments() + pair[1])
        return rows

    def _levels(self, width: int) -> list[Segment]:
        ink = self.desk.ink
        row = Row(width, ink.text).add("KL  ", ink.muted)
        bounds = [f"<{value:g}" for value in KL_LEVELS] + [f"≥{KL_LEVELS[-1]:g}"]
        for name, bound, style in zip(LEVEL_NAMES, bounds, ink.levels, strict=True):
            row.add(f"{name} {bound}", style).add("   ", ink.text)
        return row.segments()

    def _roles(self, width: int) -> list[Segment]:
        ink = self.desk.ink
        row = Row(width, ink.text).add("    ", ink.text)
        for glyph, name, style in zip(GLYPHS, ("assistant", "user", "tool result", "system"), ink.margins, strict=True):
            row.add(f"{glyph} ", style).add(f"{name}   ", ink.muted)
        return row.add("flip", ink.flip).segments()

    def _keys(self, groups: list[str], width: int) -> list[list[Segment]]:
        ink = self.desk.ink
        rows: list[list[Segment]] = []
        for group in groups:
            rows.append(Row(width, ink.text).add(group, ink.active).segments())
            for item in ACTIONS:
                if item.group != group or (
                    item.id.startswith("lane-") and item.id[5:].isdigit() and item.id != "lane-1"
                ):
                    continue
                keys, description = " ".join(keys_of(item.id, self.chosen)), item.description
                if item.id == "lane-1":
                    keys, description = "1 … 8", "Make lane 1 … 8 the active one"
                row = Row(width, ink.text).add("  ", ink.text).add(keys, ink.accent, limit=KEY_WIDTH - 3).to(KEY_WIDTH)
                rows.append(row.add(description, ink.text).segments())
            rows.append(Row(width, ink.text).segments())
        return rows


class HelpScreen(ScrolledDialog):
    """The key that opened it closes it."""

    BINDINGS = (*ScrolledDialog.BINDINGS, rebound("help", "dismiss_dialog"))

    def __init__(self, desk: Desk, chosen: Mapping[str, str], notes: list[str]) -> None:
        words = "↑↓ scroll · esc close · the commands list names every id"
        super().__init__(HelpBody(desk, chosen, notes), "help", words)
