"""One table of what the user can do: bindings, footer, help and palette are all made from it.

Ids are for people: they stand in the settings file's `[keys]`. `place` says where an action works: everywhere (`app`),
on the lanes (`lanes`), in the configuration switcher (`switcher`) or in any dialog (`dialog`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding, BindingsMap
from textual.keys import Keys, format_key, key_to_character

Place = Literal["app", "lanes", "switcher", "dialog"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing the user can do. `footer` is its word in the footer, empty where it is not shown there."""

    id: str
    keys: str
    call: str
    description: str
    group: str
    place: Place = "lanes"
    footer: str = ""
    priority: bool = False


ACTIONS: tuple[Action, ...] = (
    Action("play", "space", "play", "Play or pause the replay from the cursor", "Time", footer="play"),
    Action("slower", "minus", "speed(-1)", "Halve the replay speed", "Time"),
    Action("faster", "equals_sign", "speed(1)", "Double the replay speed", "Time"),
    Action("step-back", "comma", "step(-1)", "One token back, in all lanes", "Time"),
    Action("step-on", "full_stop", "step(1)", "One token on, in all lanes", "Time", footer="token"),
    Action("follow", "f", "follow", "Follow the newest token, on or off", "Time", footer="follow"),
    Action("seek", "s", "seek", "Go to a token, a turn (t8) or a share (40%)", "Time", footer="seek"),
    Action("up", "up,k", "row(-1)", "Cursor one row up", "Cursor"),
    Action("down", "down,j", "row(1)", "Cursor one row down", "Cursor"),
    Action("left", "left,h", "step(-1)", "Cursor one token left", "Cursor"),
    Action("right", "right,l", "step(1)", "Cursor one token right", "Cursor"),
    Action("page-up", "pageup,ctrl+u", "page(-1)", "One page up", "Cursor"),
    Action("page-down", "pagedown,ctrl+d", "page(1)", "One page down", "Cursor"),
    Action("top", "home,g", "edge(-1)", "First token", "Cursor"),
    Action("end", "end,G", "edge(1)", "Last token; follows while lanes run", "Cursor"),
    Action("flip-prev", "left_square_bracket", "flip(-1)", "Previous flip of the active lane", "Cursor"),
    Action("flip-next", "right_square_bracket", "flip(1)", "Next flip of the active lane", "Cursor", footer="flip"),
    Action("turn-prev", "left_curly_bracket", "turn(-1)", "Previous message", "Cursor"),
    Action("turn-next", "right_curly_bracket", "turn(1)", "Next message", "Cursor", footer="turn"),
    *(Action(f"lane-{n}", str(n), f"lane({n})", f"Make lane {n} the active one", "Lanes") for n in range(1, 9)),
    Action("lane-next", "tab", "next_lane(1)", "Next lane", "Lanes"),
    Action("lane-prev", "shift+tab", "next_lane(-1)", "Previous lane", "Lanes"),
    Action("zoom", "z", "zoom", "The active lane alone, or all lanes", "Lanes", footer="zoom"),
    Action("config", "c", "config", "Configure and open a lane", "Lanes", footer="config"),
    Action("run", "r", "run", "Run the active lane again", "Lanes"),
    Action("close-lane", "x", "close_lane", "Stop the active lane, or hide it when it is over", "Lanes"),
    Action("show-lanes", "X", "show_lanes", "Show hidden lanes again", "Lanes"),
    Action("inspect", "i", "inspect", "Inspector on or off", "Lanes", footer="inspect"),
    Action("manifest", "m", "manifest", "What was asked for, and what ran", "Lanes", footer="what ran"),
    Action("theme", "t", "theme", "Choose a theme", "Application", "app"),
    Action("palette", "ctrl+p,colon", "palette", "All commands", "Application", "app", footer="commands"),
    Action("help", "question_mark,f1", "help", "This help", "Application", "app", footer="help"),
    Action(
        "interrupt",
        "ctrl+c",
        "interrupt",
        "Stop the active lane; twice within 2 s quits",
        "Application",
        "app",
        priority=True,
    ),
    Action("quit", "q,ctrl+q", "leave", "Quit", "Application", "app", footer="quit"),
    Action("axis-prev", "up,k", "axis(-1)", "Previous axis", "Switcher", "switcher", footer="axis"),
    Action("axis-next", "down,j", "axis(1)", "Next axis", "Switcher", "switcher"),
    Action("value-prev", "left,h", "value(-1)", "Previous value", "Switcher", "switcher", footer="value"),
    Action("value-next", "right,l", "value(1)", "Next value", "Switcher", "switcher"),
    Action(
        "reset",
        "backspace,r",
        "reset",
        "Back to the active lane's configuration",
        "Switcher",
        "switcher",
        footer="reset",
    ),
    Action(
        "apply", "enter", "apply", "Open a lane of this configuration, run it", "Switcher", "switcher", footer="run"
    ),
    Action("dismiss", "escape", "dismiss_dialog", "Close", "Dialogs", "dialog", footer="close"),
)

FOOTER: tuple[tuple[str, ...], ...] = (
    ("play",), ("step-back", "step-on"), ("flip-prev", "flip-next"), ("turn-prev", "turn-next"), ("follow",), ("zoom",),
    ("config",), ("inspect",), ("manifest",), ("seek",),
)  # fmt: skip
FOOTER_END: tuple[tuple[str, ...], ...] = (("palette",), ("help",), ("quit",))

_BY_ID = {action.id: action for action in ACTIONS}
_NAMED = frozenset(key.value for key in Keys)
_SHORT = {
    "space": "space", "left_square_bracket": "[", "right_square_bracket": "]", "left_curly_bracket": "{",
    "right_curly_bracket": "}", "question_mark": "?", "comma": ",", "full_stop": ".", "minus": "-", "equals_sign": "=",
    "colon": ":", "escape": "esc", "enter": "enter", "pageup": "pgup", "pagedown": "pgdn", "backspace": "bksp",
}  # fmt: skip


def action(id: str) -> Action:
    """The action of an id. Raises KeyError."""
    return _BY_ID[id]


def resolve_keys(chosen: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The overrides that can be used, and a sentence for each that cannot: an unknown id or key, or another's key."""
    problems: list[str] = []
    used: dict[str, str] = {}
    for id, keys in chosen.items():
        names = [key.strip() for key in keys.split(",") if key.strip()]
        if id not in _BY_ID:
            problems.append(f"[keys] {id}: there is no such action")
        elif wrong := next((key for key in names if not _is_key(key)), None if names else keys):
            hint = " (a comma is written comma)" if "," in wrong else ""
            problems.append(f"[keys] {id}: {wrong!r} is no key{hint}; the default stays")
        else:
            used[id] = ",".join(names)
    # An action that gets its default back may clash with one that was looked at before: until nothing clashes.
    while clash := next(((id, *found) for id in used for found in _clashes(id, used)), None):
        id, key, other = clash
        problems.append(f"[keys] {id}: {display(key)} already is {other}; the default stays")
        del used[id]
    return used, problems


def _is_key(name: str) -> bool:
    """Whether a key of that name can be pressed: a character, or Textual's name for one, with modifiers or without."""
    *modifiers, key = name.split("+") if len(name) > 1 else [name]
    known = key.isprintable() if len(key) == 1 else key in _NAMED or key_to_character(key) is not None
    return known and set(modifiers) <= {"ctrl", "shift", "alt", "super", "hyper", "meta"}


def _clashes(id: str, chosen: Mapping[str, str]):  # type: ignore[no-untyped-def]
    mine, place = set(_split(chosen[id])), _BY_ID[id].place
    for other in ACTIONS:
        together = {place, other.place} <= {"app", "lanes"} or place == other.place or "dialog" in (place, other.place)
        if other.id == id or not together:
            continue
        for key in _split(chosen.get(other.id, other.keys)):
            if key in mine:
                yield key, other.id


def _split(keys: str) -> list[str]:
    """Key names as Textual writes them: `]` is `right_square_bracket`."""
    return [next(iter(BindingsMap([Binding(key, "x")]).key_to_bindings)) for key in keys.split(",") if key]


def bindings(place: Place) -> list[Binding]:
    """Textual's bindings of the actions of one place; ids are what `App.set_keymap` goes by."""
    return [
        Binding(item.keys, item.call, item.description, show=False, id=item.id, priority=item.priority)
        for item in ACTIONS
        if item.place == place
    ]


def rebound(id: str, call: str) -> Binding:
    """The keys of an action, the user's own included, for another call: in a dialog where they mean the like."""
    return Binding(_BY_ID[id].keys, call, show=False, id=id)


def keys_of(id: str, chosen: Mapping[str, str]) -> list[str]:
    """The keys of an action as they are shown."""
    return [display(key) for key in chosen.get(id, _BY_ID[id].keys).split(",")]


def display(key: str) -> str:
    """A key as a person reads it."""
    short = _SHORT.get(key)
    if short is not None:
        return short
    return "^" + key[5:] if key.startswith("ctrl+") else format_key(key)
