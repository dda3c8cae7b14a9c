"""`run`, `record`, `demo` and `floor`: measure, then print the table and where it is saved."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from workbench.cli.narration import Narrator, can_show_app
from workbench.cli.signals import ending_as_by_ctrl_c
from workbench.config.lane import Configuration, read_spec
from workbench.errors import ConfigurationError, SavedSessionError
from workbench.paths import expanded
from workbench.report import table
from workbench.report.compare import compare
from workbench.run.experiment import Experiment
from workbench.run.imported import export_from
from workbench.run.prepare import Ask, ask_again
from workbench.run.sweep import sweep
from workbench.store.exchange import SUFFIX
from workbench.store.state import SessionState

DEMO_SESSION = "demo"
DEMO_LANES = ("transformers:weights=int8", "transformers:kv=int8", "transformers:kv=int4")
_POLL_SECONDS = 0.2


def run(options: argparse.Namespace) -> int:
    """`workbench run`: record or reuse the reference, run the lanes, print the table."""
    if options.repeat < 1:
        raise ConfigurationError(f"--repeat {options.repeat} is below 1", where="run")
    ask = replace(ask_of(options, options.lane), repeat=options.repeat)
    if options.sweep:
        bases = ask.lanes or (ask.reference,)
        if ask.reference_file is not None and not ask.lanes:
            raise ConfigurationError("--sweep needs a --lane: the reference is a file", where="run")
        ask = replace(ask, lanes=sweep(options.sweep, bases, ask.reference, Narrator().say))
    if ask.repeat > 1 and not ask.lanes:  # what is repeated are lanes: here the reference as one
        if ask.reference_file is not None:
            raise ConfigurationError("--repeat needs a --lane: the reference is a file", where="run")
        ask = replace(ask, lanes=(ask.reference,))
    return headless(ask, as_json=options.json)


def record(options: argparse.Namespace) -> int:
    """`workbench record`: only the reference trace."""
    if options.lane:
        options.reference = options.lane
    options.floor, options.parallel = False, 1
    if options.no_text and not options.export_reference:
        raise ConfigurationError("--no-text means nothing without --export-reference FILE.wbref", where="record")
    target = expanded(options.export_reference) if options.export_reference else None
    if target is not None and target.suffix != SUFFIX:
        raise ConfigurationError(f"an exported reference ends in {SUFFIX}", where=str(target))
    if target is not None and options.reference.endswith(SUFFIX):
        raise ConfigurationError("a reference from a file is not exported again", where=options.reference)
    return headless(ask_of(options, ()), as_json=False, export=target, text=not options.no_text)


def demo(options: argparse.Namespace) -> int:
    """`workbench demo`: the app on a terminal, else the same run headless."""
    ask = demo_ask(options.output)
    if options.headless or options.json or not can_show_app():
        return headless(ask, as_json=options.json)
    from workbench.cli.app import open_live

    return open_live(ask)


def demo_ask(output: str | None) -> Ask:
    """The demo: the sample session, three lanes and the floor."""
    lanes = tuple(read_spec(spec) for spec in DEMO_LANES)
    return Ask(DEMO_SESSION, lanes=lanes, output=Path(output) if output else None, floor=True)


def floor(options: argparse.Namespace) -> int:
    """`workbench floor FILE`: the reference of a saved session against itself."""
    path = Path(options.file)
    if not path.is_file():
        raise SavedSessionError("there is no such file", where=str(path))
    return headless(replace(ask_again(path), floor=True), as_json=options.json)


def ask_of(options: argparse.Namespace, specs: tuple[str, ...] | list[str]) -> Ask:
    """What `run` and `record` were asked for. Raises ConfigurationError."""
    base = Configuration(model=options.model) if options.model else Configuration()
    file = expanded(options.reference) if options.reference.endswith(SUFFIX) else None
    reference = base if file else read_spec(options.reference, base)
    if options.parallel < 1:
        raise ConfigurationError(f"--parallel {options.parallel} is below 1", where="run")
    return Ask(
        options.session,
        reference,
        tuple(
            read_spec(spec, Configuration(model=reference.model, chunk=reference.chunk, ctx=reference.ctx))
            for spec in specs
        ),
        Path(options.output) if options.output else None,
        options.fit,
        options.floor,
        options.parallel,
        file,
    )


def headless(ask: Ask, *, as_json: bool, export: Path | None = None, text: bool = True) -> int:
    """Run to the end, narrate on stderr, print the comparison; 0 where every lane is done, else 1.

    The reference is exported to `export` where that is given, with the session's `text` or without.
    """
    narrator = Narrator()
    experiment = Experiment(ask, narrator.say)
    with ending_as_by_ctrl_c():
        code = _measure(experiment, narrator, as_json=as_json)
    if export is not None and code == 0:
        export_from(Path(experiment.state.path), experiment.prepared.model.folder, export, text=text)
        print(f"exported: {export}" + ("" if text else " (token ids only, no text)"))
    return code


def measure(experiment: Experiment, narrator: Narrator) -> SessionState:
    """Run an experiment to its end, showing how far it is; its file stays open."""
    state = experiment.prepare()
    experiment.start()
    while not experiment.wait(_POLL_SECONDS):
        narrator.show(state)
    narrator.show(state)
    return state


def _measure(experiment: Experiment, narrator: Narrator, *, as_json: bool) -> int:
    try:
        state = measure(experiment, narrator)
        comparison = compare(state)
        print(json.dumps(comparison, indent=1) if as_json else table.text(comparison))
        print(f"saved: {state.path}", file=sys.stderr if as_json else sys.stdout)
        return 0 if all(lane.record.status == "done" for lane in state.lanes) else 1
    finally:
        experiment.close()
