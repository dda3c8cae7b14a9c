"""How each engine would read a session by itself: template, tokens, sampling defaults; and where two of them differ.

Many a "worse engine" is only another template, a control token doubled or missing, or another sampling default.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config.axes import check
from workbench.config.lane import Configuration
from workbench.config.schemes import SCHEMES
from workbench.engines.models import find_model
from workbench.engines.process import EngineProcess
from workbench.errors import EngineError
from workbench.protocol import events
from workbench.run.checks import first_difference
from workbench.run.convert import converter
from workbench.run.prepare import Say, told, transformers_python, usable_environment
from workbench.run.weights import find_weights
from workbench.session.sandbox import ChatTemplate
from workbench.session.script import Session
from workbench.session.template import plain_text
from workbench.session.tokenizer import Tokenizer

CONTEXT = 48
"""Characters shown before a difference."""
_jobs = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine's own prompt: `text` (None where it only tells the ids), `ids` as it would run them, whose template.

    `sampling` holds the engine's defaults by name; `notes` are sentences.
    """

    lane: str
    text: str | None
    ids: NDArray[np.int32]
    template_from: str
    template_hash: str
    sampling: dict[str, Any]
    notes: tuple[str, ...] = ()
    token_bytes: dict[int, bytes] = field(default_factory=dict[int, bytes], repr=False)

    def to_json(self) -> dict[str, Any]:
        """As `workbench template --json` shows it."""
        return {
            "lane": self.lane,
            "tokens": len(self.ids),
            "template_from": self.template_from,
            "template_hash": self.template_hash,
            "sampling": self.sampling,
            "notes": list(self.notes),
        }


def read_as(session: Session, configuration: Configuration, say: Say) -> Reading:
    """Start the lane's engine and ask it. Raises WorkbenchError."""
    check(configuration)
    environment = usable_environment(configuration.engine)
    model = find_model(configuration.model, converter(transformers_python), told(say))
    path = model.folder  # quantized weights have the model's own tokenizer and template: none are made for this
    if configuration.weights not in SCHEMES:
        path, _ = find_weights(configuration, model, environment.python, told(say))
    engine = EngineProcess(environment.python, configuration.engine)
    try:

        def inspect(text: str = "", **shown: Any) -> events.Inspected:
            job = next(_jobs)
            return _ask(engine, events.Inspect(job, configuration.to_json(), str(path), text, **shown))

        first = inspect(messages=session.to_json()["messages"], tools=session.tools or None)
        facts, ids = first.facts, first.arrays["ids"]
        text, notes = facts.get("rendered"), []
        if text is None and not len(ids):
            if not facts.get("template"):
                raise EngineError("the engine has no chat template", where=f"lane {configuration.to_line()}")
            template = ChatTemplate(facts["template"], str(facts.get("template_from")), _tokens(facts))
            text, notes = plain_text(session, template)
            ids = inspect(text).arrays["ids"]
            ids, note = _with_bos(ids, text, facts, Tokenizer.load(model.folder))
            notes = [*notes, *note]
    finally:
        engine.stop()
    source = str(facts.get("template") or "")
    return Reading(
        configuration.to_line(),
        text,
        ids,
        str(facts.get("template_from") or "unknown"),
        hashlib.sha256(source.encode()).hexdigest()[:12] if source else "unknown",
        dict(facts.get("sampling") or {}),
        tuple(notes),
        {int(i): data for i, data in zip(ids, Tokenizer.load(model.folder).tokens_bytes(ids.tolist()), strict=True)},
    )


def compare_readings(ours: Reading, theirs: Reading) -> dict[str, Any]:
    """Where two prompts first differ, in text and in tokens (null: nowhere), and the sampling defaults that do."""
    names = sorted({*ours.sampling, *theirs.sampling})
    pairs = {name: [ours.sampling.get(name), theirs.sampling.get(name)] for name in names}
    return {
        "text": _text_difference(ours, theirs),
        "token": _token_difference(ours, theirs),
        "sampling": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
    }


def _text_difference(ours: Reading, theirs: Reading) -> dict[str, Any] | None:
    if ours.text is None or theirs.text is None or ours.text == theirs.text:
        return None
    a, b = ours.text, theirs.text
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return {
        "character": at,
        "before": a[max(0, at - CONTEXT) : at],
        "texts": [a[at : at + CONTEXT], b[at : at + CONTEXT]],
    }


def _token_difference(ours: Reading, theirs: Reading) -> dict[str, Any] | None:
    at = first_difference(ours.ids, theirs.ids)
    if at is None:
        return None
    shown: list[dict[str, Any] | None] = []
    for reading in (ours, theirs):
        if at >= len(reading.ids):
            shown.append(None)
            continue
        token = int(reading.ids[at])
        text = reading.token_bytes.get(token, b"").decode("utf-8", "replace")
        shown.append({"id": token, "text": text, "lane": reading.lane, "template_from": reading.template_from})
    return {"index": at, "tokens": shown}


def _tokens(facts: dict[str, Any]) -> dict[str, str]:
    """The control tokens that a template may print, under the names that templates use."""
    specials: dict[str, Any] = facts.get("specials") or {}
    return {name if name.endswith("_token") else f"{name}_token": str(text) for name, text in specials.items()}


def _with_bos(
    ids: NDArray[np.int32], text: str, facts: dict[str, Any], tokenizer: Tokenizer
) -> tuple[NDArray[np.int32], list[str]]:
    """The ids with the control token that the engine puts in front on its own, where it does so."""
    bos = _tokens(facts).get("bos_token")
    known = next((identity for identity, literal in tokenizer.added.items() if literal == bos), None)
    if not facts.get("adds_bos") or bos is None or known is None:
        return ids, []
    doubled = "; the template writes it as well: doubled" if text.startswith(bos) else ""
    return np.concatenate((np.array([known], "<i4"), ids)), [f"puts {bos} in front on its own{doubled}"]


def _ask(engine: EngineProcess, request: events.Inspect) -> events.Inspected:
    engine.send(request)
    while True:
        event = engine.receive()
        if isinstance(event, events.Failed):
            raise EngineError(event.what, where=event.where, next=event.next, log_tail=engine.log_tail())
        if isinstance(event, events.Inspected):
            return event
