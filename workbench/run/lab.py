"""The lab's jobs: sessions into a file, training data from sessions, and the process that trains or merges."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from workbench.config.lane import EMBEDDED_MODEL
from workbench.engines.models import add_model, find_model, list_models, remove_model
from workbench.engines.process import SPIN_COUNT
from workbench.errors import Cancelled, EngineError, ModelError
from workbench.lab.generator import Count, Recipe, lab_session, training_length
from workbench.paths import cache_dir, data_dir, models_dir, worker_path
from workbench.run.convert import converter
from workbench.run.prepare import Say, told, transformers_python
from workbench.session.router.state import Split
from workbench.session.script import Session
from workbench.session.template import Rendered, Renderer, render
from workbench.session.tokenizer import Tokenizer

HELD_OUT_SESSIONS = 4
TOKENS_A_SECOND = 500
"""More than two cores train, so that a run is ended by its time and not by its data."""
TAUGHT_FROM = 1
"""Version of the generator, in the name of training data: raised when the same seed gives other sessions."""


@dataclass(frozen=True, slots=True)
class Training:
    """What the user asked for; `tokens` 0 takes as many as `minutes` could use."""

    output: Path
    minutes: float
    tokens: int = 0
    seed: int = 0
    threads: int = 0
    checkpoint_minutes: float = 5.0
    restart: bool = False
    model: str = EMBEDDED_MODEL


def generated(split: Split, seed: int, sessions: int, tokens: int, count: Count) -> Iterator[Session]:
    """`sessions` lab sessions of about `tokens` tokens each."""
    for number in range(sessions):
        yield lab_session(f"{seed}.{number}", Recipe(split, tokens), count)


def counter(tokenizer: Tokenizer) -> Count:
    """Tokens of a text for the generator."""
    return lambda text: len(tokenizer.encode(text).ids)


def learned(session: Session, rendered: Rendered) -> Any:
    """uint8 per token: 1 where the assistant writes it and is right (mistakes on purpose are read, not learned)."""
    wrong = cast(list[int], session.meta["lab"]["unlearned"])
    return rendered.stream["generated"] & ~np.isin(rendered.stream["message"], wrong)


def write_training_data(path: Path, renderer: Renderer, tokens: int, seed: int, say: Say) -> dict[str, int]:
    """Render training sessions until they hold `tokens` tokens, and a few more whose loss is only measured."""
    count = counter(renderer.tokenizer)
    ids: list[Any] = []
    learn: list[Any] = []
    total, number = 0, 0
    while total < tokens or number < 1:
        name = f"train.{seed}.{number}"
        _render_into(ids, learn, lab_session(name, Recipe("train", training_length(name)), count), renderer)
        total += len(ids[-1])
        number += 1
        if number % 200 == 0:
            say(f"training data: {total:,} tokens in {number} sessions")
    for held in range(HELD_OUT_SESSIONS):
        _render_into(ids, learn, lab_session(f"held.{seed}.{held}", Recipe("train", 1500), count), renderer)
    starts = np.cumsum([0, *(len(one) for one in ids)], dtype=np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part.npz")
    np.savez(
        part, ids=np.concatenate(ids), learn=np.concatenate(learn), starts=starts, held=np.int64(HELD_OUT_SESSIONS)
    )
    part.replace(path)
    return {"sessions": number, "tokens": total, "learned": int(sum(int(one.sum()) for one in learn))}


def train(asked: Training, say: Say, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train a model's adapter, or go on with a training that was interrupted; returns its facts.

    Raises WorkbenchError. ctrl+c lets the running step end and keeps what was trained.
    """
    model = find_model(asked.model, converter(transformers_python), told(say))
    tokens = asked.tokens or round(asked.minutes * 60 * TOKENS_A_SECOND)
    recipe = {"seed": asked.seed, "tokens": tokens, "generator": TAUGHT_FROM}
    renderer = Renderer.load(model.folder)
    name = hashlib.sha256(json.dumps([recipe, renderer.template.hash, renderer.tokenizer.hash]).encode()).hexdigest()
    data = asked.output / f"data-{name[:12]}.npz"
    if asked.restart:
        _forget(asked.output)
    if not data.is_file():
        facts = write_training_data(data, renderer, tokens, asked.seed, say)
        say("training data: {tokens:,} tokens, {learned:,} with loss, in {sessions} sessions".format(**facts))
    base = {"name": model.name, "weights_hash": model.facts["weights_hash"]}
    plan = {
        "model": str(model.folder),
        "data": str(data),
        "output": str(asked.output),
        "base": base,
        "recipe": recipe,
        "minutes": asked.minutes,
        "checkpoint_minutes": asked.checkpoint_minutes,
        "threads": asked.threads or len(os.sched_getaffinity(0)),
        "seed": asked.seed,
    }
    return _work("train", plan, asked.output, show)


def merge(adapter: Path, output: Path, say: Say, name: str = EMBEDDED_MODEL) -> dict[str, Any]:
    """Write a model with an adapter merged in. Raises WorkbenchError where the adapter was trained on another."""
    model = find_model(name, converter(transformers_python), told(say))
    try:
        about = json.loads((adapter / "training.json").read_text(encoding="utf-8"))
        trained_on = about["base"]["weights_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"not an adapter of ours: {error!r}", where=str(adapter)) from error
    if trained_on != model.facts["weights_hash"]:
        raise ModelError(
            f"it was trained on weights {str(trained_on)[:12]}, {model.name} has {model.facts['weights_hash'][:12]}",
            where=str(adapter),
            next="Train it again: workbench lab train.",
        )
    plan = {"model": str(model.folder), "adapter": str(adapter), "output": str(output)}
    return _work("merge", plan, cache_dir() / "lab", lambda _: None)


def install(adapter: Path, say: Say, name: str = EMBEDDED_MODEL) -> tuple[Path, dict[str, Any]]:
    """Merge into the model cache, as the model `NAME-lab`; one of that name is replaced once the new one is whole."""
    made = lab_model(name)
    folder = models_dir() / made
    models_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=models_dir()) as part:
        facts = merge(adapter, Path(part) / "model", say, name)
        if made in [row.name for row in list_models()]:
            remove_model(made)
        (Path(part) / "model").replace(folder)
    add_model(str(folder), made)
    return folder, facts


def lab_model(name: str = EMBEDDED_MODEL) -> str:
    """The name of a model with its adapter merged in."""
    return f"{Path(name).name}-lab"


def default_output() -> Path:
    """Where a training keeps its data, checkpoint and adapter."""
    return data_dir() / "lab"


def _render_into(ids: list[Any], learn: list[Any], session: Session, renderer: Renderer) -> None:
    rendered = render(session, renderer)
    ids.append(rendered.stream["ids"])
    learn.append(learned(session, rendered))


def _forget(output: Path) -> None:
    for folder in (output / "checkpoint", output / "checkpoint.old", output / "checkpoint.part"):
        for file in folder.glob("state.*"):
            file.unlink()
        if folder.is_dir():
            folder.rmdir()


def _work(task: str, plan: dict[str, Any], folder: Path, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a plan in the transformers engine's Python and return its facts; plan and log stay in `folder`."""
    python = transformers_python()
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / f"{task}.plan.json", folder / f"{task}.log"
    path.write_text(json.dumps({"task": task, **plan}, indent=1), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONSTARTUP")}
    environment |= {"PYTHONPATH": str(worker_path()), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    facts: dict[str, Any] = {}
    interrupted = False
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [python, "-P", "-m", "workbench.worker.lab", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        ) as child,
    ):
        assert child.stdout is not None
        while True:
            try:
                if not (line := child.stdout.readline()):
                    break
                if line.endswith(b"\n"):
                    facts = json.loads(line)
                    show(facts)
            except KeyboardInterrupt:  # the child ends after its step; one more ends it here
                if interrupted:
                    child.kill()
                    raise
                interrupted = True
                child.terminate()
    if "done" in facts:
        if interrupted:
            raise Cancelled("training was interrupted", where=str(folder), next="The same command goes on with it.")
        return facts["done"]
    if said := facts.get("error"):
        raise ModelError(said["what"], where=said["where"], next=said["next"])
    tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    raise EngineError(f"the process ended with code {child.returncode}: {' / '.join(tail)}", where=str(log))
