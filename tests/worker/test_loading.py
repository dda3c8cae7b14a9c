from __future__ import annotations

import json
import shutil

import pytest
import torch

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError, ModelError
from workbench.worker.devices import choose_device, devices
from workbench.worker.loading import load, read_config, vocabulary_size

CPU = torch.device("cpu")
FP32 = "transformers:weights=fp32,kv=fp32,chunk=32"


@pytest.fixture
def copy(tiny_llama, tmp_path):
    return shutil.copytree(tiny_llama, tmp_path / "llama")


def start(backend, recorder, spec, folder, context=128):
    return backend.start(parse_spec(spec), folder, context, recorder())


def header(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return data, length


def test_a_cut_off_file_is_named(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="the weights cannot be read") as caught:
        load(copy, read_config(copy), "bf16", "sdpa", CPU)
    assert caught.value.where == str(copy)
    assert "fetch the model again" in caught.value.next


@pytest.mark.parametrize("bit", [0, 9, 40, 62])
def test_a_flipped_bit_in_the_length_of_the_header_is_named(copy, bit):
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(data))
    with pytest.raises(ModelError):
        load(copy, read_config(copy), "bf16", "sdpa", CPU)


@pytest.mark.parametrize(
    ("old", "new"), [(b"embed_tokens", b"embed_tokenr"), (b'"F32"', b'"F3r"'), (b"[64,96]", b"[64,97]")]
)
def test_a_flipped_bit_in_a_name_dtype_or_shape_is_named(copy, old, new):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ModelError):
        load(copy, read_config(copy), "bf16", "sdpa", CPU)


def test_missing_weights_are_an_error_and_never_random_numbers(copy):
    config = read_config(copy)
    config.num_hidden_layers = 4
    with pytest.raises(ModelError, match="tensors are missing"):
        load(copy, config, "bf16", "sdpa", CPU)


def test_a_pickle_is_not_loaded(copy):
    torch.save({"model.embed_tokens.weight": torch.zeros(1)}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load(copy, read_config(copy), "bf16", "sdpa", CPU)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, ModelError, "there is no config.json"),
        ('{"model_type": "llama"', ModelError, "damaged"),
        ("[]", ModelError, "damaged"),
        ('{"model_type": "mamba"}', ConfigurationError, "'mamba' is not supported"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}', ConfigurationError, "is quantized"),
        (
            '{"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}',
            ConfigurationError,
            "sliding-window attention and no window",
        ),
        (
            '{"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["conv"]}',
            ConfigurationError,
            "kind 'conv' are not supported",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(tmp_path, text, error, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=words):
        read_config(tmp_path)


def test_the_vocabulary_is_the_tokenizers_and_at_most_the_logits_width(copy):
    config = read_config(copy)
    assert vocabulary_size(copy, config) == 300
    data = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9}]}
    (copy / "tokenizer.json").write_text(json.dumps(data))
    assert vocabulary_size(copy, config) == 10
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        vocabulary_size(copy, config)


def test_what_runs_is_read_back(backend, recorder, tiny_qwen3):
    effective = start(backend, recorder, "transformers:weights=int8,kv=int4,attn=eager,threads=1", tiny_qwen3)
    assert (effective["weights"]["scheme"], effective["kv"]["scheme"], effective["attn"]) == ("int8", "int4", "eager")
    assert (effective["kv"]["attended_dtype"], effective["kv"]["group"]) == ("bfloat16", 32)
    assert (effective["threads"], effective["device"], effective["model_type"]) == (1, "cpu", "qwen3")
    assert (effective["context"], effective["context_limit"], effective["vocabulary"]) == (128, 256, 300)
    json.dumps(effective)


def test_weights_stay_loaded_while_only_the_cache_or_attention_changes(backend, recorder, tiny_llama, tiny_qwen3):
    assert not start(backend, recorder, FP32, tiny_llama)["weights_kept"]
    network = backend.loaded.model
    other = start(backend, recorder, FP32.replace("kv=fp32", "kv=int8,attn=eager"), tiny_llama, 64)
    assert other["weights_kept"]
    assert backend.loaded.model is network
    assert (other["kv"]["scheme"], other["attn"], other["context"]) == ("int8", "eager", 64)
    assert not start(backend, recorder, FP32, tiny_qwen3)["weights_kept"]


def test_a_context_beyond_the_models_limit_is_refused_with_both_numbers(backend, recorder, tiny_llama):
    with pytest.raises(ConfigurationError, match="257 tokens is not within the model's limit of 256"):
        start(backend, recorder, FP32, tiny_llama, 257)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("transformers:weights=w4", "cannot do weights=w4"),
        ("transformers:kv=int3", "cannot do kv=int3"),
        ("transformers:device=cuda:77", "device=cuda:77 is not here"),
        ("transformers:kv=int8,kv_group=24", "kv_group=24 does not divide"),
        ("transformers:kv=int8,kv_group=x", "kv_group=x is not a number"),
        ("transformers:colour=red", "no key 'colour'"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_and_the_loaded_model_stays(backend, recorder, tiny_llama, spec, words):
    start(backend, recorder, FP32, tiny_llama)
    with pytest.raises(ConfigurationError, match=words):
        start(backend, recorder, spec, tiny_llama)
    assert backend.loaded is not None


def test_the_preferred_device_comes_first():
    assert choose_device("auto") == torch.device(devices()[0].split(" ")[0])
    assert choose_device("cpu") == CPU
    assert Configuration().device == "auto"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch compiles with calls that it deprecates itself
def test_flex_eager_and_sdpa_agree_in_float32(tiny, loaded, stream):
    logits = {}
    for attention in ("sdpa", "eager", "flex_attention"):
        model = loaded(tiny, "fp32", attention)
        with torch.inference_mode():
            parts = [model.forward(stream[a:b], b - a) for a, b in ((0, 64), (64, 98), (98, 99), (99, 100))]
        logits[attention] = torch.cat(parts)
    assert torch.allclose(logits["sdpa"], logits["eager"], atol=1e-5)
    assert torch.allclose(logits["sdpa"], logits["flex_attention"], atol=1e-5)


def test_eager_and_sdpa_agree_in_float32(tiny, loaded, stream):
    with torch.inference_mode():
        sdpa, eager = (loaded(tiny, "fp32", attention).forward(stream, 100) for attention in ("sdpa", "eager"))
    assert torch.allclose(sdpa, eager, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch compiles with calls that it deprecates itself
def test_flex_is_warmed_by_start_or_refused_by_name(backend, recorder, tiny_llama, monkeypatch):
    assert start(backend, recorder, FP32 + ",attn=flex", tiny_llama)["attn"] == "flex"
    assert backend.loaded.cache.length == 0

    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler\nin a long message")

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", broken)
    with pytest.raises(ConfigurationError, match="cannot be compiled here: no C"):
        start(backend, recorder, FP32 + ",attn=flex,threads=1", tiny_llama)
    assert backend.loaded is None
