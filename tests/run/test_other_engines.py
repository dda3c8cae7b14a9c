"""Lanes of other engines through a whole run: llama.cpp for real, on a tiny model that is written as GGUF here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError, ModelError
from workbench.report.compare import compare
from workbench.run.experiment import Experiment
from workbench.run.prepare import Ask
from workbench.run.weights import find_weights

FP32 = "transformers:weights=fp32,kv=fp32,chunk=256"


def ran(ask: Ask, said: list[str] | None = None) -> dict[str, Any]:
    experiment = Experiment(ask, (said if said is not None else []).append)
    try:
        state = experiment.prepare()
        experiment.start()
        assert experiment.wait(240)
        return compare(state)
    finally:
        experiment.close()


def ask(session: Path, folder: Path, output: Path, *lanes: str, reference: str = FP32) -> Ask:
    model = parse_spec(f"{reference},model={folder}")
    base = Configuration(model=str(folder), chunk=256)
    return Ask(str(session), model, tuple(parse_spec(lane, base) for lane in lanes), output)


def test_llama_cpp_in_float32_is_the_reference_and_its_quantizations_are_told_apart(
    tiny_folder: Path, tiny_session: Path, tmp_path: Path
) -> None:
    lanes = ("llamacpp:weights=F32,kv=f32,fa=off", "llamacpp:weights=Q8_0,kv=f32", "llamacpp:weights=F32,kv=q4_0,fa=on")
    comparison = ran(ask(tiny_session, tiny_folder, tmp_path / "run.wbs", *lanes))
    exact, weights, cache = comparison["lanes"]
    for lane in comparison["lanes"]:
        assert lane["status"] == "done", lane["reason"]
        assert lane["manifest"]["tokens_checked"] == "equal to the engine's own"
        assert lane["manifest"]["gguf_sha256"]
        assert lane["decode_tps"] > 0
    assert exact["kl"]["mean"] < 1e-6 and exact["flips"] == 0
    assert exact["kl"]["mean"] < weights["kl"]["mean"] < cache["kl"]["mean"]
    assert cache["manifest"]["kv"]["scheme"] == "q4_0" and exact["manifest"]["attn"] == "off"


def test_llama_cpp_records_a_reference_that_its_own_lane_equals_bit_by_bit(
    tiny_folder: Path, tiny_session: Path, tmp_path: Path
) -> None:
    reference = "llamacpp:weights=BF16,kv=f16,chunk=256"
    found = ran(
        ask(tiny_session, tiny_folder, tmp_path / "run.wbs", reference, "llamacpp:kv=q8_0", reference=reference)
    )
    same, other = found["lanes"]
    assert same["status"] == other["status"] == "done"
    assert same["kl"]["mean"] == 0 and same["kl"]["max"] == 0
    assert other["kl"]["mean"] > 0
    assert found["reference"]["engine"] == "llamacpp"


def test_a_lane_that_no_reference_can_be_is_refused_before_anything_runs(
    tiny_folder: Path, tiny_session: Path, tmp_path: Path
) -> None:
    asked = ask(tiny_session, tiny_folder, tmp_path / "x.wbs", reference="server:url=http://127.0.0.1:9")
    experiment = Experiment(asked, print)
    with pytest.raises(ConfigurationError, match="cannot be the reference"):
        experiment.prepare()
    assert not (tmp_path / "x.wbs").exists()


def test_weights_of_a_file_need_a_model_that_is_one(tiny_folder: Path, tiny_session: Path, tmp_path: Path) -> None:
    asked = ask(tiny_session, tiny_folder, tmp_path / "x.wbs", "llamacpp:weights=file")
    found = ran(asked)["lanes"][0]
    assert found["status"] == "failed"
    assert "is no GGUF file" in found["reason"]


def test_a_gguf_file_of_another_vocabulary_is_refused(
    tiny_folder: Path, tiny_session: Path, tmp_path: Path, smollm2: Path
) -> None:
    gguf = smollm2.parent / "smollm2-135m.gguf"
    if not gguf.is_file():
        pytest.skip("the embedded model's GGUF file is not there")
    asked = Ask(
        str(tiny_session),
        parse_spec(f"{FP32},model={tiny_folder}"),
        (parse_spec(f"llamacpp:weights=file,model={gguf}"),),
        tmp_path / "x.wbs",
    )
    with pytest.raises(ModelError, match="its token 0 is"):
        Experiment(asked, print).prepare()


def test_what_is_not_llama_cpp_loads_the_folder_itself() -> None:
    class Folder:
        folder = Path("/nowhere/model")

    path, facts = find_weights(parse_spec("vllm:"), Folder(), "python", lambda *_: None)  # type: ignore[arg-type]
    assert path == Folder.folder and facts == {}
