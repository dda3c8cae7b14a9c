from __future__ import annotations

from workbench.lab.generator import Recipe, lab_session
from workbench.session.script import Session, from_json
from workbench.session.tools import LIST, RUN, RecordedTools, Request, RouterTools, call_key, tools_of


def call(name: str, arguments: object, identity: str) -> dict[str, object]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def recorded() -> Session:
    return from_json(
        {
            "tools": [{"function": {"name": "look"}}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [call("look", '{"a": 1, "b": 2.0}', "1")]},
                {"role": "tool", "tool_call_id": "1", "content": "first"},
                {"role": "assistant", "tool_calls": [call("look", {"b": 2.0, "a": 1}, "2")]},
                {"role": "tool", "tool_call_id": "2", "content": "second"},
                {"role": "assistant", "content": "done"},
            ],
        }
    )


def test_a_recorded_result_answers_the_same_call_whatever_the_order_of_keys() -> None:
    tools = RecordedTools(recorded())
    same = Request("look", {"b": 2.0, "a": 1})
    assert tools.answer(same).content == "first"
    assert tools.answer(same, message=1).content == "first"
    assert tools.answer(same, message=3).content == "second"
    assert tools.answer(same, message=99).content == "second"


def test_a_call_that_was_never_recorded_gets_no_invented_result() -> None:
    tools = RecordedTools(recorded())
    assert tools.answer(Request("look", {"a": 2})).outcome == "not recorded"
    assert tools.answer(Request("other", {})).outcome == "unknown tool"
    assert tools.answer(Request("look", None)).outcome == "bad arguments"


def test_the_lab_answers_the_same_to_every_lane_and_gives_the_canonical_call() -> None:
    session = lab_session(3, Recipe("test", 1500))
    one, two = tools_of(session), tools_of(from_json(session.to_json()))
    assert isinstance(one, RouterTools)
    device = next(iter(one.lab.devices))
    short = Request(RUN, {"device": device, "command": "sh ip int br"})
    assert one.answer(short) == two.answer(short)
    assert one.answer(short).canonical == call_key(RUN, {"command": "show ip interface brief", "device": device})
    assert one.answer(Request(LIST, {})).content.splitlines()[0].startswith(device)


def test_the_lab_refuses_what_it_cannot_run() -> None:
    tools = tools_of(lab_session(3, Recipe("test", 1500)))
    assert tools.answer(Request(RUN, {"device": "nobody", "command": "show version"})).outcome == "refused"
    assert tools.answer(Request(RUN, {"device": 1, "command": "x"})).outcome == "bad arguments"
    assert tools.answer(Request(RUN, None)).outcome == "bad arguments"
    assert tools.answer(Request("reboot", {})).outcome == "unknown tool"


def test_a_session_without_a_lab_answers_from_its_record() -> None:
    assert isinstance(tools_of(recorded()), RecordedTools)
