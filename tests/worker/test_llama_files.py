from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.config.lane import parse_spec
from workbench.errors import Cancelled, ConfigurationError, ModelError
from workbench.protocol.events import Inspect

pytest.importorskip("llama_cpp")

from workbench.worker.backends.llamacpp import make
from workbench.worker.llama.convert import permute, stored_as, write_folder
from workbench.worker.llama.effective import scheme_of
from workbench.worker.llama.header import read_header
from workbench.worker.llama.quantize import quantize
from workbench.worker.llama.tokens import pre_tokenizer_word, tokenizer_metadata
from workbench.worker.llama.writer import BF16, F16, F32, U32, Planned, write_gguf
from workbench.worker.quant.gguf import unpermute

ROOT = Path(__file__).resolve().parents[2]


def silent(done, total):
    pass


@pytest.fixture(scope="module")
def llama():
    return make()


@pytest.fixture(scope="module")
def small(tmp_path_factory, tiny_llama):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_folder(tiny_llama, path, "F32", silent)
    return path


def changed(folder, target, **config):
    shutil.copytree(folder, target)
    text = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**text, **config}))
    return target


@pytest.mark.parametrize(("scheme", "kind"), [("F32", "F32"), ("BF16", "BF16"), ("F16", "F16")])
def test_a_written_file_is_whole_and_says_what_it_holds(llama, tiny, tmp_path, scheme, kind):
    path = tmp_path / "made.gguf"
    seen = []
    facts = write_folder(tiny, path, scheme, lambda done, total: seen.append((done, total)))
    header = read_header(path, llama.log)
    assert (header.architecture, scheme_of(header)) == (tiny.name, scheme)
    assert header.tensors == facts["tensors"]
    assert header.dominant == kind
    assert header.metadata[f"{tiny.name}.attention.head_count_kv"] == 2
    assert ("output.weight" in [tensor for tensor in names_of(path)]) == (tiny.name == "qwen3")
    assert seen[-1] == (sum(header.tensors.values()),) * 2
    assert [file.name for file in tmp_path.iterdir()] == ["made.gguf"]


def names_of(path):
    from gguf import GGUFReader

    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def test_the_written_tensors_are_the_folders_own_bit_for_bit_also_through_bf16(tiny, tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in load_file(tiny / "model.safetensors").items()}
    folder = shutil.copytree(tiny, tmp_path / tiny.name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_folder(folder, tmp_path / "made.gguf", "F32", silent)
    tensors = names_of(tmp_path / "made.gguf")
    q = weights["model.layers.1.self_attn.q_proj.weight"].float().numpy()
    written = np.array(tensors["blk.1.attn_q.weight"].data)
    assert np.array_equal(unpermute(written, 4) if tiny.name == "llama" else written, q)
    assert np.array_equal(tensors["blk.2.ffn_down.weight"].data, weights["model.layers.2.mlp.down_proj.weight"].float())
    write_folder(folder, tmp_path / "bf16.gguf", "BF16", silent)
    bits = np.array(names_of(tmp_path / "bf16.gguf")["blk.2.ffn_down.weight"].data).view("<u2")
    expected = weights["model.layers.2.mlp.down_proj.weight"].view(torch.uint16).numpy()
    assert np.array_equal(bits.reshape(expected.shape), expected)


def test_values_are_stored_as_torch_would_store_them():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 100
    values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    as_bf16 = stored_as(values.numpy(), "F32", BF16, "x")
    assert np.array_equal(as_bf16[1:], values.bfloat16().view(torch.uint16).numpy()[1:])
    assert torch.from_numpy(as_bf16[:1].copy()).view(torch.bfloat16).isnan().all()
    half = stored_as(values.numpy(), "F32", F16, "x")
    assert np.array_equal(half, values.half().numpy(), equal_nan=True)
    bits = values.bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(stored_as(bits, "BF16", F32, "x"), values.bfloat16().float().numpy(), equal_nan=True)
    with pytest.raises(ConfigurationError, match="beyond float16"):
        stored_as(np.array([1e6], np.float32), "F32", F16, "x")


def test_permuting_rotary_rows_is_undone_by_the_reader():
    rows = np.arange(48.0).reshape(16, 3)
    assert np.array_equal(unpermute(permute(rows, 2), 2), rows)
    assert not np.array_equal(permute(rows, 2), rows)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma3"}, "model type 'gemma3' cannot be written"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rescales its rotary positions by yarn"),
        ({"layer_types": ["sliding_attention"]}, "layers of sliding_attention"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised already"),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_a_way_out(tiny_llama, tmp_path, config, words):
    folder = changed(tiny_llama, tmp_path / "llama", **config)
    with pytest.raises(ConfigurationError, match=words) as error:
        write_folder(folder, tmp_path / "made.gguf", "F32", silent)
    assert "weights=file" in error.value.next
    assert not (tmp_path / "made.gguf").exists()


def test_a_damaged_or_incomplete_folder_is_named(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "llama")
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing \(blk.1.ffn_up.weight\)"):
        write_folder(folder, tmp_path / "made.gguf", "F32", silent)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"damaged: tensor .* ends beyond"):
        write_folder(folder, tmp_path / "made.gguf", "F32", silent)
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match="damaged: a header of"):
        write_folder(folder, tmp_path / "made.gguf", "F32", silent)
    file.unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        write_folder(folder, tmp_path / "made.gguf", "F32", silent)


def test_a_cancelled_conversion_leaves_nothing(tiny_llama, tmp_path, llama, recorder):
    with pytest.raises(Cancelled):
        llama.convert(tiny_llama, tmp_path / "made.gguf", "F32", recorder(checks=5))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_0"])
def test_a_folder_becomes_a_quantised_file_that_loads(tiny, tmp_path, llama, recorder, scheme):
    path = tmp_path / "made.gguf"
    job = recorder()
    facts = llama.convert(tiny, path, scheme, job)
    assert facts["tensors"][scheme] > 10
    assert not facts["requantised"]
    assert [file.name for file in tmp_path.iterdir()] == ["made.gguf"]
    effective = llama.start(parse_spec(f"llamacpp:weights={scheme},threads=1"), path, 64, recorder())
    assert effective["weights"]["scheme"] == scheme
    llama.release()
    again = quantize(path, tmp_path / "again.gguf", "Q4_0", llama.log, silent)
    assert (again["requantised"], again["source_scheme"]) == (True, scheme)


def test_schemes_and_sources_that_do_not_work_are_refused(tiny_llama, tmp_path, llama, recorder):
    for scheme in ("", "int8", "file"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            llama.convert(tiny_llama, tmp_path / "made.gguf", scheme, recorder())
    with pytest.raises(ModelError, match="cannot be read"):
        llama.convert(tmp_path / "none.gguf", tmp_path / "made.gguf", "Q8_0", recorder())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 3, 20, 300, 4000, -1])
def test_a_file_that_is_cut_off_is_named_and_not_loaded(llama, small, tmp_path, recorder, size):
    path = tmp_path / "cut.gguf"
    data = small.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(ModelError, match=r"not a (whole )?GGUF file"):
        llama.start(parse_spec("llamacpp:weights=F32"), path, 64, recorder())


DAMAGE = """
import random, sys
from pathlib import Path
from workbench.errors import WorkbenchError
from workbench.worker.llama.header import read_header
from workbench.worker.llama.log import Log
log, random_ = Log(), random.Random(5)
data = Path(sys.argv[1]).read_bytes()
refused = 0
for round_ in range(300):
    broken = bytearray(data)
    for _ in range(random_.choice((1, 2, 8))):
        broken[random_.randrange(4, 2600)] = random_.choice((0, 255, 128, random_.randrange(256)))
    Path(sys.argv[2]).write_bytes(broken)
    try:
        read_header(Path(sys.argv[2]), log)
    except WorkbenchError:
        refused += 1
print(refused)
"""


def test_no_damage_in_the_header_ends_the_process(small, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DAMAGE, str(small), str(tmp_path / "broken.gguf")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-600:]
    assert int(done.stdout) > 50


def test_a_writer_refuses_data_that_is_not_what_it_planned(tmp_path):
    wrong = Planned("x", (2, 3), F32, lambda: np.zeros((3, 2), np.float32))
    with pytest.raises(ModelError, match=r"x is \(3, 2\)"):
        write_gguf(tmp_path / "made.gguf", {"general.architecture": "llama"}, [wrong], silent)
    assert not list(tmp_path.iterdir())


def test_the_written_bytes_are_those_that_the_gguf_package_reads(tmp_path):
    from gguf import GGUFReader

    metadata = {
        "a": U32(7), "b": -1, "c": 1.5, "d": True, "e": "Ġé", "f": ["x", ""], "g": [1, 2], "h": [],
    }  # fmt: skip
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    planned = [Planned(name, (2, 3), F32, lambda: values) for name in ("one", "two")]
    write_gguf(tmp_path / "made.gguf", metadata, planned, silent)
    reader = GGUFReader(tmp_path / "made.gguf")
    read = {name: reader.fields[name].contents() for name in metadata}
    assert read == {"a": 7, "b": -1, "c": 1.5, "d": True, "e": "Ġé", "f": ["x", ""], "g": [1, 2], "h": []}
    assert [np.array_equal(tensor.data, values) for tensor in reader.tensors] == [True, True]
    head = (tmp_path / "made.gguf").read_bytes()[:24]
    assert struct.unpack("<4sIQQ", head) == (b"GGUF", 3, 2, 8)


def test_a_pre_tokenizer_without_a_word_is_refused_and_known_ones_are_told_apart():
    def definition(steps, model=None, normalizer=None):
        return {
            "model": {"type": "BPE", **(model or {})},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "normalizer": normalizer,
        }

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_word(definition([byte_level]), "x") == "gpt-2"
    assert pre_tokenizer_word(definition([digits, byte_level]), "x") == "smollm"
    for steps, more in (
        ([{"type": "Whitespace"}], {}),
        ([digits, {**byte_level, "add_prefix_space": True}], {}),
        ([{"type": "Digits", "individual_digits": False}, byte_level], {}),
        ([byte_level], {"normalizer": {"type": "NFKC"}}),
        ([byte_level], {"model": {"type": "Unigram"}}),
        ([byte_level], {"model": {"ignore_merges": True}}),
    ):
        with pytest.raises(ConfigurationError, match="no name in GGUF"):
            pre_tokenizer_word(definition(steps, **more), "x")


def test_ids_that_no_token_has_are_unused_ones_and_left_out_of_the_vocabulary(tiny_llama, tmp_path, llama, recorder):
    folder = shutil.copytree(tiny_llama, tmp_path / "llama")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "{{ messages }}"}))
    metadata = tokenizer_metadata(folder, {}, 300)
    assert metadata["tokenizer.ggml.tokens"][256:260] == ["ab", "<s>", "<x>", "[PAD259]"]
    assert metadata["tokenizer.ggml.token_type"][255:260] == [1, 1, 3, 4, 5]
    write_folder(folder, tmp_path / "made.gguf", "F32", silent)
    effective = llama.start(parse_spec("llamacpp:weights=F32,threads=1"), tmp_path / "made.gguf", 64, recorder())
    assert (effective["vocabulary"], effective["logits_width"]) == (259, 300)
    facts, arrays = llama.inspect(Inspect(1, {}, str(tmp_path / "made.gguf"), "<s>abc<x>ab"), recorder())
    assert arrays["ids"].tolist() == [257, 256, 66, 258, 256]
    assert facts["adds_bos"] is True
    assert (facts["specials"]["bos"], facts["template"]) == ("<s>", "{{ messages }}")
    assert facts["sampling"]["top_k"] == 40
    llama.release()


def byte_names():
    """The visible letters of byte-level BPE, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in (*plain, *others)]


NAMES = sorted(byte_names())
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {**{name: i for i, name in enumerate(NAMES)}, "ab": 256}, "merges": [["a", "b"]]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    },
    "added_tokens": [{"id": 257, "content": "<s>", "special": True}, {"id": 258, "content": "<x>", "special": False}],
}


def test_a_file_without_a_tokenizer_still_loads_but_cannot_tokenise(llama, small, recorder):
    facts, arrays = llama.inspect(Inspect(1, {}, str(small)), recorder())
    assert (facts["template"], facts["vocabulary"], len(arrays["ids"])) == (None, 300, 0)
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        llama.inspect(Inspect(1, {}, str(small), "text"), recorder())


def test_tokens_are_those_of_our_tokenizer_on_every_edge_case(llama, smollm2, shared, recorder):
    from workbench.session.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(smollm2)
    path = str(smollm2.parent / "smollm2-135m.gguf")
    lines = (shared / "data" / "tokenizer" / "edge_cases.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [case["text"] for line in lines if "text" in (case := json.loads(line))]
    texts += ["".join(texts[:20]), "<|im_start|>user\n" + texts[0] + "<|im_end|>\n"]
    different = []
    for text in texts:
        _, arrays = llama.inspect(Inspect(1, {}, path, text), recorder())
        if arrays["ids"].tolist() != tokenizer.encode(text).ids.tolist():
            different.append(text)
    assert len(texts) > 50
    assert not different
