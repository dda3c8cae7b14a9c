from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.config.lane import parse_spec
from workbench.errors import ConfigurationError, EngineError, ModelError
from workbench.worker.backends.base import OutOfMemory
from workbench.worker.vllm import drafters, settings
from workbench.worker.vllm.failures import as_ours
from workbench.worker.vllm.prompt import sampling
from workbench.worker.vllm.readback import kv_word, weights_word

FOLDER = Path("model")
CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
POSITION = 2 * 30 * 3 * 64 * 2


def arguments(spec, context=5000, device="cpu", config=CONFIG):
    return settings.arguments(parse_spec(f"vllm:{spec}"), FOLDER, config, context, device)


def test_arguments_pin_what_changes_numbers():
    made = arguments("weights=bf16,chunk=256,kv=fp8,attn=CPU_ATTN")
    assert (made["dtype"], made["kv_cache_dtype"], made["attention_backend"]) == ("bfloat16", "fp8", "CPU_ATTN")
    assert (made["max_num_batched_tokens"], made["max_num_seqs"], made["seed"]) == (256, 1, 0)
    assert (made["logprobs_mode"], made["max_logprobs"], made["enforce_eager"]) == ("raw_logprobs", -1, True)
    assert made["trust_remote_code"] is False
    assert not {"quantization", "speculative_config", "logits_processors"} & made.keys()


def test_weights_are_a_dtype_the_folders_own_or_quantized_while_loading():
    assert arguments("weights=fp32")["dtype"] == "float32"
    own = arguments("weights=checkpoint")
    assert (own["dtype"], "quantization" in own) == ("auto", False)
    made = arguments("weights=fp8_per_tensor", device="cuda")
    assert (made["dtype"], made["quantization"], made["enforce_eager"]) == ("auto", "fp8_per_tensor", False)


def test_the_kv_cache_holds_the_context_and_not_gigabytes():
    made = arguments("weights=bf16")["kv_cache_memory_bytes"]
    assert 5001 * POSITION < made < 1.5 * 5001 * POSITION
    assert arguments("weights=fp32")["kv_cache_memory_bytes"] == 2 * made
    assert arguments("weights=bf16,kv=fp8")["kv_cache_memory_bytes"] == made // 2
    assert arguments("weights=bf16,kv_space=0.5")["kv_cache_memory_bytes"] == 1 << 29
    assert arguments("weights=bf16", config={"model_type": "other"})["kv_cache_memory_bytes"] == 1 << 30
    assert "kv_cache_memory_bytes" not in arguments("weights=bf16", device="cuda")


def test_a_served_token_is_forced_by_a_processor_on_a_cpu_and_by_replay_on_a_gpu():
    assert arguments("path=decode")["logits_processors"] == ["workbench.worker.vllm.forced:Forced"]
    assert arguments("path=decode", device="cuda")["enable_trace_replay"] is True
    drafted = arguments("path=decode,draft=ngram")
    assert not {"logits_processors", "enable_trace_replay"} & drafted.keys()


def test_the_core_runs_in_this_process_unless_devices_or_an_executor_are_asked_for():
    for spec, here in (("weights=bf16", True), ("tensor_parallel=2", False), ("executor=ray", False)):
        configuration = parse_spec(f"vllm:{spec}")
        assert settings.in_process(configuration) is here
        environment = settings.environment(configuration, "cuda")
        assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == str(int(not here))
    assert arguments("tensor_parallel=2")["distributed_executor_backend"] == "mp"
    assert arguments("executor=ray")["distributed_executor_backend"] == "ray"
    assert arguments("weights=bf16")["distributed_executor_backend"] == "uni"
    on = settings.environment(parse_spec("vllm:batch_invariant=on"), "cuda")
    assert (on["VLLM_BATCH_INVARIANT"], on["HF_HUB_OFFLINE"]) == ("1", "1")
    assert "TORCHDYNAMO_DISABLE" not in on


def test_drafters_become_a_speculative_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert drafters.speculation(parse_spec("vllm:draft=none")) is None
    ngram = drafters.speculation(parse_spec("vllm:draft=ngram,width=6,lookup_max=8"))
    assert ngram == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 8,
    }
    assert drafters.speculation(parse_spec("vllm:draft=ngram,lookup_max=1"))["prompt_lookup_min"] == 1
    eagle = drafters.speculation(parse_spec("vllm:draft=eagle3@/some/where"))
    assert eagle == {"method": "eagle3", "num_speculative_tokens": 3, "model": "/some/where"}
    made = arguments(f"draft=draft_model@{tmp_path}")
    assert made["per_request_spec_decode_metrics"] == "detailed"
    assert made["kv_cache_memory_bytes"] > 2 * arguments("draft=ngram")["kv_cache_memory_bytes"]


@pytest.mark.parametrize("spec", ["draft=ngram,lookup_min=5,lookup_max=3", "draft=none,lookup_min=2"])
def test_a_lookup_that_is_none_is_refused(spec):
    with pytest.raises(ConfigurationError, match="lookup_min"):
        drafters.speculation(parse_spec(f"vllm:{spec}"))


def test_the_suffix_drafter_is_refused_where_its_package_is_not(monkeypatch):
    monkeypatch.setattr(drafters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="arctic-inference"):
        drafters.speculation(parse_spec("vllm:draft=suffix"))


def test_a_folder_is_refused_for_weights_that_it_does_not_hold_and_for_a_context_beyond_its_limit():
    quantized = {**CONFIG, "quantization_config": {"quant_method": "compressed-tensors"}}
    with pytest.raises(ConfigurationError, match="compressed-tensors") as refused:
        settings.check_folder(parse_spec("vllm:weights=bf16"), quantized, 100, "model")
    assert "checkpoint" in refused.value.next
    settings.check_folder(parse_spec("vllm:weights=checkpoint"), quantized, 100, "model")
    settings.check_folder(parse_spec("vllm:weights=bf16"), CONFIG, 8192, "model")
    for context in (0, 8193):
        with pytest.raises(ConfigurationError, match="limit of 8192"):
            settings.check_folder(parse_spec("vllm:weights=bf16"), CONFIG, context, "model")


def test_the_traces_ids_are_refused_where_they_cannot_be_asked_for():
    settings.check_keys(parse_spec("vllm:logprobs=trace"), "cuda")
    settings.check_keys(parse_spec("vllm:logprobs=full"), "cpu")
    for spec, device in (("logprobs=trace", "cpu"), ("logprobs=trace,path=decode", "cuda")):
        with pytest.raises(ConfigurationError, match="V2"):
            settings.check_keys(parse_spec(f"vllm:{spec}"), device)


def test_an_executor_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs the package ray"):
        settings.check_keys(parse_spec("vllm:executor=ray"), "cuda")
    settings.check_keys(parse_spec("vllm:executor=mp"), "cuda")


def test_a_damaged_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        settings.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        settings.read_config(tmp_path)
    with pytest.raises(ModelError, match="damaged"):
        sampling(tmp_path)


def test_sampling_defaults_come_from_the_folder_also_where_it_says_greedy(tmp_path):
    assert sampling(tmp_path)["temperature"] == 1.0
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.2, "top_k": 20}))
    assert sampling(tmp_path) == {
        "temperature": 0.2,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_what_runs_is_named_by_its_layers_and_not_by_what_was_asked_for():
    plain = {"UnquantizedLinearMethod": 120}
    assert weights_word(plain, {"bfloat16": 182}, "int8_per_channel_weight_only") == "bf16"
    assert weights_word(plain, {"float32": 182}, "") == "fp32"
    assert weights_word({"Fp8OnlineLinearMethod": 120}, {"bfloat16": 62}, "fp8_per_tensor") == "fp8_per_tensor"
    int8 = {"CompressedTensorsLinearMethod CompressedTensorsW8A8Int8 CPUInt8ScaledMMLinearKernel": 120}
    assert weights_word(int8, {"int8": 120}, "compressed-tensors") == "compressed-tensors W8A8Int8"
    silent = {"CompressedTensorsLinearMethod CompressedTensorsWNA16 CPUWNA16LinearKernel W4A8": 120}
    assert weights_word(silent, {"int8": 120}, "compressed-tensors") == "compressed-tensors W4A8"


def test_a_kv_cache_that_its_backend_does_not_declare_is_unknown():
    found = {"kv_types": {"auto": 30}, "kv_declared": ["auto", "fp8"], "kv_tensors": ["bfloat16"]}
    assert kv_word(found) == "bfloat16"
    assert kv_word({**found, "kv_types": {"fp8": 30}, "kv_tensors": ["uint8"]}) == "fp8"
    assert kv_word({**found, "kv_types": {"int4_per_token_head": 30}, "kv_tensors": ["uint8"]}) is None
    assert kv_word({**found, "kv_types": {}, "kv_tensors": []}) is None


def test_failures_name_their_cause_also_one_in_another_process(tmp_path, monkeypatch):
    log = tmp_path / "engine.log"
    log.write_text(
        "INFO loading\n"
        "(EngineCore pid=7) ERROR 12-01 core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 12-01 core.py:1] KeyError: 'model.layers.0.weight'\n"
        "(EngineCore pid=7) ERROR 12-01 core.py:1] RuntimeError: worker failed\n"
    )
    monkeypatch.setenv("WORKBENCH_LOG", str(log))
    failed = as_ours(RuntimeError("Engine core initialization failed. See root cause above."))
    assert isinstance(failed, EngineError)
    assert "KeyError: 'model.layers.0.weight'" in failed.what
    full = as_ours(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert isinstance(full, OutOfMemory)
    assert "ValueError: no such thing" in as_ours(ValueError("no such thing\nand more")).what
