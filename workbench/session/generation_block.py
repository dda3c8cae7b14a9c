"""The `{% generation %}` block of chat templates: it marks what an assistant wrote and prints its body unchanged."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    """Accepts the block; roles come from marks in the messages, which every template carries, so it adds nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> Any:
        """The body in a scope of its own, as a block's variables are."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
