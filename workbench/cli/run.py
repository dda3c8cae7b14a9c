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
from workbench.report import table
from workbench.report.compare import compare
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask, ask_again

DEMO_SESSION = "demo"
DEMO_LANES = ("transformers:weights=int8", "transformers:kv=int8", "transformers:kv=int4")
_POLL_SECONDS = 0.2


def run(options: argparse.Namespace) -> int:
    """`workbench run`: record or reuse the reference, run the lanes, print the table."""
    return headless(ask_of(options, options.lane), as_json=options.json)


def record(options: argparse.Namespace) -> int:
    """`workbench record`: only the reference trace."""
    if options.lane:
        options.reference = options.lane
    options.floor, options.parallel = False, 1
    return headless(ask_of(options, ()), as_json=False)


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
    reference = read_spec(options.reference, base)
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
    )


def headless(ask: Ask, *, as_json: bool) -> int:
    """Run to the end, narrate on stderr, print the comparison; 0 where every lane is done, else 1."""
    narrator = Narrator()
    experiment = Experiment(ask, narrator.say)
    with ending_as_by_ctrl_c():
        return _measure(experiment, narrator, as_json=as_json)


def _measure(experiment: Experiment, narrator: Narrator, *, as_json: bool) -> int:
    try:
        state = experiment.prepare()
        experiment.start()
        while not experiment.wait(_POLL_SECONDS):
            narrator.show(state)
        narrator.show(state)
        comparison = compare(state)
        print(json.dumps(comparison, indent=1) if as_json else table.text(comparison))
        print(f"saved: {state.path}", file=sys.stderr if as_json else sys.stdout)
        return 0 if all(lane.record.status == "done" for lane in state.lanes) else 1
    finally:
        experiment.close()
