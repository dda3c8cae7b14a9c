"""`ladder`: what each axis between two configurations adds, in both orders."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from workbench.cli.narration import Narrator
from workbench.cli.run import measure
from workbench.cli.signals import ending_as_by_ctrl_c
from workbench.config.lane import Configuration, read_spec
from workbench.report import table
from workbench.report.compare import compare
from workbench.report.ladder import ladder_facts, ladder_text
from workbench.run.experiment import Experiment
from workbench.run.ladder import ladder as steps_of
from workbench.run.ladder import lanes
from workbench.run.prepare import Ask


def ladder(options: argparse.Namespace) -> int:
    """`workbench ladder SESSION --from SPEC --to SPEC`."""
    base = Configuration(model=options.model) if options.model else Configuration()
    start = read_spec(options.start, base)
    stop = read_spec(options.stop, Configuration(model=start.model, chunk=start.chunk, ctx=start.ctx))
    orders = [steps_of(start, stop), steps_of(start, stop, backwards=True)]
    if [step.stop for step in orders[0]] == [step.stop for step in orders[1]]:
        orders = orders[:1]
    output = Path(options.output) if options.output else None
    narrator = Narrator()
    experiment = Experiment(Ask(options.session, start, lanes(*orders), output, options.fit), narrator.say)
    try:
        with ending_as_by_ctrl_c():
            state = measure(experiment, narrator)
        facts = ladder_facts(state, orders)
        if options.json:
            print(json.dumps({**compare(state), "ladder": facts}, indent=1))
        else:
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
            print(table.text(compare(state)))
            print(ladder_text(facts, colour=colour), end="")
        print(f"saved: {state.path}", file=sys.stderr if options.json else sys.stdout)
        return 0 if all(lane.record.status == "done" for lane in state.lanes) else 1
    finally:
        experiment.close()
