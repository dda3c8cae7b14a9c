"""Quantized weights made by an llmcompressor process: once for a model, a recipe and a calibration text."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config.lane import Configuration
from workbench.config.schemes import SCHEMES, Recipe, check_widths, recipe
from workbench.engines.environments import Environment, environment_for
from workbench.engines.models import Model
from workbench.engines.process import EngineProcess
from workbench.engines.quantized import is_whole, linear_inputs, quantized_path, read_manifest
from workbench.engines.weights import locked, weights_hash
from workbench.errors import Cancelled, ConfigurationError, EngineError, ModelError
from workbench.protocol import events
from workbench.run.calibration import NONE, Calibration, calibration
from workbench.session.template import Renderer

ENGINE = "llmcompressor"
Tell = Callable[[str, int, int], None]
"""Told a phase and how far it is; may raise Cancelled."""


def recipe_of(configuration: Configuration) -> Recipe | None:
    """What a lane's weights are to be made by; None where they are the model's own. Raises ConfigurationError."""
    if configuration.weights not in SCHEMES:
        return None
    own = dict(configuration.extra)
    return recipe(configuration.weights, own.get("w_group", ""), where=f"lane {configuration.to_line()}")


def check_recipe(made: Recipe, model: Model, where: str) -> None:
    """Raise ConfigurationError where a recipe does not fit a model; nothing is loaded."""
    if model.facts.get("quantized_by"):
        raise ConfigurationError(
            f"the weights of {model.name} are quantized already", where=where, next="Use the original weights."
        )
    left = {*made.ignore}  # whole names, or the last part of one
    inputs = linear_inputs(model.folder)
    wanted = {name: width for name, width in inputs.items() if not {name, name.rpartition(".")[2]} & left}
    check_widths(made, wanted, where)


def lane_weights(
    configuration: Configuration, model: Model, studied: NDArray[np.int32] | None, tell: Tell
) -> tuple[Path, dict[str, Any]]:
    """The folder of a lane whose weights name a scheme, made where it is not there yet; and facts for its manifest."""
    made, where = recipe_of(configuration), f"lane {configuration.to_line()}"
    assert made is not None
    check_recipe(made, model, where)
    text = NONE
    if SCHEMES[made.scheme].calibrated:
        tell("reading calibration text", 0, 0)
        named = dict(configuration.extra).get("w_calibration")
        text = calibration((named,) if named else (), Renderer.load(model.folder), studied, where)
    path = cached(made, model, text, tell)
    manifest = {name: value for name, value in read_manifest(path).items() if name != "errors"}
    return path, {"quantization": manifest, "quantized_weights": weights_hash(path, tell)}


def cached(made: Recipe, model: Model, text: Calibration, tell: Tell) -> Path:
    """The folder of a recipe, from the cache where it is there and was made by the library that is here."""
    path = quantized_path(model.name, model.facts["weights_hash"], made, text.hash)
    environment = environment_for(ENGINE)
    if is_whole(path) and not _other_library(path, environment):
        return path
    with locked(path.with_name(f".{path.name}.lock"), tell):
        if is_whole(path):
            if not _other_library(path, environment):
                return path
            shutil.rmtree(path)
        make_at(path, made, model, text, tell)
    return path


def make_at(target: Path, made: Recipe, model: Model, text: Calibration, tell: Tell) -> None:
    """As `make`, beside its place and renamed: a folder that is there is whole."""
    part = target.with_name(f".part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        make(made, model, text, part, tell)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def make(made: Recipe, model: Model, text: Calibration, target: Path, tell: Tell) -> dict[str, Any]:
    """Have an engine process quantize a model into `target`; returns the manifest that it wrote.

    Raises ConfigurationError, ModelError, EngineError where the library is not there; Cancelled where `tell` does.
    """
    environment = environment_for(ENGINE)
    if environment is None or not environment.usable:
        raise EngineError(
            f"weights of {made.scheme} are made by llmcompressor, which is not installed",
            where=f"model {model.name}",
            next=f"workbench engines install {ENGINE}",
        )
    facts = {
        "model": model.name,
        "weights_hash": model.facts["weights_hash"],
        "calibration": text.facts or None,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    phase = f"making {made.scheme}"
    tell(phase, 0, 0)
    engine = EngineProcess(environment.python, ENGINE)
    try:
        request = events.Quantize(
            1, str(model.folder), str(target), made.to_json(), facts, {"windows": text.windows.astype("<i4")}
        )
        engine.send(request)
        done = total = 0
        while True:
            match engine.receive(timeout=0.5):
                case events.Converted(facts=manifest):
                    return manifest
                case events.Failed(kind="refused") as failed:
                    raise ConfigurationError(failed.what, where=failed.where, next=failed.next)
                case events.Failed() as failed:
                    raise ModelError(failed.what, where=failed.where or str(model.folder), next=failed.next)
                case events.Progress() as progress:
                    done, total = progress.done, progress.total
                case _:
                    pass
            tell(phase, done, total)
    except (Cancelled, KeyboardInterrupt):
        engine.kill()
        raise
    finally:
        engine.stop()


def _other_library(path: Path, environment: Environment | None) -> bool:
    """Whether the library that is installed is not the one that made a folder; what is not installed makes nothing."""
    if environment is None or not environment.usable:
        return False
    made_by: dict[str, Any] = read_manifest(path).get("versions") or {}
    return made_by.get(ENGINE) != environment.versions.get(ENGINE)
