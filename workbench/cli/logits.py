"""`logits`: llama.cpp's files of log-probabilities, written by a lane, looked at, or scored against."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from workbench.cli.narration import Narrator
from workbench.cli.signals import ending_as_by_ctrl_c
from workbench.config.lane import read_spec
from workbench.errors import ConfigurationError
from workbench.metrics.windows import perplexity, statistics
from workbench.paths import expanded
from workbench.protocol.logits_file import LEVELS, LogitsFile, clamp_of, row_ranges, windows_of
from workbench.report.windows import file_text, recorded_text, scored_text
from workbench.run import windows

LEAST_WINDOW = 8


def record(options: argparse.Namespace) -> int:
    """`workbench logits record`: windows of a session or text, run by a lane."""
    configuration = read_spec(options.lane)
    windows.check_lane(configuration)
    if options.window < LEAST_WINDOW or options.windows < 0:
        raise ConfigurationError(
            f"windows of {options.window} tokens, at most {options.windows}: no such file is made",
            where="logits record",
            next=f"A window has {LEAST_WINDOW} tokens or more.",
        )
    narrator, target = Narrator(), expanded(options.output)
    ids = windows.stream(options.source, configuration, narrator.say)
    tokens = windows_of(ids, options.window)
    tokens = tokens[: options.windows or None]
    if not len(tokens):
        raise ConfigurationError(
            f"{len(ids):,} tokens make no window of {options.window:,}",
            where=options.source,
            next="Give a longer text or a smaller --window.",
        )
    began = time.monotonic()
    try:
        with ending_as_by_ctrl_c():
            ran = windows.record(target, tokens, configuration, narrator.say, _tell(narrator, began))
    finally:
        narrator.clear()
    result = _result(target, configuration.to_line(), ran) | {"perplexity": perplexity(ran.rows["nll"])}
    print(json.dumps(result, indent=1) if options.json else recorded_text(result), end="\n" if options.json else "")
    return 0


def show(options: argparse.Namespace) -> int:
    """`workbench logits show`: the file's header, and what its rows span."""
    facts = _facts(expanded(options.file))
    print(json.dumps(facts, indent=1) if options.json else file_text(facts), end="\n" if options.json else "")
    return 0


def score(options: argparse.Namespace) -> int:
    """`workbench logits score`: a lane against the file."""
    configuration = read_spec(options.lane)
    windows.check_lane(configuration)
    narrator, path = Narrator(), expanded(options.file)
    with LogitsFile(path) as file:
        shape = file.shape
    began = time.monotonic()
    try:
        with ending_as_by_ctrl_c():
            ran = windows.score(path, shape, configuration, narrator.say, _tell(narrator, began))
    finally:
        narrator.clear()
    result = _result(path, configuration.to_line(), ran) | {"statistics": statistics(ran.rows, shape.rows_each)}
    print(json.dumps(result, indent=1) if options.json else scored_text(result), end="\n" if options.json else "")
    return 0


def _result(path: Path, line: str, ran: windows.Ran) -> dict[str, Any]:
    stats = {**ran.stats, "load_seconds": ran.load_seconds}
    return {"base": _facts(path), "lane": line, "effective": ran.effective, "stats": stats}


def _facts(path: Path) -> dict[str, Any]:
    with LogitsFile(path) as file:
        shape, ranges = file.shape, row_ranges(file)
    return {
        "file": str(path),
        "bytes": shape.bytes,
        "window": shape.window,
        "windows": shape.windows,
        "vocabulary": shape.vocabulary,
        "rows": shape.rows,
        "first": shape.first,
        "clamp": clamp_of(ranges),
        "range_max": float(ranges.max()),
        "step": float(ranges.max()) / LEVELS,
    }


def _tell(narrator: Narrator, began: float) -> windows.Tell:
    def tell(phase: str, done: int, total: int) -> None:
        share = f" {done:,} of {total:,}" if total else ""
        narrator.draw(f"{phase}{share}, {time.monotonic() - began:.0f} s")

    return tell
