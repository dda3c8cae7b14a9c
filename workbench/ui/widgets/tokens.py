"""The lanes' tokens side by side, each pane a window of its own over columns.

One widget draws all panes: it keeps the top row itself and paints rows from a cache, so appended tokens never touch the
layout, and only rectangles that changed are painted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.cache import LRUCache
from textual.geometry import Region
from textual.message import Message

from workbench.ui.board import MARGIN, Board, Desk, LaneView
from workbench.ui.layout import Layout
from workbench.ui.measures import FLIP, KIND_SHIFT, UNMEASURED
from workbench.ui.pieces import ASSISTANT
from workbench.ui.rows import Rows
from workbench.ui.widgets.lines import Lines, Row, fill, grid
from workbench.ui.widgets.notices import failure, waiting, waiting_lane

GLYPHS = ("▸", "»", "◂", "§")  # by kind: assistant, user, tool result, system
BARS = ("▏", "▏", "▏", " ")
CACHED_ROWS = 512  # painted rows kept for each lane
KEEP = 3  # rows of context between the cursor and the edge of the pane


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a pane shows; where two are equal nothing need be painted."""

    lane: int
    top: int
    shown: int
    last_row: int
    cursor_row: int
    cursor: int
    status: str
    active: bool
    resets: int


class Run(NamedTuple):
    """What a row shows of one token."""

    token: int
    text: str
    style: Style
    bare: bool  # a space that begins it stays without its mark


class TokenPanes(Lines):
    """The token view. The screen calls `sync` after anything moved."""

    class Clicked(Message):
        """A token, or a pane, was clicked."""

        def __init__(self, lane: int, position: int | None) -> None:
            super().__init__()
            self.lane = lane
            self.position = position

    class Wheel(Message):
        """The wheel turned by some rows."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

    def __init__(self, desk: Desk, *, id: str) -> None:
        super().__init__(desk, id=id)
        self.top = 0
        self._drawn: list[Drawn] = []
        self._rows: dict[int, tuple[int, LRUCache[int, list[Segment]]]] = {}
        self._views: list[LaneView] = []
        self._tops: dict[int, int] = {}
        self._notices: dict[int, list[list[Segment]]] = {}

    # ---- geometry

    @property
    def text_width(self) -> int:
        """Cells of text in a pane; one column at the right stays free for a line break's mark."""
        count = max(1, len(self._views))
        return max(1, (self.size.width - (count - 1)) // count - MARGIN - 1)

    @property
    def rows(self) -> Rows:
        """The rows of every pane at the current width."""
        return Rows(self._board, self.text_width)

    @property
    def drawn_lanes(self) -> list[int]:
        """Ids of the lanes in the panes."""
        return [drawn.lane for drawn in self._drawn]

    @property
    def _board(self) -> Board:
        board = self.desk.board
        assert board is not None
        return board

    # ---- what changed

    def reset(self) -> None:
        """Forget every painted row: another theme, width or session."""
        self._rows.clear()
        self._drawn = []
        if self.desk.board is not None:
            self.sync()
        self.refresh()

    def sync(self) -> None:
        """Bring every pane to the cursor and paint what differs from what is on screen."""
        board, height = self.desk.board, self.size.height
        if board is None or not self.size.width or not height:
            return
        views = board.panes(self.size.width)
        if [view.lane.record.id for view in views] != [view.lane.record.id for view in self._views]:
            self._views = views
            self._rows.clear()
        self._views = views
        if not views:
            self.refresh()
            return
        active = board.active
        cursor = board.transport.cursor
        if active is not None:
            rows = self.rows
            self._scroll(rows.at(active, cursor), height, rows.count(active, board.shown_of(active)))
        drawn = [self._draw(view, cursor, height) for view in views]
        before, self._drawn = self._drawn, drawn
        panes = grid(self.size.width, len(views))
        if len(before) != len(drawn):
            self.refresh()
            return
        for (x, width), old, new in zip(panes, before, drawn, strict=True):
            if old == new:
                continue
            if (old.lane, old.top, old.status, old.resets) != (new.lane, new.top, new.status, new.resets):
                self.refresh(Region(x, 0, width, height))
                continue
            rows = {
                old.cursor_row,
                new.cursor_row,
                *range(min(old.last_row, new.last_row), max(old.last_row, new.last_row) + 1),
            }
            spans = [row - new.top for row in rows if 0 <= row - new.top < height]
            if spans:
                self.refresh(Region(x, min(spans), width, max(spans) - min(spans) + 1))

    def _scroll(self, row: int, height: int, rows: int) -> None:
        """Bring a row into view: by as little as possible; while text grows, by a quarter page, to be read."""
        transport = self._board.transport
        if transport.follow or transport.playing:
            self.top = _jump(self.top, row, height)
            return
        keep = min(KEEP, (height - 1) // 2)
        if row < self.top + keep:
            self.top = max(0, row - keep)
        elif row > self.top + height - 1 - keep:
            self.top = min(row - height + 1 + keep, max(0, rows - height))

    def _draw(self, view: LaneView, cursor: int, height: int) -> Drawn:
        board, record = self._board, view.lane.record
        shown = board.shown_of(view)
        last = max(0, self.rows.count(view, shown) - 1)
        notice = self._notices[record.id] = failure(view, board, self._width_of(view), height, self.desk.ink)
        room = max(1, height - len(notice))
        here = cursor < shown
        cursor_row = self.rows.at(view, cursor) if here else -1
        top = self.top
        if not here or not top <= cursor_row < top + room:
            # A lane that is not there yet keeps to its own newest row.
            top = self._tops[record.id] = _jump(self._tops.get(record.id, top), cursor_row if here else last, room)
        return Drawn(
            record.id, top, shown, last, cursor_row, cursor if here else -1,
            f"{record.status}{record.reason}{len(notice)}{view.lane.phase if not shown else ''}", view is board.active,
            view.measures.resets,
        )  # fmt: skip

    def _width_of(self, view: LaneView) -> int:
        panes = grid(self.size.width, len(self._views))
        return panes[self._views.index(view)][1]

    # ---- painting

    def line(self, y: int, width: int) -> list[Segment]:
        ink = self.desk.ink
        if self.desk.board is None or not self._drawn:
            return waiting(self.desk, y, width, self.size.height)
        segments: list[Segment] = []
        rule = Segment("│", ink.rule)
        for index, ((_, cells), view, drawn) in enumerate(
            zip(grid(width, len(self._views)), self._views, self._drawn, strict=True)
        ):
            if index:
                segments.append(rule)
            segments += self._pane_line(view, drawn, y, cells)
        return fill(segments, width, len(self._views), ink.text)

    def _pane_line(self, view: LaneView, drawn: Drawn, y: int, width: int) -> list[Segment]:
        notice = self._notices.get(drawn.lane, [])
        from_bottom = self.size.height - y
        if from_bottom <= len(notice):
            return notice[len(notice) - from_bottom]
        row = drawn.top + y
        if not drawn.shown:
            return waiting_lane(self.desk, view, y, width)
        if row > drawn.last_row:
            return [Segment(" " * width, self.desk.ink.text)]
        if row == drawn.cursor_row:
            return self._paint(view, drawn, row, width, cursor=drawn.cursor)
        if row == drawn.last_row:
            return self._paint(view, drawn, row, width)
        kept = self._rows.get(drawn.lane)
        if kept is None or kept[0] != drawn.resets:
            kept = self._rows[drawn.lane] = (drawn.resets, LRUCache(CACHED_ROWS))
        rows = kept[1]
        cached = rows.get(row)
        if cached is None:
            cached = rows[row] = self._paint(view, drawn, row, width)
        return cached

    def _paint(self, view: LaneView, drawn: Drawn, row: int, width: int, cursor: int = -1) -> list[Segment]:
        board, ink = self._board, self.desk.ink
        layout = board.layout(self.text_width)
        if row < len(layout):
            return self._paint_stream(view, layout, row, width, drawn, cursor)
        if row == len(layout):
            text = " … continues freely "
            line = Row(width, ink.rule).add("──", ink.rule).add(text, ink.muted, limit=width - 3)
            return line.add("─" * line.left, ink.rule).segments()
        tail = view.tail.layout
        runs = [
            Run(token + board.count, text, ink.text, False)
            for token, text in tail.parts(row - len(layout) - 1)
            if token + board.count < drawn.shown
        ]
        margin = Segment("┆ ", ink.accent)
        return self._assemble(margin, runs, width, cursor, drawn.active)

    def _paint_stream(
        self, view: LaneView, layout: Layout, row: int, width: int, drawn: Drawn, cursor: int
    ) -> list[Segment]:
        board, ink = self._board, self.desk.ink
        codes, tokens = view.measures.codes, ink.tokens
        texts, spaced, indices = board.pieces.texts, board.pieces.spaced, board.text.indices
        runs: list[Run] = []
        for token, text in layout.parts(row):
            if token >= drawn.shown:
                break
            code = int(codes[token])
            # A line break is invisible; where it diverged it gets a mark, in the column that wrapping leaves free.
            if (
                not text
                and (code & FLIP or (code >> KIND_SHIFT == 0 and 2 <= code & 7 <= 4))
                and texts[indices[token]][:1] == "\n"
            ):
                text = "↵"
            style, bare = tokens[code], spaced[indices[token]] and ink.marked[code]
            if ink.marked[code] and text.isspace() and not code & FLIP:
                # An underlined blank reads as an underscore: written ones become dots, in context they stay blank.
                style = tokens[code & ~7 | UNMEASURED] if code >> KIND_SHIFT else ink.dots[code & 7]
                text = text if code >> KIND_SHIFT else "·" * len(text)
            runs.append(Run(token, text, style, bare))
        first = layout.first_token(row)
        kind = int(board.shared.kinds[min(first, board.count - 1)])
        begins = bool(board.shared.breaks[min(first, board.count - 1)]) and layout.begins(row)
        glyph = GLYPHS[kind] if begins else BARS[kind]
        margin = Segment(glyph + " ", ink.margins[kind] if begins or kind == ASSISTANT else ink.rule)
        return self._assemble(margin, runs, width, cursor, drawn.active)

    def _assemble(self, margin: Segment, runs: list[Run], width: int, cursor: int, active: bool) -> list[Segment]:
        """One row of exactly `width` cells: the margin, then runs of equal style joined."""
        ink = self.desk.ink
        ground = ink.text if cursor < 0 else ink.text + ink.row
        first = margin if cursor < 0 else Segment(margin.text, (margin.style or ink.text) + ink.row)
        segments, used = [first], MARGIN
        pending, style = "", ground
        for text, wanted in self._spans(runs, cursor, ground, ink.cursor if active else ink.cursor_away):
            if wanted is not style and pending:
                segments.append(Segment(pending, style))
                used += cell_len(pending)
                pending = ""
            pending, style = pending + text, wanted
        if pending:
            segments.append(Segment(pending, style))
            used += cell_len(pending)
        if used < width:
            segments.append(Segment(" " * (width - used), ground))
        elif used > width:
            segments = Segment.adjust_line_length(segments, width, style=ground)
        return segments

    def _spans(self, runs: list[Run], cursor: int, ground: Style, at_cursor: Style) -> Iterator[tuple[str, Style]]:
        """Texts and styles of a row. The space that begins a word carries no mark, so that marked words stand apart."""
        row = self.desk.ink.row
        for token, text, style, bare in runs:
            if token == cursor:
                text, style, bare = text or "↵", at_cursor, len(text) > 1
            elif cursor >= 0 and not style.reverse:
                style = style + row
            if bare and text[0:1] == " ":
                yield " ", ground
                text = text[1:]
            if text:
                yield text, style

    # ---- mouse

    def _pane_at(self, x: int) -> tuple[LaneView, Drawn, int] | None:
        for (left, width), view, drawn in zip(
            grid(self.size.width, len(self._views)), self._views, self._drawn, strict=True
        ):
            if left <= x < left + width:
                return view, drawn, x - left
        return None

    def on_click(self, event: events.Click) -> None:
        if (found := self._pane_at(event.x)) is None:
            return
        view, drawn, x = found
        row = drawn.top + event.y
        position = self.rows.hit(view, row, x - MARGIN) if row <= drawn.last_row else None
        shown = position is not None and position < drawn.shown
        self.post_message(self.Clicked(drawn.lane, position if shown else None))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Wheel(3))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Wheel(-3))


def _jump(top: int, row: int, height: int) -> int:
    """The top row that shows `row`: unchanged where it is in view, else with a quarter page free below."""
    return top if top <= row < top + height else max(0, row - height + 1 + height // 4)
