from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from workbench.errors import ModelError
from workbench.worker.lab import train as training
from workbench.worker.lab.data import read_sessions
from workbench.worker.lab.lora import add_adapters, read_adapter
from workbench.worker.lab.merge import merge
from workbench.worker.lab.train import Plan, held_out_loss, session_loss, train

BASE = {"name": "tiny", "weights_hash": "0"}


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in bf16, as the embedded one is."""
    target = tmp_path_factory.mktemp("bf16") / "llama"
    LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).save_pretrained(target)
    return target


@pytest.fixture
def plan(folder: Path, tmp_path: Path) -> Plan:
    """Twelve sessions that repeat a pattern, two more that are held out; time enough for all."""
    pattern = np.random.default_rng(0).integers(0, 300, 12).astype(np.int32)
    ids = np.tile(pattern, 14 * 3)
    learn = np.tile(np.repeat([0, 1], 6).astype(np.uint8), 14 * 3)
    np.savez(tmp_path / "data.npz", ids=ids, learn=learn, starts=np.arange(15, dtype=np.int64) * 36, held=np.int64(2))
    return Plan(
        str(folder), str(tmp_path / "data.npz"), str(tmp_path / "out"), BASE, {}, 60.0, threads=1, rank=4, rate=1e-2
    )


def quiet(_fact: dict[str, Any]) -> None:
    pass


def tensors(plan: Plan) -> dict[str, torch.Tensor]:
    return load_file(Path(plan.output) / "adapter_model.safetensors")


def test_the_loss_falls_on_what_is_trained_and_on_what_is_held_out(plan: Plan) -> None:
    said: list[dict[str, Any]] = []
    facts = train(plan, said.append)
    losses = [fact["loss"] for fact in said if "loss" in fact]
    assert facts["finished"] and facts["step"] == 12
    assert losses[-1] < losses[0]
    assert facts["held"][-1] < facts["held"][0]
    assert facts["tokens"] == 12 * 36
    assert facts["learned"] == 12 * 18


def test_a_training_that_was_interrupted_goes_on_to_the_same_adapter(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(plan, quiet)
    whole = tensors(plan)
    parts = replace(plan, output=str(tmp_path / "parts"))
    steps = 0

    def interrupt(fact: dict[str, Any]) -> None:
        nonlocal steps
        steps += "loss" in fact
        if steps == 5 and "loss" in fact:
            os.kill(os.getpid(), signal.SIGINT)

    # The learning rate follows the clock; here it follows the steps alone.
    monkeypatch.setattr(training.time, "monotonic", lambda: 0.0)
    first = train(parts, interrupt)
    assert not first["finished"] and first["step"] == 5
    assert train(parts, quiet)["finished"]
    for name, value in tensors(parts).items():
        assert torch.allclose(value.float(), whole[name].float(), atol=2e-2), name


def test_a_checkpoint_of_another_run_is_not_continued(plan: Plan) -> None:
    train(plan, quiet)
    with pytest.raises(ModelError, match="seed differ"):
        train(replace(plan, seed=1), quiet)
    assert train(plan, quiet)["step"] == 12


def test_time_ends_a_run_and_its_adapter_is_whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(clock)))
    facts = train(replace(plan, minutes=1.0), quiet)
    assert facts["finished"] and facts["step"] == 2
    assert len(tensors(plan)) == 2 * 7 * 3


def test_an_adapter_begins_as_the_model_itself(folder: Path) -> None:
    ids = torch.arange(20)[None]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = model(ids).logits
    add_adapters(model, 4, 8.0, seed=0)
    assert torch.equal(model(ids).logits, before)


def test_a_merged_model_is_the_trained_one(plan: Plan, folder: Path, tmp_path: Path) -> None:
    train(plan, quiet)
    facts = merge(folder, Path(plan.output), tmp_path / "merged")
    assert 0 < facts["relative_change"] < 1
    sessions = read_sessions(Path(plan.data))
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).requires_grad_(False)
    trained_loss = json.loads((Path(plan.output) / "training.json").read_text())["held"][-1]
    assert held_out_loss(merged, sessions) == pytest.approx(trained_loss, rel=0.05)
    assert (tmp_path / "merged" / "config.json").is_file()


def test_an_adapter_for_another_model_or_a_damaged_one_is_refused(plan: Plan, tiny_qwen3: Path, tmp_path: Path) -> None:
    train(plan, quiet)
    pairs, scale, _ = read_adapter(Path(plan.output))
    assert scale == 32 / 4
    assert all(down.shape[0] == 4 == up.shape[1] for down, up in pairs.values())
    (Path(plan.output) / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="not an adapter"):
        merge(tiny_qwen3, Path(plan.output), tmp_path / "merged")


def test_long_sessions_have_the_same_gradient_with_less_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, learn = torch.arange(60), torch.ones(60, dtype=torch.uint8)

    def gradient() -> torch.Tensor:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        trained = add_adapters(model, 4, 8.0, seed=0)
        session_loss(model, ids, learn).backward()
        return torch.cat([value.grad.flatten() for value in trained.values() if value.grad is not None])

    plain = gradient()
    monkeypatch.setattr(training, "_RECOMPUTE_FROM", 1)
    assert torch.allclose(gradient(), plain)
    assert plain.abs().max() > 0


def test_loss_is_taken_where_it_is_marked_and_nowhere_else(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    ids = torch.arange(30)
    learn = torch.zeros(30, dtype=torch.uint8)
    learn[[7, 20]] = 1
    logits = model(ids[None]).logits[0].log_softmax(-1)
    wanted = -(logits[6, 7] + logits[19, 20]) / 2
    assert torch.allclose(session_loss(model, ids, learn), wanted)


@pytest.mark.parametrize("damage", ["missing", "no session", "pickle"])
def test_training_data_that_cannot_be_used_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "data.npz"
    if damage == "no session":
        empty = np.zeros(0, np.int32)
        np.savez(path, ids=empty, learn=empty.astype(np.uint8), starts=np.zeros(1, np.int64), held=np.int64(0))
    elif damage == "pickle":
        np.savez(path, ids=np.array([{}]), learn=np.zeros(1), starts=np.zeros(1), held=np.int64(0))
    with pytest.raises(ModelError):
        read_sessions(path)


@pytest.mark.slow
def test_the_process_says_each_step_and_at_last_its_facts(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"task": "train", **asdict(plan)}))
    done = subprocess.run([sys.executable, "-m", "workbench.worker.lab", str(path)], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert sum("loss" in line for line in lines) == 12
    assert lines[-1]["done"]["finished"]
    path.write_text(json.dumps({"task": "train", **asdict(replace(plan, data="nowhere"))}))
    failed = subprocess.run([sys.executable, "-m", "workbench.worker.lab", str(path)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "nowhere" in json.loads(failed.stdout.splitlines()[-1])["error"]["where"]
