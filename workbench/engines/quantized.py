"""Folders of quantized weights, made from models: named by content and recipe, made once, gone with their model."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from workbench.config.schemes import MANIFEST, Recipe
from workbench.engines.made import plain_name
from workbench.engines.weights import read_safetensors, weights_files
from workbench.errors import ModelError
from workbench.paths import models_dir
from workbench.session.tokenizer import read_object

WRITER = 1
"""Raised when our writer gives other weights, so that what was made before is made again."""


def quantized_dir() -> Path:
    """Where they are kept."""
    return models_dir() / "quantized"


def quantized_path(name: str, weights_hash: str, recipe: Recipe, windows_hash: str) -> Path:
    """The folder of a model's weights by a recipe and calibration text, whether it is there or not."""
    content = json.dumps([weights_hash, recipe.to_json(), windows_hash, WRITER], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return quantized_dir() / f"{plain_name(name)}-{digest}-{recipe.scheme}-{recipe.group}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """How a folder's weights were made; empty where that is not known. Raises ModelError where it is damaged."""
    return read_object(folder / MANIFEST, missing={})


def is_whole(folder: Path) -> bool:
    """Whether a folder of ours is there with all its weights."""
    try:
        return bool(read_manifest(folder)) and bool(weights_files(folder))
    except ModelError:
        return False


def remove_quantized(name: str) -> int:
    """Delete what was made from a model; returns the bytes freed."""
    freed = 0
    for folder in quantized_dir().glob(f"{plain_name(name)}-*"):
        if re.fullmatch(rf"{re.escape(plain_name(name))}-[0-9a-f]{{12}}-[a-z0-9-]+", folder.name):
            freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)
    return freed


def linear_inputs(folder: Path) -> dict[str, int]:
    """Inputs of each two-dimensional weight inside the layers of a model folder, by its module's name.

    From the files' headers: nothing is loaded. Raises ModelError for damaged files.
    """
    found: dict[str, int] = {}
    for path in weights_files(folder):
        for name, shape in read_safetensors(path).shapes.items():
            if name.endswith(".weight") and ".layers." in name and len(shape) == 2:
                found[name.removesuffix(".weight")] = shape[1]
    return found
