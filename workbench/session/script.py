"""A session: OpenAI chat messages and tool schemas, read from a file, one row of a JSONL file, or a shipped sample.

Everything is checked once, here: what `load_session` returns can be rendered or is refused by the template alone. Texts
are kept as written, of any length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from workbench.errors import SessionError
from workbench.paths import sessions_dir

Message = dict[str, Any]
ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")
THINKING_KEYS: tuple[str, ...] = ("reasoning_content", "reasoning", "thinking")
"""Names under which servers send an assistant's thinking beside its content."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. `messages` are OpenAI chat messages whose content is a string (absent content is "")."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    title: str = ""
    source: str = ""
    licence: str = ""
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def turns(self) -> int:
        """How many assistant messages there are."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def boundaries(self) -> list[int]:
        """Message counts at which a cut leaves whole turns: an assistant message with all its tool results.

        The full length is always among them, 0 never.
        """
        found: list[int] = []
        pending: set[str] = set()
        for count, message in enumerate(self.messages, 1):
            role = message["role"]
            if role == "assistant":
                pending = {call["id"] for call in message.get("tool_calls", ())}
            elif role == "tool":
                pending.discard(message["tool_call_id"])
            if count == len(self.messages) or (role in ("assistant", "tool") and not pending):
                found.append(count)
        return found

    def cut(self, count: int) -> Session:
        """The first `count` messages; `meta["cut"]` says of how many."""
        note = {"messages": count, "of": len(self.messages)}
        return replace(self, messages=self.messages[:count], meta={**self.meta, "cut": note})

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {
            "id": self.id,
            "title": self.title,
            "source": self.source,
            "licence": self.licence,
            "meta": self.meta,
            "tools": list(self.tools),
            "messages": list(self.messages),
        }


def load_session(spec: str, folder: Path | None = None) -> Session:
    """The session of `FILE.json`, `FILE.jsonl#ID` or the name of a sample in `folder` (default: the shipped ones).

    Raises SessionError.
    """
    name, _, row = spec.rpartition("#")
    if name.endswith(".jsonl"):
        return _row(Path(name), row)
    path = Path(spec)
    if path.suffix == ".jsonl":
        ids = ", ".join(_some(_ids(path)))
        raise SessionError("a JSONL file holds many sessions", where=spec, next=f"Write {spec}#ID; ids: {ids}.")
    if path.suffix != ".json":
        samples = sample_names(folder)
        if spec not in samples:
            raise SessionError(
                f"there is no session {spec!r}",
                where="session",
                next=f"Give a .json file, FILE.jsonl#ID, or a sample: {', '.join(samples) or 'none found'}.",
            )
        path = (folder or sessions_dir()) / f"{spec}.json"
    return from_json(_parse(_read(path), str(path)), where=str(path), name=path.stem)


def sample_names(folder: Path | None = None) -> list[str]:
    """Names of the sample sessions that come with the program."""
    return sorted(path.stem for path in (folder or sessions_dir()).glob("*.json"))


def from_json(value: Any, where: str = "session", name: str = "") -> Session:
    """The session of a JSON object with `messages` (or of a bare list of messages). Raises SessionError."""
    if not isinstance(value, list | dict):
        raise SessionError(f"a session is an object with messages, not {_kind(value)}", where=where)
    row = cast(dict[str, Any], {"messages": value} if isinstance(value, list) else value)
    messages: Any = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise SessionError("messages must be a list with at least one message", where=f"{where}, messages")
    calls: set[str] = set()
    checked = tuple(
        _message(message, f"{where}, message {index}", calls) for index, message in enumerate(cast(list[Any], messages))
    )
    tools: Any = row.get("tools") or []
    if not isinstance(tools, list):
        raise SessionError(f"tools must be a list, not {_kind(tools)}", where=f"{where}, tools")
    meta: Any = row.get("meta") or {}
    if not isinstance(meta, dict):
        raise SessionError(f"meta must be an object, not {_kind(meta)}", where=f"{where}, meta")
    texts = {key: _text(row.get(key, ""), f"{where}, {key}") for key in ("id", "title", "source", "licence")}
    session = Session(
        id=texts["id"] or name,
        messages=checked,
        tools=tuple(_tool(tool, f"{where}, tool {index}") for index, tool in enumerate(cast(list[Any], tools))),
        title=texts["title"] or texts["id"] or name,
        source=texts["source"],
        licence=texts["licence"],
        meta=cast(dict[str, Any], meta),
    )
    _check_unicode(session.to_json(), where)
    return session


def _message(value: Any, where: str, calls: set[str]) -> Message:
    if not isinstance(value, dict):
        raise SessionError(f"a message is an object, not {_kind(value)}", where=where)
    message: Message = dict(cast(dict[str, Any], value))
    role: Any = message.get("role")
    if role not in ROLES:
        raise SessionError(f"unknown role {role!r}", where=where, next=f"Roles: {', '.join(ROLES)}.")
    message["content"] = _content(message.get("content"), f"{where}, content")
    for key in (*THINKING_KEYS, "name"):
        if message.get(key) is None:
            message.pop(key, None)
        else:
            _text(message[key], f"{where}, {key}")
    tool_calls: Any = message.pop("tool_calls", None)
    if tool_calls:
        if role != "assistant" or not isinstance(tool_calls, list):
            raise SessionError("tool_calls must be a list in an assistant message", where=where)
        message["tool_calls"] = [
            _call(call, f"{where}, tool call {index}") for index, call in enumerate(cast(list[Any], tool_calls))
        ]
        calls.update(call["id"] for call in message["tool_calls"])
    if role == "tool":
        answered = message.get("tool_call_id")
        if not isinstance(answered, str) or answered not in calls:
            what = (
                "tool_call_id is missing" if answered is None else f"tool_call_id {answered!r} answers no earlier call"
            )
            raise SessionError(what, where=where, next="Give it the id of the call that it answers.")
    return message


def _content(value: Any, where: str) -> str:
    """Content as one string; the text parts of a list are joined by line breaks, as servers do."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return _text(value, where)
    parts: list[str] = []
    for index, part in enumerate(cast(list[Any], value)):
        item = cast(dict[str, Any], part) if isinstance(part, dict) else {"type": _kind(part)}
        if (kind := item.get("type")) != "text":
            raise SessionError(f"part {index} is of type {kind!r}", where=where, next="Only text parts can be used.")
        parts.append(_text(item.get("text"), f"{where}, part {index}"))
    return "\n".join(parts)


def _call(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SessionError(f"a tool call is an object, not {_kind(value)}", where=where)
    call = cast(dict[str, Any], value)
    identity, function = call.get("id"), call.get("function")
    if not isinstance(identity, str) or not identity:
        raise SessionError("the call has no id", where=where, next="Give each call an id; its tool message names it.")
    if not isinstance(function, dict):
        raise SessionError("function must be an object with name and arguments", where=where)
    named = cast(dict[str, Any], function)
    name, arguments = named.get("name"), named.get("arguments")
    if not isinstance(name, str) or not name:
        raise SessionError("the called function has no name", where=where)
    if arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str | dict):
        raise SessionError(f"arguments must be a JSON text or an object, not {_kind(arguments)}", where=where)
    return {**call, "type": "function", "function": {**named, "arguments": arguments}}


def _tool(value: Any, where: str) -> dict[str, Any]:
    function: Any = cast(dict[str, Any], value).get("function") if isinstance(value, dict) else None
    name: Any = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise SessionError(
            "a tool is an object with a function that has a name",
            where=where,
            next='Write {"type": "function", "function": {"name": ..., "parameters": ...}}.',
        )
    return {"type": "function", **value}


def _row(path: Path, wanted: str) -> Session:
    seen: list[str] = []
    for number, line in _lines(path):
        value = _parse(line, str(path), first_line=number)
        identity = str(cast(dict[str, Any], value).get("id", "")) if isinstance(value, dict) else ""
        if identity == wanted:
            return from_json(value, where=f"{path}#{wanted}", name=wanted)
        seen.append(identity)
    raise SessionError(
        f"there is no session {wanted!r} among {len(seen)}", where=str(path), next=f"Ids: {', '.join(_some(seen))}."
    )


def _ids(path: Path) -> list[str]:
    rows = (_parse(line, str(path), first_line=number) for number, line in _lines(path))
    return [str(cast(dict[str, Any], row).get("id", "")) for row in rows if isinstance(row, dict)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, cut at LF only: other line breaks may stand inside a JSON string."""
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            yield number, line


def _some(ids: list[str], most: int = 6) -> list[str]:
    return ids if len(ids) <= most else [*ids[:most], f"and {len(ids) - most} more"]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SessionError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise SessionError(
            f"not UTF-8: byte {error.start} is {error.object[error.start]:#04x}",
            where=str(path),
            next="Save the file as UTF-8; it may be damaged.",
        ) from error


def _parse(text: str, where: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise SessionError(
            f"not JSON: {error.msg}", where=f"{where}, line {line}, column {error.colno}", next="Is the file whole?"
        ) from error
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SessionError(f"not JSON: {what}", where=f"{where}, line {first_line}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _check_unicode(value: Any, where: str) -> None:
    """Refuse half surrogate pairs: they are no text and cannot be tokenised."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SessionError(
                f"half a surrogate pair at character {error.start}", where=where, next="Replace the character."
            ) from error
    elif isinstance(value, dict):
        for key, item in cast(dict[str, Any], value).items():
            _check_unicode(key, where)
            _check_unicode(item, f"{where}, {key}")
    elif isinstance(value, list):
        for index, item in enumerate(cast(list[Any], value)):
            _check_unicode(item, f"{where} {index}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise SessionError(f"must be text, not {_kind(value)}", where=where)
    return value


def _kind(value: Any) -> str:
    names: dict[Any, str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }
    return names.get(type(cast(object, value)), "a number")
