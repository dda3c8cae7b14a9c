"""The last line: the keys that work now, made from the table of actions; each can be clicked."""

from __future__ import annotations

from rich.segment import Segment
from textual import events
from textual.message import Message

from workbench.ui.actions import FOOTER, FOOTER_END, action, keys_of
from workbench.ui.board import Desk
from workbench.ui.widgets.lines import Lines, Row


class Footer(Lines):
    """Keys and words, as many as fit; commands, help and quit stay at the right."""

    class Chosen(Message):
        """An action was clicked."""

        def __init__(self, id: str) -> None:
            super().__init__()
            self.id = id

    def __init__(self, desk: Desk, *, id: str) -> None:
        super().__init__(desk, id=id)
        self._spots: list[tuple[int, int, str]] = []

    def line(self, y: int, width: int) -> list[Segment]:
        ink = self.desk.ink
        self._spots = []
        row = Row(width, ink.text).add(" ", ink.text)
        end = [(self._keys(ids), action(ids[-1]).footer, ids[-1]) for ids in FOOTER_END]
        if self.desk.board is None:
            end = [item for item in end if item[2] == "quit"]
        reserve = sum(len(keys) + len(word) + 3 for keys, word, _ in end) + 1
        for ids in FOOTER if self.desk.board is not None else ():
            keys, word = self._keys(ids), action(ids[-1]).footer
            if row.used + len(keys) + len(word) + 3 > width - reserve:
                break
            self._item(row, keys, word, ids[-1])
            row.add("  ", ink.text)
        row.to(width - reserve)
        for keys, word, id in end:
            row.add("  ", ink.text)
            self._item(row, keys, word, id)
        return row.segments()

    def _keys(self, ids: tuple[str, ...]) -> str:
        return " ".join(keys_of(id, self.desk.keys)[0] for id in ids)

    def _item(self, row: Row, keys: str, word: str, id: str) -> None:
        start = row.used
        row.add(keys, self.desk.ink.accent).add(f" {word}", self.desk.ink.muted)
        self._spots.append((start, row.used, id))

    def on_click(self, event: events.Click) -> None:
        for start, stop, id in self._spots:
            if start <= event.x < stop:
                self.post_message(self.Chosen(id))
