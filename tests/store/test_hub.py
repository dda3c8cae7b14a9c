from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.samples import equal, make_rows, record, token_bytes
from workbench.errors import SavedSessionError
from workbench.protocol.columns import KINDS, cut
from workbench.protocol.events import Progress, Rows, Tokens
from workbench.protocol.wire import Arrays, WireError
from workbench.store.hub import Hub
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.state import Columns, LaneState, SessionState
from workbench.store.trace import rows_of_trace

N = 3000


@pytest.fixture
def hub(path: Path) -> Hub:
    saved = SavedSession.create(path, {"title": "A session"})
    saved.set_stream(make_rows("stream", N))
    return Hub(saved, token_bytes)


def send(hub: Hub, lane: LaneState, arrays: Arrays, first: int = 1, size: int = 512) -> None:
    kind = "trace" if "k" in arrays else "rows"
    rows = len(arrays["valid"])
    for start in range(0, rows, size):
        hub.receive(lane.record.id, Rows(1, first + start, cut(kind, arrays, start, min(start + size, rows))))


def columns_of(columns: Columns) -> Arrays:
    return {name: columns.column(name) for name in KINDS["rows"] if name in columns._arrays}


def same_state(one: SessionState, other: SessionState) -> bool:
    assert one.title == other.title
    assert one.facts == other.facts
    assert one.floor == other.floor
    assert equal(one.stream, other.stream)
    assert [lane.record for lane in one.lanes] == [lane.record for lane in other.lanes]
    for mine, theirs in zip(one.lanes, other.lanes, strict=True):
        assert mine.rows.first == theirs.rows.first
        assert equal(columns_of(mine.rows), columns_of(theirs.rows))
        assert (mine.entropy is None) == (theirs.entropy is None)
        if mine.entropy is not None:
            assert np.array_equal(mine.entropy, theirs.entropy, equal_nan=True)
        for name in KINDS["continuation"]:
            assert np.array_equal(mine.continuation.column(name), theirs.continuation.column(name))
    return True


def test_what_the_hub_shows_is_what_playback_loads(hub: Hub, path: Path) -> None:
    trace, rows, tokens = make_rows("trace", N - 1), make_rows("rows", N - 1), make_rows("continuation", 130)
    lane = hub.add_lane(record())
    reference = hub.add_lane(record("reference", "bf16"))
    assert hub.state.lanes == [reference, lane]
    send(hub, reference, trace)
    send(hub, lane, rows)
    for start in range(0, 130, 10):
        hub.receive(lane.record.id, Tokens(2, start, cut("continuation", tokens, start, start + 10)))
    hub.update(lane.record.id, status="done", stats={"kv_cache_bytes": 1 << 40})
    hub.set_floor({"value": 1e-9, "rows": []})
    assert equal(columns_of(lane.rows), rows)
    assert equal(hub.state.trace(1020, 1030), cut("trace", trace, 1019, 1029))
    live = hub.state
    with SavedSession.open(path) as saved:
        assert saved.read(lane.record.id, "rows", 1, 2049)
    hub.close()
    with SavedSession.open(path) as saved:
        state = load_state(saved)
        assert same_state(live, state)
        assert equal(state.trace(1020, 1030), cut("trace", trace, 1019, 1029))
        occurring = {int(token) for name in ("head_ids", "sample_ids") for token in trace[name]}
        occurring |= {int(token) for token in rows["top_ids"].reshape(-1)} | set(tokens["ids"].tolist())
        occurring |= set(state.stream["ids"].tolist())
        assert saved.tokens() == {token: b"<%d>" % token for token in occurring}
        assert state.token_bytes(trace["head_ids"][0]) == b"<%d>" % trace["head_ids"][0]
        assert state.token_bytes(1 << 30) == b""


def test_each_token_is_asked_for_once(path: Path) -> None:
    asked: list[int] = []

    def ask(ids: Sequence[int]) -> list[bytes]:
        asked.extend(ids)
        return token_bytes(ids)

    saved = SavedSession.create(path, {})
    saved.set_stream(make_rows("stream", 100))
    hub = Hub(saved, ask)
    lane = hub.add_lane(record())
    send(hub, lane, make_rows("rows", 99))
    hub.close()
    assert len(asked) == len(set(asked))
    with SavedSession.open(path, write=True) as saved:
        Hub(saved, lambda ids: pytest.fail(f"asked again for {ids}"))


def test_the_reference_shows_itself_as_its_own_lane(hub: Hub) -> None:
    trace = make_rows("trace", 200)
    lane = hub.add_lane(record("reference"))
    send(hub, lane, trace, size=64)
    starts = np.cumsum(trace["k"].astype(int)) - trace["k"]
    assert np.array_equal(lane.rows.column("top_ids")[:, 0], trace["head_ids"][starts])
    assert np.array_equal(lane.rows.column("top_logprobs")[:, 3], trace["head_logprobs"][starts + 3])
    assert np.array_equal(lane.rows.column("logprob"), trace["logprob"])
    assert not lane.rows.column("kl").any()
    assert (lane.rows.column("rank") == 1).all()
    assert lane.entropy is not None
    assert np.array_equal(lane.entropy, trace["entropy"])
    hub.close()


def test_a_head_of_fewer_than_four_ids_leaves_the_rest_empty() -> None:
    trace = make_rows("trace", 2)
    trace = {**trace, "k": np.array([2, 5], "|u1"), "head_ids": trace["head_ids"][:7]}
    trace["head_logprobs"] = trace["head_logprobs"][:7]
    rows = rows_of_trace(trace)
    assert rows["top_ids"][0].tolist() == [*trace["head_ids"][:2], -1, -1]
    assert np.isneginf(rows["top_logprobs"][0, 2:]).all()
    assert rows["top_ids"][1].tolist() == trace["head_ids"][2:6].tolist()


@pytest.mark.parametrize("kind", ["lane", "reference"])
def test_a_lane_goes_on_where_it_stopped_and_drops_what_is_there(hub: Hub, path: Path, kind: str) -> None:
    arrays = make_rows("trace" if kind == "reference" else "rows", N - 1)
    name = "trace" if kind == "reference" else "rows"
    lane = hub.add_lane(record(kind))
    assert hub.missing(lane.record.id) == [(1, N)]
    send(hub, lane, cut(name, arrays, 0, 700))
    assert hub.missing(lane.record.id) == [(701, N)]
    hub.close()
    with SavedSession.open(path, write=True) as saved:
        hub = Hub(saved, token_bytes)
        assert hub.missing(lane.record.id) == [(701, N)]
        lane = hub.lane(lane.record.id)
        send(hub, lane, arrays)
        assert hub.missing(lane.record.id) == []
        assert equal(saved.read(lane.record.id, name, 1, N), arrays)
        live = hub.state
    with SavedSession.open(path) as saved:
        assert same_state(live, load_state(saved))


@pytest.mark.parametrize("kind", ["lane", "reference"])
def test_holes_are_absent_rows_until_they_are_filled(hub: Hub, path: Path, kind: str) -> None:
    name = "trace" if kind == "reference" else "rows"
    arrays = make_rows(name, N - 1)
    arrays["valid"][:] = 1
    lane = hub.add_lane(record(kind))
    send(hub, lane, cut(name, arrays, 0, 100))
    send(hub, lane, cut(name, arrays, 499, 1499), first=500)
    assert hub.missing(lane.record.id) == [(101, 500), (1500, N)]
    assert lane.rows.column("valid")[100:499].any() == np.False_
    assert np.isnan(lane.rows.column("kl")[100:499]).all()
    hub.close()
    with SavedSession.open(path, write=True) as saved:
        hub = Hub(saved, token_bytes)
        lane = hub.lane(lane.record.id)
        assert hub.missing(lane.record.id) == [(101, 500), (1500, N)]
        assert hub.missing(lane.record.id, 300, 1600) == [(300, 500), (1500, 1600)]
        hub.receive(lane.record.id, Rows(1, 200, cut(name, arrays, 199, 249)))
        assert hub.missing(lane.record.id) == [(101, 200), (250, 500), (1500, N)]
        send(hub, lane, arrays)
        assert hub.missing(lane.record.id) == []
        assert lane.rows.column("valid").all()
        assert equal(saved.read(lane.record.id, name, 1, N), arrays)
        live = hub.state
    with SavedSession.open(path) as saved:
        assert same_state(live, load_state(saved))


def test_a_decode_lane_begins_where_its_first_row_is(hub: Hub, path: Path) -> None:
    rows = make_rows("rows", 256)
    lane = hub.add_lane(record(path="decode"))
    send(hub, lane, rows, first=N - 256)
    assert lane.rows.first == N - 256
    assert hub.missing(lane.record.id, N - 256) == []
    assert hub.missing(lane.record.id) == [(1, N - 256)]
    send(hub, lane, make_rows("rows", 10, 7), first=N - 300)
    assert lane.rows.first == N - 300
    assert hub.missing(lane.record.id, N - 300) == [(N - 290, N - 256)]
    assert np.array_equal(lane.rows.column("kl")[-256:], rows["kl"])
    live = hub.state
    hub.close()
    with SavedSession.open(path) as saved:
        assert same_state(live, load_state(saved))


def test_a_continuation_begun_again_replaces_the_old_one(hub: Hub) -> None:
    lane = hub.add_lane(record())
    first, second = make_rows("continuation", 20, 1), make_rows("continuation", 12, 2)
    hub.receive(lane.record.id, Tokens(1, 0, first))
    hub.receive(lane.record.id, Tokens(2, 0, second))
    assert np.array_equal(lane.continuation.column("ids"), second["ids"])
    with pytest.raises(SavedSessionError, match="tokens from 30 on after 12"):
        hub.receive(lane.record.id, Tokens(2, 30, first))
    hub.close()


def test_a_cleared_lane_is_measured_anew(hub: Hub, path: Path) -> None:
    reference = hub.add_lane(record("reference"))
    send(hub, reference, make_rows("trace", 100, 1))
    hub.clear(reference.record.id)
    assert len(reference.rows) == 0
    send(hub, reference, make_rows("trace", 50, 2))
    assert equal(hub.state.trace(1, 51), make_rows("trace", 50, 2))
    live = hub.state
    hub.close()
    with SavedSession.open(path) as saved:
        assert same_state(live, load_state(saved))


def test_every_change_is_seen_in_the_version(hub: Hub) -> None:
    lane = hub.add_lane(record())
    seen = [hub.state.version]
    for change in (
        lambda: hub.receive(lane.record.id, Progress(1, "prefill", 512, 3000)),
        lambda: hub.receive(lane.record.id, Rows(1, 1, make_rows("rows", 5))),
        lambda: hub.update(lane.record.id, status="failed", reason="ended"),
        lambda: hub.set_fact("a", 1),
    ):
        change()
        seen.append(hub.state.version)
    assert seen == sorted(set(seen))
    assert (lane.phase, lane.done, lane.total) == ("prefill", 512, 3000)
    assert lane.record == replace(lane.record, status="failed", reason="ended")
    hub.close()


def test_rows_that_are_none_are_refused_and_change_nothing(hub: Hub) -> None:
    lane = hub.add_lane(record())
    with pytest.raises(WireError):
        hub.receive(lane.record.id, Rows(1, 1, make_rows("trace", 5)))
    with pytest.raises(SavedSessionError, match="no lane 99"):
        hub.receive(99, Progress(1, "x"))
    assert len(lane.rows) == 0
    hub.close()


def test_lanes_on_several_threads_do_not_mix(hub: Hub, path: Path) -> None:
    lanes = [hub.add_lane(record(name=str(number))) for number in range(4)]
    rows = [make_rows("rows", N - 1, number) for number in range(4)]
    threads = [
        threading.Thread(target=send, args=(hub, lane, arrays, 1, 97)) for lane, arrays in zip(lanes, rows, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.close()
    with SavedSession.open(path) as saved:
        for lane, arrays in zip(lanes, rows, strict=True):
            assert equal(saved.read(lane.record.id, "rows", 1, N), arrays)


def test_a_lane_of_100_000_positions_takes_less_than_10_megabytes(hub: Hub) -> None:
    lane = hub.add_lane(record())
    rows = make_rows("rows", 1000)
    for first in range(1, 100_001, 1000):
        lane.rows.append(first, rows)
    assert lane.rows.nbytes < 10_000_000
    hub.close()
