"""Tools that answer a model's calls. All lanes of a session get the same answer to the same call.

Kinds: `recorded` (results that stand in the session) and `router` (the router lab).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from workbench.session.forms import read_arguments
from workbench.session.router.simulator import Lab
from workbench.session.script import Message, Session

Outcome = Literal["answered", "refused", "not recorded", "unknown tool", "bad arguments"]
"""`refused`: the tool ran and said no (an IOS `%` error). The last three come from us: the tool never ran."""

RUN, LIST = "run_show_command", "list_devices"
ROUTER_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": RUN,
            "description": "Run a show command on a device and return its output.",
            "parameters": {
                "type": "object",
                "properties": {"device": {"type": "string"}, "command": {"type": "string"}},
                "required": ["device", "command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": LIST,
            "description": "List the devices.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


class Asked(Protocol):
    """A call as a parser found it; `arguments` is None where they cannot be read."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A call made by hand."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What goes into the conversation, and how it came about. `canonical` is the call in its full form, where known."""

    content: str
    outcome: Outcome
    canonical: str = ""


class Tools(Protocol):
    """What answers the calls of a session."""

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools as OpenAI schemas."""
        ...

    def answer(self, call: Asked, message: int = 0) -> ToolResult:
        """The result of a call that a model makes in place of the session's message `message`. Never raises."""
        ...


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as one text, equal for calls that differ in the order of keys alone."""
    return f"{name} {json.dumps(arguments, sort_keys=True, ensure_ascii=False)}"


class RecordedTools:
    """Results that stand in a session, by call. A call that was never recorded gets no invented result."""

    def __init__(self, session: Session) -> None:
        self._schemas = session.tools
        self._results: dict[str, list[tuple[int, str]]] = {}
        asked: dict[str, tuple[int, str]] = {}
        for index, message in enumerate(session.messages):
            for call in cast(list[Message], message.get("tool_calls") or []):
                function = call["function"]
                asked[call["id"]] = (index, _key(function["name"], function["arguments"]))
            if message["role"] == "tool" and message["tool_call_id"] in asked:
                place, key = asked[message["tool_call_id"]]
                self._results.setdefault(key, []).append((place, message["content"]))

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The session's own."""
        return self._schemas

    def answer(self, call: Asked, message: int = 0) -> ToolResult:
        """The result recorded at or after `message`, else the last one before it."""
        if call.arguments is None:
            return _unreadable(call.name)
        found = self._results.get(call_key(call.name, call.arguments))
        if not found:
            if call.name not in _names(self._schemas):
                return _unknown(call.name, self._schemas)
            return ToolResult("Not recorded: this call does not stand in the session.", "not recorded")
        later = [content for place, content in found if place >= message]
        return ToolResult(later[0] if later else found[-1][1], "answered", call_key(call.name, call.arguments))


class RouterTools:
    """The router lab: `run_show_command` and `list_devices`."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """Of the two tools."""
        return ROUTER_SCHEMAS

    def answer(self, call: Asked, message: int = 0) -> ToolResult:
        """What the device prints."""
        del message  # a device's state does not change
        if call.arguments is None:
            return _unreadable(call.name)
        if call.name == LIST:
            lines = [f"{device.name}  {device.kind}" for device in self.lab.devices.values()]
            return ToolResult("\n".join(lines), "answered", call_key(LIST, {}))
        if call.name != RUN:
            return _unknown(call.name, ROUTER_SCHEMAS)
        device, command = call.arguments.get("device"), call.arguments.get("command")
        if not isinstance(device, str) or not isinstance(command, str):
            return ToolResult("Arguments must be: device (text), command (text).", "bad arguments")
        answer = self.lab.run(device, command)
        canonical = call_key(RUN, {"device": device, "command": answer.command}) if answer.command else ""
        # A last line break would stand between the output and the template's own.
        return ToolResult(answer.text.rstrip("\n"), "refused" if answer.fault else "answered", canonical)


def tools_of(session: Session) -> Tools:
    """What answers for a session: the router lab where its `meta["lab"]` describes one, else what it recorded.

    Raises SessionError where the lab cannot be built.
    """
    about: Any = session.meta.get("lab")
    return RouterTools(Lab.of(cast(dict[str, Any], about))) if isinstance(about, dict) else RecordedTools(session)


def _key(name: str, arguments: Any) -> str:
    values = read_arguments(arguments)
    return f"{name} {arguments}" if values is None else call_key(name, values)


def _names(schemas: tuple[dict[str, Any], ...]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


def _unknown(name: str, schemas: tuple[dict[str, Any], ...]) -> ToolResult:
    return ToolResult(f"There is no tool {name!r}. Tools: {', '.join(_names(schemas)) or 'none'}.", "unknown tool")


def _unreadable(name: str) -> ToolResult:
    return ToolResult(f"The arguments of {name!r} are not a JSON object.", "bad arguments")
