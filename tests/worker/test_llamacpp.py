from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from workbench.config.lane import parse_spec
from workbench.errors import Cancelled, ConfigurationError
from workbench.protocol.columns import count_rows, join
from workbench.protocol.events import Generate, Score

pytest.importorskip("llama_cpp")

from workbench.worker.backends.base import OutOfMemory
from workbench.worker.backends.llamacpp import LlamaBackend, make
from workbench.worker.llama.convert import write_folder
from workbench.worker.llama.effective import flash_attention


class NoReport:
    def check(self):
        pass

    def progress(self, phase, done, total):
        pass


FP32 = "llamacpp:weights=F32,kv=f32,fa=off,chunk=32,threads=1"


@pytest.fixture(scope="module")
def llama() -> LlamaBackend:
    return make()


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory, tiny_llama, tiny_qwen3):
    folder = tmp_path_factory.mktemp("gguf")
    made = {}

    def of(source, scheme="F32"):
        path = folder / f"{source.name}-{scheme}.gguf"
        if path not in made:
            made[path] = write_folder(source, path, scheme, lambda done, total: None)
        return path

    return of


@pytest.fixture
def start(llama, tiny_file, tiny_llama, recorder):
    def started(spec=FP32, source=None, context=128):
        configuration = parse_spec(spec)
        path = tiny_file(source or tiny_llama, configuration.weights)
        return llama.start(configuration, path, context, recorder())

    yield started
    llama.release()


def score(llama, job, ids, **fields):
    single = fields.pop("single", None)
    arrays = {"ids": ids} if single is None else {"ids": ids, "single": single}
    return llama.score(Score(**{"job": 1, "first": 1, "record": True, "arrays": arrays, **fields}), job)


def traced(llama, recorder, ids, **fields):
    job = recorder()
    score(llama, job, ids, **fields)
    return job.joined("trace")


def compared(llama, recorder, ids, trace, **fields):
    job = recorder(trace=trace)
    score(llama, job, ids, record=False, **fields)
    rows = job.joined("rows")
    assert count_rows("rows", rows) == len(ids) - fields.get("first", 1)
    return rows


def test_float32_is_that_of_transformers_on_both_architectures(llama, start, tiny, backend, stream, recorder):
    job = recorder()
    backend.start(parse_spec("transformers:weights=fp32,kv=fp32,chunk=32"), tiny, 128, recorder())
    backend.score(Score(1, 1, True, arrays={"ids": stream}), job)
    effective = start(source=tiny)
    rows = compared(llama, recorder, stream, job.joined("trace"))
    assert effective["model_type"] == tiny.name
    assert rows["valid"].all() and (rows["rank"] == 1).all()
    assert 0 < rows["kl"].mean() < 1e-9
    for path in ("decode", "prefill"):
        again = compared(llama, recorder, stream, job.joined("trace"), path=path)
        assert (again["rank"] == 1).all() and again["kl"].max() < 1e-8


@pytest.mark.parametrize("spec", [FP32, "llamacpp:weights=BF16,kv=q8_0,chunk=32,threads=1"])
def test_a_repeat_is_bit_identical_and_reads_exactly_zero_against_its_own_recording(
    llama, start, stream, recorder, spec
):
    start(spec)
    trace = traced(llama, recorder, stream)
    again = traced(llama, recorder, stream)
    assert all(np.array_equal(trace[name], again[name]) for name in trace)
    rows = compared(llama, recorder, stream, trace)
    assert not rows["kl"].any() and not rows["tv"].any()
    assert np.array_equal(rows["logprob"], trace["logprob"])


def test_tokens_on_their_own_give_nearly_the_rows_of_chunks(llama, start, stream, recorder):
    start()
    trace = traced(llama, recorder, stream)
    single = np.zeros(100, np.uint8)
    single[20:30] = single[60:] = 1
    job = recorder(trace=trace)
    stats = score(llama, job, stream, record=False, path="decode", single=single)
    rows = job.joined("rows")
    assert (stats["prefill_tokens"], stats["decode_tokens"]) == (50, 50)
    assert len(rows["kl"]) == 99
    assert rows["kl"].max() < 1e-8


@pytest.mark.parametrize("first", [2, 33, 70, 99])
def test_scoring_again_from_the_middle_sends_only_what_is_missing_bit_for_bit(llama, start, stream, recorder, first):
    start()
    whole, rest = traced(llama, recorder, stream), traced(llama, recorder, stream, first=first)
    assert np.array_equal(rest["logprob"], whole["logprob"][first - 1 :])


def test_reused_positions_are_not_run_again_and_give_the_rows_of_a_kept_cache(llama, start, stream, recorder):
    start()
    traced(llama, recorder, stream[:45])
    job = recorder()
    stats = score(llama, job, stream, reuse=45, first=46)
    kept = job.joined("trace")
    assert stats["prefill_tokens"] == 55
    start()
    traced(llama, recorder, stream[:45])
    again = traced(llama, recorder, stream, reuse=45, first=1)
    assert np.array_equal(again["logprob"][45:], kept["logprob"])


@pytest.mark.parametrize(
    ("kv", "worst"), [("f16", 1e-4), ("bf16", 1e-2), ("q8_0", 1e-2), ("q5_0", 2.0), ("q4_0", 5.0), ("q8_0/f16", 1e-2)]
)
def test_each_kv_type_runs_is_read_back_and_costs_what_it_costs(llama, start, stream, recorder, kv, worst):
    start()
    trace = traced(llama, recorder, stream)
    effective = start(FP32.replace("kv=f32,fa=off", f"kv={kv}"))
    assert effective["kv"]["scheme"] == kv
    assert effective["weights_kept"]
    rows = compared(llama, recorder, stream, trace)
    assert 0 < rows["kl"].mean() < worst


def test_keys_and_values_apart_run_without_flash_attention(llama, start, stream, recorder):
    effective = start(FP32.replace("kv=f32", "kv=q8_0/f16"))
    assert (effective["kv"]["keys"], effective["kv"]["values"], effective["attn"]) == ("q8_0", "f16", "off")
    assert traced(llama, recorder, stream)["valid"].all()


def test_quantised_values_without_flash_attention_are_refused_before_anything_loads(start):
    with pytest.raises(ConfigurationError, match="without flash attention"):
        start(FP32.replace("kv=f32", "kv=q8_0"))


@pytest.mark.parametrize(("asked", "runs"), [("on", "on"), ("off", "off"), ("auto", None)])
def test_flash_attention_is_read_back(start, asked, runs):
    effective = start(FP32.replace("fa=off", f"fa={asked}"))
    assert effective["attn"] in ((runs,) if runs else ("on", "off"))


def test_what_auto_came_to_be_is_said_after_it():
    assert flash_attention(["llama_context: flash_attn            = enabled"]) == "on"
    assert flash_attention(["llama_context: flash_attn            = auto"]) is None
    lines = ["llama_context: flash_attn            = auto", "llama_context: Flash Attention was auto, set to enabled"]
    assert flash_attention(lines) == "on"


def test_what_runs_is_read_back_from_the_engine(llama, start):
    effective = start("llamacpp:weights=BF16,kv=f16,chunk=64,threads=2,n_ubatch=32")
    expected = {"engine": "llamacpp", "threads": 2, "threads_batch": 2, "chunk": 64, "n_ubatch": 32, "logits": "full"}
    assert {name: effective[name] for name in expected} == expected
    assert effective["weights"]["scheme"] == "BF16"
    assert effective["weights"]["tensors"] == {"BF16": 22, "F32": 7}
    assert effective["weights_bytes"] > 0
    assert effective["context_limit"] == 256
    assert effective["vocabulary"] == effective["logits_width"] == 300
    assert effective["context"] >= 128
    kv = effective["kv"]
    assert kv["bytes"] == pytest.approx(2 * 2 * 3 * 2 * 32 * effective["context"], rel=0.05)
    assert effective["device"] == "cpu"
    assert effective["cpu"]


def test_a_chunk_longer_than_the_session_is_kept(start):
    assert start(FP32.replace("chunk=32", "chunk=512"), context=40)["chunk"] == 512


@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_of_a_few_tokens_run(llama, start, stream, recorder, chunk):
    start()
    trace = traced(llama, recorder, stream)
    assert start(FP32.replace("chunk=32", f"chunk={chunk}"))["chunk"] == chunk
    assert compared(llama, recorder, stream, trace)["kl"].max() < 1e-8


def test_a_smaller_physical_batch_gives_nearly_the_same_rows(llama, start, stream, recorder):
    start()
    trace = traced(llama, recorder, stream)
    start(FP32 + ",n_ubatch=8")
    rows = compared(llama, recorder, stream, trace)
    assert len(rows["kl"]) == 99
    assert rows["kl"].max() < 1e-8


def test_rolling_back_and_running_again_is_bit_equal(llama, start, stream):
    start()
    loaded = llama.loaded
    loaded.prefill(stream[:64].tolist(), 32, NoReport())
    first = loaded.forward(stream[64:72], 8).copy()
    assert loaded.length() == 72
    loaded.truncate(64)
    assert loaded.length() == 64
    loaded.forward(stream[:5], 1)  # a guess that is thrown away
    loaded.truncate(64)
    assert np.array_equal(loaded.forward(stream[64:72], 8), first)


def test_a_branch_is_bit_equal_to_what_its_source_would_have_gone_on_to(llama, start, stream):
    start()
    loaded = llama.loaded
    loaded.prefill(stream[:64].tolist(), 32, NoReport())
    loaded.branch(0, 1)
    on_branch = loaded.forward(stream[64:72], 8, sequence=1).copy()
    assert [loaded.length(sequence) for sequence in (0, 1, 2)] == [64, 72, 0]
    loaded.truncate(64, sequence=1)
    assert np.array_equal(loaded.forward(stream[64:72], 8), on_branch)


def test_branches_go_on_apart_and_a_branch_can_be_made_anew(llama, start, stream):
    start()
    loaded = llama.loaded
    loaded.prefill(stream[:64].tolist(), 32, NoReport())
    loaded.branch(0, 1)
    loaded.branch(0, 2)
    other = loaded.forward(stream[:8], 8, sequence=2).copy()
    on_branch = loaded.forward(stream[64:72], 8, sequence=1).copy()
    main = loaded.forward(stream[64:72], 8).copy()
    assert np.allclose(main, on_branch, atol=1e-4)
    assert not np.allclose(other, on_branch, atol=1e-1)
    loaded.forward(stream[72:74], 1)
    loaded.branch(0, 1)
    assert [loaded.length(sequence) for sequence in (0, 1, 2, 3)] == [74, 74, 72, 0]
    with pytest.raises(ConfigurationError, match="cannot branch"):
        loaded.branch(0, 4)


def test_greedy_tokens_are_those_of_transformers(llama, start, tiny, backend, stream, recorder):
    ours, theirs = recorder(), recorder()
    backend.start(parse_spec("transformers:weights=fp32,kv=fp32,chunk=32"), tiny, 128, recorder())
    backend.generate(Generate(1, 20, arrays={"ids": stream}), theirs)
    start(source=tiny)
    stats = llama.generate(Generate(1, 20, arrays={"ids": stream}), ours)
    mine, other = (join("continuation", [arrays for _, arrays in job.batches]) for job in (ours, theirs))
    assert mine["ids"].tolist() == other["ids"].tolist()
    assert mine["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
    assert (stats["tokens"], stats["stop_reason"], stats["kv_positions"]) == (20, "length", 119)
    assert stats["peak_memory_bytes"] > 10 << 20


def test_generation_goes_on_after_scoring_and_stops_at_a_stop_token(llama, start, stream, recorder):
    start()
    traced(llama, recorder, stream)

    def tokens(**fields):
        job = recorder()
        llama.generate(Generate(job=1, **fields), job)
        return join("continuation", [arrays for _, arrays in job.batches])["ids"].tolist()

    after, fresh = tokens(count=8), tokens(count=8, arrays={"ids": stream})
    assert after == fresh
    assert tokens(count=8, stop=(fresh[2],), arrays={"ids": stream}) == fresh[: fresh.index(fresh[2]) + 1]
    sampled = {"count": 12, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "arrays": {"ids": stream[:50]}}
    assert tokens(seed=1, **sampled) == tokens(seed=1, **sampled)
    assert tokens(seed=1, **sampled) != tokens(seed=2, **sampled)


def test_cancelling_stops_between_chunks_and_the_model_can_be_used_again(llama, start, stream, recorder):
    start()
    whole = traced(llama, recorder, stream)
    with pytest.raises(Cancelled):
        score(llama, recorder(checks=2), stream)
    assert np.array_equal(traced(llama, recorder, stream)["logprob"], whole["logprob"])


def test_loading_can_be_cancelled(llama, tiny_file, tiny_llama, recorder):
    with pytest.raises(Cancelled):
        llama.start(parse_spec(FP32), tiny_file(tiny_llama), 128, recorder(checks=0))
    assert llama.loaded is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ids": np.full(5, 300, "<i4")}, "ids must lie in 0 to 299"),
        ({"ids": np.zeros(300, "<i4")}, "do not fit a context"),
        ({"reuse": 5, "first": 6}, "does not hold the 5 tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused(llama, start, stream, recorder, fields, words):
    start()
    with pytest.raises(ConfigurationError, match=words):
        score(llama, recorder(), fields.pop("ids", stream), **fields)


def test_what_cannot_be_generated_or_started_is_refused(llama, start, tiny_llama, recorder, stream):
    start()
    with pytest.raises(ConfigurationError, match="outside the vocabulary"):
        llama.generate(Generate(1, 5, arrays={"ids": np.full(5, 300, "<i4")}), recorder())
    with pytest.raises(ConfigurationError, match="limit of 256"):
        start(context=1000)
    with pytest.raises(ConfigurationError, match="this is a folder"):
        llama.start(parse_spec(FP32), tiny_llama, 128, recorder())
    llama.release()
    with pytest.raises(ConfigurationError, match="no model is loaded"):
        score(llama, recorder(), stream)


def test_a_context_that_llama_cpp_refuses_is_refused_with_its_words(llama, start, monkeypatch):
    monkeypatch.setattr("workbench.worker.backends.llamacpp.check", lambda configuration: configuration)
    with pytest.raises(ConfigurationError, match="requires flash_attn"):
        start(FP32.replace("kv=f32", "kv=q8_0"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_memory_that_cannot_be_had_is_said_so_and_the_backend_goes_on(llama, start, tiny_llama, recorder, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 19}))
    path = tmp_path / "long.gguf"
    write_folder(folder, path, "F32", lambda done, total: None)
    now, hard = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(), resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (now + (400 << 20), hard))  # the cache takes 768 MiB
    try:
        with pytest.raises(OutOfMemory, match="context of 524288 tokens"):
            llama.start(parse_spec(FP32), path, 1 << 19, recorder())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))
    llama.release()
    assert start()["engine"] == "llamacpp"
