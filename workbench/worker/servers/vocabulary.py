"""How many ids the session's tokenizer has, and how wide its model's logits are: what a server must agree with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import ModelError


def sizes(folder: Path) -> tuple[int, int]:
    """Ids of the folder's tokenizer.json, and the width of its config.json, which may be padded beyond them.

    Raises ModelError.
    """
    width = _read(folder / "config.json").get("vocab_size")
    if not isinstance(width, int) or width < 1:
        raise ModelError("config.json names no vocab_size", where=str(folder))
    path = folder / "tokenizer.json"
    if not path.is_file():
        return width, width
    data = _read(path)
    try:
        vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
        top = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        return min(max([top, *(int(item["id"]) for item in added)]) + 1, width), width
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"tokenizer.json is damaged: {error}", where=str(folder)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}", where=str(path.parent)) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} is not an object", where=str(path.parent))
    return found
