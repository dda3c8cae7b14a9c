from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.conftest import Recorder
from workbench.config.lane import parse_spec
from workbench.config.schemes import SCHEMES, recipe
from workbench.engines.environments import Environment, ask, environment_for
from workbench.engines.models import Model, add_model, remove_model
from workbench.engines.quantized import is_whole, linear_inputs, quantized_dir, quantized_path, read_manifest
from workbench.errors import Cancelled, ConfigurationError, EngineError
from workbench.run import quantize
from workbench.run.calibration import NONE, Calibration
from workbench.run.quantize import cached, check_recipe, lane_weights
from workbench.worker.backends.transformers import make as transformers


@pytest.fixture
def model(tiny_folder: Path, home: Path) -> Model:
    return add_model(str(tiny_folder), "tiny")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def silent(_phase: str, _done: int, _total: int) -> None:
    pass


def test_inputs_are_read_from_the_headers_alone(model: Model) -> None:
    widths = linear_inputs(model.folder)
    config = json.loads((model.folder / "config.json").read_text())
    assert widths["model.layers.0.mlp.down_proj"] == config["intermediate_size"]
    assert widths["model.layers.0.self_attn.q_proj"] == config["hidden_size"]
    assert not any("embed" in name or "norm" in name for name in widths)


def test_without_the_library_the_command_that_installs_it_is_named(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "environment_for", lambda _engine: None)
    with pytest.raises(EngineError, match="workbench engines install llmcompressor"):
        cached(recipe("w8a16"), model, NONE, silent)
    assert not any(path.is_dir() for path in quantized_dir().iterdir())


def test_a_folder_that_is_quantized_already_is_refused(model: Model) -> None:
    stored = dataclasses.replace(model, facts={**model.facts, "quantized_by": "awq"})
    with pytest.raises(ConfigurationError, match="quantized already"):
        check_recipe(recipe("w8a16"), stored, "lane")


def test_another_text_model_or_group_is_another_folder(model: Model) -> None:
    weights = model.facts["weights_hash"]
    paths = {
        quantized_path("tiny", weights, recipe("w4a16"), ""),
        quantized_path("tiny", weights, recipe("w4a16", "32"), ""),
        quantized_path("tiny", weights, recipe("w4a16", ignore=("down_proj",)), ""),
        quantized_path("tiny", "other", recipe("w4a16"), ""),
        quantized_path("tiny", weights, recipe("w4a16"), "text"),
    }
    assert len(paths) == 5


@pytest.fixture
def library() -> Environment:
    asked = os.environ.get("WORKBENCH_LLMCOMPRESSOR_PYTHON")
    found = ask("llmcompressor", asked) if asked else environment_for("llmcompressor")
    if found is None or not found.usable:
        if os.environ.get("WORKBENCH_LLMCOMPRESSOR") == "required":
            pytest.fail("llmcompressor is required here and in no environment")
        pytest.skip("needs an environment with llmcompressor: `workbench engines install llmcompressor`")
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_scheme_is_made_loaded_and_read_back(
    library: Environment, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "environment_for", lambda _engine: library)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    model = add_model(str(tiny_folder), "tiny")
    windows = np.random.default_rng(0).integers(3, 258, (4, 64)).astype(np.int32)
    text = Calibration(windows, {"sessions": ["random"], "sha256": "x"})

    def stopped(_phase: str, _done: int, _total: int) -> None:
        raise Cancelled("cancelled")

    for scheme, about in SCHEMES.items():
        group = "32" if about.group == "64" else ""
        seen: list[tuple[int, int]] = []
        used = text if about.calibrated else NONE

        def tell(_phase: str, done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        folder = cached(recipe(scheme, group), model, used, tell)
        manifest = read_manifest(folder)
        assert is_whole(folder) and manifest["scheme"] == scheme
        assert 0 < manifest["error_mean"] <= manifest["error_max"] < 0.5
        assert manifest["modules"] == len(manifest["errors"]) == 7 * model.facts["layers"]
        assert not about.calibrated or any(done for done, _ in seen)
        assert cached(recipe(scheme, group), model, used, stopped) == folder  # from the cache: nothing is told
        backend = transformers()
        effective = backend.start(
            parse_spec(f"transformers:weights={scheme}" + (f",w_group={group}" if group else "")),
            folder, 64, Recorder(),  # type: ignore[arg-type]
        )  # fmt: skip
        assert effective["weights"]["scheme"] == scheme
        if about.kind == "int":
            assert effective["weights"]["levels"] <= 2**about.bits
        assert "emulated" in effective["weights"]["ran"]
        assert backend.loaded is not None
        with torch.inference_mode():
            assert bool(backend.loaded.forward(np.arange(3, 30), 27).isfinite().all())
        backend.stop()
    with pytest.raises(ConfigurationError, match="quantized already"):
        transformers().start(parse_spec("transformers:"), folder, 64, Recorder())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not w8a16"):
        transformers().start(parse_spec("transformers:weights=w8a16"), folder, 64, Recorder())  # type: ignore[arg-type]

    before = sorted(quantized_dir().iterdir())
    with pytest.raises(Cancelled):
        cached(recipe("w4a16", "channel"), model, NONE, stopped)
    assert [path for path in sorted(quantized_dir().iterdir()) if path.is_dir()] == [p for p in before if p.is_dir()]
    with pytest.raises(ConfigurationError, match="Use 32"):
        lane_weights(parse_spec("transformers:weights=w4a16,w_group=128"), model, None, silent)
    assert remove_model("tiny") > 0
    assert not any(path.is_dir() for path in quantized_dir().iterdir())
