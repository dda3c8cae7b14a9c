"""llama.cpp base files: written by a lane, or a lane scored against one. The engine's process reads and writes them; a
few numbers a row come back here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from workbench.config.axes import check
from workbench.config.lane import Configuration
from workbench.engines.environments import Environment
from workbench.engines.models import Model, find_model
from workbench.engines.process import EngineProcess
from workbench.engines.weights import file_hashes
from workbench.errors import Cancelled, ConfigurationError, EngineError, InvalidLaneError, LogitsFileError
from workbench.metrics.windows import INVALID_SHARE
from workbench.paths import expanded
from workbench.protocol import events
from workbench.protocol.events import Event
from workbench.protocol.logits_file import Shape
from workbench.protocol.wire import Arrays
from workbench.run.checks import check_effective
from workbench.run.convert import converter
from workbench.run.prepare import Say, check_model, told, transformers_python, usable_environment
from workbench.run.weights import check_weights, find_weights
from workbench.session.script import load_session
from workbench.session.template import Renderer, render
from workbench.session.tokenizer import Tokenizer, token_text

ENGINES = ("transformers", "llamacpp")
"""Those with whole distributions and a KV cache that can be emptied."""
COLUMNS = ("kl", "kl_whole", "mass", "nll", "nll_base", "same")
POLL_SECONDS = 0.5
Tell = Callable[[str, int, int], None]
"""Told a phase and how far it is."""
_jobs = itertools.count(1)
_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a lane did with a file: `rows` of the file's length by column, the engine's statistics, what really ran."""

    rows: Arrays
    stats: dict[str, Any]
    effective: dict[str, Any]
    load_seconds: float


def check_lane(configuration: Configuration) -> None:
    """Raise ConfigurationError for what cannot run windows; nothing is loaded."""
    check(configuration)
    where, what, advice = f"lane {configuration.to_line()}", "", ""
    if configuration.engine not in ENGINES:
        what = f"{configuration.engine} gives no whole distributions for windows"
        advice = f"Use {'|'.join(ENGINES)}."
    elif configuration.path != "prefill":
        what, advice = "windows run as prefill, as in llama-perplexity", "Leave path out."
    elif configuration.draft != "none":
        what, advice = "a drafter has no part in scoring windows", "Leave draft out."
    if what:
        raise ConfigurationError(what, where=where, next=advice)


def score(path: Path, shape: Shape, configuration: Configuration, say: Say, tell: Tell) -> Ran:
    """Run a file's windows on a lane, against the file. Raises WorkbenchError; InvalidLaneError for numbers that must
    not be used."""
    ran = _run(configuration, shape, events.Windows(next(_jobs), str(path.resolve())), say, tell)
    lost = int(np.isnan(ran.rows["nll"]).sum())
    if lost > INVALID_SHARE * shape.rows:
        raise InvalidLaneError(
            f"{lost:,} of {shape.rows:,} rows hold non-finite values: more than {INVALID_SHARE:.1%}",
            where=f"lane {configuration.to_line()}",
        )
    mean, even = float(np.nanmean(ran.rows["nll"])), float(np.log(shape.vocabulary))
    if mean > even >= float(ran.rows["nll_base"].mean()):
        raise InvalidLaneError(
            f"NLL {mean:.2f} nats a token, and blind guessing among {shape.vocabulary:,} ids gives {even:.2f}",
            where=f"lane {configuration.to_line()}",
            next="The file may be of a model with another tokenizer, although of the same size.",
        )
    return ran


def record(path: Path, tokens: NDArray[np.int32], configuration: Configuration, say: Say, tell: Tell) -> Ran:
    """Write the file of windows `tokens` (windows, n_ctx); it appears whole or not at all. Raises WorkbenchError."""
    part = path.resolve().with_name(f".part-{path.name}")
    shape = Shape(tokens.shape[1], 0, tokens.shape[0])
    try:
        request = events.Windows(next(_jobs), str(part), True, {"tokens": tokens.astype("<i4")})
        ran = _run(configuration, shape, request, say, tell)
        part.replace(path)
    except LogitsFileError as error:
        raise LogitsFileError(error.what, where=str(path), next=error.next) from error
    except OSError as error:
        raise LogitsFileError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    finally:
        part.unlink(missing_ok=True)
    return ran


def stream(source: str, configuration: Configuration, say: Say) -> NDArray[np.int32]:
    """The token ids of a session, or of a text file (.txt), which is read as llama-perplexity reads it: letters that
    look like a control token stay letters, and the token that the tokenizer puts in front stands in front.

    Raises WorkbenchError.
    """
    model = find_model(configuration.model, converter(transformers_python), told(say))
    if not source.endswith(".txt"):
        return render(load_session(source), Renderer.load(model.folder)).stream["ids"].astype(np.int32)
    try:
        text = expanded(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot be read as UTF-8 text: {error}", where=source) from error
    tokenizer = Tokenizer.load(model.folder)
    ids = tokenizer.encode(text, [(0, len(text))]).ids.astype(np.int32)
    return np.concatenate((np.array(_in_front(tokenizer), np.int32), ids))


def _in_front(tokenizer: Tokenizer) -> list[int]:
    """The control token that a tokenizer puts in front of a text by itself, if any."""
    processor: Any = tokenizer.definition.get("post_processor") or {}
    steps: list[Any] = processor.get("processors") or [processor]
    firsts = [step["single"][0] for step in steps if step.get("type") == "TemplateProcessing" and step.get("single")]
    texts = [str(first["SpecialToken"]["id"]) for first in firsts if "SpecialToken" in first]
    if tokenizer.config.get("add_bos_token"):
        texts.append(token_text(tokenizer.config.get("bos_token")))
    return [identity for text in texts[:1] for identity, token in tokenizer.added.items() if token == text]


def _run(configuration: Configuration, shape: Shape, request: events.Windows, say: Say, tell: Tell) -> Ran:
    """Start the lane's engine and have it answer; the engine's process is ended."""
    check_lane(configuration)
    environment = usable_environment(configuration.engine)
    # The process starts while the model is looked up: both take their time.
    engine = EngineProcess(environment.python, configuration.engine)
    try:
        path = _weights(configuration, environment, shape.window, say, tell)
        context = configuration.ctx or shape.window
        start = events.Start(next(_jobs), configuration.to_json(), str(path), context)
        started = _ask(engine, start, events.Started, lambda _: None, tell)
        check_effective(configuration, started.effective)
        rows: Arrays = {}

        def take(event: events.WindowRows) -> None:
            for name, values in event.arrays.items():
                if name not in rows:
                    kind = np.float64 if values.dtype.kind == "f" else values.dtype
                    rows[name] = np.zeros(shape.rows, kind)
                rows[name][event.first : event.first + len(values)] = values

        scored = _ask(engine, request, events.Scored, take, tell)
    except (Cancelled, KeyboardInterrupt):
        engine.kill()
        raise
    finally:
        engine.stop()
    return Ran(rows, scored.stats, started.effective, started.load_seconds)


def _weights(configuration: Configuration, environment: Environment, window: int, say: Say, tell: Tell) -> Path:
    """The path that the engine loads. A GGUF file that llama.cpp runs as it is needs no conversion."""
    file = expanded(configuration.model)
    if configuration.engine == "llamacpp" and file.suffix == ".gguf" and configuration.weights == "file":
        if not file.is_file():
            raise ConfigurationError("there is no such file", where=str(file))
        file_hashes([file], tell)
        return file.resolve()
    model: Model = find_model(configuration.model, converter(transformers_python), told(say))
    check_model(configuration, model.facts, window)
    check_weights(configuration, model)
    return find_weights(configuration, model, environment.python, tell)[0]


def _ask(
    engine: EngineProcess,
    request: events.Start | events.Windows,
    answer: type[_E],
    take: Callable[[events.WindowRows], None],
    tell: Tell,
) -> _E:
    engine.send(request)
    phase, done, total = "starting", 0, 0
    while True:
        event = engine.receive(timeout=POLL_SECONDS)
        match event:
            case events.Failed(kind="refused"):
                raise ConfigurationError(event.what, where=event.where, next=event.next)
            case events.Failed():
                if isinstance(request, events.Windows) and event.where == request.path:
                    raise LogitsFileError(event.what, where=event.where, next=event.next)
                raise EngineError(event.what, where=event.where, next=event.next, log_tail=engine.log_tail())
            case events.WindowRows():
                take(event)
                continue
            case events.Progress():
                phase, done, total = event.phase, event.done, event.total
            case _ if isinstance(event, answer):
                return event
            case _:
                pass
        tell(phase, done, total)
