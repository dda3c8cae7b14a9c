"""A model's chat template, run sandboxed in the user's process with what templates expect to find.

The globals and filters are those that model authors write against: `tojson` without HTML escaping, `raise_exception`,
`strftime_now` (a fixed day here, so that a prompt is the same tomorrow), loop controls, and the `generation` block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from workbench.errors import ModelError, SessionError
from workbench.session.marks import marked_json
from workbench.session.tokenizer import read_object, token_text

TODAY = datetime(2025, 1, 1)
"""The day that a template which asks for one is told; it stands in the facts."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source and the named control tokens (`bos_token`, ...) that it may print."""

    source: str
    where: str
    tokens: dict[str, str]

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any] | None = None) -> ChatTemplate:
        """The template of a model folder: chat_template.jinja, else the one in tokenizer_config.json.

        Raises ModelError where the model has none (a base model) or a file cannot be read.
        """
        config = read_object(folder / "tokenizer_config.json", missing={}) if config is None else config
        named = {**read_object(folder / "special_tokens_map.json", missing={}), **config}
        tokens = {key: text for key, value in named.items() if key.endswith("_token") and (text := token_text(value))}
        path = folder / "chat_template.jinja"
        try:
            if path.is_file():
                return cls(path.read_text(encoding="utf-8"), str(path), tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot be read: {error}", where=str(path)) from error
        source = _inline(config.get("chat_template"))
        if not source:
            raise ModelError(
                "the model has no chat template: it is a base model or its folder is not whole",
                where=str(folder),
                next="Use an instruction-tuned model, or put its chat_template.jinja into the folder.",
            )
        return cls(source, str(folder / "tokenizer_config.json"), tokens)

    @property
    def hash(self) -> str:
        """sha256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @cached_property
    def names(self) -> frozenset[str]:
        """Variables that the template reads from outside. Raises SessionError where it does not parse."""
        from jinja2 import TemplateError, meta

        environment = _environment()
        try:
            return frozenset(meta.find_undeclared_variables(environment.parse(self.source)))
        except TemplateError as error:
            raise self._error(f"the chat template does not parse: {error}") from error

    @property
    def knows_tools(self) -> bool:
        """Whether it shows both tool schemas and an assistant's calls."""
        return "tools" in self.names and "tool_calls" in self.source

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        """The text of a conversation; `prompt` adds the header of an assistant's turn. Raises SessionError."""
        from jinja2 import TemplateError

        try:
            return self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.tokens
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise self._error(f"the chat template refuses the session: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise self._error(f"the chat template does not end: {type(error).__name__}") from error

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self.source)
        except TemplateError as error:
            raise self._error(f"the chat template does not parse: {error}") from error

    def _error(self, what: str) -> SessionError:
        return SessionError(
            what, where=self.where, next="The session may need another order of roles, or the model another template."
        )


def _inline(value: Any) -> str:
    """A template written in tokenizer_config.json: one text, or a list of named ones (`tool_use` before `default`)."""
    if isinstance(value, str):
        return value
    found: dict[str, str] = {}
    for entry in cast(list[Any], value if isinstance(value, list) else []):
        if isinstance(entry, dict):
            item = cast(dict[str, Any], entry)
            found[str(item.get("name"))] = str(item.get("template", ""))
    return found.get("tool_use") or found.get("default") or ""


def _environment() -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from workbench.session.generation_block import GenerationBlock

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    return environment


def _raise(message: Any) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escaping, and values that are marked keep their marks."""
    return marked_json(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
