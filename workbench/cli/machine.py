"""`models`, `doctor` and `paths`: what is on this machine, what is missing, and how to clean up."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

from workbench import __version__, paths
from workbench.cli.engines import described, engine_facts, tell_problems
from workbench.config.lane import EMBEDDED_MODEL
from workbench.engines import disk
from workbench.engines import models as catalogue
from workbench.engines.environments import find_environments
from workbench.errors import ConfigurationError
from workbench.run.convert import converter
from workbench.run.memory import free_bytes
from workbench.run.prepare import told, transformers_python
from workbench.run.reference import processor
from workbench.session.text import one_line


def show_paths(options: argparse.Namespace) -> int:
    """`workbench paths`."""
    places = {name: str(path) for name, path in paths.places().items()}
    if options.json:
        print(json.dumps(places, indent=1))
    else:
        width = max(len(name) for name in places)
        for name, path in places.items():
            print(f"{name:<{width}}  {path}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """`workbench doctor`: engines, versions, devices, memory, and the command for what is missing."""
    tell_problems()
    free = free_bytes()
    facts: dict[str, Any] = {
        "workbench": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "free_memory_bytes": free,
        "engines": engine_facts(find_environments()),
        "disk": {item.kind: item.bytes for item in disk.disk_use()},
    }
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    for name in ("workbench", "python", "system", "processor", "cores"):
        print(f"{name:<12} {one_line(str(facts[name]))}")
    print(f"{'free memory':<12} {_size(free) if free is not None else 'unknown'}")
    for fact in facts["engines"]:
        print("\n" + "\n".join(described(fact)))
        for axis, values in fact["axes"].items():
            print(one_line(f"  {axis:<8} {' '.join(values)}"))
        if fact["capability"] == "verified":
            print(one_line(f"  verified {fact['checked']}"))
        elif fact["used"]:
            print(f"  declared; to see what this installation does: workbench engines check {fact['engine']}")
    print("\ndisk")
    _print_disk()
    return 0


def models(options: argparse.Namespace) -> int:
    """`workbench models`: list, add, verify, remove, clean."""
    if options.action == "list":
        return _list_models(as_json=options.json)
    if not options.target:
        raise ConfigurationError(
            f"models {options.action} needs a name", where="models", next="See `workbench models`."
        )
    tell = told(lambda line: print(one_line(line), file=sys.stderr))
    if options.action == "add":
        convert = converter(transformers_python)
        name = EMBEDDED_MODEL if options.target == EMBEDDED_MODEL else options.name or ""
        if name == EMBEDDED_MODEL:
            model = catalogue.find_model(name, convert, tell)
        else:
            model = catalogue.add_model(options.target, name, convert, tell)
        print(one_line(f"{model.name}: {model.folder}"))
    elif options.action == "remove":
        print(f"freed {_size(catalogue.remove_model(options.target))}")
    elif options.action == "verify":
        faults = catalogue.verify_model(options.target, tell)
        for fault in faults:
            print(one_line(f"{options.target}: {fault}"))
        if faults:
            return 1
        print(one_line(f"{options.target}: as it was added"))
    else:
        print(f"freed {_size(disk.clean(options.target))}")
    return 0


def _list_models(*, as_json: bool) -> int:
    rows = catalogue.list_models()
    if as_json:
        print(json.dumps([{**asdict(row), "folder": str(row.folder)} for row in rows], indent=1))
        return 0
    for row in rows:
        print(one_line(f"{row.name:<24} {row.kind:<9} {_size(row.bytes):>10}  {row.status:<12} {row.source}"))
    print("\ndisk")
    _print_disk()
    return 0


def _print_disk() -> None:
    for item in disk.disk_use():
        print(f"  {item.kind:<14} {_size(item.bytes):>10}  {item.folder}  clean: {item.clean}")


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
