from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import SessionError
from workbench.session.script import from_json, load_session, sample_names

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
GOOD: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
    {"role": "assistant", "content": "a"},
]


def test_a_session_reads_back_from_its_json() -> None:
    session = from_json({"id": "x", "messages": GOOD, "licence": "MIT"})
    assert from_json(json.loads(json.dumps(session.to_json()))) == session
    assert session.turns == 2
    assert session.messages[2]["content"] == ""


def test_turn_boundaries_never_part_a_call_from_its_results() -> None:
    two = {**CALL, "id": "c2"}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, two]},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
    ]
    assert from_json(messages).boundaries() == [4, 5, 6]
    assert from_json(messages).cut(4).meta["cut"] == {"messages": 4, "of": 6}


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert from_json([{"role": "user", "content": parts}]).messages[0]["content"] == "a\nb"
    with pytest.raises(SessionError, match=r"message 0, content: part 0 is of type 'image_url'.*Only text"):
        from_json([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "x"}, "at least one message"),
        ({"messages": ["x"]}, "message 0: a message is an object, not a text"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 0: unknown role 'bot'.*system, developer, user"),
        ({"messages": [{"role": "user", "content": 3}]}, "content: must be text, not a number"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages 0, content: half a surrogate pair"),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "tool_calls must be a list in an assistant message"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "0: the call has no id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "function must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}]}, "has no name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": 1}}]}]},
         "arguments must be a JSON text or an object, not a number"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id is missing.*Give it the id"),
        ({"messages": [*GOOD[:3], {"role": "tool", "tool_call_id": "c9"}]}, "'c9' answers no earlier call"),
        ({"tools": [{"name": "f"}]}, "tool 0: a tool is an object with a function that has a name"),
        ({"tools": {}}, None),
        ({"tools": 3}, "tools must be a list"),
        ({"meta": []}, None),
        ({"meta": [1]}, "meta must be an object, not a list"),
        ({"id": 3}, "id: must be text"),
    ],
)  # fmt: skip
def test_malformed_sessions_say_what_and_where(change: dict[str, Any], says: str | None) -> None:
    value = {"messages": GOOD, **change}
    if says is None:
        from_json(value)
        return
    with pytest.raises(SessionError, match=says):
        from_json(value)


def test_samples_load_by_name_and_carry_their_licence() -> None:
    assert {"demo", "dice", "refactor-long"} <= set(sample_names())
    for name in sample_names():
        session = load_session(name)
        assert session.licence and session.source and session.title
        assert session.id == name
    with pytest.raises(SessionError, match=r"there is no session 'nope'.*demo"):
        load_session("nope")


def test_the_demo_is_cut_at_a_turn_boundary() -> None:
    demo = load_session("demo")
    assert demo.turns == 18
    assert demo.messages[-1]["role"] == "tool"
    assert demo.boundaries()[-1] == len(demo.messages) == demo.meta["cut"]["messages"]


def test_rows_of_a_jsonl_file_are_found_by_id(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    rows = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"line\u2028{i}"}]} for i in range(9)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert load_session(f"{path}#r7").messages[0]["content"] == "line\u20287"
    with pytest.raises(SessionError, match=r"no session 'r99' among 9.*r0, r1.*and 3 more"):
        load_session(f"{path}#r99")
    with pytest.raises(SessionError, match=r"holds many sessions.*#ID; ids: r0"):
        load_session(str(path))


def test_bad_json_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"messages": [\n{"role": "user",\n"content": }]}')
    with pytest.raises(SessionError, match=r"line 3, column 12: not JSON"):
        load_session(str(path))
    rows = tmp_path / "s.jsonl"
    rows.write_text('{"id": "a", "messages": [{"role": "user"}]}\n{"id": "b", \n')
    with pytest.raises(SessionError, match="line 2, column"):
        load_session(f"{rows}#b")
    path.write_text("[" * 100_000)
    with pytest.raises(SessionError, match="nested too deeply"):
        load_session(str(path))
    path.write_text('{"messages": [{"role": "user", "content": NaN}]}')
    with pytest.raises(SessionError, match="NaN is no JSON value"):
        load_session(str(path))
    path.write_bytes(b'{"messages": "caf\xe9"}')
    with pytest.raises(SessionError, match="not UTF-8: byte 17 is 0xe9"):
        load_session(str(path))
    with pytest.raises(SessionError, match="cannot be read: No such file"):
        load_session(str(tmp_path / "none.json"))


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert load_session(str(path)).title == "s"


def test_truncated_and_bit_flipped_files_give_named_errors_or_load(tmp_path: Path) -> None:
    whole = json.dumps({"id": "x", "messages": GOOD, "tools": []}).encode()
    path = tmp_path / "s.json"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SessionError, match=r"s\.json"):
            load_session(str(path))
    dice = random.Random(5)
    refused = 0
    for _ in range(500):
        flipped = bytearray(whole)
        flipped[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        try:
            load_session(str(path))
        except SessionError as error:
            refused += 1
            assert "s.json" in error.where
    assert refused > 200


def test_every_shared_row_loads(shared: Path) -> None:
    count = 0
    for name in ("short", "medium", "long"):
        for row in (shared / f"data/sessions/{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
            session = from_json(json.loads(row))
            assert session.licence and session.turns
            count += 1
    assert count == 54
