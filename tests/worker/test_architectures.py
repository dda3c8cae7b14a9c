"""Tiny models with random weights of every supported type, in float32, through the backend as a lane starts it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from workbench.config.lane import parse_spec
from workbench.engines.weights import model_facts
from workbench.errors import Cancelled, ConfigurationError
from workbench.protocol.events import Generate, Score

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 24}
DELTA = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
TYPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "4 of 4 layers (full attention)"),
    "qwen2": ("Qwen2", {}, "4 of 4 layers (full attention)"),
    "qwen3": ("Qwen3", {}, "4 of 4 layers (full attention)"),
    "mistral": ("Mistral", WINDOW, "4 of 4 layers (sliding-window attention)"),
    "gemma2": ("Gemma2", {**WINDOW, "query_pre_attn_scalar": 32},
               "4 of 4 layers (2 full attention, 2 sliding-window attention)"),
    "gemma3_text": ("Gemma3", {**WINDOW, "query_pre_attn_scalar": 32,
                               "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
                    "4 of 4 layers (1 full attention, 3 sliding-window attention)"),
    "gemma4_text": ("Gemma4", {**WINDOW, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "global_head_dim": 64,
                               "layer_types": ["sliding_attention", "full_attention"] * 3,
                               "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
                    "4 of 6 layers (2 full attention, 2 sliding-window attention);"
                    " 2 layers read what earlier ones stored"),
    "gpt_oss": ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
                "4 of 4 layers (2 full attention, 2 sliding-window attention)"),
    "qwen3_5_text": ("Qwen3_5", DELTA,
                     "1 of 4 layers (full attention); 3 linear-attention layers keep their own state"),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
                         "1 of 4 layers (full attention); 3 linear-attention layers keep their own state"),
}  # fmt: skip
EAGER = ("gemma2", "gpt_oss")
HYBRID = ("qwen3_5_text", "qwen3_5_moe_text")
LAYERED = [kind for kind in TYPES if kind not in ("llama", "qwen2", "qwen3", "qwen3_5_moe_text")]
"""Types whose layers are not those that the tests beside this file run on already."""


def attention(kind):
    return "eager" if kind in EAGER else "sdpa"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function: model type to its folder, made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            name, fields, _ = TYPES[kind]
            text = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
            torch.manual_seed(7)
            model = getattr(transformers, f"{name}ForCausalLM")(text(**{**SIZES, **fields}))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0, 0.15)
                    elif "sinks" in dict(model.named_parameters()):
                        parameter.normal_()
            model.generation_config.eos_token_id = None
            made[kind] = tmp_path_factory.mktemp("models") / kind
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture
def start(backend, recorder, folders):
    """A function: model type and KV scheme to a backend that has started a lane of it."""

    def started(kind, kv="fp32", **own):
        extra = "".join(f",{key}={value}" for key, value in own.items())
        spec = f"transformers:weights=fp32,kv={kv},attn={attention(kind)},chunk=32{extra}"
        return backend, backend.start(parse_spec(spec), folders(kind), 128, recorder())

    return started


def whole(backend, ids):
    """Logits of one pass without any cache."""
    with torch.inference_mode():
        return backend.loaded.model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]


def run(backend, ids, borders):
    with torch.inference_mode():
        return torch.cat([backend.loaded.forward(ids[a:b], b - a) for a, b in pairwise(borders)])


def cut(backend, length):
    with torch.inference_mode():
        backend.loaded.truncate(length)


def tolerance(kind):
    """Nats of KL. The delta rule's chunks of 64 tokens and its single steps sum in quite different orders."""
    return 1e-7 if kind in HYBRID else 1e-8


def divergence(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


def score(backend, recorder, ids, **fields):
    job = recorder()
    request = Score(**{"job": 1, "first": 1, "record": True, "arrays": {"ids": ids}, **fields})
    backend.score(request, job)
    return job.joined("trace")["logprob"]


@pytest.mark.parametrize("kind", TYPES)
def test_chunks_and_single_tokens_give_the_logits_of_one_pass_without_a_cache(start, folders, stream, kind):
    backend, effective = start(kind)
    exact = whole(backend, stream)
    for borders in ([0, 100], [0, 32, 64, 96, 100], [0, 7, 50, 51, 52, 100], list(range(101))):
        cut(backend, 0)
        assert divergence(exact, run(backend, stream, borders)) < tolerance(kind)
    assert effective["kv"]["layers"] == TYPES[kind][2]
    assert effective["model_type"] == kind
    assert model_facts(folders(kind))["kv_layers"] == len(backend.loaded.cache.stored)
    assert effective["attn"] == attention(kind)
    json.dumps(effective)


@pytest.mark.parametrize("kind", LAYERED)
def test_a_scheme_applies_to_the_layers_that_have_a_cache_and_carries_its_error_on_both_paths(start, stream, kind):
    backend, effective = start(kind, "int4")
    exact = whole(backend, stream)
    one = run(backend, stream, [0, 100])
    cut(backend, 0)
    parts = run(backend, stream, list(range(101)))
    error = float((one - exact).abs().mean())
    assert error > 1e-4
    assert float((one - parts).abs().mean()) < 0.3 * error
    assert (effective["kv"]["scheme"], effective["kv"]["layers"]) == ("int4", TYPES[kind][2])
    shapes = [shape for shape in backend.loaded.cache.shapes if shape.stores]
    values = 2 * 128 * sum(shape.heads * shape.head_dim for shape in shapes)
    assert effective["kv"]["bytes"] == values * (0.5 + 4 / 32)


@pytest.mark.parametrize("kind", LAYERED)
def test_rows_scored_after_a_cut_are_those_of_a_fresh_start(start, stream, recorder, kind):
    backend, _ = start(kind)
    fresh = score(backend, recorder, stream)
    other = np.concatenate((stream[:50], stream[:0:-1][:40]))
    score(backend, recorder, other)
    again = score(backend, recorder, stream, reuse=50, first=51)
    assert np.allclose(again, fresh[50:], atol=1e-4)
    assert backend.loaded.tokens == stream.tolist()
    assert backend.loaded.cache.length == 100


@pytest.mark.parametrize("kind", LAYERED)
def test_generation_goes_on_from_the_context_twice_with_the_same_tokens(start, stream, recorder, kind):
    backend, _ = start(kind)
    score(backend, recorder, stream[:60])
    runs = []
    for _ in range(2):
        job = recorder()
        backend.generate(Generate(job=1, count=12, keep=60), job)
        runs.append(np.concatenate([batch["ids"] for _, batch in job.batches]))
    assert np.array_equal(*runs)
    expected = stream[:60]
    for token in runs[0]:
        logits = whole(backend, expected)[-1]
        assert float(logits[token]) > float(logits.max()) - 1e-3
        expected = np.append(expected, token).astype("<i4")


@pytest.mark.parametrize("kind", HYBRID)
def test_a_state_is_put_back_from_the_nearest_saved_one_and_only_the_tokens_after_it_run_again(start, stream, kind):
    backend, _ = start(kind)
    loaded = backend.loaded
    run(backend, stream, [0, 32, 64, 80])
    loaded.tokens = stream[:80].tolist()
    ran = []
    forward = loaded.forward
    loaded.forward = lambda ids, keep: (ran.append(len(ids)), forward(ids, keep))[1]
    with torch.inference_mode():
        loaded.truncate(80)
        assert ran == []
        loaded.truncate(70)
        assert ran == [6]
        loaded.truncate(10)
    assert ran == [6, 10]
    assert loaded.tokens == stream[:10].tolist()
    assert divergence(whole(backend, stream)[10:], run(backend, stream[10:], [0, 22, 90])) < tolerance(kind)


@pytest.mark.parametrize("kind", HYBRID)
def test_a_pass_that_broke_off_leaves_no_trace_in_the_states(start, stream, kind, monkeypatch):
    backend, _ = start(kind)
    loaded = backend.loaded
    run(backend, stream, [0, 40])
    loaded.tokens = stream[:40].tolist()
    layer = loaded.model.model.layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda *_: (_ for _ in ()).throw(Cancelled("in the middle")))
        with pytest.raises(Cancelled):
            run(backend, stream[40:], [0, 20])
    assert loaded.cache.length == 40
    cut(backend, 40)
    assert divergence(whole(backend, stream)[40:], run(backend, stream[40:], [0, 60])) < tolerance(kind)


def test_memory_of_states_is_told_beside_that_of_keys_and_values(start, stream, recorder):
    backend, effective = start("qwen3_5_text")
    assert effective["kv"]["bytes"] == 2 * 128 * 2 * 32 * 4
    score(backend, recorder, stream)
    state = 4 * 16 * 16 * 4 + (2 * 2 * 16 + 4 * 16) * 4 * 4
    # What runs and the copy of before the last pass of several tokens.
    assert backend.stats()["kv_state_bytes"] == 2 * 3 * state


def test_what_is_lent_to_later_layers_is_not_overwritten_by_those_between(start, stream):
    backend, _ = start("gemma4_text", "bf16")
    spaces = {id(layer.workspace) for layer in backend.loaded.cache.stored}
    # Layers 2 and 3 lend to 4 and 5; 0 and 1 differ in the size of their heads.
    assert len(spaces) == 4
    one = run(backend, stream, [0, 100])
    assert 0 < divergence(whole(backend, stream), one) < 0.05


MROPE = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
QWEN_EYES = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {"rope_parameters": MROPE}, {"vision_config": QWEN_EYES}),
    "qwen3_5_moe": ("Qwen3_5Moe", {"rope_parameters": MROPE}, {"vision_config": QWEN_EYES}),
    "gemma3": ("Gemma3", {}, {"vision_config": {**EYES, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4", {}, {"vision_config": {**EYES, "num_key_value_heads": 2, "head_dim": 16}}),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_of_a_folder_with_a_vision_part_the_text_part_is_loaded_and_gives_the_same_logits(
    backend, recorder, stream, tmp_path, kind
):
    name, text, parts = PICTURES[kind]
    fields = {**SIZES, **TYPES[f"{kind}_text"][1], **text}
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(text_config=fields, **parts)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(stream).long()[None]).logits[0]
    model.save_pretrained(tmp_path)
    spec = "transformers:weights=fp32,kv=fp32,chunk=32"
    effective = backend.start(parse_spec(spec), tmp_path, 128, recorder())
    assert torch.allclose(run(backend, stream, [0, 32, 64, 100]), expected, atol=1e-4)
    assert effective["kv"]["layers"] == TYPES[f"{kind}_text"][2]
    facts = model_facts(tmp_path)
    assert facts["kv_layers"] == sum(shape.stores for shape in backend.loaded.cache.shapes)
    stored = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stored}))
    with pytest.raises(ConfigurationError, match="of which only the text part is loaded, is not supported"):
        backend.start(parse_spec("transformers:weights=checkpoint"), tmp_path, 128, recorder())


def test_a_model_whose_tokens_see_those_after_them_is_refused(backend, recorder, folders, tmp_path):
    text = json.loads((folders("gemma3_text") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "use_bidirectional_attention": True}))
    with pytest.raises(ConfigurationError, match="tokens attend to those after them"):
        backend.start(parse_spec("transformers:weights=fp32"), tmp_path, 128, recorder())


@pytest.mark.parametrize(("kind", "words"), [("gemma2", "soft-cap"), ("gpt_oss", "sinks")])
def test_attention_that_would_leave_parts_out_is_refused_by_name(backend, recorder, folders, kind, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        backend.start(parse_spec("transformers:weights=fp32,kv=fp32,attn=sdpa"), folders(kind), 128, recorder())
    assert "attn=eager" in caught.value.next
    assert backend.loaded is None


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_moe_text"])
def test_int8_weights_of_experts_are_refused_by_name(backend, recorder, folders, kind):
    spec = f"transformers:weights=int8,attn={attention(kind)}"
    with pytest.raises(ConfigurationError, match=f"the experts of model type {kind} are none"):
        backend.start(parse_spec(spec), folders(kind), 128, recorder())


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text"])
def test_bf16_weights_are_named_by_their_matrices(backend, recorder, folders, kind):
    effective = backend.start(parse_spec(f"transformers:attn={attention(kind)}"), folders(kind), 128, recorder())
    assert effective["weights"]["scheme"] == "bf16"


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_5_text"])
def test_heads_that_read_shared_keys_where_they_lie_give_the_bits_of_copies(start, stream, kind, monkeypatch):
    backend, _ = start(kind)
    shared = run(backend, stream, [0, 32, 64, 100])
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")
    cut(backend, 0)
    assert torch.equal(run(backend, stream, [0, 32, 64, 100]), shared)
