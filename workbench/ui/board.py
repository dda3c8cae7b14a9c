"""What the lanes screen knows, without the screen: a session, its text and rows, its lanes, the reader's place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from workbench.store.state import LaneState, SessionState
from workbench.ui.layout import Layout
from workbench.ui.measures import Measures, Shared
from workbench.ui.pieces import ASSISTANT, SYSTEM, TOOL, USER, Pieces, TokenText, message_kinds
from workbench.ui.styles import Ink
from workbench.ui.transport import Transport

ACTIVE = ("queued", "running")
MIN_PANE = 36
MAX_PANES = 8
MARGIN = 2  # columns before the text of a pane: the kind of message, a space
KIND_NAMES = {ASSISTANT: "assistant", USER: "user", TOOL: "tool result", SYSTEM: "system"}


@dataclass(slots=True)
class Tail:
    """A lane's free continuation: its text, wrapped for the current width."""

    text: TokenText
    layout: Layout


@dataclass(slots=True)
class LaneView:
    """A lane as the widgets draw it."""

    number: int  # as typed on the keyboard, from 1
    lane: LaneState
    measures: Measures
    tail: Tail


class Board:
    """A session's state made ready to draw. `update` takes in what the hub wrote since."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self.pieces = Pieces()
        self.text = TokenText(self.pieces, state.token_bytes)
        self.text.extend(state.stream["ids"])
        names = [str(message.get("role", "")) for message in _messages(state.session)]
        kinds = message_kinds(state.stream["role"], state.stream["message"], names)
        self.shared = Shared(state.stream, kinds)
        self.transport = Transport(total=self.shared.count)
        self.hidden: set[int] = set()
        self.focus = 0  # id of the active lane
        self.zoomed = False
        self.first_pane = 0
        self._layout: Layout | None = None
        self._views: dict[int, LaneView] = {}
        self.update()
        if self.views:
            self.focus = self.views[min(1, len(self.views) - 1)].lane.record.id

    @property
    def count(self) -> int:
        """Positions of the stream."""
        return self.shared.count

    @property
    def views(self) -> list[LaneView]:
        """The lanes that are not hidden, the reference first, numbered as they stand."""
        return [view for view in self._views.values() if view.lane.record.id not in self.hidden]

    @property
    def active(self) -> LaneView | None:
        """The lane under the keyboard."""
        views = self.views
        return next((view for view in views if view.lane.record.id == self.focus), views[0] if views else None)

    @property
    def running(self) -> bool:
        return any(lane.record.status in ACTIVE for lane in self.state.shown)

    @property
    def measuring(self) -> str:
        """What runs without a pane of its own: the noise floor, row by row."""
        for lane in list(self.state.lanes):
            if lane.record.kind == "floor" and lane.record.status == "running":
                share = len(lane.rows) / max(1, self.count)
                return f"noise floor, {lane.record.name}: {100 * min(1.0, share):.0f}%"
        return ""

    def update(self) -> set[int]:
        """Take in new lanes and rows; the ids of the lanes whose tokens changed."""
        changed: set[int] = set()
        lanes = self.state.shown
        ids = [lane.record.id for lane in lanes]
        if ids != list(self._views):
            self._views = {lane.record.id: self._views.get(lane.record.id) or self._view(lane) for lane in lanes}
            changed.update(ids)
        total = self.count
        for number, (lane, view) in enumerate(zip(lanes, list(self._views.values()), strict=True), 1):
            view.number = number
            if view.lane is not lane:
                view = self._views[lane.record.id] = self._view(lane)
                view.number = number
                changed.add(lane.record.id)
            if view.measures.update():
                changed.add(lane.record.id)
            seen, came = len(view.tail.text), len(lane.continuation)
            if came < seen:
                view.tail = self._tail()
                seen = 0
            if came > seen:
                view.tail.text.extend(lane.continuation.column("ids")[seen:came])
                view.tail.layout.extend()
                changed.add(lane.record.id)
            total = max(total, self.count + came)
        self.transport.total = total
        return changed

    def layout(self, width: int) -> Layout:
        """The stream wrapped at a width; kept until another width is asked for."""
        if self._layout is None or self._layout.width != width:
            self._layout = Layout(self.text, width, self.shared.breaks)
            for view in self._views.values():
                view.tail.layout = Layout(view.tail.text, width)
        return self._layout

    def panes(self, width: int) -> list[LaneView]:
        """The lanes that fit side by side, always with the active one among them."""
        views, active = self.views, self.active
        if active is None or not views:
            return []
        if self.zoomed:
            return [active]
        fits = max(1, min(MAX_PANES, width // MIN_PANE, len(views)))
        index = views.index(active)
        self.first_pane = max(index - fits + 1, min(self.first_pane, index), 0)
        self.first_pane = min(self.first_pane, len(views) - fits)
        return views[self.first_pane : self.first_pane + fits]

    def shown_of(self, view: LaneView) -> int:
        """How many positions of a lane may be drawn: what it got to, at most what the playhead passed."""
        edge = view.measures.edge
        if 0 < self.count <= edge:
            edge = self.count + len(view.tail.text)
        return min(edge, self.transport.shown)

    def newest(self) -> int:
        """Where following looks: the newest token of the active lane while it runs, else of the furthest lane."""
        active = self.active
        if active and active.lane.record.status == "running" and self.shown_of(active):
            return self.shown_of(active) - 1
        busy = [self.shown_of(view) for view in self.views if view.lane.record.status == "running"]
        edges = [edge for edge in busy if edge] or [self.shown_of(view) for view in self.views]
        return max(0, max(edges, default=0) - 1)

    def turn_at(self, position: int) -> int:
        """The assistant turn that a position belongs or leads up to, from 1; 0 where there is none."""
        if not self.count or not self.shared.turns:
            return 0
        return min(int(self.shared.turn[min(position, self.count - 1)]) + 1, self.shared.turns)

    def next_turn(self, position: int, step: int) -> int | None:
        """Where the next message begins (`step` 1), or this one or the one before it (−1)."""
        starts = self.shared.message_starts
        if step > 0:
            index = int(np.searchsorted(starts, position, side="right"))
            return int(starts[index]) if index < len(starts) else None
        index = int(np.searchsorted(starts, position, side="left")) - 1
        return int(starts[index]) if index >= 0 else None

    def _tail(self) -> Tail:
        text = TokenText(self.pieces, self.state.token_bytes)
        return Tail(text, Layout(text, self._layout.width if self._layout else 34))

    def _view(self, lane: LaneState) -> LaneView:
        return LaneView(0, lane, Measures(lane, self.shared), self._tail())


@dataclass(frozen=True, slots=True)
class TraceRow:
    """The reference's distribution at a position: the most probable ids with ln p, and its entropy in nats."""

    head: tuple[tuple[int, float], ...]
    entropy: float


@dataclass(slots=True)
class Desk:
    """What all widgets of the lanes screen share and the screen alone writes."""

    ink: Ink
    board: Board | None = None
    message: str = ""  # what is being loaded or done
    notice: str = ""  # an answer to the last key, until the next one
    live: bool = False
    missing: str = ""
    trace: dict[int, TraceRow] = field(default_factory=lambda: {})  # by position, around where the cursor has been
    compact: bool = False
    keys: dict[str, str] = field(default_factory=lambda: {})  # the user's own keys by action id


def _messages(session: dict[str, Any]) -> list[dict[str, Any]]:
    messages: Any = session.get("messages", [])
    if not isinstance(messages, list):
        return []
    return [cast("dict[str, Any]", m) if isinstance(m, dict) else {} for m in cast("list[Any]", messages)]
