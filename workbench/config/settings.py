"""The user's settings file: the theme, keys by action id, and interpreters by engine. What is wrong in it is reported,
never fatal.

theme = "paper"
[keys]
zoom = "Z"
flip-next = "],n"
[engines]
vllm = "~/venvs/vllm/bin/python"
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from workbench.config.axes import ENGINES
from workbench.config.theme import DEFAULT_THEME, MAX_BYTES, read_start
from workbench.errors import ConfigurationError

SETTINGS_FILE = "settings.toml"
"""Its name, in the configuration folder."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose. `keys` maps an action's id to its keys, by comma; `engines` an engine to the path of the
    Python that runs it; `problems` says what was ignored.
    """

    theme: str = DEFAULT_THEME
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    engines: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[ConfigurationError, ...] = ()


def read_settings(path: Path) -> Settings:
    """The settings of a file; an absent file is the defaults, a damaged one the defaults and a problem."""
    try:
        data = read_start(path)
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        return Settings(problems=(ConfigurationError(f"cannot be read: {error}", where=str(path)),))
    if len(data) > MAX_BYTES:
        return Settings(problems=(ConfigurationError(f"larger than {MAX_BYTES} bytes", where=str(path)),))
    try:
        return parse_settings(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        return Settings(problems=(ConfigurationError(f"not UTF-8: {error}", where=str(path)),))


def keep_theme(path: Path, name: str) -> None:
    """Write the theme into the settings file and leave everything else in it as it is. Raises ConfigurationError.

    A file that is no TOML is not touched.
    """
    _keep(path, "", "theme", name)


def keep_engine(path: Path, engine: str, python: str | None) -> None:
    """Write an engine's interpreter into the settings file, or take it out (None), and leave the rest as it is.

    Raises ConfigurationError, also for a file that is no TOML, which is not touched.
    """
    _keep(path, "engines", engine, python)


def parse_settings(text: str, where: str = "settings") -> Settings:
    """The settings of a TOML text; every field that cannot be used is left at its default and named in `problems`."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets numbers and nesting beyond Python's limits through
        return Settings(problems=(ConfigurationError(f"not TOML: {error}", where=where),))
    problems: list[ConfigurationError] = []
    theme, keys, engines = data.pop("theme", DEFAULT_THEME), data.pop("keys", {}), data.pop("engines", {})
    problems += [
        ConfigurationError(f"unknown setting {name!r}", where=where, next="Known: theme, [keys], [engines].")
        for name in data
    ]
    if not isinstance(theme, str):
        problems.append(ConfigurationError("theme must be the name of a theme", where=where))
        theme = DEFAULT_THEME
    chosen = _texts("keys", keys, "a text of keys", 'zoom = "Z"', where, problems)
    pythons = _texts("engines", engines, "the path of a Python", 'vllm = "/path/to/python"', where, problems)
    for name in [name for name in pythons if name not in ENGINES]:
        del pythons[name]
        known = f"Engines: {', '.join(ENGINES)}."
        problems.append(ConfigurationError(f"[engines] has no engine {name!r}", where=where, next=known))
    return Settings(theme, MappingProxyType(chosen), MappingProxyType(pythons), tuple(problems))


def _texts(
    table: str, value: Any, what: str, sample: str, where: str, problems: list[ConfigurationError]
) -> dict[str, str]:
    """A table of texts; whatever in it is none goes to `problems`."""
    if not isinstance(value, dict):
        problems.append(ConfigurationError(f"[{table}] must be a table, such as {sample}", where=where))
        return {}
    found: dict[str, str] = {}
    for name, text in cast("dict[str, Any]", value).items():
        if isinstance(text, str) and text.strip():
            found[name] = text.strip()
        else:
            problem = ConfigurationError(f"[{table}] {name} must be {what}", where=where, next=f"Such as {sample}.")
            problems.append(problem)
    return found


def _keep(path: Path, table: str, key: str, value: str | None) -> None:
    """Set a key of a table ("" is the top) to a text, or take it out; the file's other lines stay byte for byte."""
    line = f"{key} = {json.dumps(value, ensure_ascii=False)}" if value is not None else ""
    advice = f"Write there{f', under [{table}]' if table else ''}: {line}" if line else f"Take {key} out by hand."
    try:
        path = path.resolve()  # a link to a file kept elsewhere stays one
        data = read_start(path) if path.exists() else b""
        if len(data) > MAX_BYTES:
            raise ConfigurationError(f"larger than {MAX_BYTES} bytes", where=str(path), next=advice)
        text = data.decode("utf-8")
        wanted = _with(tomllib.loads(text), table, key, value)
        new = _edited(text, table, key, line)
        if tomllib.loads(new) != wanted:
            raise ConfigurationError(f"{key} cannot be set without changing more", where=str(path), next=advice)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(new.encode("utf-8"))
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot be changed: {error}", where=str(path), next=advice) from error


def _with(data: dict[str, Any], table: str, key: str, value: str | None) -> dict[str, Any]:
    """What the file must say afterwards. Raises ValueError where the table is none."""
    inside = data.get(table, {}) if table else data
    if not isinstance(inside, dict):
        raise ValueError(f"{table} is not a table")
    held = dict(cast("dict[str, Any]", inside))
    held.pop(key, None)
    if value is not None:
        held[key] = value
    if not table:
        return held
    return {**data, table: held} if value is not None or table in data else data


def _edited(text: str, table: str, key: str, line: str) -> str:
    """The text with the key's line replaced, added at the start of its table, or (an empty `line`) taken out."""
    end = "\r\n" if "\r\n" in text else "\n"
    start = 0
    if table:
        header = re.search(rf"^[ \t]*\[[ \t]*{re.escape(table)}[ \t]*\][^\n]*(\n|\Z)", text, re.MULTILINE)
        if header is None:
            gap = "" if not text or text.endswith("\n") else end
            return text + (f"{gap}[{table}]{end}{line}{end}" if line else "")
        start = header.end()
    body = text[start:]
    following = re.search(r"^[ \t]*\[", body, re.MULTILINE)
    stop = following.start() if following else len(body)
    inside, rest = body[:stop], body[stop:]
    present = re.compile(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=[^\r\n]*(\r?\n|\Z)", re.MULTILINE)
    inside, found = present.subn(lambda match: f"{line}{match[1]}" if line else "", inside, count=1)
    if not found and line:
        before = text[:start]
        gap = end if before and not before.endswith("\n") else ""
        return f"{before}{gap}{line}{end}{inside}{rest}"
    return text[:start] + inside + rest
