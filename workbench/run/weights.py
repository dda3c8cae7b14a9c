"""The weights that a lane loads: the model's folder, or what was made from it once and is kept by content: a GGUF file,
or a folder of quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config.lane import EMBEDDED_MODEL, Configuration
from workbench.config.schemes import SCHEMES
from workbench.engines.made import made_path
from workbench.engines.models import Model
from workbench.engines.process import EngineProcess
from workbench.engines.weights import file_hashes, locked
from workbench.errors import Cancelled, ConfigurationError, ModelError
from workbench.paths import models_dir
from workbench.protocol import events
from workbench.run.quantize import check_recipe, lane_weights, recipe_of

Tell = Callable[[str, int, int], None]
"""Told a phase and how far it is; may raise Cancelled."""
WHOLE = ("F32", "F16", "BF16")
"""Written from the folder itself; the others are quantised from F32."""


def check_weights(configuration: Configuration, model: Model) -> None:
    """Raise ConfigurationError where the lane's weights cannot be made of this model; nothing is made or loaded."""
    made = recipe_of(configuration) if configuration.engine != "llamacpp" else None
    if made is not None:
        check_recipe(made, model, f"lane {configuration.to_line()}")


def find_weights(
    configuration: Configuration, model: Model, python: str, tell: Tell, studied: NDArray[np.int32] | None = None
) -> tuple[Path, dict[str, Any]]:
    """The path that the lane's engine loads, and facts for the manifest. Raises ModelError, ConfigurationError.

    `studied` (n,) are the token ids of the session under study, which no weights are calibrated on.
    """
    if configuration.engine != "llamacpp" and configuration.weights in SCHEMES:
        return lane_weights(configuration, model, studied, tell)
    if configuration.engine != "llamacpp":
        return model.folder, {}
    if configuration.weights == "file":
        path, facts = _own_file(configuration, model), {"gguf_made": "the model's own file"}
    else:
        path, facts = _made(configuration.weights, model, python, tell)
    return path, {**facts, "gguf": path.name, "gguf_sha256": file_hashes([path], tell)[path.name]}


def _own_file(configuration: Configuration, model: Model) -> Path:
    embedded = models_dir() / f"{EMBEDDED_MODEL}.gguf"
    path = embedded if model.kind == "embedded" else Path(str(model.facts.get("source", "")))
    if model.kind not in ("embedded", "gguf"):
        raise ConfigurationError(
            f"model {model.name} is no GGUF file",
            where=f"lane {configuration.to_line()}",
            next="Use weights=BF16|Q8_0|..., which are made from it, or give model=FILE.gguf.",
        )
    if not path.is_file():
        raise ModelError(f"its GGUF file is gone: {path}", where=f"model {model.name}", next="Put it back.")
    if (recorded := model.facts.get("gguf_sha256")) and file_hashes([path])[path.name] != recorded:
        raise ModelError("its GGUF file has changed since it was added", where=str(path), next="Add it again.")
    return path


def _made(scheme: str, model: Model, python: str, tell: Tell) -> tuple[Path, dict[str, Any]]:
    path = made_path(model.name, model.facts["weights_hash"], scheme)
    facts: dict[str, Any] = {"gguf_made": f"{scheme} from the model's {model.facts['dtype']} weights"}
    if path.is_file():
        return path, facts
    with locked(path.with_name(f".{path.name}.lock"), tell):
        if not path.is_file():
            if plain := model.facts.get("plain_gguf"):
                source = Path(str(plain))
            else:
                source = model.folder if scheme in WHOLE else _made("F32", model, python, tell)[0]
            _convert(python, source, path, scheme, tell)
    return path, facts


def _convert(python: str, source: Path, target: Path, scheme: str, tell: Tell) -> None:
    """Have an engine process write `target`, under another name until it is whole."""
    part = target.with_name(f".part-{target.name}")
    part.unlink(missing_ok=True)
    engine = EngineProcess(python, "llamacpp")
    try:
        engine.send(events.Convert(1, str(source), str(part), scheme))
        while True:
            match engine.receive(timeout=0.5):
                case events.Converted():
                    break
                case events.Failed() as failed:
                    raise ModelError(failed.what, where=failed.where or str(source), next=failed.next)
                case events.Progress() as progress:
                    tell(f"making {scheme}", progress.done, progress.total)
                case None:
                    tell(f"making {scheme}", 0, 0)
                case _:
                    continue
        part.replace(target)
    except Cancelled:
        engine.kill()
        raise
    finally:
        part.unlink(missing_ok=True)
        engine.stop()
