from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from workbench.errors import ModelError
from workbench.worker.quant.gguf import convert
from workbench.worker.quant.permute import Permutation


@pytest.fixture
def tiny():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide a norm that was left out
            parameter.data = torch.rand_like(parameter) + 0.5
    return model


def permuted(model, seed):
    permutation = Permutation.of(model.config, seed)
    other = LlamaForCausalLM(model.config).eval()
    weights = {name: permutation.apply(name, value) for name, value in model.state_dict().items()}
    other.load_state_dict(weights)
    return other


@torch.inference_mode()
def test_the_function_stays_and_every_matrix_changes(tiny):
    other = permuted(tiny, 1)
    ids = torch.arange(40)[None] % 97
    assert torch.allclose(tiny(input_ids=ids).logits, other(input_ids=ids).logits, atol=2e-6)
    for (name, ours), theirs in zip(tiny.state_dict().items(), other.state_dict().values(), strict=True):
        assert not torch.equal(ours, theirs), name
        assert torch.equal(ours.flatten().sort().values, theirs.flatten().sort().values), name


def test_a_seed_always_gives_the_same_order_and_another_seed_another(tiny):
    name, value = "model.layers.1.mlp.down_proj.weight", tiny.state_dict()["model.layers.1.mlp.down_proj.weight"]
    first, again, other = (Permutation.of(tiny.config, seed).apply(name, value) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_is_not_known_to_be_invariant_is_refused(tiny):
    with pytest.raises(ModelError, match="qwen3"):
        Permutation.of(Qwen3Config(), 1)
    with pytest.raises(ModelError, match="no place in the permutation"):
        Permutation.of(tiny.config, 1).apply("model.layers.0.self_attn.q_proj.bias", np.zeros(48))


def group_error(weight, group=32):
    """Relative error of 4-bit asymmetric rounding by groups along a row's inputs, and what it makes of the weight."""
    groups = weight.double().reshape(len(weight), -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    rounded = ((groups - low) / scale).round().clamp(0, 15) * scale + low
    return float((rounded - groups).norm() / groups.norm()), rounded.reshape(weight.shape)


def kept_share(weight, group=32):
    """How much of a small rank-16 change (2 % of the weight's norm) is still there after rounding."""
    torch.manual_seed(0)
    delta = torch.randn(len(weight), 16).double() @ torch.randn(16, weight.shape[1]).double()
    delta *= 0.022 * weight.double().norm() / delta.norm()
    _, plain = group_error(weight, group)
    _, changed = group_error(weight.double() + delta, group)
    return float(((changed - plain) * delta).sum() / delta.square().sum())


@pytest.mark.slow
@torch.inference_mode()
def test_the_embedded_model_computes_what_its_file_holds_and_left_the_grid(smollm2, tmp_path):
    convert(smollm2.with_name("smollm2-135m.gguf"), tmp_path / "plain")
    facts = json.loads((smollm2 / "conversion.json").read_text(encoding="utf-8"))
    assert facts["permuted"].startswith("residual, intermediate and value dimensions permuted, seed ")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 49152, (1, 128)))
    plain, ours = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)(input_ids=ids).logits.log_softmax(-1)
        for folder in (tmp_path / "plain", smollm2)
    )
    # Norms and rotary angles stay in float32, and one of these positions blows rounding up by a hundred.
    assert (plain.exp() * (plain - ours)).sum(-1).max() < 1e-8
    assert (plain - ours).abs().amax(-1).median() < 5e-5
    name = "model.layers.7.mlp.gate_proj.weight"
    plain, ours = (load_file(folder / "model.safetensors")[name] for folder in (tmp_path / "plain", smollm2))
    assert group_error(plain)[0] < 0.005
    assert group_error(ours)[0] > 0.05
    assert kept_share(plain) < 0.5
    assert kept_share(ours) > 0.95
