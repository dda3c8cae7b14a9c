from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError, SavedSessionError, WorkbenchError
from workbench.protocol.columns import cut as piece
from workbench.protocol.columns import join
from workbench.report.compare import compare
from workbench.run.experiment import Experiment
from workbench.run.imported import export_from
from workbench.run.prepare import Ask
from workbench.store.exchange import FACT
from workbench.store.saved import SavedSession

Told = list[str]


def run(ask: Ask, said: Told | None = None) -> dict[str, Any]:
    experiment = Experiment(ask, (said if said is not None else []).append)
    try:
        experiment.prepare()
        experiment.start()
        assert experiment.wait(120)
        return compare(experiment.state)
    finally:
        experiment.close()


@pytest.fixture(scope="module")
def exported(
    tiny_folder: Path, tiny_session: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """A reference in fp32 with the session's text, one without, and the comparison of int8 KV on the spot."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(folder / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        base = Configuration(model=str(tiny_folder), weights="fp32", kv="fp32", chunk=256)
        lanes = (replace(base, kv="int8"),)
        compared = run(Ask(str(tiny_session), base, lanes, folder / "own.wbs"))
    for name, text in (("text.wbref", True), ("ids.wbref", False)):
        export_from(folder / "own.wbs", tiny_folder, folder / name, text=text)
    return folder / "text.wbref", folder / "ids.wbref", compared


@pytest.fixture
def ask(tiny_folder: Path, tmp_path: Path) -> Callable[..., Ask]:
    base = Configuration(model=str(tiny_folder))
    lane = replace(base, weights="fp32", kv="int8", chunk=256)

    def made(file: Path, session: str | None = None, **changes: Any) -> Ask:
        return replace(Ask(session, base, (lane,), tmp_path / "out.wbs", reference_file=file), **changes)

    return made


def changed(source: Path, target: Path, change: Callable[[SavedSession, int], None]) -> Path:
    """A copy of an exported reference that `change(file, reference id)` was let loose on."""
    shutil.copyfile(source, target)
    with SavedSession.open(target, write=True) as saved:
        change(saved, next(lane.id for lane in saved.lanes()))
    return target


def with_trace(edit: Callable[[dict[str, Any]], None]) -> Callable[[SavedSession, int], None]:
    def change(saved: SavedSession, lane: int) -> None:
        rows = {name: part.copy() for name, part in join("trace", [p for _, p in saved.pieces(lane, "trace")]).items()}
        edit(rows)
        saved.delete_rows(lane, "trace")
        saved.append(lane, "trace", 1, rows)
        saved.flush()

    return change


@pytest.mark.parametrize("which", [0, 1], ids=["with text", "ids only"])
def test_an_imported_reference_gives_the_numbers_of_the_one_recorded_here(exported, ask, which, tiny_session) -> None:
    said: Told = []
    session = str(tiny_session) if which else None
    compared = run(ask(exported[which], session), said)
    ours, theirs = compared["lanes"][0], exported[2]["lanes"][0]
    assert ours["status"] == "done", ours["reason"]
    assert (ours["kl"], ours["flips"]) == (theirs["kl"], theirs["flips"])
    assert any("recorded by transformers" in line for line in said)


def test_without_text_the_file_holds_token_ids_and_no_word_of_the_session(exported) -> None:
    with_text, without, _ = exported
    assert b"Run number 3" in with_text.read_bytes()
    held = without.read_bytes()
    assert not any(word in held for word in (b"Run number", b"You run commands", b"it said ok"))
    with SavedSession.open(without) as saved:
        assert saved.session["messages"] == []
        assert saved.tokens() == {}
        assert len(saved.stream()["ids"]) > 1000
        assert str(without.parent) not in json.dumps([lane.manifest for lane in saved.lanes()])


def edited(folder: Path, target: Path, name: str, edit: Callable[[str], str]) -> Path:
    shutil.copytree(folder, target)
    path = target / name
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    return target


def other_tokenizer(text: str) -> str:
    data = json.loads(text)
    vocabulary = data["model"]["vocab"]
    first, second = (next(token for token, number in vocabulary.items() if number == n) for n in (40, 41))
    vocabulary[first], vocabulary[second] = 41, 40
    return json.dumps(data)


def test_a_permuted_vocabulary_of_the_same_size_is_told_by_its_first_token(
    exported, ask, tiny_folder, tmp_path
) -> None:
    other = edited(tiny_folder, tmp_path / "other", "tokenizer.json", other_tokenizer)
    asked = replace(ask(exported[1]), reference=Configuration(model=str(other)))
    with pytest.raises(ConfigurationError, match=r"in another order: id 40 is .* which is id 41 there"):
        run(asked)


def vocabulary(values: Callable[[np.ndarray], np.ndarray]) -> Callable[[SavedSession, int], None]:
    def change(saved: SavedSession, _lane: int) -> None:
        fact = dict(saved.facts[FACT])
        held = np.frombuffer(base64.b64decode(fact["vocabulary"]), "<u4")
        saved.set_fact(FACT, {**fact, "vocabulary": base64.b64encode(values(held).astype("<u4").tobytes()).decode()})

    return change


def padding(saved: SavedSession, lane: int) -> None:
    record = next(record for record in saved.lanes() if record.id == lane)
    saved.update_lane(replace(record, manifest={**record.manifest, "padding_mass_max": 0.02}))


def nonsense(rows: dict[str, Any]) -> None:
    rows["logprob"][122] = np.nan


def lost(rows: dict[str, Any]) -> None:
    rows["valid"][40] = 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (vocabulary(lambda held: held ^ 1), "its tokenizer is another one: id 0 is"),
        (vocabulary(lambda held: np.append(held, np.arange(6))), "vocabulary is padded otherwise.*6 more"),
        (padding, r"up to 2\.0% of the probability on ids that the tokenizer does not have"),
        (with_trace(nonsense), "not finite .*first at position 123"),
        (with_trace(lost), "not finite .*first at position 41"),
    ],
)
def test_each_wrong_reference_gets_an_answer_of_its_own(exported, ask, tmp_path, change, words) -> None:
    with pytest.raises(WorkbenchError, match=words):
        run(ask(changed(exported[1], tmp_path / "wrong.wbref", change)))
    assert not (tmp_path / "out.wbs").exists()


def test_another_template_is_told_by_its_first_line(exported, ask, tiny_folder, tmp_path) -> None:
    name = "chat_template.jinja" if (tiny_folder / "chat_template.jinja").is_file() else "tokenizer_config.json"
    other = edited(tiny_folder, tmp_path / "other", name, lambda text: text.replace("assistant", "assistent"))
    asked = replace(ask(exported[1]), reference=Configuration(model=str(other)))
    with pytest.raises(ConfigurationError, match=r"template is another one: line \d+ here is"):
        run(asked)


def test_another_window_and_another_session_are_told_apart(exported, ask, tiny_session, tmp_path) -> None:
    whole = json.loads(tiny_session.read_text())
    shorter = tmp_path / "shorter.json"
    shorter.write_text(json.dumps({**whole, "messages": whole["messages"][:9]}))
    with pytest.raises(ConfigurationError, match=r"another (window|session)"):
        run(ask(exported[0], str(shorter)))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**whole, "messages": [{"role": "system", "content": "No."}, *whole["messages"][1:]]}))
    with pytest.raises(ConfigurationError, match=r"of another session: token \d+ is"):
        run(ask(exported[0], str(other)))

    def cut(saved: SavedSession, lane: int) -> None:
        rows = join("trace", [part for _, part in saved.pieces(lane, "trace")])
        saved.delete_rows(lane, "trace")
        saved.append(lane, "trace", 1, piece("trace", rows, 0, 500))
        saved.flush()

    with pytest.raises(SavedSessionError, match=r"covers another window than the session.*1 to 500"):
        run(ask(changed(exported[1], tmp_path / "cut.wbref", cut)))


def test_a_text_that_repeats_itself_is_measured_and_said_to_prove_little(exported, ask, tmp_path) -> None:
    def certain(rows: dict[str, Any]) -> None:
        rows["entropy"][:] = 0.001

    said: Told = []
    compared = run(ask(changed(exported[1], tmp_path / "certain.wbref", with_trace(certain))), said)
    assert compared["lanes"][0]["status"] == "done"
    assert any("hardly ever in doubt" in line for line in said)


def test_a_damaged_or_foreign_file_is_refused(exported, ask, tmp_path) -> None:
    broken = tmp_path / "broken.wbref"
    data = bytearray(exported[1].read_bytes())
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    broken.write_bytes(data)
    with pytest.raises(SavedSessionError):
        run(ask(broken))
    with pytest.raises(SavedSessionError, match="is no exported reference, but a saved session"):
        run(ask(exported[0].parent / "own.wbs"))
    with pytest.raises(SavedSessionError, match="no such file"):
        run(ask(tmp_path / "none.wbref"))
    with pytest.raises(ConfigurationError, match="noise floor"):
        run(ask(exported[1], floor=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "user"), [("transformers:", "llamacpp:weights=BF16"), ("llamacpp:", "transformers:")]
)
def test_a_reference_of_one_engine_is_used_by_another(recorder, user, smollm2, tmp_path) -> None:
    base = Configuration(model=str(smollm2))
    output = tmp_path / "recorded.wbs"
    run(Ask("dice", parse_spec(recorder, base), (), output))
    export_from(output, smollm2, tmp_path / "one.wbref", text=False)
    compared = run(
        Ask(None, base, (parse_spec(user, base),), tmp_path / "x.wbs", reference_file=tmp_path / "one.wbref")
    )
    lane = compared["lanes"][0]
    assert lane["status"] == "done", lane["reason"]
    assert 1e-5 < lane["kl"]["mean"] < 0.02
