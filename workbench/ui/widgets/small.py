"""One line for a terminal that is too small for the lanes."""

from __future__ import annotations

from rich.segment import Segment

from workbench.ui.actions import keys_of
from workbench.ui.widgets.lines import Lines, Row, app_of

MIN_WIDTH, MIN_HEIGHT = 60, 20


class TooSmall(Lines):
    """Says the size that is needed and the size that is there."""

    def line(self, y: int, width: int) -> list[Segment]:
        row = Row(width, self.desk.ink.text)
        if y == 0:
            size = app_of(self).size
            quits = f"{keys_of('quit', self.desk.keys)[0]} quits"
            row.add(f" needs {MIN_WIDTH}×{MIN_HEIGHT}, has {size.width}×{size.height} · {quits}", self.desk.ink.warning)
        return row.segments()
