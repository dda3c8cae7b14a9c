"""`lab`: sessions of the router lab, and the adapter that makes the embedded model act in it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from workbench.cli.narration import Narrator
from workbench.cli.signals import ending_as_by_ctrl_c
from workbench.config.lane import EMBEDDED_MODEL
from workbench.errors import ConfigurationError
from workbench.lab.generator import estimate
from workbench.paths import models_dir
from workbench.run import lab as jobs
from workbench.session.text import one_line
from workbench.session.tokenizer import Tokenizer


def generate(options: argparse.Namespace) -> int:
    """`workbench lab generate -o FILE.jsonl`."""
    if options.sessions < 1 or options.tokens < 1:
        raise ConfigurationError("give at least one session and one token", where="lab generate")
    path = Path(options.output)
    if path.suffix != ".jsonl":
        raise ConfigurationError("sessions are written as rows of a .jsonl file", where=f"-o {path}")
    count = _count(options.model)
    made = questions = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for session in jobs.generated(options.split, options.seed, options.sessions, options.tokens, count):
            file.write(json.dumps(session.to_json(), ensure_ascii=False) + "\n")
            made += 1
            questions += len(session.meta["lab"]["questions"])
    print(one_line(f"{made} sessions with {questions} questions: {path}"), file=sys.stderr)
    return 0


def train(options: argparse.Namespace) -> int:
    """`workbench lab train --minutes N`."""
    if options.minutes <= 0:
        raise ConfigurationError("training takes time: give --minutes above 0", where="lab train")
    output = Path(options.output) if options.output else jobs.default_output()
    asked = jobs.Training(
        output,
        options.minutes,
        options.tokens,
        options.seed,
        options.threads,
        options.checkpoint,
        options.restart,
        options.model,
    )
    narrator = Narrator()

    def show(fact: dict[str, Any]) -> None:
        if "loss" in fact:
            speed = fact["tokens"] / max(fact["seconds"], 1e-9)
            narrator.draw(
                f"step {fact['step']}: loss {fact['loss']:.4f}, {fact['tokens']:,} tokens, {speed:.0f} tokens/s, "
                f"{fact['seconds'] / 60:.1f} of {options.minutes:g} min"
            )
        elif "held_out_loss" in fact:
            narrator.say(f"step {fact['step']}: held-out loss {fact['held_out_loss']:.4f}")

    with ending_as_by_ctrl_c():
        facts = jobs.train(asked, narrator.say, show)
    narrator.clear()
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    first, last = facts["held"][0], facts["held"][-1]
    print(one_line(f"{facts['step']} steps, {facts['tokens']:,} tokens, held-out loss {first:.4f} to {last:.4f}"))
    print(one_line(f"adapter: {output}"))
    print(one_line(f"to use it: workbench lab merge {output}"))
    return 0


def merge(options: argparse.Namespace) -> int:
    """`workbench lab merge ADAPTER`: the merged model, in the model cache or in a folder."""
    adapter = Path(options.adapter) if options.adapter else jobs.default_output()
    narrator = Narrator()
    with ending_as_by_ctrl_c():
        if options.output:
            folder, facts = Path(options.output), jobs.merge(adapter, Path(options.output), narrator.say, options.model)
        else:
            folder, facts = jobs.install(adapter, narrator.say, options.model)
    if options.json:
        print(json.dumps({"folder": str(folder), **facts}, indent=1))
        return 0
    print(one_line(f"{folder}: adapter {facts['adapter_sha256'][:12]} merged, {facts['relative_change']:.2%} of |W|"))
    return 0


def _count(model: str | None) -> Any:
    """Tokens as the embedded model counts them where it is here, else an estimate."""
    folder = Path(model) if model else models_dir() / EMBEDDED_MODEL
    return jobs.counter(Tokenizer.load(folder)) if model or (folder / "tokenizer.json").is_file() else estimate
