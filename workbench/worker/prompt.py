"""How a model folder's own tokenizer and template read a prompt: what transformers, and engines built on it, do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, GenerationConfig

from workbench.errors import ModelError
from workbench.protocol.wire import Arrays

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def inspect(folder: Path, text: str) -> tuple[dict[str, Any], Arrays]:
    """The facts and arrays of `protocol.events.Inspected`. Raises ModelError where the folder cannot be read."""
    tokenizer = _tokenizer(folder)
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    facts = {
        "template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        "template_from": "the model folder",
        "rendered": None,
        "adds_bos": _adds_bos(tokenizer),
        "specials": {name: str(value) for name, value in tokenizer.special_tokens_map.items() if value},
        "vocabulary": len(tokenizer),
        "sampling": _sampling(folder),
    }
    return facts, {"ids": np.array(ids, "<i4")}


def bos(folder: Path) -> int | None:
    """The token that the folder's tokenizer puts in front of a text; None where there is none. Raises ModelError."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = _tokenizer(folder)
    return tokenizer.bos_token_id if _adds_bos(tokenizer) else None


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises plain Exception for any fault in the files
        raise ModelError(f"the tokenizer cannot be read: {error}", where=str(folder)) from error


def _adds_bos(tokenizer: Any) -> bool:
    alone = tokenizer.encode("a", add_special_tokens=False)
    return tokenizer.encode("a")[: -len(alone)] == [tokenizer.bos_token_id]


def _sampling(folder: Path) -> dict[str, Any]:
    """What `generate` would apply: the folder's generation_config, and the library's defaults for the rest."""
    if not (folder / "generation_config.json").is_file():
        return {"do_sample": False}
    try:
        config: Any = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"generation_config.json is damaged: {error}", where=str(folder)) from error
    found = {name: getattr(config, name, None) for name in SAMPLING}
    found = {name: value for name, value in found.items() if value is not None}
    return found if found.get("do_sample") else {"do_sample": False}
