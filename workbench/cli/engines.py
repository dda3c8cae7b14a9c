"""`engines`: which Python runs which engine, and making, naming, checking and removing those."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from workbench.cli.narration import Narrator
from workbench.cli.signals import ending_as_by_ctrl_c
from workbench.config.settings import keep_engine, read_settings
from workbench.engines import capabilities, install
from workbench.engines.environments import (
    NEEDED,
    Environment,
    ask,
    created_python,
    environment_for,
    find_environments,
    settings_path,
)
from workbench.engines.plans import PLANS
from workbench.errors import ConfigurationError, EngineError, WorkbenchError
from workbench.session.text import one_line

SOURCES = {"own": "our own Python", "created": "made by engines install", "settings": "named in the settings"}


def engines(options: argparse.Namespace) -> int:
    """`workbench engines`: list, install, add, check, remove."""
    if options.action == "list":
        return _list(options)
    if not options.engine and options.action != "check":
        raise ConfigurationError(
            f"engines {options.action} needs an engine", where="engines", next=f"Engines: {', '.join(NEEDED)}."
        )
    if options.python and options.action not in ("install", "add"):
        raise ConfigurationError(f"--python means nothing to engines {options.action}", where="engines")
    return {"install": _install, "add": _add, "check": _check, "remove": _remove}[options.action](options)


def tell_problems() -> None:
    """Say on stderr what in the settings file is ignored."""
    for problem in read_settings(settings_path()).problems:
        print(f"workbench: {one_line(str(problem))}", file=sys.stderr)


def engine_facts(environments: list[Environment]) -> list[dict[str, Any]]:
    """Every environment as JSON: what it is, whether a lane of its engine would use it, and what it can do."""
    used: set[str] = set()
    facts: list[dict[str, Any]] = []
    for item in environments:
        known = capabilities.capability(item)
        facts.append(
            {
                "engine": item.engine,
                "python": item.python,
                "source": item.source,
                "used": item.engine not in used and item.usable,
                "usable": item.usable,
                "implementation": item.implementation or None,
                "versions": item.versions,
                "missing": list(item.missing),
                "reason": item.reason or None,
                "install": item.install or None,
                "build": known.build or None,
                "devices": known.devices,
                "capability": known.source,
                "checked": known.when or None,
                "axes": {axis: list(values) for axis, values in known.axes.items()},
            }
        )
        used.add(item.engine)
    return facts


def described(fact: dict[str, Any]) -> list[str]:
    """An environment in lines of text."""
    versions = " ".join(f"{name} {version}" for name, version in fact["versions"].items())
    lines = [f"engine {fact['engine']}: {versions or 'not installed'} ({fact['python']}, {SOURCES[fact['source']]})"]
    if not fact["usable"]:
        what = fact["reason"] or "lacks " + ", ".join(fact["missing"])
        lines.append(f"  {what}" + (f"; install: {fact['install']}" if fact["install"] else ""))
    elif not fact["used"]:
        lines.append("  not used: another one goes first")
    if fact["build"]:
        lines.append(f"  {'build':<8} {fact['build']}")
    if fact["devices"]:
        lines.append(f"  {'devices':<8} {', '.join(fact['devices'])}")
    return [one_line(line) for line in lines]


def _list(options: argparse.Namespace) -> int:
    tell_problems()
    facts = engine_facts(find_environments())
    if options.engine:
        _known(options.engine)
        facts = [fact for fact in facts if fact["engine"] == options.engine]
    extra = [] if options.engine else [name for name in PLANS if name not in NEEDED]
    if options.json:
        others = [
            {"environment": name, "python": str(created_python(name)), "state": install.state(name)} for name in extra
        ]
        print(json.dumps({"engines": facts, "environments": others}, indent=1))
        return 0
    for fact in facts:
        print("\n".join(described(fact)))
        when = f"verified {fact['checked']}" if fact["checked"] else "declared; to verify: "
        command = "" if fact["checked"] else f"workbench engines check {fact['engine']}"
        if fact["used"]:
            print(one_line(f"  {'can do':<8} {when}{command}"))
    for name in extra:
        print(
            one_line(
                f"environment {name}: {install.state(name)} ({created_python(name)}), for tests of the engine server"
            )
        )
    return 0


def _install(options: argparse.Namespace) -> int:
    name, narrator = options.engine, Narrator()
    if options.json:
        raise ConfigurationError(
            "engines install has no --json", where="engines", next="See: workbench engines --json."
        )

    def tell(phase: str, line: str) -> None:
        if line:
            narrator.draw(f"{phase}: {line}")
        else:
            narrator.say(f"{name}: {phase}")

    about = install.plan_for(name).about
    if about and install.state(name) != "installed":
        narrator.say(f"{name}: {about}")
    try:
        with ending_as_by_ctrl_c():
            made = install.install(name, tell, options.python or "")
    except KeyboardInterrupt:
        narrator.say(f"{name}: stopped; what is there is kept for the next try: workbench engines install {name}")
        raise
    finally:
        narrator.clear()
    python = str(created_python(name))
    print(one_line(f"{name}: {'installed' if made else 'is installed already'} ({python})"))
    if name not in NEEDED:
        return 0
    first = environment_for(name)
    if first is not None and first.source == "settings":
        narrator.say(f"{name}: lanes use {first.python}, which the settings name; workbench engines remove {name}")
    return _report([_verified(ask(name, python, "created"))], as_json=False)


def _add(options: argparse.Namespace) -> int:
    engine = _known(options.engine)
    if not options.python:
        raise ConfigurationError("engines add needs --python PATH", where="engines")
    if not NEEDED[engine]:
        raise ConfigurationError(
            f"the engine {engine} needs no interpreter", where="engines", next="Give its address as url= of a lane."
        )
    found = ask(engine, options.python)
    if not found.usable:
        what = found.reason or f"lacks {', '.join(found.missing)}"
        raise ConfigurationError(f"{found.python} {what}", where=f"engine {engine}", next=found.install)
    keep_engine(settings_path(), engine, found.python)
    return _print(engine_facts([found]), as_json=options.json)


def _check(options: argparse.Namespace) -> int:
    names = [_known(options.engine)] if options.engine else list(NEEDED)
    found = [environment for name in names if (environment := environment_for(name)) is not None]
    if not options.engine:
        found = [environment for environment in found if environment.usable]
    with ending_as_by_ctrl_c():
        return _report([_verified(environment) for environment in found], as_json=options.json)


def _verified(environment: Environment) -> tuple[Environment, WorkbenchError | None]:
    if not environment.usable:
        what = environment.reason or f"lacks {', '.join(environment.missing)}"
        where = f"engine {environment.engine}"
        return environment, EngineError(f"{environment.python} {what}", where=where, next=environment.install)
    print(one_line(f"{environment.engine}: starting {environment.python}"), file=sys.stderr, flush=True)
    try:
        capabilities.verify(environment)
    except WorkbenchError as error:
        return environment, error
    return environment, None


def _report(results: list[tuple[Environment, WorkbenchError | None]], *, as_json: bool) -> int:
    facts = engine_facts([environment for environment, _ in results])
    for fact, (_, error) in zip(facts, results, strict=True):
        fact["error"] = str(error) if error else None
        for line in [str(error), *getattr(error, "log_tail", ())] if error else ():
            print(f"workbench: {one_line(line)}", file=sys.stderr)
    good = [fact for fact in facts if not fact["error"]]
    _print(facts if as_json else good, as_json=as_json)
    return 0 if len(good) == len(facts) else 1


def _print(facts: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(facts, indent=1))
        return 0
    for fact in facts:
        print("\n".join(described(fact)))
        for axis, values in fact["axes"].items():
            print(one_line(f"  {axis:<8} {' '.join(values)}"))
        print(one_line(f"  {fact['capability']} {fact['checked'] or ''}".rstrip()))
    return 0


def _remove(options: argparse.Namespace) -> int:
    name = options.engine
    if name not in PLANS:
        _known(name)
    named = read_settings(settings_path()).engines.get(name)
    if named is not None:
        keep_engine(settings_path(), name, None)
        left = "" if install.state(name) == "absent" else f"; what was made for it stays: {created_python(name)}"
        result: dict[str, Any] = {"engine": name, "no_longer_named": named, "freed_bytes": 0}
        text = f"{name}: {named} is no longer used{left}"
    else:
        own = environment_for(name) if name in NEEDED else None
        if not os.path.isdir(created_python(name).parent.parent) and own is not None and own.usable:
            raise ConfigurationError(
                f"{name} is part of our own Python, {own.python}",
                where="engines remove",
                next=f"Remove its packages there: {own.python} -m pip uninstall {_main_package(name)}",
            )
        freed = install.remove(name, lambda phase, _line: print(f"{name}: {phase}", file=sys.stderr, flush=True))
        result = {"engine": name, "no_longer_named": None, "freed_bytes": freed}
        text = f"{name}: freed {freed / (1 << 20):,.0f} MiB"
    print(json.dumps(result, indent=1) if options.json else one_line(text))
    return 0


def _main_package(engine: str) -> str:
    return next((names[0] for module, names in NEEDED[engine].items() if module in (engine, "llama_cpp")), "")


def _known(engine: str) -> str:
    if engine not in NEEDED:
        raise ConfigurationError(
            f"there is no engine {engine!r}", where="engines", next=f"Engines: {', '.join(NEEDED)}."
        )
    return engine
