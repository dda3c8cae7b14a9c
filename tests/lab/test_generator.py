from __future__ import annotations

import json
from random import Random
from string import Formatter

import pytest

from workbench.lab import mistakes
from workbench.lab.generator import KINDS, Recipe, estimate, lab_session, training_length
from workbench.lab.question import QuestionKind
from workbench.session.router.devices import generate
from workbench.session.router.simulator import Lab
from workbench.session.router.state import Split
from workbench.session.script import Session, from_json
from workbench.session.tools import RUN, Request, tools_of

TRAIN = [lab_session(number, Recipe("train", 2500)) for number in range(40)]
TEST = [lab_session(number, Recipe("test", 2500)) for number in range(40)]


@pytest.mark.parametrize("session", TRAIN + TEST, ids=lambda session: session.id)
def test_every_right_call_is_answered_and_every_mistake_is_refused(session: Session) -> None:
    tools = tools_of(session)
    wrong = set(session.meta["lab"]["unlearned"])
    for index, message in enumerate(session.messages):
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            result = tools.answer(Request(call["function"]["name"], arguments))
            assert session.messages[index + 1]["content"] == result.content
            assert result.outcome == ("refused" if index in wrong else "answered")
            if index not in wrong and call["function"]["name"] == RUN:
                assert json.loads(result.canonical.partition(" ")[2]) == arguments


@pytest.mark.parametrize("session", TRAIN + TEST, ids=lambda session: session.id)
def test_what_an_answer_needs_stands_in_it_and_in_what_the_tools_said(session: Session) -> None:
    ends = [question["message"] for question in session.meta["lab"]["questions"][1:]] + [len(session.messages)]
    for question, end in zip(session.meta["lab"]["questions"], ends, strict=True):
        span = session.messages[question["message"] : end]
        assert span[0]["role"] == "user"
        assert span[-1]["content"] == question["answer"]
        seen = " ".join(message["content"] for message in span if message["role"] in ("tool", "user"))
        for value in question["must"]:
            assert value in question["answer"]
        for value in question["must"]:
            plain = value.strip().removeprefix("is ").removeprefix("protocol ").split()[0]
            assert plain in seen or plain in ("No", "None", "no")
        commands = [
            json.loads(call["function"]["arguments"])["command"]
            for index, message in enumerate(span, question["message"])
            for call in message.get("tool_calls", ())
            if call["function"]["name"] == RUN and index not in session.meta["lab"]["unlearned"]
        ]
        assert commands == question["commands"]


def test_a_session_is_read_back_as_it_was_and_is_the_same_for_the_same_seed() -> None:
    for session in (TRAIN[0], TEST[0]):
        assert from_json(json.loads(json.dumps(session.to_json()))) == session
    assert lab_session(0, Recipe("train", 2500)) == TRAIN[0]
    assert lab_session(1, Recipe("train", 2500)) != TRAIN[0]


def test_training_asks_in_no_phrasing_that_is_held_out_for_tests() -> None:
    assert not any(question["held"] for session in TRAIN for question in session.meta["lab"]["questions"])
    held = [question["held"] for session in TEST for question in session.meta["lab"]["questions"]]
    assert 0.35 < sum(held) / len(held) < 0.65


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_phrasings_are_many_different_and_use_the_same_slots(kind: QuestionKind) -> None:
    assert len(kind.seen) >= 6 and len(kind.held) == 2
    assert len({*kind.seen, *kind.held}) == len(kind.seen) + len(kind.held)
    slots = {frozenset(name for _, name, _, _ in Formatter().parse(text) if name) for text in kind.seen + kind.held}
    assert len(slots) == 1


def test_no_phrasing_belongs_to_two_kinds() -> None:
    every = [text for kind in KINDS for text in kind.seen + kind.held]
    assert len(set(every)) == len(every)


def test_every_kind_is_asked() -> None:
    asked = {question["kind"] for session in TRAIN + TEST for question in session.meta["lab"]["questions"]}
    assert {kind.name for kind in KINDS} <= asked


def test_questions_with_two_steps_and_recoveries_are_among_them() -> None:
    questions = [question for session in TRAIN for question in session.meta["lab"]["questions"]]
    assert sum(len(question["commands"]) == 2 for question in questions) > len(questions) / 20
    assert sum(question["mistakes"] > 0 for question in questions) > len(questions) / 20


@pytest.mark.parametrize("tokens", [400, 1000, 7000, 120_000])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_session_is_about_as_long_as_asked(tokens: int, split: Split) -> None:
    session = lab_session("length", Recipe(split, tokens))
    size = estimate(json.dumps(session.to_json()["messages"]))
    assert len(session.meta["lab"]["questions"]) >= 1
    if tokens > 1000:
        assert 0.7 * tokens < size < 1.6 * tokens
    names = session.messages[0]["content"]
    assert names.count("(router)") + names.count("(switch)") == session.meta["lab"]["count"]


def test_lengths_of_training_sessions_are_drawn_from_the_table() -> None:
    lengths = [training_length(number) for number in range(400)]
    assert {1000, 1500, 2200, 4000} <= set(lengths) <= {1000, 1500, 2200, 4000, 7000}
    assert lengths == [training_length(number) for number in range(400)]


def test_no_mistake_is_a_command_that_some_device_takes() -> None:
    lab = Lab(generate("mistakes", "train", 8))
    assert {device.kind for device in lab.devices.values()} == {"router", "switch"}
    for tried in mistakes.TRIED.values():
        for command in tried:
            assert all(lab.run(name, command).fault for name in lab.devices), command


def test_every_command_of_a_question_has_mistakes() -> None:
    for session in TRAIN:
        for question in session.meta["lab"]["questions"]:
            for command in question["commands"]:
                assert mistakes.mistaken(command, Random(1)) != command
