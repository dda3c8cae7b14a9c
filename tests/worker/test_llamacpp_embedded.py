from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from workbench.config.axes import ENGINES
from workbench.config.lane import parse_spec
from workbench.protocol.events import Generate, Score

pytest.importorskip("llama_cpp")

from workbench.worker.backends.llamacpp import make

pytestmark = pytest.mark.slow

N = 400
ALONE = 48
FP32 = "llamacpp:weights=F32,kv=f32,fa=off"
SCHEMES = [scheme for scheme in ENGINES["llamacpp"].axes["weights"] if scheme != "file"]


@pytest.fixture
def ids(smollm2):
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    return np.array(Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids[:N], dtype="<i4")


@pytest.fixture(scope="module")
def llama():
    one = make()
    yield one
    one.release()


@pytest.fixture(scope="module")
def files(tmp_path_factory, smollm2):
    folder = tmp_path_factory.mktemp("gguf")

    def of(llama, job, scheme):
        path = folder / f"{scheme}.gguf"
        if not path.exists():
            source = smollm2 if scheme in ("F32", "F16", "BF16") else of(llama, job, "F32")
            facts = llama.convert(source, path, scheme, job)
            assert not facts["requantised"]
        return path

    return of


def score(backend, recorder, model, ids, spec, trace=None, single=None):
    started = backend.start(parse_spec(f"{spec},threads=1"), model, N + 16, recorder())
    job = recorder(trace)
    arrays = {"ids": ids} if single is None else {"ids": ids, "single": single}
    path = "prefill" if single is None else "decode"
    backend.score(Score(1, 1, trace is None, path=path, arrays=arrays), job)
    return started, job.joined("trace" if trace is None else "rows")


@pytest.fixture(scope="module")
def references(smollm2):
    found = {}

    def of(backend, recorder, ids, dtype):
        if dtype not in found:
            found[dtype] = score(backend, recorder, smollm2, ids, f"transformers:weights={dtype},kv={dtype}")[1]
        return found[dtype]

    return of


def test_float32_is_float32_of_transformers_in_chunks_and_token_by_token(
    llama, backend, recorder, files, references, ids
):
    reference = references(backend, recorder, ids, "fp32")
    single = np.zeros(N, dtype=np.uint8)
    single[-ALONE:] = 1
    for alone in (None, single):
        _, rows = score(llama, recorder, files(llama, recorder(), "F32"), ids, FP32, reference, alone)
        assert rows["valid"].all()
        assert rows["kl"].mean() < 1e-6
        assert not (rows["rank"] > 1).any()
    tokens = []
    for one in (llama, backend):
        job = recorder()
        one.generate(Generate(2, 24, arrays={"ids": ids[:100]}), job)
        tokens.append(np.concatenate([arrays["ids"] for _, arrays in job.batches]).tolist())
    assert tokens[0] == tokens[1]


def test_a_repeat_is_bit_identical_and_zero_against_itself(llama, recorder, files, ids):
    file, spec = files(llama, recorder(), "Q8_0"), "llamacpp:weights=Q8_0,kv=q8_0"
    _, first = score(llama, recorder, file, ids, spec)
    _, again = score(llama, recorder, file, ids, spec)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    _, rows = score(llama, recorder, file, ids, spec, first)
    assert not rows["kl"].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_made_read_back_and_lies_where_its_bits_put_it(
    llama, backend, recorder, files, references, ids, scheme
):
    reference = references(backend, recorder, ids, "bf16")
    started, rows = score(
        llama, recorder, files(llama, recorder(), scheme), ids, f"llamacpp:weights={scheme}", reference
    )
    assert started["weights"]["scheme"] == scheme
    assert started["weights_bytes"] < 4.1 * 134_515_008
    # Measured on other text: 0.0012 for the floats, 0.005, 0.010, 0.061, 0.17, 0.30.
    worst = {"F32": 0.01, "BF16": 0.01, "F16": 0.01, "Q8_0": 0.02, "Q6_K": 0.04}.get(scheme, 1.0)
    assert rows["valid"].all()
    assert rows["kl"].mean() < worst


def test_kv_types_cost_in_the_order_of_their_bits_and_can_differ_for_keys_and_values(llama, recorder, files, ids):
    file = files(llama, recorder(), "BF16")
    _, reference = score(llama, recorder, file, ids, "llamacpp:weights=BF16,kv=f16,fa=on")
    costs, sizes = [], []
    for kv in ("q8_0", "q5_0", "q4_0"):
        started, rows = score(llama, recorder, file, ids, f"llamacpp:weights=BF16,kv={kv},fa=on", reference)
        assert started["kv"]["scheme"] == kv
        costs.append(float(rows["kl"].mean()))
        sizes.append(started["kv"]["bytes"])
    assert 0 < costs[0] < costs[1] < costs[2] < 0.5
    assert sizes[0] > sizes[1] > sizes[2]
    started, rows = score(llama, recorder, file, ids, "llamacpp:weights=BF16,kv=q8_0/f16,fa=off", reference)
    assert (started["kv"]["scheme"], started["attn"]) == ("q8_0/f16", "off")
    assert 0 < rows["kl"].mean() < costs[1]
