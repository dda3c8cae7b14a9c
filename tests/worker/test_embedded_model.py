from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from workbench.config.lane import parse_spec
from workbench.protocol.events import Generate, Score

pytestmark = pytest.mark.slow

N = 600


@pytest.fixture
def ids(smollm2):
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    return np.array(Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids[:N], dtype="<i4")


def score(backend, recorder, folder, ids, spec, trace=None, single=None):
    backend.start(parse_spec(f"transformers:{spec},threads=1"), folder, N + 16, recorder())
    job = recorder(trace)
    arrays = {"ids": ids} if single is None else {"ids": ids, "single": single}
    path = "prefill" if single is None else "decode"
    backend.score(Score(1, 1, trace is None, path=path, arrays=arrays), job)
    return job.joined("trace" if trace is None else "rows")


def test_bf16_against_itself_is_zero_everywhere_and_bit_for_bit_the_same_again(backend, recorder, smollm2, ids):
    reference = score(backend, recorder, smollm2, ids, "weights=bf16")
    again = score(backend, recorder, smollm2, ids, "weights=bf16")
    assert all(np.array_equal(reference[name], again[name]) for name in reference)
    lane = score(backend, recorder, smollm2, ids, "weights=bf16", reference)
    assert not lane["kl"].any()
    assert lane["valid"].all()


def test_lossy_lanes_lie_in_the_order_of_their_bits(backend, recorder, smollm2, ids):
    reference = score(backend, recorder, smollm2, ids, "weights=bf16")
    specs = ("weights=bf16,kv=int8", "weights=int8", "weights=bf16,kv=int4")
    kls = [float(score(backend, recorder, smollm2, ids, spec, reference)["kl"].mean()) for spec in specs]
    assert 0 < kls[0] < kls[1] < kls[2] < 0.2


def test_fp32_decoding_is_fp32_prefill(backend, recorder, smollm2, ids):
    reference = score(backend, recorder, smollm2, ids, "weights=fp32,kv=fp32")
    single = np.zeros(N, dtype=np.uint8)
    single[-48:] = 1
    lane = score(backend, recorder, smollm2, ids, "weights=fp32,kv=fp32", reference, single)
    assert lane["kl"][-48:].mean() < 1e-8
    assert not (lane["rank"] > 1).any()


def test_int8_weights_take_less_memory_than_bf16(backend, recorder, smollm2, ids):
    peaks = []
    for spec in ("weights=bf16", "weights=int8"):
        backend.start(parse_spec(f"transformers:{spec},threads=1"), smollm2, N + 16, recorder())
        peaks.append(backend.generate(Generate(1, 4, arrays={"ids": ids[:64]}), recorder())["peak_memory_bytes"])
    assert peaks[0] - peaks[1] > 50 << 20
