"""`template`: where the prompts of two engines first differ, and the sampling defaults that each would apply."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from workbench.config.lane import Configuration, read_spec
from workbench.errors import ConfigurationError
from workbench.run.reading import Reading, compare_readings, read_as
from workbench.session.script import load_session
from workbench.session.text import one_line


def template(options: argparse.Namespace) -> int:
    """`workbench template SESSION --lane A --lane B`."""
    if len(options.lane) < 2:
        raise ConfigurationError("give at least two lanes to compare", where="template", next="--lane A --lane B")
    base = Configuration(model=options.model) if options.model else Configuration()
    session = load_session(options.session)

    def say(line: str) -> None:
        print(one_line(line), file=sys.stderr)

    readings = [read_as(session, read_spec(spec, base), say) for spec in options.lane]
    differences = [compare_readings(readings[0], reading) for reading in readings[1:]]
    if options.json:
        print(json.dumps({"lanes": [item.to_json() for item in readings], "differences": differences}, indent=1))
        return 0
    for reading in readings:
        _show(reading)
    for reading, difference in zip(readings[1:], differences, strict=True):
        print(f"\n{one_line(readings[0].lane)}\n{one_line(reading.lane)}")
        for line in _told(difference):
            print(f"  {one_line(line)}")
    return 0


def _show(reading: Reading) -> None:
    print(one_line(reading.lane))
    print(f"  template  {one_line(reading.template_from)} ({reading.template_hash})")
    print(f"  tokens    {len(reading.ids):,}")
    defaults = ", ".join(f"{name} {value}" for name, value in reading.sampling.items())
    print(f"  sampling  {one_line(defaults) or 'the engine names no defaults'}")
    for note in reading.notes:
        print(f"  note      {one_line(note)}")


def _told(difference: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if text := difference["text"]:
        lines.append(f"text: first difference at character {text['character']:,}, after {text['before']!r}")
        lines += [f"  {part!r}" for part in text["texts"]]
    if token := difference["token"]:
        lines.append(f"tokens: first difference at {token['index']:,}")
        for side in token["tokens"]:
            if side is None:
                lines.append("  the end")
            else:
                lines.append(f"  {side['id']} {side['text']!r} from the template of {side['template_from']}")
    if not lines:
        lines.append("same text, same tokens")
    for name, pair in difference["sampling"].items():
        ours, theirs = ("not set" if value is None else str(value) for value in pair)
        lines.append(f"sampling default {name}: {ours} / {theirs}")
    return lines
