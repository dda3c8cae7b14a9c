from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from workbench.config.axes import ENGINES
from workbench.config.lane import parse_spec
from workbench.protocol.events import Score

pytest.importorskip("llama_cpp")

from workbench.worker.backends.llamacpp import LlamaBackend, make
from workbench.worker.llama.convert import write_folder
from workbench.worker.llama.effective import scheme_of
from workbench.worker.llama.header import Header

QUANTISED = [scheme for scheme in ENGINES["llamacpp"].axes["weights"] if scheme.startswith("Q")]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaBackend]:
    one = make()
    yield one
    one.release()


def run(backend, model, spec, ids, job, **fields):
    started = backend.start(parse_spec(spec), model, 128, job)
    backend.score(Score(1, 1, arrays={"ids": ids}, **fields), job)
    return started


@pytest.mark.parametrize("scheme", QUANTISED)
def test_every_scheme_is_made_from_a_folder_read_back_and_runs(
    llama, tiny_llama, tmp_path, stream, recorder, scheme, backend
):
    reference = recorder()
    run(backend, tiny_llama, "transformers:weights=fp32,kv=fp32,chunk=32", stream, reference, record=True)
    target = tmp_path / f"{scheme}.gguf"
    facts = llama.convert(tiny_llama, target, scheme, recorder())
    assert not facts["requantised"]
    job = recorder(trace=reference.joined("trace"))
    started = run(llama, target, f"llamacpp:weights={scheme},chunk=32,threads=1", stream, job, record=False)
    assert started["weights"]["scheme"] == scheme
    rows = job.joined("rows")
    assert rows["valid"].all()
    assert 1e-7 < rows["kl"].mean() < 2


@pytest.mark.parametrize("scheme", ["Q6_K", "Q4_K_M"])
def test_a_k_scheme_on_rows_that_do_not_fit_it_says_what_it_is_made_of(llama, tiny_llama, tmp_path, recorder, scheme):
    target = tmp_path / "model.gguf"
    llama.convert(tiny_llama, target, scheme, recorder())
    started = llama.start(parse_spec(f"llamacpp:weights={scheme},threads=1"), target, 64, recorder())
    assert {"Q6_K": "Q8_0", "Q4_K_M": "Q5_0"}[scheme] in started["weights"]["tensors"]
    assert any(f"{scheme} is larger and better here than its name says" in note for note in started["notes"])


@pytest.mark.parametrize(
    ("number", "tensors", "scheme"),
    [
        (15, {"F32": 9, "Q4_K": 30, "Q6_K": 5}, "Q4_K_M"),
        (15, {"F32": 61, "Q5_0": 166, "Q4_K": 16, "Q8_0": 15}, "Q4_K_M"),
        (3, {"F32": 61, "Q4_1": 210, "Q8_0": 1}, "Q4_1"),
        (15, {"F32": 9, "Q8_0": 30, "Q6_K": 1}, "Q8_0"),
        (0, {"F32": 9, "Q4_0": 30}, "Q4_0"),
        (7, {"F32": 39}, "F32"),
        (-5, {"F32": 9, "Q3_K": 30}, "Q3_K"),
    ],
)
def test_a_file_that_names_a_scheme_its_tensors_are_not_of_is_called_by_its_tensors(number, tensors, scheme):
    header = Header(
        "llama", {"general.file_type": number}, tensors, {name: count * 9 for name, count in tensors.items()}
    )
    assert scheme_of(header) == scheme


def test_llama_3s_rotary_positions_are_those_of_transformers(tiny_llama, tmp_path, llama, backend, stream, recorder):
    folder = shutil.copytree(tiny_llama, tmp_path / "llama3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": LLAMA3}))
    file = tmp_path / "llama3.gguf"
    write_folder(folder, file, "F32", lambda done, total: None)
    spec = "llamacpp:weights=F32,kv=f32,fa=off,chunk=32,threads=1"
    reference, other = recorder(), recorder()
    run(backend, folder, "transformers:weights=fp32,kv=fp32,chunk=32", stream, reference, record=True)
    trace = reference.joined("trace")
    run(backend, tiny_llama, "transformers:weights=fp32,kv=fp32,chunk=32", stream, other, record=True)
    assert np.abs(other.joined("trace")["lse"] - trace["lse"]).max() > 1e-3  # the rescaling shows at these lengths
    job = recorder(trace=trace)
    run(llama, file, spec, stream, job, record=False)
    assert job.joined("rows")["kl"].mean() < 1e-6
    inverse = LlamaForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    plain = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(read_factors(file), (plain / inverse).numpy(), rtol=1e-5)


def read_factors(file):
    from gguf import GGUFReader

    return next(tensor.data for tensor in GGUFReader(file).tensors if tensor.name == "rope_freqs.weight")
