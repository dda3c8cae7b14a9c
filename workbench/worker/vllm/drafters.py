"""A lane's drafter as vLLM's speculative configuration."""

from __future__ import annotations

import importlib.util
from typing import Any

from workbench.config.lane import Configuration
from workbench.config.rules import drafter
from workbench.errors import ConfigurationError

WIDTHS = {"ngram": 4, "suffix": 8, "draft_model": 4, "eagle3": 3, "mtp": 1, "dflash": 8, "dspark": 8}
"""Tokens drafted at once where the lane does not say."""

LOOKUP = (2, 4)
"""Shortest and longest run of tokens that `ngram` looks for in the text so far."""


def speculation(configuration: Configuration) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None without a drafter. Raises ConfigurationError."""
    kind, path = drafter(configuration)
    own = dict(configuration.extra)
    lookups = [key for key in ("lookup_min", "lookup_max") if key in own]
    if lookups and kind != "ngram":
        raise ConfigurationError(f"{lookups[0]} has no effect on draft={kind}", where="vllm", next="Leave it out.")
    if kind == "none":
        return None
    if kind == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigurationError(
            "draft=suffix needs the package arctic-inference, which is not in vLLM's environment",
            where="vllm",
            next="Install arctic-inference there (it is built from source), or use draft=ngram.",
        )
    values: dict[str, Any] = {"method": kind, "num_speculative_tokens": configuration.width or WIDTHS[kind]}
    if path:
        values["model"] = path
    if kind == "ngram":
        low = int(own.get("lookup_min", min(LOOKUP[0], int(own.get("lookup_max", LOOKUP[0])))))
        high = int(own.get("lookup_max", max(LOOKUP[1], low)))
        if not 1 <= low <= high:
            raise ConfigurationError(
                f"lookup_min={low} and lookup_max={high} are no range", where="vllm", next="Such as 2 and 4."
            )
        values |= {"prompt_lookup_min": low, "prompt_lookup_max": high}
    return values
