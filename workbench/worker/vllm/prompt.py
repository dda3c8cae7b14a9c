"""How vLLM reads a prompt: the folder's own tokenizer and template, and the sampling defaults it takes from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import ModelError
from workbench.protocol.wire import Arrays
from workbench.worker import prompt

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Of vLLM's SamplingParams; a folder's generation_config.json overrules them, also where it says do_sample=false."""


def inspect(folder: Path, text: str) -> tuple[dict[str, Any], Arrays]:
    """The facts and arrays of `protocol.events.Inspected`. Raises ModelError where the folder cannot be read."""
    facts, arrays = prompt.inspect(folder, text)
    return {**facts, "sampling": sampling(folder)}, arrays


def sampling(folder: Path) -> dict[str, Any]:
    """The sampling defaults of a `vllm serve` on this folder. Raises ModelError for a damaged file."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return dict(DEFAULTS)
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"generation_config.json is damaged: {error}", where=str(folder)) from error
    if not isinstance(found, dict):
        raise ModelError("generation_config.json is damaged: not an object", where=str(folder))
    return {name: value if found.get(name) is None else found[name] for name, value in DEFAULTS.items()}
