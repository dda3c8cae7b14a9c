"""What a template is given: the session's messages in the form that it understands, and the rewrites it may need.

`template`: the template shows tools and calls itself. `hermes`: it does not, so tools stand in the system text between
<tools> tags, calls in the assistant's text between <tool_call> tags, and results in a user turn between <tool_response>
tags. `none`: the session has neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, cast

from workbench.session.marks import Marks, marked_json
from workbench.session.regions import Role
from workbench.session.script import THINKING_KEYS, Message, Session

ToolForm = Literal["template", "hermes", "none"]
_SYSTEM_ROLES = ("system", "developer")
_CONTENT_ROLES = {"user": Role.USER, "tool": Role.TOOL_RESULT, "assistant": Role.CONTENT}


@dataclass(frozen=True, slots=True)
class Form:
    """How messages are put to a template; the last four are rewrites for one that refuses the session as it is."""

    tools: ToolForm
    thinking_keys: tuple[str, ...] = ()  # those the template reads
    developer: bool = False  # whether it knows the role
    short_ids: bool = False
    fold_system: bool = False
    merge: bool = False
    text_arguments: bool = False

    def rewrites(self) -> list[str]:
        """A sentence for each rewrite in force."""
        said = {
            "tool-call ids were shortened to nine letters": self.short_ids,
            "the system text stands at the start of the first user message": self.fold_system,
            "neighbouring messages of one role were joined": self.merge,
            "arguments of calls were passed as JSON text": self.text_arguments,
        }
        return [sentence for sentence, used in said.items() if used]


@dataclass(slots=True)
class Prompt:
    """Messages for a template, each with the index of the session's message that it begins with, and tool schemas."""

    messages: list[Message] = field(default_factory=list[Message])
    sources: list[int] = field(default_factory=list[int])
    tools: list[dict[str, Any]] | None = None


def compose(session: Session, form: Form, marks: Marks) -> Prompt:
    """The session in a form, its texts marked."""
    prompt = Prompt()
    if form.tools == "template" and session.tools:
        schemas = [marks.tool(tool) for tool in session.tools]
        prompt.tools = cast(list[dict[str, Any]], marks.wrapped_list(schemas, Role.SYSTEM))
    for index, message in enumerate(session.messages):
        if form.tools == "hermes" and message["role"] == "tool" and _follows_result(session, index):
            prompt.messages[-1]["content"] += "\n" + _response(message, marks, index)
            continue
        prompt.messages.append(_message(message, index, form, marks))
        prompt.sources.append(index)
    if form.tools == "hermes" and session.tools:
        _add_hermes_tools(prompt, session, marks)
    if form.fold_system:
        _fold_system(prompt)
    if form.merge:
        _merge(prompt)
    return prompt


def read_arguments(arguments: Any) -> dict[str, Any] | None:
    """A call's arguments as an object, as engines pass them to a template; None where that would lose something."""
    if isinstance(arguments, dict):
        return cast(dict[str, Any], arguments)
    try:
        value: Any = json.loads(arguments, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
        marked_json(value).encode()
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def split_thinking(content: str) -> tuple[str, str, str, str] | None:
    """An assistant's content that begins with a <think> block: opening tag, thinking, closing tag, the rest."""
    match = re.match(r"(\s*<think>)(.*?)(</think>)(.*)\Z", content, re.DOTALL)
    return cast(tuple[str, str, str, str], match.groups()) if match else None


def _message(message: Message, index: int, form: Form, marks: Marks) -> Message:
    role, content = message["role"], message["content"]
    if role in _SYSTEM_ROLES:
        name = role if role == "system" or form.developer else "system"
        return {"role": name, "content": marks.text(content, Role.SYSTEM, index)}
    named = {"name": marks.guard(message["name"], index)} if "name" in message else {}
    if role == "tool":
        if form.tools == "hermes":
            return {"role": "user", "content": _response(message, marks, index)}
        identity = _identity(message["tool_call_id"], form, marks, index)
        content = marks.text(content, Role.TOOL_RESULT, index)
        return {"role": role, **named, "tool_call_id": identity, "content": content}
    if role == "user":
        return {"role": role, **named, "content": marks.text(content, Role.USER, index)}
    return _assistant(message, index, form, marks)


def _assistant(message: Message, index: int, form: Form, marks: Marks) -> Message:
    out: Message = {"role": "assistant"}
    thinking = next((message[key] for key in THINKING_KEYS if message.get(key)), "")
    if thinking:
        marked = marks.text(thinking, Role.THINKING, index)  # a piece even where the template reads none of the keys
        out |= dict.fromkeys(form.thinking_keys, marked)
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    content: str = message["content"]
    if parts := split_thinking(content):
        opening, inner, closing, rest = parts
        content = opening + marks.text(inner, Role.THINKING, index) + closing
        content += marks.text(rest, Role.CONTENT, index)
    elif content or not calls:
        content = marks.text(content, Role.CONTENT, index)
    made = [_call(call, index, form, marks) for call in calls]
    if form.tools == "hermes":
        lines = [f"<tool_call>\n{marked_json(call['function'])}\n</tool_call>" for call in made]
        out["content"] = "\n".join([*([content] if content else []), *lines])
    else:
        out["content"] = content
        if made:
            out["tool_calls"] = made
    return out


def _call(call: dict[str, Any], index: int, form: Form, marks: Marks) -> dict[str, Any]:
    function = call["function"]
    name = marks.call_text(function["name"], Role.CALL_NAME, index)
    values = read_arguments(function["arguments"])
    arguments: Any = (
        marks.call_text(function["arguments"], Role.ARGUMENT_VALUE, index)
        if values is None
        else marks.arguments(values, index)
    )
    if form.text_arguments and values is not None:
        arguments = marked_json(arguments)
    identity = _identity(call["id"], form, marks, index)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _identity(identity: str, form: Form, marks: Marks, index: int) -> str:
    if form.short_ids:
        letters = re.sub(r"[^A-Za-z0-9]", "", identity)[-9:]
        return letters.rjust(9, "0")
    return marks.guard(identity, index)


def _response(message: Message, marks: Marks, index: int) -> str:
    return f"<tool_response>\n{marks.text(message['content'], Role.TOOL_RESULT, index)}\n</tool_response>"


def _follows_result(session: Session, index: int) -> bool:
    return index > 0 and session.messages[index - 1]["role"] == "tool"


def _add_hermes_tools(prompt: Prompt, session: Session, marks: Marks) -> None:
    # Only a function's own object is shown, and few words: every token here is taken from the session's context.
    schemas = "\n".join(marked_json(marks.value(tool["function"], Role.SYSTEM, -1)) for tool in session.tools)
    text = (
        f"You can call these functions:\n<tools>\n{schemas}\n</tools>\n"
        'To call one, write:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    )
    first = prompt.messages[0]
    if first["role"] in _SYSTEM_ROLES:
        first["content"] = f"{first['content']}\n\n{text}" if first["content"] else text
    else:
        prompt.messages.insert(0, {"role": "system", "content": text})
        prompt.sources.insert(0, -1)


def _fold_system(prompt: Prompt) -> None:
    """Join the system texts in front of the first user message (or make one of them)."""
    texts: list[str] = []
    kept = Prompt(tools=prompt.tools)
    for message, source in zip(prompt.messages, prompt.sources, strict=True):
        if message["role"] in _SYSTEM_ROLES:
            texts.append(message["content"])
        else:
            kept.messages.append(message)
            kept.sources.append(source)
    text = "\n\n".join(texts)
    if texts and kept.messages and kept.messages[0]["role"] == "user":
        kept.messages[0] = {**kept.messages[0], "content": f"{text}\n\n{kept.messages[0]['content']}"}
        kept.sources[0] = prompt.sources[0]
    elif texts:
        kept.messages.insert(0, {"role": "user", "content": text})
        kept.sources.insert(0, prompt.sources[0])
    prompt.messages, prompt.sources = kept.messages, kept.sources


def _merge(prompt: Prompt) -> None:
    messages: list[Message] = []
    sources: list[int] = []
    for message, source in zip(prompt.messages, prompt.sources, strict=True):
        last = messages[-1] if messages else None
        if last and last["role"] == message["role"] and message["role"] != "tool":
            joined = "\n\n".join(text for text in (last["content"], message["content"]) if text)
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            messages[-1] = {**last, "content": joined, **({"tool_calls": calls} if calls else {})}
        else:
            messages.append(message)
            sources.append(source)
    prompt.messages, prompt.sources = messages, sources


def attempts(form: Form, hermes_too: bool) -> Iterator[Form]:
    """The form as it is, then with ever more rewrites; at last the Hermes form, where that is another one."""
    tried = [form, *([replace(form, tools="hermes")] if hermes_too and form.tools == "template" else [])]
    for one in tried:
        either = (False, True) if one.tools == "template" else (False,)
        for text_arguments, short_ids, merge, fold_system in product(either, either, (False, True), (False, True)):
            yield replace(one, text_arguments=text_arguments, short_ids=short_ids, merge=merge, fold_system=fold_system)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice")
    return out


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is beyond a float")
    return value
