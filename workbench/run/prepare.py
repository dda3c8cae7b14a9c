"""From what was asked to what can run: the session rendered, the model found, every configuration checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.config.axes import ENGINES
from workbench.config.lane import Configuration, from_json
from workbench.config.rules import DEFAULT_KV_GROUP, OUR_QUANTIZED_KV, QUANTIZED_KV, keys_and_values
from workbench.engines.environments import Environment, environment_for
from workbench.engines.models import Model, find_model
from workbench.errors import ConfigurationError, EngineError, SavedSessionError
from workbench.run.convert import converter
from workbench.run.imported import check_reading, check_stream, check_trace, session_of
from workbench.session.script import Session, load_session
from workbench.session.script import from_json as session_from_json
from workbench.session.template import Rendered, Renderer, check_length, fit, render
from workbench.session.tokenizer import Tokenizer
from workbench.store.exchange import Exchange
from workbench.store.saved import SavedSession

Say = Callable[[str], None]
SAY_SECONDS = 2.0
NO_LIMIT = 1 << 40
"""The context of a model that does not say its limit."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the user asked for: a session or its SPEC, and configurations that are checked before anything loads.

    Where `reference_file` is given, the reference is the one in it, and so is the session where none is named.
    Each lane is run `repeat` times (`run.determinism`).
    """

    session: str | Session | None
    reference: Configuration = field(default_factory=Configuration)
    lanes: tuple[Configuration, ...] = ()
    output: Path | None = None
    fit: bool = False
    floor: bool = False
    parallel: int = 1
    reference_file: Path | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a session and a model become before an engine is started; `environment` is the reference's, None where it
    was recorded elsewhere."""

    session: Session
    model: Model
    tokenizer: Tokenizer
    rendered: Rendered
    environment: Environment | None

    @property
    def hashes(self) -> dict[str, str]:
        """What names the numbers' subject: weights, template, tokenizer and token stream."""
        names = ("template_hash", "tokenizer_hash", "token_stream_hash")
        return {"weights": self.model.facts["weights_hash"], **{name: self.rendered.facts[name] for name in names}}


def prepare(ask: Ask, say: Say, file: Exchange | None = None) -> Prepared:
    """Session, model, tokenizer and rendering; `file` is a reference that was recorded elsewhere.

    Raises WorkbenchError; a session that is too long needs `fit`.
    """
    if file is not None:
        return _prepare_imported(ask, file, say)
    if ask.session is None:
        raise ConfigurationError("name a session", where="run", next="Or give --reference FILE.wbref, which holds one.")
    session = load_session(ask.session) if isinstance(ask.session, str) else ask.session
    environment = usable_environment(ask.reference.engine)
    model = find_model(ask.reference.model, converter(transformers_python), told(say))
    if not ENGINES[ask.reference.engine].records:
        raise ConfigurationError(
            f"{ask.reference.engine} gives no whole distributions, so it cannot be the reference",
            where=f"reference {ask.reference.to_line()}",
            next=f"Use {'|'.join(name for name, engine in ENGINES.items() if engine.records)}.",
        )
    renderer = Renderer.load(model.folder)
    check_model(ask.reference, model.facts)
    limit = ask.reference.ctx or model.facts["context_limit"] or NO_LIMIT
    rendered = render(session, renderer)
    if ask.fit and len(rendered) > limit:
        fitted = fit(session, renderer, limit, rendered)
        session, rendered = fitted.session, fitted.rendered
        say(f"session: {rendered.facts['notes'][-1]}")
    check_length(session, len(rendered), limit)
    return Prepared(session, model, renderer.tokenizer, rendered, environment)


def _prepare_imported(ask: Ask, file: Exchange, say: Say) -> Prepared:
    """As `prepare`, of a reference that is in a file: nothing of it runs here."""
    model = find_model(ask.reference.model, converter(transformers_python), told(say))
    renderer = Renderer.load(model.folder)
    check_reading(file, renderer)
    session, rendered = session_of(file.path)
    notes = check_trace(file)
    if ask.session is not None or file.text:
        given = load_session(ask.session) if isinstance(ask.session, str) else ask.session or session
        own = render(given, renderer)
        if ask.fit and len(own) > len(rendered):
            own = fit(given, renderer, len(rendered), own).rendered
        check_stream(file, own.stream["ids"], rendered.stream["ids"], renderer)
        session, rendered = (given if file.text else session), own
    if file.record.manifest.get("weights_hash") != model.facts["weights_hash"]:
        notes.append("the reference was recorded from other weight files than this model's")
    rendered.facts["notes"] = [*(rendered.facts.get("notes") or []), *notes]
    for note in (f"reference: from {file.path.name}, recorded by {file.record.manifest.get('engine')}", *notes):
        say(note)
    return Prepared(session, model, renderer.tokenizer, rendered, None)


def check_model(configuration: Configuration, facts: dict[str, Any], tokens: int = 0) -> None:
    """Raise ConfigurationError for what this model, or a session of so many tokens, does not allow."""
    limit, ctx, size = facts["context_limit"], configuration.ctx, facts["head_dim"]
    what = advice = ""
    if limit and ctx > limit:
        what, advice = f"ctx={ctx} is beyond the model's context of {limit:,}", f"Use at most {limit}."
    elif 0 < ctx < tokens:
        what = f"ctx={ctx} is too small for the session's {tokens:,} tokens"
        advice = "Use a larger one, 0 for as many as needed, or --fit with the reference's ctx."
    elif configuration.engine == "transformers" and _grouped_along_heads(configuration) and size:
        group = int(dict(configuration.extra).get("kv_group", DEFAULT_KV_GROUP))
        fitting = [str(n) for n in (8, 16, 32, 64, 128) if size % n == 0]
        if group < 2 or group % (4 if "int2" in keys_and_values(configuration.kv) else 2) or size % group:
            what = f"kv_group={group} does not divide the head size {size} into even groups"
            advice = f"Use kv_group={'|'.join(fitting) or size}."
    elif configuration.engine == "llamacpp" and size % 32 and set(keys_and_values(configuration.kv)) & {*QUANTIZED_KV}:
        what = f"llama.cpp stores kv={configuration.kv} in blocks of 32, which do not fit a head size of {size}"
        advice = "Use kv=f16|bf16|f32."
    if what:
        raise ConfigurationError(what, where=f"lane {configuration.to_line()}", next=advice)


def _grouped_along_heads(configuration: Configuration) -> bool:
    """Whether groups of the KV cache lie along the head size: those of keys per channel lie along tokens."""
    keys, values = keys_and_values(configuration.kv)
    per_channel = dict(configuration.extra).get("kv_keys") == "channel"
    return bool({values, *(() if per_channel else (keys,))} & {*OUR_QUANTIZED_KV})


def ask_again(path: Path) -> Ask:
    """What a saved session was asked for, so that it can go on: its session, reference and lanes."""
    with SavedSession.open(path) as saved:
        session = session_from_json(saved.session)
        records = saved.lanes()
    reference = next((record for record in records if record.kind == "reference"), None)
    if reference is None:
        raise SavedSessionError("this file holds no reference", where=str(path), next="Record one: workbench record.")
    lanes = tuple(from_json(record.configuration) for record in records if record.kind == "lane")
    return Ask(session, from_json(reference.configuration), lanes, path)


def usable_environment(engine: str) -> Environment:
    """The interpreter that runs an engine. Raises EngineError with the command for what is missing."""
    environment = environment_for(engine)
    if environment is None:
        raise ConfigurationError(f"there is no engine {engine!r}", where="engines")
    if not environment.usable:
        what = environment.reason or f"lacks {', '.join(environment.missing)}"
        raise EngineError(f"{environment.python} {what}", where=f"engine {engine}", next=environment.install)
    return environment


def transformers_python() -> str:
    """The interpreter that converts models. Raises EngineError where there is none."""
    return usable_environment("transformers").python


def told(say: Say) -> Callable[[str, int, int], None]:
    """A model cache's progress as narration: a line a phase, and one every two seconds while it lasts."""
    phase_said, said = "", 0.0

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal phase_said, said
        now = time.monotonic()
        if phase == phase_said and now - said < SAY_SECONDS:
            return
        say(f"model: {phase}" + (f" {100 * done // total} %" if total and done else ""))
        phase_said, said = phase, now

    return progress
