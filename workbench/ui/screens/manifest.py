"""One lane in full: what was asked for beside what its engine read back, its marks, its drafter, what it stands on."""

from __future__ import annotations

from typing import Any

from rich.segment import Segment
from textual.geometry import Size

from workbench.store.effective import (
    UNREAD,
    acceptance,
    configuration_of,
    engine_words,
    logits_words,
    sentences,
    settings,
)
from workbench.ui.actions import rebound
from workbench.ui.board import Desk, LaneView
from workbench.ui.marks import acceptance_words, marks_of, status_of
from workbench.ui.screens.dialog import ScrolledDialog
from workbench.ui.widgets.lines import Lines, Row, app_of
from workbench.ui.widgets.notices import wrapped

LABEL, RAN = 18, 40
"""Columns of what was asked, and of what ran."""

FACTS: tuple[str, ...] = (
    "model_name", "weights_hash", "gguf", "gguf_made", "gguf_sha256", "build", "runner", "dtype", "processor", "cpu",
    "system", "argv", "logits", "vocabulary_rule", "tokens_checked", "cache_reuse", "trace_rule", "token_stream_hash",
    "template_hash", "workbench",
)  # fmt: skip
"""Keys of a manifest that are shown as they stand."""


SOURCES = {"steps": "single steps", "histogram": "a histogram of steps", "average": "the engine's own average"}


class ManifestBody(Lines):
    """The lines, made anew for every width."""

    def __init__(self, desk: Desk, view: LaneView) -> None:
        super().__init__(desk, id="manifest")
        self.view = view

    @property
    def _width(self) -> int:
        return min(108, app_of(self).size.width - 8)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return self._width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(self._width))

    def line(self, y: int, width: int) -> list[Segment]:
        rows = self._rows(width)
        return rows[y].segments() if y < len(rows) else Row(width, self.desk.ink.text).segments()

    def _rows(self, width: int) -> list[Row]:
        ink, record, board = self.desk.ink, self.view.lane.record, self.desk.board
        rows = [Row(width, ink.text)]
        status, reason = status_of(self.view, board) if board is not None else (record.status, record.reason)
        asked = configuration_of(record.configuration)
        rows += self._fact("lane", record.name, width)
        rows += self._fact("configuration", asked.to_line() if asked is not None else "of a newer version", width)
        rows += self._fact("engine", engine_words(record.manifest, record.configuration), width)
        rows += self._fact("status", f"{status}: {reason}" if reason else status, width)
        rows += self._fact("estimator", self._estimator(), width)
        for mark in marks_of(self.view, board) if board is not None else []:
            if mark.word not in (status, "bounded"):
                rows += self._fact(mark.word, mark.why, width)
        rows += [Row(width, ink.text), *self._settings(width), Row(width, ink.text)]
        rows += self._drafter(width)
        for key in ("engine_notes", "notes"):
            for text in sentences(record.manifest, key):
                rows += self._fact("note", text, width)
        rows.append(Row(width, ink.text))
        for key in FACTS:
            if (value := _text(record.manifest.get(key))) and value != "none":
                rows += self._fact(key.replace("_", " "), value, width)
        return rows

    def _fact(self, label: str, text: str, width: int) -> list[Row]:
        ink = self.desk.ink
        rows: list[Row] = []
        for part in text.splitlines() or [""]:
            for line in wrapped(part, width - LABEL - 1):
                row = Row(width, ink.text).add("" if rows else label, ink.muted, limit=LABEL - 1).to(LABEL)
                rows.append(row.add(line, ink.text))
        return rows

    def _estimator(self) -> str:
        record = self.view.lane.record
        gives = logits_words(record.manifest)
        what = f"{record.estimator}, from {gives}" if gives else record.estimator
        if not self.view.measures.bounded:
            return what
        return f"{what}: KL is a lower bound and has no upper one, TV lies in an interval; never ranked by KL"

    def _settings(self, width: int) -> list[Row]:
        ink, record = self.desk.ink, self.view.lane.record
        rows = [Row(width, ink.text).to(LABEL).add("asked for", ink.muted).to(RAN).add("ran, as read back", ink.muted)]
        for name, setting in settings(record.configuration, record.manifest).items():
            if not (setting.asked or setting.ran):
                continue
            own = setting.asked == "0"
            row = Row(width, ink.text).add(name, ink.muted, limit=LABEL - 1).to(LABEL)
            row.add("the engine's choice" if own else setting.asked, ink.text, limit=RAN - LABEL - 1).to(RAN)
            if setting.unread:
                rows.append(row.add(f"{UNREAD} cannot be read back", ink.warning))
                continue
            as_asked = setting.ran in ("", setting.asked)
            rows.append(row.add(setting.ran or "–", ink.text if as_asked else ink.strong))
        asked = configuration_of(record.configuration)
        for key, value in asked.extra if asked is not None else ():
            rows.append(Row(width, ink.text).add(key, ink.muted, limit=LABEL - 1).to(LABEL).add(value, ink.text))
        return rows

    def _drafter(self, width: int) -> list[Row]:
        found = acceptance(self.view.lane.record.stats)
        length, words = acceptance_words(self.view.lane.record)
        if not length:
            return self._fact("acceptance", words, width)
        source = SOURCES.get(words, words or "an unnamed source")
        text = f"{length} tokens a step, the bonus token included · from {source}"
        if found.get("steps"):
            text += f", {found['steps']} of them"
        rows = self._fact("acceptance", text, width)
        per_request = found.get("per_request")
        if isinstance(per_request, int | float):
            rows += self._fact("", f"mean of requests {per_request:.2f}", width)
        if slots := found.get("by_slot"):
            shares = ", ".join("–" if rate is None else f"{100 * rate:.0f}%" for rate in slots)
            rows += self._fact("by slot", f"{shares} (accepted of those reached)", width)
        if counts := found.get("histogram"):
            shown = ", ".join(f"{accepted}: {count}" for accepted, count in enumerate(counts))
            rows += self._fact("histogram", f"{shown} (drafts accepted: steps)", width)
        return rows


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return "" if value is None or isinstance(value, dict) else str(value)


class ManifestScreen(ScrolledDialog):
    """The key that opened it closes it."""

    BINDINGS = (*ScrolledDialog.BINDINGS, rebound("manifest", "dismiss_dialog"))

    def __init__(self, desk: Desk, view: LaneView) -> None:
        super().__init__(ManifestBody(desk, view), f"lane {view.number}", "↑↓ scroll · esc close")
