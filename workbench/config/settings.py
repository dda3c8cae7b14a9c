"""The user's settings file: the theme, and keys by action id. What is wrong in it is reported, never fatal.

theme = "paper"
[keys]
zoom = "Z"
flip-next = "],n"
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from workbench.config.theme import DEFAULT_THEME, MAX_BYTES, read_start
from workbench.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose. `keys` maps an action's id to its keys, by comma; `problems` says what was ignored."""

    theme: str = DEFAULT_THEME
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
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
    line = f"theme = {json.dumps(name, ensure_ascii=False)}"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        tomllib.loads(text)
        head, mark, tables = re.match(r"(.*?)(^\s*\[|\Z)(.*)", text, re.DOTALL | re.MULTILINE).groups()  # pyright: ignore[reportOptionalMemberAccess]
        head, found = re.subn(r"^\s*theme\s*=.*$", lambda _: line, head, count=1, flags=re.MULTILINE)
        new = (head if found else f"{line}\n{head}") + mark + tables
        if tomllib.loads(new) != {**tomllib.loads(text), "theme": name}:
            raise ConfigurationError("its theme cannot be set without changing more", where=str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(new, encoding="utf-8")
        part.replace(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot be changed: {error}", where=str(path), next=f"Write there: {line}") from error


def parse_settings(text: str, where: str = "settings") -> Settings:
    """The settings of a TOML text; every field that cannot be used is left at its default and named in `problems`."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets numbers and nesting beyond Python's limits through
        return Settings(problems=(ConfigurationError(f"not TOML: {error}", where=where),))
    problems: list[ConfigurationError] = []
    theme, keys = data.pop("theme", DEFAULT_THEME), data.pop("keys", {})
    problems += [
        ConfigurationError(f"unknown setting {name!r}", where=where, next="Known: theme, [keys].") for name in data
    ]
    if not isinstance(theme, str):
        problems.append(ConfigurationError("theme must be the name of a theme", where=where))
        theme = DEFAULT_THEME
    chosen: dict[str, str] = {}
    if isinstance(keys, dict):
        for action, value in cast("dict[str, Any]", keys).items():
            if isinstance(value, str) and value.strip():
                chosen[action] = value.strip()
            else:
                problems.append(
                    ConfigurationError(
                        f"[keys] {action} must be a text of keys", where=where, next='Such as zoom = "Z".'
                    )
                )
    else:
        problems.append(ConfigurationError("[keys] must be a table of action = keys", where=where))
    return Settings(theme, MappingProxyType(chosen), tuple(problems))
