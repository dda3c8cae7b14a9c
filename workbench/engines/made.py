"""GGUF files that were made from models for llama.cpp: named by model, content and scheme, made once, gone with it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from workbench.paths import models_dir

WRITER = 1
"""Raised when our writer gives another file, so that what was made before is made again."""


def made_dir() -> Path:
    """Where they are kept."""
    return models_dir() / "gguf"


def made_path(name: str, weights_hash: str, scheme: str) -> Path:
    """The file of a model's weights in a scheme, whether it is there or not."""
    digest = hashlib.sha256(f"{weights_hash} {WRITER}".encode()).hexdigest()[:12]
    return made_dir() / f"{plain_name(name)}-{digest}-{scheme}.gguf"


def remove_made(name: str) -> int:
    """Delete what was made from a model; returns the bytes freed."""
    freed = 0
    for path in made_dir().glob(f"{plain_name(name)}-*.gguf"):
        if re.fullmatch(rf"{re.escape(plain_name(name))}-[0-9a-f]{{12}}-[A-Z0-9_]+\.gguf", path.name):
            freed += path.stat().st_size
            path.unlink()
    return freed


def plain_name(name: str) -> str:
    """A file name made of a model's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "model"
