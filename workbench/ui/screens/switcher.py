"""The configuration switcher: one line an axis, values by arrow keys, and why a value cannot be had."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size

from workbench.config.axes import AXIS_NAMES, ENGINES, refusal, values
from workbench.config.lane import Configuration, default_of, from_json, with_engine
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
REASON_ROWS, TEXT_ROWS = 3, 2
SHARE = 0.92  # of the screen's height is what a dialog may take, by the style sheet
MORE = 4  # cells of the sign that more values follow


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
        """Every value of the chosen engine for an axis, those first that it can do here: others stay visible."""
        if axis == "engine":
            known = list(ENGINES)
        else:
            here = values(self.chosen.engine, axis)
            known = [*here, *(value for value in ENGINES[self.chosen.engine].axes[axis] if value not in here)]
        current = str(getattr(self.chosen, axis))
        return known if current in known else [current, *known]

    def refused(self, axis: str, value: str) -> ConfigurationError | None:
        """Why a value cannot be had with everything else as it is chosen; None where another axis is to blame."""
        error = refusal(self.with_value(axis, value))
        if error is None:
            return None
        sound = self._sound()
        left = refusal(sound)
        if axis == "engine":
            return error if value != self.chosen.engine or left is not None else None
        own = refusal(replace(sound, **{axis: value}))
        return error if own is not None and (left is None or own.what != left.what) else None

    def _sound(self) -> Configuration:
        """The choice with its engine's default on every axis that is to blame for a refusal."""
        sound, usual = self.chosen, default_of(self.chosen.engine)
        for axis in AXIS_NAMES[1:]:
            if (error := refusal(sound)) is None:
                break
            other = replace(sound, **{axis: getattr(usual, axis)})
            if f" {axis}=" in error.what or refusal(other) is None:
                sound = other
        return sound

    def with_value(self, axis: str, value: str) -> Configuration:
        """The choice with another value; another engine brings its own defaults, the first one what it began with."""
        if axis != "engine":
            return replace(self.chosen, **{axis: value})
        if value == self.base.engine:
            return replace(self.base, path=self.chosen.path)
        return with_engine(self.chosen, value)

    def move(self, step: int) -> None:
        self.axis = (self.axis + step) % len(AXIS_NAMES)

    def turn(self, step: int) -> None:
        """The next or previous value of the axis; refused ones can be looked at, not run."""
        options = self.values(self.name)
        index = options.index(str(getattr(self.chosen, self.name))) + step
        if 0 <= index < len(options):
            self.chosen = self.with_value(self.name, options[index])


class SwitcherBody(Lines):
    """Draws a Choice: labels, values, the reason, the SPEC, what enter does. An answer to enter needs more rows.

    `missing` says why nothing can be run here; `note` is the answer to the last enter, until the choice changes.
    """

    def __init__(self, desk: Desk, choice: Choice, missing: str, twins: dict[str, int]) -> None:
        super().__init__(desk, id="switcher")
        self.choice = choice
        self.missing = missing
        self.note = ""
        self.twins = twins
        self.can_focus = True
        self._made: tuple[object, list[Row]] | None = None

    @property
    def narrow(self) -> bool:
        return app_of(self).size.width < 100

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return 68 if self.narrow else min(118, app_of(self).size.width - 10)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(width))

    def line(self, y: int, width: int) -> list[Segment]:
        rows = self._rows(width)
        return rows[y].segments() if y < len(rows) else Row(width, self.desk.ink.text).segments()

    def _rows(self, width: int) -> list[Row]:
        """Made once for a choice: what can be had is asked of every value."""
        key = (self.choice.chosen, self.choice.axis, width, self.note, app_of(self).size, self.desk.ink)
        if self._made is None or self._made[0] != key:
            self._made = key, self._make(width)
        return self._made[1]

    def _make(self, width: int) -> list[Row]:
        ink, choice = self.desk.ink, self.choice
        error, said = refusal(choice.chosen), self.note or self.missing
        rows = [Row(width, ink.text)]
        for index, axis in enumerate(AXIS_NAMES):
            rows += self._axis(axis, index == choice.axis, width)
        rows.append(Row(width, ink.text))
        if error is not None or not self.note:
            rows += self._block("" if error is None else _reason(error, choice), width)
        rows += self._labelled("lane", choice.chosen.to_line(), width, ink.muted if error else ink.strong)
        rows += self._labelled("change", self._change(), width, ink.text)
        rows.append(Row(width, ink.text))
        if said:
            room = int(app_of(self).size.height * SHARE) - 2 - len(rows)  # the frame takes two
            lines = _cut([part for line in said.splitlines() for part in wrapped(line, width - 4)], max(2, room))
            return rows + [Row(width, ink.text).add("   ", ink.text).add(text, ink.warning) for text in lines]
        return [*rows, self._outcome(Row(width, ink.text), error is None)]

    def _block(self, reason: str, width: int) -> list[Row]:
        """REASON_ROWS rows, whatever there is to say; a text that is longer ends in a sign."""
        ink = self.desk.ink
        texts = _cut(wrapped(reason, width - 4), REASON_ROWS)
        texts += [""] * (REASON_ROWS - len(texts))
        signs = ["   " if index or not reason else " ✗ " for index in range(REASON_ROWS)]
        return [
            Row(width, ink.text).add(sign, ink.error).add(text, ink.text)
            for sign, text in zip(signs, texts, strict=True)
        ]

    def _labelled(self, label: str, text: str, width: int, style: Style) -> list[Row]:
        """TEXT_ROWS rows of a label and its text."""
        ink = self.desk.ink
        texts = _cut(wrapped(text, width - LABEL_COLUMN - 1), TEXT_ROWS)
        texts += [""] * (TEXT_ROWS - len(texts))
        rows = [Row(width, ink.text).add(f"   {label}" if not index else "", ink.muted) for index in range(TEXT_ROWS)]
        return [row.to(LABEL_COLUMN).add(text, style) for row, text in zip(rows, texts, strict=True)]

    def _axis(self, axis: str, here: bool, width: int) -> list[Row]:
        """One row; where the screen is narrow only the axis under the cursor shows all its values, in a second row."""
        ink, choice = self.desk.ink, self.choice
        row = Row(width, ink.text).add(" ▌ " if here else "   ", ink.active)
        row.add(LABELS.get(axis, axis), ink.active if here else ink.muted).to(LABEL_COLUMN)
        if not self.narrow:
            return [self._values(row, axis, VALUE_WIDTH)]
        row = self._value(row, axis, str(getattr(choice.chosen, axis)))
        return [row, self._values(Row(width, ink.text).add("   ", ink.text), axis, 0)] if here else [row]

    def _values(self, row: Row, axis: str, least: int) -> Row:
        """The values around the chosen one; `◂3` and `4▸` count those that do not fit before and after."""
        ink, options = self.desk.ink, self.choice.values(axis)
        chosen = options.index(str(getattr(self.choice.chosen, axis)))
        widths = [max(least, cell_len(value) + 3) for value in options]
        first, stop = window(widths, chosen, row.left, MORE)
        if first:
            row.add(f"◂{first} ".ljust(MORE), ink.accent)
        for value, cells in zip(options[first:stop], widths[first:stop], strict=True):
            start = row.used
            self._value(row, axis, value).to(start + cells)
        return row.add(f"{len(options) - stop}▸".rjust(MORE - 1), ink.accent) if stop < len(options) else row

    def _value(self, row: Row, axis: str, value: str) -> Row:
        """`[value]` is where the switcher started, `‹value›` what is chosen now, ✗ what cannot be had."""
        ink, choice = self.desk.ink, self.choice
        chosen, base = str(getattr(choice.chosen, axis)), str(getattr(choice.base, axis))
        bad = choice.refused(axis, value) is not None
        began = value == base and (axis == "engine" or choice.base.engine == choice.chosen.engine)
        left, right = ("[", "]") if began else ("‹", "›") if value == chosen else (" ", " ")
        style: Style = ink.muted if bad else ink.text
        if value == chosen:
            style = ink.error if bad else ink.active
        row.add(f"{left}{value}", style)
        return row.add("✗" if bad else "", ink.error).add(right, style)

    def _change(self) -> str:
        base, chosen = self.choice.base, self.choice.chosen
        began = with_engine(base, chosen.engine)  # the defaults of another engine are no change of their own
        parts = [f"engine {base.engine} → {chosen.engine}"] if base.engine != chosen.engine else []
        parts += [
            f"{LABELS.get(axis, axis)} {getattr(began, axis)} → {getattr(chosen, axis)}"
            for axis in AXIS_NAMES
            if axis != "engine" and getattr(began, axis) != getattr(chosen, axis)
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
        if not possible:
            return row.add("this lane cannot be run", ink.muted)
        if twin is not None:
            return row.add(key, ink.accent).add(f" goes to lane {twin}, which is this one", ink.muted)
        return row.add(key, ink.accent).add(" opens it as a new lane and runs it", ink.muted)


def window(widths: list[int], chosen: int, room: int, sign: int) -> tuple[int, int]:
    """First and stop of the values to show so that the chosen one is in view and as many around it as fit.

    `widths` are cells; each end that leaves values out needs `sign` cells to say so. At least the chosen one is shown.
    """
    first, stop = chosen, chosen + 1

    def fits(low: int, high: int) -> bool:
        signs = sign * ((low > 0) + (high < len(widths)))
        return sum(widths[low:high]) + signs <= room

    grown = True
    while grown:
        grown = False
        for low, high in ((first - 1, stop), (first, stop + 1)):
            if low >= 0 and high <= len(widths) and fits(low, high):
                first, stop, grown = low, high, True
                break
    # Near an end the sign's own room may be what the last value needs.
    for low, high in ((0, stop), (first, len(widths))):
        if fits(low, high):
            first, stop = low, high
    return first, stop


def _cut(lines: list[str], count: int) -> list[str]:
    """At most `count` lines; what is left out is said by a sign."""
    return lines if len(lines) <= count else [*lines[: count - 1], f"{lines[count - 1]} …"]


def _reason(error: ConfigurationError, choice: Choice) -> str:
    text = f"{error.what}. {error.next}"
    if choice.chosen.engine == "server" and "url" not in dict(choice.chosen.extra):
        return f"{text} It is not typed here: give it on the command line, with --lane."
    return text


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
        missing = runner.missing if runner is not None else "This is a replay: lanes cannot be run here."
        self.choice = Choice(base, base)
        self.body = SwitcherBody(desk, self.choice, missing, twins)

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
        self._changed(layout=self.body.narrow)

    def action_value(self, step: int) -> None:
        self.choice.turn(step)
        self._changed()

    def action_reset(self) -> None:
        self.choice.chosen = self.choice.base
        self._changed()

    def _changed(self, layout: bool = False) -> None:
        layout = layout or bool(self.body.note)
        self.body.note = ""
        self.body.refresh(layout=layout)

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
                self.body.refresh(layout=True)
            else:
                self.dismiss(opened)
