from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.errors import ModelError, SessionError
from workbench.protocol.columns import count_rows
from workbench.session.regions import Role
from workbench.session.script import Session, from_json, load_session
from workbench.session.template import Rendered, Renderer, check_length, fit, render

STYLES = ["chatml", "llama3", "qwen3", "mistral", "gemma", "tagged", "deepseek"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def call(identity: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    return {"id": identity, "type": "function", "function": function}


def weather_session(**changes: Any) -> Session:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call("call_0001", city='Par"is\n', days=3)]},
        {"role": "tool", "tool_call_id": "call_0001", "content": "sunny & 21 °C"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Gladly."},
    ]
    return from_json({"id": "weather", "messages": messages, "tools": [WEATHER], **changes})


def text_of(rendered: Rendered, renderer: Renderer, role: Role, message: int | None = None) -> str:
    stream = rendered.stream
    chosen = stream["role"] == role
    if message is not None:
        chosen &= stream["message"] == message
    return b"".join(renderer.tokenizer.tokens_bytes(stream["ids"][chosen])).decode()


def generated(rendered: Rendered, renderer: Renderer, turn: int) -> str:
    stream = rendered.stream
    chosen = (stream["generated"] == 1) & (stream["turn"] == turn)
    return b"".join(renderer.tokenizer.tokens_bytes(stream["ids"][chosen])).decode()


@pytest.mark.parametrize("style", STYLES)
def test_every_style_knows_the_role_of_each_token(style: str, make_renderer: Any) -> None:
    renderer = make_renderer(style)
    rendered = render(weather_session(), renderer)
    assert rendered.facts["roles_from"] == "marks"
    assert count_rows("stream", rendered.stream) == rendered.facts["tokens"]
    assert b"".join(renderer.tokenizer.tokens_bytes(rendered.stream["ids"])).decode() == rendered.text
    assert (rendered.stream["ids"] == renderer.tokenizer.encode(rendered.text).ids).all()
    assert text_of(rendered, renderer, Role.USER) == "How is Paris?Thanks"
    assert "sunny & 21 °C" in text_of(rendered, renderer, Role.TOOL_RESULT)
    assert text_of(rendered, renderer, Role.CONTENT) == "It is sunny.Gladly."
    assert text_of(rendered, renderer, Role.CALL_NAME) == "get_weather"
    assert text_of(rendered, renderer, Role.ARGUMENT_KEY) == "citydays"
    assert text_of(rendered, renderer, Role.SYSTEM).count("Be brief.") == 1
    assert "Weather of a city" in text_of(rendered, renderer, Role.SYSTEM)
    value = text_of(rendered, renderer, Role.ARGUMENT_VALUE)
    assert value == ('Par"is\n3' if style == "tagged" else 'Par\\"is\\n3')


@pytest.mark.parametrize(
    ("style", "turns"),
    [
        ("llama3", ('{"name": "get_weather", "parameters": {"city": "Par\\"is\\n", "days": 3}}<|eot_id|>',
                    "It is sunny.<|eot_id|>", "Gladly.<|eot_id|>")),
        ("qwen3", ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\\"is\\n", "days": 3}}\n'
                   "</tool_call><|im_end|>", "It is sunny.<|im_end|>", "<think>\n\n</think>\n\nGladly.<|im_end|>")),
        ("mistral", ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Par\\"is\\n", "days": 3}, '
                     '"id": "call00001"}]</s>', " It is sunny.</s>", " Gladly.</s>")),
        ("gemma", ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\\"is\\n", "days": 3}}\n'
                   "</tool_call><end_of_turn>", "It is sunny.<end_of_turn>", "Gladly.<end_of_turn>")),
        ("deepseek", ('<|calls|><|call|>get_weather<|sep|>{"city": "Par\\"is\\n", "days": 3}<|/call|><|/calls|><|eos|>',
                      "It is sunny.<|eos|>", "Gladly.<|eos|>")),
    ],
)  # fmt: skip
def test_generated_tokens_are_what_the_assistant_writes_and_its_end_token(
    style: str, turns: tuple[str, ...], make_renderer: Any
) -> None:
    renderer = make_renderer(style)
    session = weather_session()
    if style == "mistral":
        session = from_json(json.loads(json.dumps(session.to_json()).replace("call_0001", "call00001")))
    rendered = render(session, renderer)
    assert [generated(rendered, renderer, turn) for turn in range(3)] == list(turns)


def test_tool_form_says_how_tools_were_shown_and_which_rewrites_were_needed(make_renderer: Any) -> None:
    facts = {style: render(weather_session(), make_renderer(style)).facts for style in STYLES}
    forms = {style: said["tool_form"] for style, said in facts.items()}
    assert forms == {
        "chatml": "hermes", "llama3": "template", "qwen3": "template", "mistral": "template", "gemma": "hermes",
        "tagged": "template", "deepseek": "template",
    }  # fmt: skip
    assert facts["chatml"]["notes"] == []
    assert "the system text stands at the start of the first user message" in facts["gemma"]["notes"]
    plain = from_json([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    assert render(plain, make_renderer("chatml")).facts["tool_form"] == "none"


def test_ids_that_a_template_refuses_are_shortened_and_said(make_renderer: Any) -> None:
    session = json.loads(json.dumps(weather_session().to_json()).replace("call_0001", "call_with_a_long_name_1"))
    facts = render(from_json(session), make_renderer("mistral")).facts
    assert facts["tool_form"] == "template"
    assert "tool-call ids were shortened to nine letters" in facts["notes"]


def test_a_template_that_wants_arguments_as_text_gets_them_and_the_facts_say_so(make_renderer: Any) -> None:
    source = """
{%- for t in tools -%}{{- t | tojson + '\\n' -}}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content -}}
{%- for c in m.tool_calls or [] -%}{{- c.function.name + '(' + c.function.arguments + ')' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""
    renderer = make_renderer(template=source)
    rendered = render(weather_session(), renderer)
    assert rendered.facts["tool_form"] == "template"
    assert "arguments of calls were passed as JSON text" in rendered.facts["notes"]
    assert text_of(rendered, renderer, Role.ARGUMENT_KEY) == "citydays"


def test_a_template_without_control_tokens_still_tells_who_wrote_what(make_renderer: Any) -> None:
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    renderer = make_renderer(template=source)
    rendered = render(from_json(messages), renderer)
    assert text_of(rendered, renderer, Role.USER) == "aa" or text_of(rendered, renderer, Role.USER) == " a a"
    assert [generated(rendered, renderer, turn).strip() for turn in range(2)] == ["b", "b"]


def test_neighbouring_user_turns_are_joined_where_roles_must_alternate(make_renderer: Any) -> None:
    messages = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Three"},
    ]
    renderer = make_renderer("gemma")
    rendered = render(from_json(messages), renderer)
    assert "neighbouring messages of one role were joined" in rendered.facts["notes"]
    assert text_of(rendered, renderer, Role.USER, 0) == "One"
    assert text_of(rendered, renderer, Role.USER, 1) == "Two"


def test_a_session_that_no_rewrite_makes_acceptable_is_refused_with_the_templates_words(make_renderer: Any) -> None:
    renderer = make_renderer(template="{{ raise_exception('never on a Sunday') }}")
    with pytest.raises(SessionError, match="never on a Sunday"):
        render(weather_session(), renderer)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("literal", ["<|im_end|>", "<|eot_id|>", "</s>", "<tool_call>", "<end_of_turn>", "[/INST]"])
def test_control_token_letters_in_messages_stay_text(style: str, literal: str, make_renderer: Any) -> None:
    renderer = make_renderer(style)
    clean = weather_session().to_json()
    dirty = json.loads(json.dumps(clean))
    dirty["messages"][1]["content"] = f"How {literal} is Paris?"
    dirty["messages"][3]["content"] = f"{literal}sunny{literal}"
    dirty["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": literal, "days": [literal]})
    dirty["messages"][4]["content"] = f"It {literal}"
    dirty["tools"][0]["function"]["description"] = literal
    before, after = render(from_json(clean), renderer), render(from_json(dirty), renderer)
    control = np.array(sorted(renderer.tokenizer.added))

    def counts(rendered: Rendered) -> dict[int, int]:
        ids = rendered.stream["ids"]
        return {int(i): int((ids == i).sum()) for i in control if (ids == i).any()}

    assert counts(before) == counts(after)
    assert b"".join(renderer.tokenizer.tokens_bytes(after.stream["ids"])).decode() == after.text
    assert after.facts["roles_from"] == "marks"
    assert any("encoded as plain text" in note for note in after.facts["notes"])
    assert literal in text_of(after, renderer, Role.USER, 1)


def test_jinja_in_a_message_is_printed_and_not_run(make_renderer: Any) -> None:
    renderer = make_renderer("chatml")
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% for %}"}, {"role": "assistant", "content": "ok"}]
    assert text_of(render(from_json(messages), renderer), renderer, Role.USER) == "{{ 7 * 7 }}{% for %}"


def test_a_template_cannot_reach_beyond_its_sandbox(make_renderer: Any) -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}"):
        with pytest.raises(SessionError):
            render(weather_session(), make_renderer(template=source))


def test_thinking_has_its_own_role_and_what_a_template_drops_is_said(make_renderer: Any) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "early thought"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\nlate thought\n</think>\n\nd"},
    ]
    renderer = make_renderer("qwen3")
    rendered = render(from_json(messages), renderer)
    assert text_of(rendered, renderer, Role.THINKING) == "late thought"
    assert generated(rendered, renderer, 1) == "<think>\nlate thought\n</think>\n\nd<|im_end|>"
    assert generated(rendered, renderer, 0) == "b<|im_end|>"
    assert "the template leaves out 1 × thinking" in rendered.facts["notes"]


def test_blanks_that_a_template_keeps_belong_to_the_message_and_those_it_trims_are_gone(make_renderer: Any) -> None:
    messages = [{"role": "user", "content": "  x \n"}, {"role": "assistant", "content": "\n\ny  "}]
    kept, trimmed = make_renderer("chatml"), make_renderer("llama3")
    assert text_of(render(from_json(messages), kept), kept, Role.USER) == "  x \n"
    assert generated(render(from_json(messages), kept), kept, 0) == "\n\ny  <|im_end|>"
    assert text_of(render(from_json(messages), trimmed), trimmed, Role.USER) == "x"
    assert generated(render(from_json(messages), trimmed), trimmed, 0) == "y<|eot_id|>"


def test_empty_texts_keep_their_turns(make_renderer: Any) -> None:
    messages = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    renderer = make_renderer("chatml")
    rendered = render(from_json(messages), renderer)
    assert [generated(rendered, renderer, turn) for turn in range(2)] == ["<|im_end|>", "y<|im_end|>"]


def test_turns_count_up_and_context_leads_to_the_turn_that_follows(make_renderer: Any) -> None:
    renderer = make_renderer("chatml")
    rendered = render(weather_session(), renderer)
    turn, message = rendered.stream["turn"], rendered.stream["message"]
    assert (np.diff(turn) >= 0).all()
    assert turn[0] == 0
    expected = {1: {0}, 2: {0}, 3: {1}, 4: {1}, 5: {2}, 6: {2}}
    assert {m: set(turn[message == m].tolist()) for m in expected} == expected


def test_a_session_that_ends_before_an_assistant_gets_its_header(make_renderer: Any) -> None:
    renderer = make_renderer("chatml")
    rendered = render(weather_session().cut(4), renderer)
    assert rendered.text.endswith("<|im_start|>assistant\n")
    assert rendered.facts["generation_prompt"] is True
    assert rendered.stream["turn"][-1] == 1
    assert rendered.stream["generated"][-1] == 0


def test_a_template_whose_output_depends_on_marks_falls_back_to_message_boundaries(make_renderer: Any) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content[:4] + '<|im_end|>\n' }}{% endfor %}"
    renderer = make_renderer(template=source)
    messages = [{"role": "user", "content": "abcdefg"}, {"role": "assistant", "content": "hijklmn"}]
    rendered = render(from_json(messages), renderer)
    assert rendered.facts["roles_from"] == "message boundaries"
    assert "hijk" in text_of(rendered, renderer, Role.CONTENT)
    with pytest.raises(SessionError, match="cannot be told"):
        render(from_json([{"role": "user", "content": "<|im_end|>"}, messages[1]]), renderer)


def test_arguments_that_are_no_plain_object_are_passed_as_written(make_renderer: Any) -> None:
    for written in ('{"a": 1, "a": 2}', '{"a": 1e999}', '{"cmd": "x\ny"}', "not json", '{"lone": "\\ud83d"}'):
        session = weather_session().to_json()
        session["messages"][2]["tool_calls"][0]["function"]["arguments"] = written
        renderer = make_renderer("qwen3")
        rendered = render(from_json(session), renderer)
        assert written in text_of(rendered, renderer, Role.ARGUMENT_VALUE)  # tokens at its ends take letters along


def test_truth_values_and_nested_arguments_have_their_role(make_renderer: Any) -> None:
    session = weather_session().to_json()
    arguments = {"on": True, "none": None, "x": 1.5, "deep": {"a": ["b", {"c": 1}]}, "": ""}
    session["messages"][2]["tool_calls"][0]["function"]["arguments"] = arguments
    renderer = make_renderer("qwen3")
    rendered = render(from_json(session), renderer)
    assert text_of(rendered, renderer, Role.ARGUMENT_VALUE) == 'truenull1.5 {"a": ["b", {"c": 1}]}'
    assert rendered.facts["roles_from"] == "marks"


def test_private_use_characters_in_a_session_do_not_upset_the_marks(make_renderer: Any) -> None:
    messages = [
        {"role": "user", "content": "".join(map(chr, range(0xF0000, 0xF0040)))},
        {"role": "assistant", "content": "\U00100000ok\U0010fffd"},
    ]
    renderer = make_renderer("chatml")
    rendered = render(from_json(messages), renderer)
    assert rendered.facts["roles_from"] == "marks"
    assert text_of(rendered, renderer, Role.CONTENT) == "\U00100000ok\U0010fffd"


def test_fit_cuts_at_a_turn_boundary_and_says_how_much(make_renderer: Any) -> None:
    renderer = make_renderer("chatml")
    session = weather_session()
    whole = render(session, renderer)
    limit = len(whole) - 1
    fitted = fit(session, renderer, limit)
    assert (fitted.kept_turns, fitted.dropped_turns) == (2, 1)
    assert len(fitted.rendered) + fitted.dropped_tokens == len(whole)
    assert fitted.session.messages == session.messages[:5]
    assert any("cut at a turn boundary" in note for note in fitted.rendered.facts["notes"])
    shorter = fit(session, renderer, len(fitted.rendered) - 1)
    assert shorter.session.messages == session.messages[:4]  # never between a call and its result
    assert fit(session, renderer, len(whole)).dropped_turns == 0
    with pytest.raises(SessionError, match="even its first turn"):
        fit(session, renderer, 10)


def test_a_session_that_is_too_long_is_refused_with_the_numbers() -> None:
    check_length(weather_session(), 100, 100)
    with pytest.raises(SessionError, match=r"1,300 tokens, the context holds 1,200: 100 too many.*--fit"):
        check_length(weather_session(), 1300, 1200)


def test_hashes_change_with_what_they_name(make_renderer: Any) -> None:
    one, same, other = make_renderer("chatml"), make_renderer("chatml"), make_renderer("qwen3")
    first, second, third = (render(weather_session(), each).facts for each in (one, same, other))
    for key in ("template_hash", "tokenizer_hash", "token_stream_hash"):
        assert first[key] == second[key]
    assert first["template_hash"] != third["template_hash"]
    assert first["token_stream_hash"] != third["token_stream_hash"]


def test_a_base_model_without_template_is_named(make_renderer: Any) -> None:
    folder = make_renderer("chatml").tokenizer.folder
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        Renderer.load(folder)


def test_loop_controls_the_generation_block_and_a_fixed_day_work(make_renderer: Any) -> None:
    source = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = render(from_json(messages), make_renderer(template=source))
    assert rendered.text.startswith("2025<|im_start|>user\na<|im_end|>")
    assert any("today" in note for note in rendered.facts["notes"])


def test_all_shared_sessions_render_with_roles_from_marks(shared: Path, make_renderer: Any) -> None:
    renderers = [make_renderer(style) for style in ("chatml", "qwen3")]
    for row in (shared / "data/sessions/short.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        session = from_json(json.loads(row))
        for renderer in renderers:
            rendered = render(session, renderer)
            assert rendered.facts["roles_from"] == "marks", session.id
            written = rendered.stream["message"][rendered.stream["generated"] == 1]
            assert len(np.unique(written)) == session.turns


def test_the_shipped_demo_leaves_room_for_a_continuation(smollm2: Path) -> None:
    renderer = Renderer.load(smollm2)
    facts = render(load_session("demo"), renderer).facts
    assert (facts["tokens"], facts["turns"]) == (8032, 18)
    assert facts["tokens"] + 128 <= 8192


@pytest.mark.slow
@pytest.mark.parametrize("name", ["short", "medium", "long"])
def test_ids_equal_those_of_transformers_on_all_shared_sessions(name: str, shared: Path, smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from workbench.session.forms import Form, compose
    from workbench.session.marks import Marks

    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    renderer = Renderer.load(smollm2)
    for row in (shared / f"data/sessions/{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        session = from_json(json.loads(row))
        rendered = render(session, renderer)
        prompt = compose(session, Form("hermes"), Marks("none"))
        expected = theirs.apply_chat_template(
            prompt.messages, add_generation_prompt=rendered.facts["generation_prompt"], return_dict=False
        )
        assert rendered.stream["ids"].tolist() == expected, session.id


def test_calls_that_a_template_refuses_are_shown_in_the_hermes_form_and_that_is_said(make_renderer: Any) -> None:
    session = weather_session().to_json()
    session["messages"][2]["tool_calls"].append(call("call_0002", city="Rome"))
    session["messages"].insert(4, {"role": "tool", "tool_call_id": "call_0002", "content": "rain"})
    renderer = make_renderer("llama3")  # one call at a time
    rendered = render(from_json(session), renderer)
    assert rendered.facts["tool_form"] == "hermes"
    assert (
        "the template cannot show these calls in its own form, so the Hermes form was used" in rendered.facts["notes"]
    )
    assert text_of(rendered, renderer, Role.CALL_NAME) == "get_weatherget_weather"


def test_a_template_that_prints_no_calls_gets_the_hermes_form(make_renderer: Any) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% if m.tool_calls %}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    )
    renderer = make_renderer(template=source)
    rendered = render(weather_session(), renderer)
    assert rendered.facts["tool_form"] == "hermes"
    assert text_of(rendered, renderer, Role.CALL_NAME) == "get_weather"
