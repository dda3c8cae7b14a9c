"""`quantize`: weights of a scheme made from a model, for transformers and vLLM to load."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from workbench.cli.narration import Narrator
from workbench.cli.signals import ending_as_by_ctrl_c
from workbench.config.lane import EMBEDDED_MODEL
from workbench.config.schemes import CHANNEL, SCHEMES, recipe
from workbench.engines.models import find_model
from workbench.engines.quantized import read_manifest
from workbench.errors import ConfigurationError
from workbench.paths import expanded
from workbench.run.calibration import NONE, calibration
from workbench.run.convert import converter
from workbench.run.prepare import told, transformers_python
from workbench.run.quantize import cached, check_recipe, make_at
from workbench.session.template import Renderer
from workbench.session.text import one_line


def quantize(options: argparse.Namespace) -> int:
    """`workbench quantize MODEL --scheme S`."""
    narrator = Narrator()
    ignore = tuple(word for text in options.ignore for word in text.split(",") if word)
    made = recipe(options.scheme, options.group or "", ignore)
    calibrated = SCHEMES[made.scheme].calibrated
    if options.calibrate and not calibrated:
        raise ConfigurationError(
            f"{made.scheme} reads no calibration text", where="quantize", next="Leave --calibrate out."
        )
    target = expanded(options.output) if options.output else None
    if target is not None and target.exists():
        raise ConfigurationError("it is there already", where=str(target), next="Give another folder with -o.")
    model = find_model(options.model or EMBEDDED_MODEL, converter(transformers_python), told(narrator.say))
    check_recipe(made, model, f"model {model.name}")
    began = time.monotonic()

    def tell(phase: str, done: int, total: int) -> None:
        share = f" layer {done} of {total}" if total else ""
        narrator.draw(f"{phase}{share}, {time.monotonic() - began:.0f} s")

    try:
        with ending_as_by_ctrl_c():
            text = NONE
            if calibrated:
                tell("reading calibration text", 0, 0)
                text = calibration(tuple(options.calibrate), Renderer.load(model.folder), None, "quantize")
            if target is None:
                folder = cached(made, model, text, tell)
            else:
                make_at(folder := target, made, model, text, tell)
    finally:
        narrator.clear()
    manifest = read_manifest(folder)
    if options.json:
        print(json.dumps({"folder": str(folder), **manifest}, indent=1))
    else:
        _show(folder, manifest)
    return 0


def _show(folder: Path, manifest: dict[str, Any]) -> None:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    per = "per channel" if manifest["group"] == CHANNEL else f"groups of {manifest['group']}"
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    worst = max(manifest["errors"], key=manifest["errors"].__getitem__)
    lines = [
        f"{folder}",
        f"  scheme       {manifest['scheme']}, {per}, symmetric",
        f"  modules      {manifest['modules']} Linears; left alone: {', '.join(manifest['ignore'])}",
        f"  weight error {manifest['error_mean']:.4f} mean, {manifest['error_max']:.4f} at most ({worst})",
        f"               {manifest['error_of']}",
        f"  size         {size / 1e6:,.0f} MB",
        f"  made by      {versions}",
    ]
    if text := manifest.get("calibration"):
        words = f"{text['windows']} × {text['length']} tokens of {', '.join(text['sessions'])}"
        lines.append(f"  calibration  {words}, sha256 {text['sha256'][:12]}; left out: {text['left_out']}")
    for line in lines:
        print(one_line(line))
    print(one_line(f"load it: --lane transformers:model={folder},weights=checkpoint"), file=sys.stderr)
