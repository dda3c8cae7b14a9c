"""A configuration: what one lane runs, frozen, hashable, printable as one line and as TOML."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from workbench.errors import ConfigurationError

EMBEDDED_MODEL = "smollm2-135m"
DEFAULT_CHUNK = 512

DEFAULTS: dict[str, tuple[str, str, str]] = {
    "transformers": ("bf16", "bf16", "sdpa"),
    "llamacpp": ("BF16", "f16", "auto"),
    "vllm": ("bf16", "auto", "auto"),
    "server": ("served", "served", "served"),
}
"""Weights, KV cache and attention of a lane that names none of them, each in its engine's own words."""

ALIASES: dict[str, dict[str, str]] = {"llamacpp": {"fa": "attn"}}
"""What an engine's users call one of our axes: read and printed in its place."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Engine × weights × KV cache × attention × drafter, and the numerics and sampling that go with them.

    `chunk` is the number of positions a prefill pass scores at once; `ctx` 0 means as long as the session needs;
    `threads` 0 means the engine's choice, read back into the manifest; `temperature` 0 is greedy; `extra` holds the
    engine's own keys, sorted.
    """

    engine: str = "transformers"
    model: str = EMBEDDED_MODEL
    weights: str = "bf16"
    kv: str = "bf16"
    attn: str = "sdpa"
    draft: str = "none"
    width: int = 0
    path: str = "prefill"
    device: str = "auto"
    threads: int = 0
    ctx: int = 0
    chunk: int = DEFAULT_CHUNK
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, low in (("width", 0), ("threads", 0), ("ctx", 0), ("chunk", 1), ("top_k", 0)):
            if getattr(self, name) < low:
                raise ConfigurationError(f"{name}={getattr(self, name)} is below {low}", where="lane")
        if self.path not in ("prefill", "decode"):
            raise ConfigurationError(f"path={self.path} is unknown", where="lane", next="Use prefill or decode.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(f"temperature={self.temperature} is not a temperature", where="lane")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p={self.top_p} is not in (0, 1]", where="lane")

    def to_line(self) -> str:
        """The one-line SPEC; axes that stand at their default are left out, except weights and kv."""
        default = default_of(self.engine)
        names = {axis: alias for alias, axis in ALIASES.get(self.engine, {}).items()}
        parts: list[str] = []
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("engine", "extra"):
                continue
            if value != getattr(default, item.name) or item.name in ("weights", "kv"):
                parts.append(f"{names.get(item.name, item.name)}={_quote(_plain(value))}")
        parts += [f"{key}={_quote(value)}" for key, value in self.extra]
        return f"{self.engine}:{','.join(parts)}"

    def to_toml(self) -> str:
        """A TOML table that `parse_toml` reads back to the same configuration."""
        lines: list[str] = []
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "extra":
                lines.append(f"{item.name} = {json.dumps(value, ensure_ascii=False)}")
        if self.extra:
            lines.append("[extra]")
            lines += [f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}" for key, value in self.extra]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` reads it back."""
        return {**asdict(self), "extra": dict(self.extra)}

    def key(self) -> str:
        """Sixteen hex digits that name this configuration."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def weights_key(self) -> tuple[Any, ...]:
        """What must be equal for an engine process to keep its loaded weights."""
        if self.engine == "vllm":  # it takes all of its settings when it loads, and none later
            return self.engine, self.key()
        return self.engine, self.model, self.weights, self.device, self.threads


def default_of(engine: str) -> Configuration:
    """The configuration of a lane that names its engine and nothing else."""
    weights, kv, attn = DEFAULTS.get(engine, DEFAULTS["transformers"])
    return Configuration(engine=engine, weights=weights, kv=kv, attn=attn)


def with_engine(configuration: Configuration, engine: str) -> Configuration:
    """The same on another engine: its own default weights, KV cache and attention, no drafter, none of the old keys."""
    if engine == configuration.engine:
        return configuration
    own = default_of(engine)
    values = {"weights": own.weights, "kv": own.kv, "attn": own.attn, "draft": "none", "width": 0}
    return replace(configuration, engine=engine, extra=(), **values)  # pyright: ignore[reportArgumentType]


def from_json(values: dict[str, Any]) -> Configuration:
    """The configuration of a JSON object. Raises ConfigurationError for unknown keys or wrong types."""
    extra: Any = values.get("extra") or {}
    plain = {key: value for key, value in values.items() if key != "extra"}
    default = Configuration()
    known: dict[str, type[Any]] = {item.name: type(getattr(default, item.name)) for item in fields(Configuration)}
    if not isinstance(extra, dict):
        raise ConfigurationError("extra must be a table of the engine's own keys", where="lane")
    for key, value in plain.items():
        if key not in known:
            raise ConfigurationError(
                f"unknown key {key!r}", where="lane", next=f"Known keys: {', '.join(sorted(known))}."
            )
        if known[key] is float and isinstance(value, int) and not isinstance(value, bool):
            plain[key] = float(value)
        elif type(value) is not known[key]:
            raise ConfigurationError(f"{key}={value!r} must be of type {known[key].__name__}", where="lane")
    own = cast(dict[Any, Any], extra)
    pairs = tuple(sorted((str(key), str(value)) for key, value in own.items()))
    return replace(default_of(plain.get("engine", default.engine)), **plain, extra=pairs)


def parse_toml(text: str, where: str = "lane") -> Configuration:
    """The configuration of a TOML document. Raises ConfigurationError."""
    try:
        return from_json(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not TOML: {error}", where=where) from error


def parse_spec(spec: str, base: Configuration | None = None) -> Configuration:
    """The configuration of `engine:key=value,...`; unnamed axes come from `base`. Raises ConfigurationError.

    A value that holds a comma is quoted with double quotes. Keys that are no axis are the engine's own.
    """
    engine, _, rest = spec.strip().partition(":")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", engine):
        raise ConfigurationError(
            f"{spec!r} is not a lane", where="lane", next="Write engine:key=value,... such as transformers:kv=int8."
        )
    default = with_engine(base or Configuration(), engine)
    values: dict[str, Any] = {}
    extra = dict(default.extra)
    aliases = ALIASES.get(engine, {})
    types: dict[str, type[Any]] = {item.name: type(getattr(default, item.name)) for item in fields(Configuration)}
    for written, value in _pairs(rest, spec):
        key = aliases.get(written, written)
        if key in values or (key in extra and key not in dict(default.extra)):
            raise ConfigurationError(f"{key!r} is given twice", where=f"lane {spec!r}")
        if key in types and key not in ("extra", "engine"):
            values[key] = _typed(key, value, types[key], spec)
        else:
            extra[key] = value
    return replace(default, **values, extra=tuple(sorted(extra.items())))


def read_spec(spec: str, base: Configuration | None = None) -> Configuration:
    """A lane SPEC of any form: one line, or the path of a TOML file. Raises ConfigurationError."""
    if spec.endswith(".toml"):
        try:
            return parse_toml(Path(spec).read_text(encoding="utf-8"), where=spec)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot be read: {error}", where=spec) from error
    return parse_spec(spec, base)


def _pairs(text: str, spec: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    position = 0
    pattern = re.compile(r'\s*([A-Za-z][A-Za-z0-9_.-]*)\s*=\s*("(?:[^"\\]|\\.)*"|[^,"]*)\s*(?:,|$)')
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            raise ConfigurationError(
                f"{text[position:]!r} is not key=value", where=f"lane {spec!r}", next="Separate pairs by commas."
            )
        key, value = match.group(1), match.group(2).strip()
        pairs.append((key, _unquoted(key, value, spec) if value.startswith('"') else value))
        position = match.end()
    return pairs


def _unquoted(key: str, value: str, spec: str) -> str:
    try:
        return str(json.loads(value))
    except ValueError as error:
        raise ConfigurationError(
            f"{key}={value} is not well quoted", where=f"lane {spec!r}", next="Quotes and backslashes as in JSON."
        ) from error


def _typed(key: str, value: str, kind: type, spec: str) -> Any:
    if not value:
        raise ConfigurationError(f"{key} has no value", where=f"lane {spec!r}")
    try:
        return kind(value)
    except ValueError as error:
        form = "a whole number" if kind is int else "a number"
        raise ConfigurationError(f"{key}={value} must be {form}", where=f"lane {spec!r}") from error


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r'[,"\s]', value) else value
