"""The head of every lane: what it runs, how far it is, and its four figures. Fixed height, fixed columns."""

from __future__ import annotations

import math

import numpy as np
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from workbench.ui.board import LaneView
from workbench.ui.marks import acceptance_words, interval, marks_of, near_floor, short_configuration, status_of
from workbench.ui.measures import BINS, KL_LEVELS, speeds
from workbench.ui.widgets.lines import BLOCKS, Lines, Row, depth, figure, fill, grid, thousands

Parts = list[tuple[str, Style]]

HEIGHT, COMPACT_HEIGHT = 6, 3
LABEL, VALUE = 9, 18  # columns where values and what follows them begin

STATUS_GLYPHS: dict[str, str] = {
    "queued": "…",
    "running": "●",
    "done": "✓",
    "failed": "✗",
    "invalid": "!",
    "cancelled": "■",
    "interrupted": "■",
}


def phase_of(view: LaneView) -> str:
    """What a running lane does now."""
    lane, edge, count = view.lane, view.measures.edge, view.measures.shared.count
    if edge >= count > 0:  # everything is scored: what is left is the decode sample, which reports tokens alone
        written = len(lane.continuation)
        return f"decode, {written} tok" if written else "decode"
    if lane.total and not edge and lane.phase != "prefill":
        return f"{lane.phase} {thousands(lane.done)}/{thousands(lane.total)}"
    return lane.phase or "loading"


def kl_step(value: float) -> int:
    """The level of a KL, 0 to 4."""
    return sum(value >= threshold for threshold in KL_LEVELS)


def kl_block(value: float) -> str:
    """A KL as one of eight blocks, on a square-root scale that ends at 1 nat."""
    return BLOCKS[min(7, int(math.sqrt(max(0.0, min(value, 1.0))) * 8))]


class Gauges(Lines):
    """Figures of the visible lanes, one column each, with a rule under them."""

    def line(self, y: int, width: int) -> list[Segment]:
        ink, board = self.desk.ink, self.desk.board
        if board is None:
            return Row(width, ink.text).segments()
        views = board.panes(width)
        panes = grid(width, len(views))
        last = (COMPACT_HEIGHT if self.desk.compact else HEIGHT) - 1
        if y >= last:
            text = list("─" * width)
            for x, _ in panes[1:]:
                text[x - 1] = "┼"
            return [Segment("".join(text), ink.rule)]
        segments: list[Segment] = []
        for (x, cells), view in zip(panes, views, strict=True):
            if x:
                segments.append(Segment("│", ink.rule))
            segments += self._cell(view, y, cells).segments()
        return fill(segments, width, len(views), ink.text)

    def _cell(self, view: LaneView, y: int, width: int) -> Row:
        row = Row(width, self.desk.ink.text)
        board = self.desk.board
        active = board is not None and view is board.active
        row.add("▌" if active and y < 2 else " ", self.desk.ink.active)
        if self.desk.compact:
            return self._compact_title(view, row, active) if y == 0 else self._compact_figures(view, row)
        painters = (self._title, self._status, self._divergence, self._flips, self._speed)
        return painters[y](view, row, active)

    def _title(self, view: LaneView, row: Row, active: bool) -> Row:
        ink = self.desk.ink
        record = view.lane.record
        row.add(f"{view.number} ", ink.active if active else ink.muted)
        words = short_configuration(record)
        if record.kind == "reference":
            return row.add("reference ", ink.active if active else ink.strong).add(words, ink.muted)
        return row.add(words, ink.active if active else ink.strong)

    def _status(self, view: LaneView, row: Row, active: bool) -> Row:
        ink = self.desk.ink
        glyph, words, style = self._words(view)
        row.add(f"{glyph} ", style).add(words, ink.text if view.lane.record.status == "running" else ink.muted)
        for word, style in self._marks(view):
            row.add(" · ", ink.muted).add(word, style)
        edge, total = view.measures.edge, view.measures.shared.count
        share = edge / total if total else 0.0
        if view.lane.record.status == "running" and share < 1:
            return self._progress(row, share, f" {100 * share:3.0f}% ")
        return row.right((f" {thousands(edge)} tok ", ink.muted)) if edge else row

    def _marks(self, view: LaneView) -> list[tuple[str, Style]]:
        """The words beside the status; an invalid lane says so in the status itself."""
        ink, board = self.desk.ink, self.desk.board
        marks = marks_of(view, board) if board is not None else []
        quiet = ("bounded", "two runs")
        styles = [ink.error if mark.grave else ink.muted if mark.word in quiet else ink.warning for mark in marks]
        return [(mark.word, style) for mark, style in zip(marks, styles, strict=True) if mark.word != "invalid"]

    def _progress(self, row: Row, share: float, text: str) -> Row:
        ink = self.desk.ink
        cells = min(12, row.left - len(text) - 1)
        if cells < 4:
            return row.right((text, ink.text))
        done = round(share * cells)
        return row.right((" " + "━" * done, ink.accent), ("━" * (cells - done), ink.rule), (text, ink.text))

    def _words(self, view: LaneView) -> tuple[str, str, Style]:
        ink, lane, board = self.desk.ink, view.lane, self.desk.board
        status, reason = status_of(view, board) if board is not None else (lane.record.status, lane.record.reason)
        styles = {
            "running": ink.accent, "failed": ink.error, "invalid": ink.error, "cancelled": ink.warning,
            "interrupted": ink.warning,
        }  # fmt: skip
        style = styles.get(status, ink.muted)
        words: str = status
        if status == "running":
            words = phase_of(view)
        elif status == "done" and lane.record.stats.get("reused"):
            words = "cached, earlier speeds"
        elif status in ("failed", "invalid"):
            words = f"{status}: {reason.partition(chr(10))[0]}" if reason else status
        return STATUS_GLYPHS[status], words, style

    def _unusable(self, view: LaneView) -> bool:
        """Whether a lane's figures say nothing about quality: they are drawn without colour and crossed by a mark."""
        board = self.desk.board
        return board is not None and status_of(view, board)[0] == "invalid"

    def _label(self, row: Row, label: str) -> Row:
        return row.add(label, self.desk.ink.muted).to(LABEL)

    def _divergence(self, view: LaneView, row: Row, active: bool) -> Row:
        ink, measures = self.desk.ink, view.measures
        if measures.is_reference:
            entropy = view.lane.entropy
            self._label(row, "entropy")
            if entropy is None or not len(entropy):
                return row.add("—", ink.muted)
            used = entropy[measures.shared.generated[1 : len(entropy) + 1]]
            used = used[np.isfinite(used)]
            mean = float(used.mean(dtype=np.float64)) if len(used) else None
            return row.add(figure(mean), ink.text).to(VALUE).add("nat a written token", ink.muted)
        self._label(row, "KL mean")
        mean = measures.kl_mean
        if mean is None:
            return row.add("—", ink.muted)
        unusable = self._unusable(view)
        style = ink.error if unusable else self.desk.ink.levels[kl_step(mean)] + Style(underline=False)
        row.add(f"{_least(view)}{mean:.4f}{' !' if unusable else ''}", style).to(VALUE)
        return self._sparkline(view, row, row.left - 1)

    def _sparkline(self, view: LaneView, row: Row, cells: int) -> Row:
        """Mean KL by depth, each slice on the same scale in every lane; dots where nothing is measured yet."""
        ink = self.desk.ink
        means, _, _ = view.measures.curve(min(cells, BINS))
        unusable = self._unusable(view)
        for value in means.tolist():
            if math.isnan(value):
                row.add("·", ink.rule)
            elif unusable:
                row.add(kl_block(value), ink.rule)
            else:
                row.add(
                    kl_block(value), ink.levels[kl_step(value)] + Style(underline=False, bgcolor=ink.palette.background)
                )
        return row

    def _flips(self, view: LaneView, row: Row, active: bool) -> Row:
        ink, measures, board = self.desk.ink, view.measures, self.desk.board
        self._label(row, "flips")
        rate, deepest = measures.flip_rate, measures.deepest
        if rate is None:
            return row.add("—", ink.muted)
        row.add(f"{100 * rate:.2f}%", ink.text).to(VALUE)
        tv = measures.tv if measures.bounded else None
        if tv is not None:
            row.add("TV ", ink.muted).add(f"{interval(*tv)}  ", ink.text)
        if deepest is not None and (tv is None or row.left > 24):
            row.add(f"@{depth(deepest.start)}–{depth(deepest.stop)} ", ink.muted)
            row.add(f"{100 * deepest.rate:.2f}%", ink.text)
        return row.right((" ≈ floor ", ink.accent)) if board is not None and near_floor(view, board) else row

    def _speed(self, view: LaneView, row: Row, active: bool) -> Row:
        ink = self.desk.ink
        decode, prefill = speeds(view.lane)
        style = ink.muted if view.lane.record.stats.get("reused") else ink.text
        self._label(row, "decode").add("—" if decode is None else f"{decode:.1f}/s", style if decode else ink.muted)
        row.to(VALUE)
        length, words = acceptance_words(view.lane.record)
        fast = [] if prefill is None and length else [("prefill ", ink.muted), (_speed_of(prefill), style)]
        short = [("pre ", ink.muted), (_speed_of(prefill), style)] if prefill is not None else []
        value, source = (f" acc {length}", ink.text), (f" {words} ", ink.muted)
        if not length:
            return _spread(row, (fast, [source] if words else []), (fast, []))
        return _spread(row, (fast, [value, source]), (fast, [value]), (short, [value]), ([], [value, source]))

    def _compact_title(self, view: LaneView, row: Row, active: bool) -> Row:
        ink = self.desk.ink
        record = view.lane.record
        glyph, _, style = self._words(view)
        name = ("ref " if record.kind == "reference" else "") + short_configuration(record)
        end = [(f" {word}", mark) for word, mark in self._marks(view) if word in ("severe", "no effect", "differs")]
        share = view.measures.edge / max(1, view.measures.shared.count)
        if record.status == "running":
            end.append((f" {100 * share:.0f}%", ink.text))
        end.append((f" {glyph} ", style))
        row.add(f"{view.number} ", ink.active if active else ink.muted)
        row.add(name, ink.active if active else ink.strong, limit=max(1, row.left - sum(len(text) for text, _ in end)))
        return row.right(*end)

    def _compact_figures(self, view: LaneView, row: Row) -> Row:
        ink, measures, board = self.desk.ink, view.measures, self.desk.board
        decode, _ = speeds(view.lane)
        speed = "—" if decode is None else f"{decode:.0f}/s"
        mean, rate, unusable = measures.kl_mean, measures.flip_rate, self._unusable(view)
        if view.lane.record.status == "failed" or (unusable and mean is None):
            return row.add(self._words(view)[1], ink.error)
        if measures.is_reference:
            then = ink.muted if view.lane.record.stats.get("reused") else ink.text
            return row.add(f"{thousands(measures.edge)} tok", ink.muted).add("  ", ink.muted).add(speed, then)
        if unusable:
            row.add("invalid ", ink.error)
        row.add("KL ", ink.muted).add("—" if mean is None else f"{_least(view)}{mean:.4f}", ink.text)
        row.add(" flip ", ink.muted).add("—" if rate is None else f"{100 * rate:.1f}%", ink.text)
        row.add(" ", ink.muted).add(speed, ink.text)
        if board is not None and near_floor(view, board):
            return row.right((" ≈floor ", ink.accent))
        length, words = acceptance_words(view.lane.record)
        tv = measures.tv if measures.bounded else None
        end: Parts = [(f" acc {length} ", ink.text)] if length else [(f" {words} ", ink.muted)]
        if tv is not None and not length:
            end = [(f" TV {interval(*tv, digits=2)} ", ink.muted)]
        return _spread(row, ([], end))


def _spread(row: Row, *choices: tuple[Parts, Parts]) -> Row:
    """Add the first pair of parts that fits whole, the second of the pair at the end of the row; else nothing."""
    for near, far in choices:
        if sum(cell_len(text) for text, _ in (*near, *far)) <= row.left:
            for text, style in near:
                row.add(text, style)
            return row.right(*far)
    return row


def _speed_of(tokens: float | None) -> str:
    return "—" if tokens is None else f"{thousands(tokens)}/s"


def _least(view: LaneView) -> str:
    """What stands before a lane's KL: it is a lower bound where the engine gives bounds only."""
    return "≥" if view.measures.bounded else ""
