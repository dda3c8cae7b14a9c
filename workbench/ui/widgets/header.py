"""The first line (what is open, where its reference comes from) and the legend near the bottom."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from workbench.store.effective import logits_words
from workbench.ui.marks import short_configuration
from workbench.ui.measures import KL_LEVELS, LEVEL_NAMES
from workbench.ui.widgets.lines import Lines, Row, thousands
from workbench.ui.widgets.tokens import GLYPHS


class Header(Lines):
    """Title, size, reference; at the right what is going on and the way to help."""

    def line(self, y: int, width: int) -> list[Segment]:
        ink, board = self.desk.ink, self.desk.board
        row = Row(width, ink.text).add(" workbench ", ink.active)
        if y:
            return self._list(width)
        if board is None:
            return row.right(("? help ", ink.muted)).segments()
        row.add(" ", ink.text).add(board.state.title or "untitled", ink.strong, limit=max(8, width // 3))
        if width >= 100:
            row.add(f"  {board.shared.turns} turns · {thousands(board.count)} tok", ink.muted)
            free = board.transport.total - board.count  # what the scrubber's total holds beside the session's tokens
            row.add(f" + {thousands(free)} free" if free > 0 else "", ink.muted)
            reference = board.state.reference
            model = str(reference.record.manifest.get("model_name") or "") if reference is not None else ""
            row.add(f" · {model}" if model else "", ink.muted)
        parts: list[tuple[str, Style]] = []
        if board.state.damage:
            parts.append((f" ! {len(board.state.damage)} damaged ", ink.warning))
        message = board.measuring or self.desk.message
        if message and width >= 100:
            parts.append((f"{message[: width // 3]}  ", ink.text))
        parts.append(("live  " if self.desk.live else "replay  ", ink.accent if board.running else ink.muted))
        if width >= 100:
            parts.append((f"{ink.palette.name}  ", ink.muted))
        return row.right(*parts, ("? help ", ink.muted)).segments()

    def _list(self, width: int) -> list[Segment]:
        """Where more lanes are open than fit: all of them by number, the visible ones marked."""
        ink, board = self.desk.ink, self.desk.board
        row = Row(width, ink.chip)
        if board is None:
            return row.segments()
        seen = board.panes(width)
        for view in board.views:
            room = max(6, width // max(1, len(board.views)) - 2)
            words = short_configuration(view.lane.record).split(" · ")
            words = words[: 2 if view.lane.record.configuration.get("engine") == "transformers" else 3]
            while len(words) > 1 and cell_len(" · ".join(words)) + len(f"{view.number}  ") > room:
                words.pop()
            name = "ref" if view.measures.is_reference else " · ".join(words)
            style = ink.active if view is board.active else ink.strong if view in seen else ink.muted
            row.add("▌" if view is board.active else " ", ink.active + ink.row)
            row.add(f"{view.number} {name} ", style + ink.row, limit=room)
        return row.right(
            (f" {len(seen)} of {len(board.views)} ", ink.muted + ink.row), ("tab ", ink.accent + ink.row)
        ).segments()


class Legend(Lines):
    """How a token of the active lane reads; or for one key press the answer to the last key."""

    def line(self, y: int, width: int) -> list[Segment]:
        ink = self.desk.ink
        row = Row(width, ink.text).add(" ", ink.text)
        if self.desk.notice:
            return row.add(self.desk.notice, ink.warning).segments()
        if self.desk.board is None:
            return row.segments()
        wide, active = width >= 100, self.desk.board.active
        least = active is not None and active.measures.bounded
        row.add(("KL at least " if least else "KL ") if wide else "at least" if least else "", ink.muted)
        bounds = [f"<{_short(value)}" for value in KL_LEVELS] + [f"≥{_short(KL_LEVELS[-1])}"]
        if least:  # the true KL has no upper bound: a level is where it begins
            bounds = ["≥0", *(f"≥{_short(value)}" for value in KL_LEVELS)]
        for name, bound, style in zip(LEVEL_NAMES, bounds, ink.levels, strict=True):
            row.add(" ", ink.text).add(f"{name}{' ' if wide else ''}{bound}", style).add(" ", ink.text)
        row.add(" ", ink.text).add("flip", ink.flip).add("  ", ink.text)
        if least and wide:
            top = logits_words(active.lane.record.manifest) if active is not None else ""
            return row.add(f" ≥ bounded: the engine gives {top or 'bounds only'}", ink.accent).segments()
        if wide:
            names = ("assistant", "user", "tool", "system")
            row.add(" ", ink.text)
            for glyph, name, style in zip(GLYPHS, names, ink.margins, strict=True):
                row.add(f" {glyph}", style).add(f" {name} ", ink.muted)
        return row.segments()


def _short(value: float) -> str:
    return f"{value:g}".lstrip("0")
