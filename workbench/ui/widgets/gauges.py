"""The head of every lane: what it runs, how far it is, and its four figures. Fixed height, fixed columns."""

from __future__ import annotations

import math

import numpy as np
from rich.segment import Segment
from rich.style import Style

from workbench.config.lane import from_json
from workbench.errors import ConfigurationError
from workbench.store.state import LaneRecord
from workbench.ui.board import LaneView
from workbench.ui.measures import BINS, KL_LEVELS, speeds
from workbench.ui.widgets.lines import BLOCKS, Lines, Row, depth, figure, fill, grid, thousands

HEIGHT, COMPACT_HEIGHT = 6, 3
LABEL, VALUE = 9, 18  # columns where values and what follows them begin

STATUS_GLYPHS: dict[str, str] = {
    "queued": "…",
    "running": "●",
    "done": "✓",
    "failed": "✗",
    "invalid": "!",
    "cancelled": "■",
}


def short_configuration(record: LaneRecord) -> str:
    """A lane's configuration in a few words: what a person switches, the engine only where it is not the usual one."""
    try:
        item = from_json(record.configuration)
    except (ConfigurationError, TypeError):
        return record.name
    words = [item.weights, f"{item.kv} kv", item.attn]
    if item.engine != "transformers":
        words.insert(0, item.engine)
    if item.path != "prefill":
        words.append(item.path)
    if item.draft != "none":
        words.append(item.draft)
    return " · ".join(words)


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
        edge, total = view.measures.edge, view.measures.shared.count
        share = edge / total if total else 0.0
        if view.lane.record.status == "running" and share < 1:
            return self._progress(row, share, f" {100 * share:3.0f}% ")
        return row.right((f" {thousands(edge)} tok ", ink.muted)) if edge else row

    def _progress(self, row: Row, share: float, text: str) -> Row:
        ink = self.desk.ink
        cells = min(12, row.left - len(text) - 1)
        if cells < 4:
            return row.right((text, ink.text))
        done = round(share * cells)
        return row.right((" " + "━" * done, ink.accent), ("━" * (cells - done), ink.rule), (text, ink.text))

    def _words(self, view: LaneView) -> tuple[str, str, Style]:
        ink, lane = self.desk.ink, view.lane
        status = lane.record.status
        style = {"running": ink.accent, "failed": ink.error, "invalid": ink.error, "cancelled": ink.warning}.get(
            status, ink.muted
        )
        words: str = status
        if status == "running":
            words = phase_of(view)
        elif status == "done" and lane.record.stats.get("reused"):
            words = "cached"
        elif status in ("failed", "invalid"):
            words = f"{status}: {lane.record.reason.partition(chr(10))[0]}" if lane.record.reason else status
        return STATUS_GLYPHS[status], words, style

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
        row.add(f"{mean:.4f}", self.desk.ink.levels[kl_step(mean)] + Style(underline=False)).to(VALUE)
        return self._sparkline(view, row, row.left - 1)

    def _sparkline(self, view: LaneView, row: Row, cells: int) -> Row:
        """Mean KL by depth, each slice on the same scale in every lane; dots where nothing is measured yet."""
        ink = self.desk.ink
        means, _, _ = view.measures.curve(min(cells, BINS))
        for value in means.tolist():
            if math.isnan(value):
                row.add("·", ink.rule)
            else:
                row.add(
                    kl_block(value), ink.levels[kl_step(value)] + Style(underline=False, bgcolor=ink.palette.background)
                )
        return row

    def _flips(self, view: LaneView, row: Row, active: bool) -> Row:
        ink, measures = self.desk.ink, view.measures
        self._label(row, "flips")
        rate, deepest = measures.flip_rate, measures.deepest
        if rate is None:
            row.add("—", ink.muted)
        else:
            row.add(f"{100 * rate:.2f}%", ink.text)
            if deepest is not None:
                row.to(VALUE).add(f"@{depth(deepest.start)}–{depth(deepest.stop)} ", ink.muted)
                row.add(f"{100 * deepest.rate:.2f}%", ink.text)
        return row.right((" ≈ floor ", ink.accent)) if self._at_floor(view) else row

    def _at_floor(self, view: LaneView) -> bool:
        board = self.desk.board
        floor = board.state.floor.get("value") if board is not None and board.state.floor else None
        mean = view.measures.kl_mean
        return isinstance(floor, int | float) and mean is not None and mean <= 2 * floor

    def _speed(self, view: LaneView, row: Row, active: bool) -> Row:
        ink = self.desk.ink
        decode, prefill = speeds(view.lane)
        self._label(row, "decode").add("—" if decode is None else f"{decode:.1f}/s", ink.text if decode else ink.muted)
        row.to(VALUE).add("prefill ", ink.muted)
        row.add("—" if prefill is None else f"{thousands(prefill)}/s", ink.text if prefill else ink.muted)
        return row.right((f" {'accept' if row.width >= 44 else 'acc'} — ", ink.muted))

    def _compact_title(self, view: LaneView, row: Row, active: bool) -> Row:
        ink = self.desk.ink
        record = view.lane.record
        glyph, _, style = self._words(view)
        name = ("ref " if record.kind == "reference" else "") + short_configuration(record)
        row.add(f"{view.number} ", ink.active if active else ink.muted)
        row.add(name, ink.active if active else ink.strong, limit=max(1, row.left - 6))
        share = view.measures.edge / max(1, view.measures.shared.count)
        if record.status == "running":
            return row.right((f" {100 * share:.0f}%", ink.text), (f" {glyph} ", style))
        return row.right((f" {glyph} ", style))

    def _compact_figures(self, view: LaneView, row: Row) -> Row:
        ink, measures = self.desk.ink, view.measures
        decode, _ = speeds(view.lane)
        speed = "—" if decode is None else f"{decode:.0f}/s"
        if view.lane.record.status in ("failed", "invalid"):
            return row.add(self._words(view)[1], ink.error)
        if measures.is_reference:
            return row.add(f"{thousands(measures.edge)} tok", ink.muted).add("  ", ink.muted).add(speed, ink.text)
        mean, rate = measures.kl_mean, measures.flip_rate
        row.add("KL ", ink.muted).add("—" if mean is None else f"{mean:.4f}", ink.text)
        row.add(" flip ", ink.muted).add("—" if rate is None else f"{100 * rate:.1f}%", ink.text)
        row.add(" ", ink.muted).add(speed, ink.text)
        return row.right((" ≈floor ", ink.accent)) if self._at_floor(view) else row.right((" acc — ", ink.muted))
