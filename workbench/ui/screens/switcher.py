"""The configuration switcher: one line an axis, values by arrow keys, and why a value cannot be had."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size

from workbench.config.axes import AXIS_NAMES, ENGINES, refusal, values
from workbench.config.lane import Configuration, from_json
from workbench.errors import ConfigurationError
from workbench.ui.actions import action, bindings, keys_of
from workbench.ui.board import Desk
from workbench.ui.runner import Runner
from workbench.ui.screens.dialog import DialogScreen
from workbench.ui.widgets.lines import Lines, Row, app_of
from workbench.ui.widgets.notices import wrapped

LABELS = {
    "engine": "engine",
    "weights": "weights",
    "kv": "kv cache",
    "attn": "attention",
    "draft": "drafter",
    "path": "path",
}
LABEL_COLUMN, VALUE_WIDTH = 15, 13
REASON_ROWS = 2


@dataclass(slots=True)
class Choice:
    """A configuration under construction: `base` is where it started, `axis` the line under the cursor."""

    base: Configuration
    chosen: Configuration
    axis: int = 1

    @property
    def name(self) -> str:
        return AXIS_NAMES[self.axis]

    def values(self, axis: str) -> list[str]:
        """Every value that some engine knows for an axis: what this engine cannot do stays visible."""
        known = [*values(self.chosen.engine, axis)]
        if axis != "engine":
            known += [value for engine in ENGINES for value in values(engine, axis) if value not in known]
        current = str(getattr(self.chosen, axis))
        return known if current in known else [current, *known]

    def refused(self, axis: str, value: str) -> ConfigurationError | None:
        """Why a value cannot be had with everything else as it is chosen."""
        return refusal(replace(self.chosen, **{axis: value}))

    def move(self, step: int) -> None:
        self.axis = (self.axis + step) % len(AXIS_NAMES)

    def turn(self, step: int) -> None:
        """The next or previous value of the axis; refused ones can be looked at, not run."""
        options = self.values(self.name)
        index = options.index(str(getattr(self.chosen, self.name))) + step
        if 0 <= index < len(options):
            self.chosen = replace(self.chosen, **{self.name: options[index]})


class SwitcherBody(Lines):
    """Draws a Choice. Fixed height: labels, the reason, the SPEC, what enter does."""

    def __init__(self, desk: Desk, choice: Choice, note: str, twins: dict[str, int]) -> None:
        super().__init__(desk, id="switcher")
        self.choice = choice
        self.note = note
        self.twins = twins
        self.can_focus = True

    @property
    def narrow(self) -> bool:
        return app_of(self).size.width < 100

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return 68 if self.narrow else 94

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(width))

    def line(self, y: int, width: int) -> list[Segment]:
        rows = self._rows(width)
        return rows[y].segments() if y < len(rows) else Row(width, self.desk.ink.text).segments()

    def _rows(self, width: int) -> list[Row]:
        ink, choice = self.desk.ink, self.choice
        error = refusal(choice.chosen)
        rows = [Row(width, ink.text)]
        for index, axis in enumerate(AXIS_NAMES):
            rows += self._axis(axis, index == choice.axis, width)
        rows.append(Row(width, ink.text))
        reason = "" if error is None else f"{error.what}. {error.next}"
        reasons = wrapped(reason, width - 6)[:REASON_ROWS]
        for line in range(REASON_ROWS):
            text = reasons[line] if line < len(reasons) else ""
            rows.append(Row(width, ink.text).add(" ✗ " if line == 0 and text else "   ", ink.error).add(text, ink.text))
        rows.append(
            Row(width, ink.text)
            .add("   lane".ljust(LABEL_COLUMN), ink.muted)
            .add(choice.chosen.to_line(), ink.strong if not error else ink.muted)
        )
        rows.append(Row(width, ink.text).add("   change".ljust(LABEL_COLUMN), ink.muted).add(self._change(), ink.text))
        rows.append(Row(width, ink.text))
        rows.append(self._outcome(Row(width, ink.text), error is None))
        return rows

    def _axis(self, axis: str, here: bool, width: int) -> list[Row]:
        ink, choice = self.desk.ink, self.choice
        row = Row(width, ink.text).add(" ▌ " if here else "   ", ink.active)
        row.add(LABELS.get(axis, axis), ink.active if here else ink.muted).to(LABEL_COLUMN)
        options = choice.values(axis)
        if self.narrow and not here:
            return [self._value(row, axis, str(getattr(choice.chosen, axis)))]
        if self.narrow:
            self._value(row, axis, str(getattr(choice.chosen, axis)))
            row = Row(width, ink.text).add("   ", ink.text)
            first = Row(width, ink.text).add(" ▌ ", ink.active).add(LABELS.get(axis, axis), ink.active).to(LABEL_COLUMN)
            self._value(first, axis, str(getattr(choice.chosen, axis)))
            for value in options:
                self._value(row, axis, value)
            return [first, row]
        for value in options:
            start = row.used
            self._value(row, axis, value)
            row.to(start + VALUE_WIDTH)
        return [row]

    def _value(self, row: Row, axis: str, value: str) -> Row:
        """`[value]` is where the switcher started, `‹value›` what is chosen now, ✗ what cannot be had."""
        ink, choice = self.desk.ink, self.choice
        chosen, base = str(getattr(choice.chosen, axis)), str(getattr(choice.base, axis))
        bad = choice.refused(axis, value) is not None
        left, right = ("‹", "›") if value == chosen != base else ("[", "]") if value == base else (" ", " ")
        style: Style = ink.muted if bad else ink.text
        if value == chosen:
            style = ink.error if bad else ink.active
        row.add(f"{left}{value}", style)
        return row.add("✗" if bad else "", ink.error).add(right, style)

    def _change(self) -> str:
        base, chosen = self.choice.base, self.choice.chosen
        parts = [
            f"{LABELS.get(axis, axis)} {getattr(base, axis)} → {getattr(chosen, axis)}"
            for axis in AXIS_NAMES
            if getattr(base, axis) != getattr(chosen, axis)
        ]
        if not parts:
            return "nothing yet"
        kept = base.weights_key() == chosen.weights_key()
        return " · ".join(parts) + (" · keeps the loaded weights" if kept else " · loads the weights anew")

    def _outcome(self, row: Row, possible: bool) -> Row:
        ink = self.desk.ink
        key = keys_of("apply", self.desk.keys)[0]
        row.add("   ", ink.text)
        twin = self.twins.get(self.choice.chosen.key())
        if self.note:
            return row.add(self.note, ink.warning)
        if not possible:
            return row.add("this lane cannot be run", ink.muted)
        if twin is not None:
            return row.add(key, ink.accent).add(f" goes to lane {twin}, which is this one", ink.muted)
        return row.add(key, ink.accent).add(" opens it as a new lane and runs it", ink.muted)


class SwitcherScreen(DialogScreen[int]):
    """Gives the id of the lane to look at, or None."""

    BINDINGS = bindings("switcher")

    def __init__(self, desk: Desk, runner: Runner | None) -> None:
        super().__init__()
        self.desk = desk
        self.runner = runner
        base, self.lanes = Configuration(), dict[str, int]()
        twins: dict[str, int] = {}
        board = desk.board
        for view in board.views if board is not None else []:
            try:
                configuration = from_json(view.lane.record.configuration)
            except ConfigurationError:  # written by a newer version: it cannot be compared, and need not be
                continue
            twins[configuration.key()] = view.number
            self.lanes[configuration.key()] = view.lane.record.id
            if board is not None and view is board.active:
                base = configuration
        note = "" if runner is not None else "This is a replay: lanes cannot be run here."
        self.choice = Choice(base, base)
        self.body = SwitcherBody(desk, self.choice, (runner.missing if runner is not None else "") or note, twins)

    def compose(self) -> ComposeResult:
        self.body.add_class("dialog")
        self.body.border_title = "configuration"
        words = [(ids, action(ids).footer) for ids in ("axis-prev", "value-prev", "reset", "apply", "dismiss")]
        chosen = self.desk.keys
        names = {"axis-prev": "↑↓", "value-prev": "←→"}
        names = {id: keys for id, keys in names.items() if id not in chosen}
        keys = [f"{names.get(id, keys_of(id, chosen)[0])} {word}" for id, word in words]
        self.body.border_subtitle = Content(" · ".join(keys))  # a key may be a bracket: no markup
        yield self.body

    def action_axis(self, step: int) -> None:
        self.choice.move(step)
        self.body.refresh(layout=self.body.narrow)

    def action_value(self, step: int) -> None:
        self.choice.turn(step)
        self.body.refresh()

    def action_reset(self) -> None:
        self.choice.chosen = self.choice.base
        self.body.refresh()

    def action_apply(self) -> None:
        chosen = self.choice.chosen
        if refusal(chosen) is not None or (self.runner is not None and self.runner.missing):
            return
        if (known := self.lanes.get(chosen.key())) is not None:
            self.dismiss(known)
        elif self.runner is not None:
            opened = self.runner.open_lane(chosen)
            if opened is None:
                self.body.note = self.runner.message or "The lane was refused."
                self.body.refresh()
            else:
                self.dismiss(opened)
