from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.cli import main
from workbench.errors import ModelError
from workbench.lab.generator import Recipe, lab_session
from workbench.run import lab as jobs
from workbench.session.script import load_session
from workbench.session.template import Renderer, render
from workbench.worker.lab.data import read_sessions


def quiet(_line: str) -> None:
    pass


def test_what_is_learned_is_what_the_assistant_rightly_writes(smollm2: Path) -> None:
    renderer = Renderer.load(smollm2)
    session = next(
        one for number in range(50) if (one := lab_session(number, Recipe("train", 1500))).meta["lab"]["unlearned"]
    )
    rendered = render(session, renderer)
    marked = jobs.learned(session, rendered)
    ids = rendered.stream["ids"]
    learned = b"".join(renderer.tokenizer.tokens_bytes(list(ids[marked.astype(bool)]))).decode()
    parts = learned.split("<|im_end|>")
    assert parts[-1] == ""
    wrong = session.meta["lab"]["unlearned"]
    right = [
        message
        for index, message in enumerate(session.messages)
        if message["role"] == "assistant" and index not in wrong
    ]
    assert len(parts) - 1 == len(right)
    for part, message in zip(parts, right, strict=False):
        if calls := message.get("tool_calls"):
            called = json.loads(part.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert called["arguments"] == json.loads(calls[0]["function"]["arguments"])
        else:
            assert part == message["content"]


def test_the_generators_own_count_is_close_to_the_rendered_length(smollm2: Path) -> None:
    renderer = Renderer.load(smollm2)
    for number in range(5):
        session = lab_session(number, Recipe("test", 3000), jobs.counter(renderer.tokenizer))
        assert 2300 < len(render(session, renderer)) <= 3050


def test_training_data_is_the_same_for_the_same_seed(smollm2: Path, tmp_path: Path) -> None:
    renderer = Renderer.load(smollm2)
    for name in ("a.npz", "b.npz"):
        facts = jobs.write_training_data(tmp_path / name, renderer, 3000, 5, quiet)
    one, two = read_sessions(tmp_path / "a.npz"), read_sessions(tmp_path / "b.npz")
    assert np.array_equal(one.ids, two.ids) and np.array_equal(one.learn, two.learn)
    assert one.held == jobs.HELD_OUT_SESSIONS
    assert one.trained == facts["sessions"]
    assert facts["tokens"] >= 3000


def test_an_adapter_that_was_trained_on_other_weights_is_not_merged(tiny_folder: Path, tmp_path: Path) -> None:
    about = {"base": {"name": "tiny", "weights_hash": "other"}}
    (tmp_path / "training.json").write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(ModelError, match="trained on weights other"):
        jobs.merge(tmp_path, tmp_path / "merged", quiet, str(tiny_folder))


@pytest.mark.slow
def test_the_command_line_trains_goes_on_and_merges(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = str(tiny_folder), str(tmp_path / "adapter")
    command = ["lab", "train", "--model", model, "--minutes", "5", "--tokens", "3000", "-o", output, "--json"]
    assert main([*command, "--threads", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["finished"] and facts["tokens"] >= 3000
    assert facts["held"][-1] < facts["held"][0]
    assert main(command) == 0  # finished: nothing is trained again
    assert json.loads(capsys.readouterr().out)["step"] == facts["step"]
    assert main([*command, "--seed", "3"]) == 1
    assert "--restart" in capsys.readouterr().err
    merged = tmp_path / "merged"
    assert main(["lab", "merge", output, "--model", model, "-o", str(merged), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["relative_change"] > 0
    written = {path.name for path in merged.iterdir()}
    assert written >= {"config.json", "merge.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not [name for name in written if "plan" in name or "log" in name]
    for _ in range(2):  # the second one takes the first one's place
        assert main(["lab", "merge", output, "--model", model, "--json"]) == 0
        capsys.readouterr()
        assert main(["models", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows["llama-lab"]["status"] == "ok"


def test_sessions_are_generated_as_rows_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "lab.jsonl"
    assert main(["lab", "generate", "-o", str(file), "--sessions", "3", "--tokens", "1200", "--seed", "4"]) == 0
    assert "3 sessions" in capsys.readouterr().err
    ids = [json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert ids == ["lab-test-4.0", "lab-test-4.1", "lab-test-4.2"]
    assert load_session(f"{file}#{ids[1]}").turns >= 2
    assert main(["lab", "generate", "-o", str(tmp_path / "lab.json")]) == 2
    assert main(["lab", "train", "--minutes", "0"]) == 2
