from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np

from tests.store.samples import make_rows, record, write_session
from workbench.session.regions import ROLE_NAMES
from workbench.store.exporters import FIELDS, write_csv, write_jsonl
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession


def test_csv_and_json_lines_hold_every_position_of_the_lanes_asked_for(path: Path) -> None:
    write_session(path, n=5001)
    stream, rows, trace = make_rows("stream", 5001), make_rows("rows", 5000, 1), make_rows("trace", 5000)
    with SavedSession.open(path) as saved:
        state = load_state(saved)
        text, lines = io.StringIO(), io.StringIO()
        assert write_csv(state, text, "3") == write_jsonl(state, lines, lane="3") == 5000
        assert write_jsonl(state, io.StringIO()) == 15_000
        assert write_jsonl(state, io.StringIO(), lane="no such lane") == 0
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    table = list(csv.reader(text.getvalue().splitlines()))
    assert table[0] == list(FIELDS) == list(records[0])
    for offset in (0, 4094, 4096, 4999):
        record_, line = records[offset], dict(zip(FIELDS, table[offset + 1], strict=True))
        assert record_["position"] == int(line["position"]) == offset + 1
        assert record_["id"] == int(line["id"]) == stream["ids"][offset + 1]
        assert record_["role"] == ROLE_NAMES[stream["role"][offset + 1]]
        assert record_["kl"] == float(line["kl"]) == rows["kl"][offset]
        assert record_["reference_entropy"] == trace["entropy"][offset]
        assert record_["reference_logprob"] == trace["logprob"][offset]


def test_absent_values_are_null_and_token_text_is_harmless(path: Path) -> None:
    rows = make_rows("rows", 3)
    rows["kl"][0] = np.nan
    with SavedSession.create(path, {}) as saved:
        stream = make_rows("stream", 4)
        stream["ids"][:] = [0, 1, 2, 3]
        saved.set_stream(stream)
        saved.append(saved.add_lane(record()).id, "rows", 1, rows)
        saved.add_tokens({1: b"=cmd()\x1b[31m", 2: "é".encode()[:1], 3: b'a"b,\n'})
        state = load_state(saved)
        text, lines = io.StringIO(), io.StringIO()
        write_csv(state, text)
        write_jsonl(state, lines)
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [record_["token"] for record_ in records] == ["=cmd()\x1b[31m", "\\xc3", 'a"b,\n']
    assert records[0]["kl"] is None
    assert records[0]["reference_entropy"] is None
    table = list(csv.reader(io.StringIO(text.getvalue())))
    assert "\x1b" not in text.getvalue()
    assert table[1][4].startswith('"=cmd')
    assert table[1][FIELDS.index("kl")] == ""
