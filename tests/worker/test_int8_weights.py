from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from workbench.worker.loading import describe_weights, load, read_config
from workbench.worker.quant.weights import PACKED_ROWS, Int8Linear, quantize_linears

CPU = torch.device("cpu")


def layer(bias=False, dtype=torch.bfloat16):
    torch.manual_seed(2)
    linear = nn.Linear(64, 48, bias=bias, dtype=dtype)
    nn.init.normal_(linear.weight, 0, 0.05)
    return linear


def dequantized(quantized):
    return quantized.codes.float() * quantized.scale.float()[:, None]


def test_codes_are_the_nearest_ones_on_a_symmetric_scale_of_each_output_channel():
    linear = layer()
    quantized = Int8Linear(linear)
    error = (dequantized(quantized) - linear.weight.float()).abs()
    assert quantized.codes.dtype == torch.int8
    assert int(quantized.codes.abs().max()) == 127
    assert bool((error <= quantized.scale.float()[:, None] * 0.6).all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, PACKED_ROWS, PACKED_ROWS + 1, 40])
def test_both_kernels_give_the_product_with_the_dequantised_weight(rows, dtype, bias):
    linear = layer(bias, dtype)
    quantized = Int8Linear(linear)
    x = torch.randn(1, rows, 64, dtype=dtype)
    expected = x.float() @ dequantized(quantized).T + (linear.bias.float() if bias else 0)
    out = quantized(x)
    assert out.shape == (1, rows, 48)
    assert torch.allclose(out.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_channel_of_zeros_stays_zero():
    linear = layer()
    with torch.no_grad():
        linear.weight[3] = 0
    out = Int8Linear(linear)(torch.ones(2, 64, dtype=torch.bfloat16))
    assert bool(out.isfinite().all())
    assert not out[:, 3].any()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_decoders_linears_are_quantised_and_embeddings_and_head_left_alone(kind, tiny_llama, tiny_qwen3):
    folder = tiny_llama if kind == "llama" else tiny_qwen3
    model = load(folder, read_config(folder), "int8", "sdpa", CPU)
    told = describe_weights(model)
    assert told["scheme"] == "int8"
    assert told["quantized"].startswith("21 decoder Linears")
    assert "embed_tokens" in told["left_alone"]
    assert "lm_head" in told["left_alone"]
    assert set(told["values_by_dtype"]) == {"int8", "bfloat16", "float32"}
    assert told["values_by_dtype"]["int8"] == sum(
        module.codes.numel() for module in model.modules() if isinstance(module, Int8Linear)
    )
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_the_original_weights_are_not_kept(tiny_llama):
    model = load(tiny_llama, read_config(tiny_llama), "int8", "sdpa", CPU)
    gc.collect()
    shapes = {tuple(m.codes.shape) for m in model.modules() if isinstance(m, Int8Linear)}
    alive = [x for x in gc.get_objects() if type(x) is nn.Parameter and tuple(x.shape) in shapes]
    assert not [x for x in alive if x.dtype == torch.bfloat16]


def test_int8_logits_are_close_to_bf16_and_not_the_same(tiny_llama, stream):
    config = read_config(tiny_llama)
    ids = torch.from_numpy(stream).long()[None]
    with torch.inference_mode():
        plain, int8 = (load(tiny_llama, config, w, "sdpa", CPU)(input_ids=ids).logits.float() for w in ("bf16", "int8"))
    assert 0 < float((plain - int8).abs().mean()) < 0.05 * float(plain.abs().mean())


def test_plain_weights_are_named_by_the_dtype_that_was_loaded(tiny_llama):
    for weights in ("bf16", "fp32"):
        assert describe_weights(load(tiny_llama, read_config(tiny_llama), weights, "sdpa", CPU))["scheme"] == weights
    model = LlamaForCausalLM(read_config(tiny_llama))
    assert quantize_linears(model, "nothing.") == 0
    assert not isinstance(model, Qwen3ForCausalLM)
