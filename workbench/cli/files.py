"""`replay`, `compare` and `export`: what a saved session says, without any engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import ConfigurationError
from workbench.report import table
from workbench.report.compare import compare as comparison_of
from workbench.report.depth import depth_text
from workbench.report.matrix import matrix, matrix_text
from workbench.session.text import one_line
from workbench.store.exporters import write_csv, write_jsonl
from workbench.store.parquet import write_parquet
from workbench.store.playback import read_state
from workbench.store.saved import SavedSession
from workbench.store.state import SessionState


def replay(options: argparse.Namespace) -> int:
    """`workbench replay FILE`: the app, or the session as text."""
    if not options.text:
        from workbench.cli.app import open_file

        return open_file(Path(options.file))
    from workbench.report.transcript import transcript

    with _opened(options.file) as state:
        for line in transcript(state):
            print(line)
    return 0


def compare(options: argparse.Namespace) -> int:
    """`workbench compare FILE...`: text, JSON, CSV or Markdown; several files give a list."""
    comparisons: list[table.Comparison] = []
    for name in options.files:
        with _opened(name) as state:
            comparison = comparison_of(state)
            comparisons.append({**comparison, "matrix": matrix(state)} if options.matrix else comparison)
    if options.json:
        print(json.dumps(comparisons[0] if len(comparisons) == 1 else comparisons, indent=1))
        return 0
    if options.csv:
        print(table.csv_text(*comparisons), end="")
        return 0
    shape = table.markdown if options.markdown else table.text
    print("\n".join(shape(comparison) for comparison in comparisons), end="")
    for comparison in comparisons if options.depth else ():
        print(f"\n{depth_text(comparison)}", end="")
    for comparison in comparisons if options.matrix else ():
        print(f"\n{matrix_text(comparison['matrix'])}", end="")
    return 0


def export(options: argparse.Namespace) -> int:
    """`workbench export FILE`: per-position rows, on stdout or in a file."""
    if options.format == "parquet" and not options.output:
        raise ConfigurationError("Parquet is written to a file", where="export", next="Give -o FILE.parquet.")
    with _opened(options.file) as state:
        names = [lane.record.name for lane in state.lanes]
        if options.lane is not None and options.lane not in names:
            raise ConfigurationError(
                f"there is no lane {options.lane!r}", where=options.file, next=f"Its lanes: {', '.join(names)}."
            )
        if options.format == "parquet":
            count = write_parquet(state, Path(options.output), lane=options.lane)
            print(one_line(f"{options.output}: {count:,} rows"), file=sys.stderr)
            return 0
        write = write_csv if options.format == "csv" else write_jsonl
        if not options.output:
            write(state, sys.stdout, lane=options.lane)
            return 0
        try:
            with Path(options.output).open("w", encoding="utf-8", newline="") as out:
                write(state, out, lane=options.lane)
        except OSError as error:
            raise ConfigurationError(f"cannot be written: {error.strerror or error}", where=options.output) from error
    return 0


@contextmanager
def _opened(name: str) -> Iterator[SessionState]:
    with SavedSession.open(Path(name)) as saved:
        state = read_state(saved)  # a damaged row is found when it is read
        for line in saved.damage:
            print(one_line(f"workbench: {name}: {line}"), file=sys.stderr)
        yield state
