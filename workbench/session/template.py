"""A session as a model reads it: rendered through its chat template, tokenised, every token's role and message known.

Roles come from marks in the messages (`marks.py`), checked against the render without marks. Where a template's output
depends on the marks, only the messages' boundaries are known, found by rendering ever longer prefixes; the facts say
so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import SessionError
from workbench.session.forms import Form, Prompt, attempts, compose
from workbench.session.layout import Layout, lay_out, tokens_of
from workbench.session.marks import Marks, Piece, Placed, Placing, private_characters
from workbench.session.regions import ROLE_NAMES, Role
from workbench.session.sandbox import TODAY, ChatTemplate
from workbench.session.script import THINKING_KEYS, Session
from workbench.session.tokenizer import Tokenizer

_MESSAGE_ROLES = {"user": Role.USER, "tool": Role.TOOL_RESULT, "assistant": Role.CONTENT}


@dataclass(frozen=True)
class Renderer:
    """A model's template and tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """Both from a model folder. Raises ModelError."""
        tokenizer = Tokenizer.load(folder)
        return cls(ChatTemplate.load(folder, tokenizer.config), tokenizer)


@dataclass(frozen=True)
class Rendered:
    """The token stream (columns of `protocol.columns.STREAM`), the text it was made from, and the facts for a manifest.

    Facts: template_hash, tokenizer_hash, token_stream_hash, tool_form, roles_from (`marks` | `message boundaries`),
    generation_prompt, tokens, generated_tokens, turns, end_tokens, notes (sentences).
    """

    stream: dict[str, NDArray[Any]]
    text: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def __len__(self) -> int:
        return len(self.stream["ids"])


@dataclass(frozen=True, slots=True)
class Fitted:
    """A session cut at a turn boundary, its render, and what the cut left out."""

    session: Session
    rendered: Rendered
    kept_turns: int
    dropped_turns: int
    dropped_tokens: int


def render(session: Session, renderer: Renderer) -> Rendered:
    """Render and tokenise a session. Raises SessionError where the template cannot show it."""
    tokenizer = renderer.tokenizer
    drawing = _draw(session, renderer)
    data = _disjoint(place for place in drawing.pieces if place.stop > place.start)
    encoded = tokenizer.encode(drawing.text, data)
    layout = tokens_of(drawing.layout, encoded.starts, encoded.stops)
    turns = np.cumsum([message["role"] == "assistant" for message in session.messages], dtype=np.int32)
    before = np.concatenate((np.zeros(1, np.int32), turns))  # before[m]: assistant messages ahead of message m
    stream: dict[str, NDArray[Any]] = {
        "ids": encoded.ids.astype("<i4"),
        "role": layout.role,
        "generated": layout.generated,
        "turn": _turns(layout.message, before).astype("<i4"),
        "message": layout.message.astype("<i4"),
    }
    notes = list(drawing.notes)
    if encoded.kept_as_text:
        notes.append(f"{encoded.kept_as_text} control-token literals in messages were encoded as plain text")
    facts = {
        "template_hash": renderer.template.hash,
        "tokenizer_hash": tokenizer.hash,
        "token_stream_hash": stream_hash(stream["ids"]),
        "tool_form": drawing.form.tools,
        "roles_from": drawing.roles_from,
        "generation_prompt": _asks(session),
        "tokens": len(stream["ids"]),
        "generated_tokens": int(stream["generated"].sum()),
        "turns": session.turns,
        "end_tokens": sorted(tokenizer.ends),
        "notes": notes,
    }
    return Rendered(stream, drawing.text, facts)


def plain_text(session: Session, template: ChatTemplate) -> tuple[str, list[str]]:
    """A session through any template: the text, and the rewrites that it needed. Raises SessionError."""
    form, _, text = _plain(session, template)
    return text, form.rewrites()


def stream_hash(ids: NDArray[Any]) -> str:
    """sha256 of the ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i4").tobytes()).hexdigest()


def check_length(session: Session, tokens: int, limit: int) -> None:
    """Raise SessionError with the numbers where a session is longer than `limit` tokens."""
    if tokens > limit:
        raise SessionError(
            f"the session has {tokens:,} tokens, the context holds {limit:,}: {tokens - limit:,} too many",
            where=f"session {session.id}",
            next="Cut it at a turn boundary with --fit, or take a model with a longer context.",
        )


def fit(session: Session, renderer: Renderer, limit: int, rendered: Rendered | None = None) -> Fitted:
    """The longest start of whole turns (an assistant message with all its tool results) of at most `limit` tokens.

    Raises SessionError where not even the first turn fits.
    """
    whole = rendered or render(session, renderer)
    if len(whole) <= limit:
        return Fitted(session, whole, session.turns, 0, 0)
    message = whole.stream["message"]
    fewest = 0
    for count in reversed(session.boundaries()):
        within = int(np.count_nonzero(message < count))
        if count == len(session.messages) or within > limit + (limit >> 3):  # clearly too long: no need to render it
            continue
        part = session.cut(count)
        if not part.turns:
            break
        shorter = render(part, renderer)
        fewest = len(shorter)
        if fewest <= limit:
            kept, dropped = part.turns, session.turns - part.turns
            shorter.facts["notes"].append(
                f"cut at a turn boundary to fit {limit:,} tokens: {kept} turns kept, {dropped} dropped "
                f"({len(whole) - fewest:,} tokens)"
            )
            return Fitted(part, shorter, kept, dropped, len(whole) - fewest)
    raise SessionError(
        f"the session has {len(whole):,} tokens and even its first turn does not fit into {limit:,}",
        where=f"session {session.id}",
        next=f"The shortest start has {fewest:,} tokens." if fewest else "It has no turn boundary to cut at.",
    )


@dataclass(frozen=True, slots=True)
class _Drawing:
    text: str
    pieces: list[Placed]
    layout: Layout
    form: Form
    roles_from: str
    notes: list[str]


def _draw(session: Session, renderer: Renderer) -> _Drawing:
    template, tokenizer = renderer.template, renderer.tokenizer
    form, prompt, text = _plain(session, template)
    asks = _asks(session)
    header = _header(template, prompt, session)
    ends = [end for identity in sorted(tokenizer.ends) if (end := tokenizer.added.get(identity))]
    assistants = frozenset(i for i, message in enumerate(session.messages) if message["role"] == "assistant")

    def prefix(message: int) -> str:
        before = [m for m, source in zip(prompt.messages, prompt.sources, strict=True) if source < message]
        return template.render(before, prompt.tools, True)

    notes = form.rewrites()
    if form.tools == "hermes" and template.knows_tools:
        notes.insert(0, "the template cannot show these calls in its own form, so the Hermes form was used")
    placed = _follow(session, template, tokenizer, form, text)
    if placed is not None:
        pieces, every, roles_from = placed.pieces, placed.every, "marks"
        notes += _left_out(every, pieces)
    else:
        pieces, roles_from = _by_prefixes(session, template, tokenizer, prompt, text), "message boundaries"
        notes.append("the template's output depends on marks: roles are known by message only")
    if "strftime_now" in template.source:
        notes.append(f"the template was told that today is {TODAY:%Y-%m-%d}")
    if asks and not header:
        notes.append("the template has no header for an assistant's turn")
    layout = lay_out(text, pieces, assistants, header, ends, prefix)
    return _Drawing(text, pieces, layout, form, roles_from, notes)


def _plain(session: Session, template: ChatTemplate) -> tuple[Form, Prompt, str]:
    """The first form, with as few rewrites as can be, that the template accepts."""
    has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in session.messages)
    wanted = "none" if not (session.tools or has_calls) else "template" if template.knows_tools else "hermes"
    keys = tuple(key for key in THINKING_KEYS if key in template.source)[:1]
    first: SessionError | None = None
    for form in attempts(Form(wanted, keys, developer="developer" in template.source), hermes_too=True):
        prompt = compose(session, form, Marks("none"))
        try:
            text = template.render(prompt.messages, prompt.tools, _asks(session))
        except SessionError as error:
            first = first or error
            continue
        if form.tools != "template" or _shows_calls(session, template, form):
            return form, prompt, text
    assert first is not None
    raise first


def _shows_calls(session: Session, template: ChatTemplate, form: Form) -> bool:
    """Whether the name of every call reaches the text; some templates know of calls and print none."""
    marks = Marks("outer")
    prompt = compose(session, form, marks)
    try:
        found = marks.locate(template.render(prompt.messages, prompt.tools, _asks(session)))
    except SessionError:
        return True
    names = {id(piece) for piece in marks.pieces if piece.role == Role.CALL_NAME}
    return found is None or names <= {id(place.piece) for place in found[1]}


@dataclass(frozen=True, slots=True)
class _Followed:
    pieces: list[Placed]
    every: list[Piece]


def _follow(session: Session, template: ChatTemplate, tokenizer: Tokenizer, form: Form, text: str) -> _Followed | None:
    """Where each piece stands in the text, or None where marks change what the template prints."""
    taken = (
        private_characters(text) | private_characters(repr(session.messages)) | private_characters(str(session.tools))
    )

    def marked(placing: Placing, empty: bool, calls: bool) -> tuple[str, list[Placed], list[Piece]] | None:
        marks = Marks(placing, taken, tokenizer.literals, empty, calls)
        prompt = compose(session, form, marks)
        try:
            found = marks.locate(template.render(prompt.messages, prompt.tools, _asks(session)))
        except SessionError:
            return None
        if not found or not all_heard(found[1]):
            return None
        return *found, marks.pieces

    speaking = {
        index
        for index, message in enumerate(session.messages)
        if message["role"] == "assistant" and (message["content"].strip() or message.get("tool_calls"))
    }

    def all_heard(pieces: list[Placed]) -> bool:
        return speaking <= {place.piece.message for place in pieces}

    for empty, calls in ((True, True), (False, True), (False, False)):
        outer = marked("outer", empty, calls)
        if outer and outer[0] == text:
            return _Followed(outer[1], outer[2])
        inner = marked("inner", empty, calls)
        if inner and inner[0] == text:
            return _Followed(_with_blanks(inner[1], text, outer), inner[2])
    return None


def _with_blanks(pieces: list[Placed], text: str, outer: tuple[str, list[Placed], list[Piece]] | None) -> list[Placed]:
    """Give pieces the blanks at their edges that the template kept.

    With outer marks nothing is trimmed, so the gap between two pieces is the template's own; what more stands in the
    gap between inner marks are blanks of the pieces beside it.
    """
    if outer is None or [place.piece for place in outer[1]] != [place.piece for place in pieces]:
        return pieces
    wide, out = outer[1], list(pieces)
    for index in range(len(pieces) + 1):
        left = pieces[index - 1].stop if index else 0
        right = pieces[index].start if index < len(pieces) else len(text)
        own_left = wide[index - 1].stop if index else 0
        own_right = wide[index].start if index < len(pieces) else len(outer[0])
        own, gap = outer[0][own_left:own_right], text[left:right]
        if len(gap) <= len(own) or (at := gap.find(own)) < 0:
            continue
        if index:
            out[index - 1] = Placed(out[index - 1].piece, out[index - 1].start, left + at)
        if index < len(pieces):
            out[index] = Placed(out[index].piece, left + at + len(own), out[index].stop)
    return out


def _by_prefixes(
    session: Session, template: ChatTemplate, tokenizer: Tokenizer, prompt: Prompt, text: str
) -> list[Placed]:
    """One piece for each message: what its render adds to that of the messages before it.

    Raises SessionError where a message holds a control token's letters: they could not be told from the template's.
    """
    for index, message in enumerate(session.messages):
        if found := tokenizer.literals(repr(message)):
            raise SessionError(
                f"the text holds the control token {found[0]}, which cannot be told from the template's own here",
                where=f"session {session.id}, message {index}",
                next="Remove it, or use a model whose template prints messages as they are.",
            )
    pieces: list[Placed] = []
    start = 0
    for count in range(1, len(prompt.messages) + 1):
        try:
            part = template.render(prompt.messages[:count], prompt.tools, False)
        except SessionError:
            continue
        stop = len(text) if count == len(prompt.messages) else len(part) if text.startswith(part) else start
        source = prompt.sources[count - 1]
        if stop > start and source >= 0:
            role = _MESSAGE_ROLES.get(session.messages[source]["role"], Role.SYSTEM)
            pieces.append(Placed(Piece(role, source, text[start:stop]), start, stop))
        start = max(start, stop)
    return pieces


def _header(template: ChatTemplate, prompt: Prompt, session: Session) -> str:
    """What the template adds for an assistant's turn, seen at the first place where one is due."""
    roles = [message["role"] for message in prompt.messages]
    count = max(1, roles.index("assistant") if "assistant" in roles else len(roles))
    try:
        without = template.render(prompt.messages[:count], prompt.tools, False)
        with_prompt = template.render(prompt.messages[:count], prompt.tools, True)
    except SessionError:
        return ""
    return with_prompt[len(without) :] if with_prompt.startswith(without) else ""


def _asks(session: Session) -> bool:
    """Whether an assistant's turn is due after the last message."""
    return session.messages[-1]["role"] != "assistant"


def _left_out(every: list[Piece], pieces: list[Placed]) -> list[str]:
    shown = {id(place.piece) for place in pieces}
    tools = any(place.piece.message < 0 for place in pieces)  # the whole list may stand for each of them
    wanted = [piece for piece in every if piece.text.strip() and not (tools and piece.message < 0)]
    missing = Counter(piece.role for piece in wanted if id(piece) not in shown)
    names = {role: ROLE_NAMES[role].replace("_", " ") for role in missing}
    return [f"the template leaves out {count} × {names[role]}" for role, count in sorted(missing.items())]


def _disjoint(pieces: Iterator[Placed]) -> list[tuple[int, int]]:
    """Spans of pieces that come sorted, outer ones first, without those inside others."""
    spans: list[tuple[int, int]] = []
    for place in pieces:
        if not spans or place.start >= spans[-1][1]:
            spans.append((place.start, place.stop))
    return spans


def _turns(message: NDArray[np.int32], before: NDArray[np.int32]) -> NDArray[np.int32]:
    """The turn of each token; what belongs to no message goes with what follows it, at the end with the next turn."""
    turn = before[np.maximum(message, 0)]
    turn[message < 0] = -1
    following = np.where(turn >= 0, turn, np.iinfo(np.int32).max)[::-1]
    filled = np.minimum.accumulate(following)[::-1]
    return np.where(turn >= 0, turn, np.where(filled == np.iinfo(np.int32).max, before[-1], filled)).astype(np.int32)
