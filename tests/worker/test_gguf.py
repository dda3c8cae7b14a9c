from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM

from workbench.errors import ModelError
from workbench.worker.loading import read_config
from workbench.worker.quant.gguf import BLOCK_NAMES, GLOBAL_NAMES, convert, unpermute

BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
BYTES += [chr(256 + i) for i in range(256 - len(BYTES))]
TOKENS = [*BYTES, "he", "ll", "12", "Ġhe", "<|im_start|>", "<|im_end|>", "<tool_call>"]
MERGES = ["h e", "l l", "1 2", "Ġ he"]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]


def permute(values, heads):
    """What GGUF's writers do to the rotary halves of Llama's q and k."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, folder, architecture="llama", pre="smollm", kind=GGMLQuantizationType.F32, skip=(), **extra):
    """A GGUF file of a tiny model's weights and a small byte-level tokenizer."""
    model = (LlamaForCausalLM if architecture == "llama" else Qwen3ForCausalLM).from_pretrained(folder)
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = TOKENS + [f"<unused{i}>" for i in range(config.vocab_size - len(TOKENS))]
    writer.add_token_list(tokens)
    writer.add_token_types(TYPES + [5] * (config.vocab_size - len(TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_chat_template("{{ messages }}")
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    names = {theirs: ours for ours, theirs in GLOBAL_NAMES.items()}
    blocks = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name in skip:
            continue
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permute(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if name.startswith("model.layers."):
            _, _, index, *middle, leaf = name.split(".")
            target = f"blk.{index}.{blocks['.'.join(middle)]}.{leaf}"
        else:
            target = names[name]
        if values.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(target, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf(tiny_llama, tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_converted_folder_has_the_weights_of_the_file_rounded_to_bf16(
    architecture, tiny_llama, tiny_qwen3, tmp_path, stream
):
    folder = tiny_llama if architecture == "llama" else tiny_qwen3
    kind = LlamaForCausalLM if architecture == "llama" else Qwen3ForCausalLM
    seen = []
    facts = convert(
        write_gguf(tmp_path / "tiny.gguf", folder, architecture),
        tmp_path / "out",
        lambda done, total: seen.append((done, total)),
    )
    original = kind.from_pretrained(folder, dtype=torch.bfloat16)
    converted = kind.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    expected = original.state_dict()
    assert converted.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in converted.state_dict().items())
    ids = torch.from_numpy(stream).long()[None]
    with torch.inference_mode():
        assert torch.equal(original(input_ids=ids).logits, converted(input_ids=ids).logits)
    assert (facts["architecture"], facts["dtype"], facts["name"], facts["licence"]) == (
        architecture,
        "bfloat16",
        "tiny",
        "apache-2.0",
    )
    assert facts["source_types"] == {"F32": len(seen)}
    assert seen[-1][0] == seen[-1][1]
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == facts
    assert read_config(tmp_path / "out").max_position_embeddings == 256
    assert not list(tmp_path.glob(".out*"))


def test_quantised_blocks_are_dequantised_and_counted(tiny_llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama, kind=GGMLQuantizationType.Q8_0)
    facts = convert(path, tmp_path / "out")
    assert facts["source_types"]["Q8_0"] == 22
    name = "model.layers.1.mlp.up_proj.weight"
    original = LlamaForCausalLM.from_pretrained(tiny_llama).state_dict()[name]
    kind = GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(quants.dequantize(quants.quantize(original.numpy(), kind), kind)).bfloat16()
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()[name], expected)


def test_unpermute_undoes_the_writers_order():
    values = torch.arange(48 * 3).view(48, 3)
    assert torch.equal(unpermute(permute(values, 4), 4), values)


def test_the_tokenizer_splits_digits_keeps_control_tokens_and_gives_every_byte_back(gguf, tmp_path):
    convert(gguf, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("he12").tokens == ["he", "1", "2"]
    assert tokenizer.encode("he<|im_end|>").tokens == ["he", "<|im_end|>"]
    assert tokenizer.encode("he<tool_call>").tokens == ["he", "<tool_call>"]
    text = "naïve 漢字 \u0000\t 👨‍👩‍👧 12 he"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode(tokenizer.encode("he<|im_end|>").ids, skip_special_tokens=True) == "he"
    assert tokenizer.decode(tokenizer.encode("he<tool_call>").ids, skip_special_tokens=True) == "he<tool_call>"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.encode("he12") == tokenizer.encode("he12").ids
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "tokens"), [("gpt-2", ["12"]), ("qwen2", ["1", "2"]), ("llama-bpe", ["12"]), ("smollm", ["1", "2"])]
)
def test_each_known_pre_tokenizer_has_its_own_rule_for_digits(tiny_llama, tmp_path, pre, tokens):
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama, pre=pre), tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("12").tokens == tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "martian"}, "pre-tokenizer 'martian' is not known"),
        ({"llama__rope__scaling__type": "yarn"}, "rescales its rotary positions"),
    ],
)
def test_what_the_conversion_does_not_carry_over_is_refused_and_leaves_nothing(tiny_llama, tmp_path, change, words):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama, **change)
    with pytest.raises(ModelError, match=words):
        convert(path, tmp_path / "out")
    assert [x.name for x in tmp_path.iterdir()] == ["tiny.gguf"]


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' cannot be converted"):
        convert(tmp_path / "other.gguf", tmp_path / "out")


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.7, 0.99])
def test_a_cut_off_file_is_named(gguf, tmp_path, share):
    data = gguf.read_bytes()
    gguf.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError) as caught:
        convert(gguf, tmp_path / "out")
    assert caught.value.where == str(gguf)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("position", [0, 4, 8, 15, 16, 23, 24, 31, 40, 60, 100, 300])
def test_a_flipped_bit_in_the_header_gives_a_named_error_or_a_whole_model(gguf, tmp_path, position):
    data = bytearray(gguf.read_bytes())
    data[position] ^= 0x40
    gguf.write_bytes(bytes(data))
    try:
        convert(gguf, tmp_path / "out")
    except ModelError as error:
        assert error.where
        assert not (tmp_path / "out").exists()
    else:
        LlamaForCausalLM.from_pretrained(tmp_path / "out")


def test_a_folder_that_exists_is_not_overwritten(gguf, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        convert(gguf, tmp_path / "out")


def test_an_error_in_the_middle_leaves_nothing_behind(gguf, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(gguf, tmp_path / "out", stop)
    assert [x.name for x in tmp_path.iterdir()] == ["tiny.gguf"]


def test_large_models_are_written_in_shards_with_an_index(gguf, tmp_path, monkeypatch, tiny_llama):
    monkeypatch.setattr("workbench.worker.quant.gguf.SHARD_BYTES", 40_000)
    convert(gguf, tmp_path / "out")
    files = sorted(x.name for x in (tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    state = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    original = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(state[name], original[name]) for name in original)


def test_the_embedded_models_tokenizer_gives_back_every_edge_case(smollm2, shared):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    lines = (shared / "data" / "tokenizer" / "edge_cases.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    texts = [
        case["text"] if "text" in case else base64.b64decode(case["bytes_b64"]).decode("utf-8", "replace")
        for case in cases
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
