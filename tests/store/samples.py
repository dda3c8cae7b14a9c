"""Realistic rows of every kind, a clock that is set by hand, and a small saved session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.protocol.columns import KINDS, STREAM
from workbench.protocol.wire import Arrays
from workbench.store.saved import SavedSession
from workbench.store.state import LaneRecord

VOCABULARY = 49_152


def make_rows(kind: str, n: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng([seed, n, list(KINDS).index(kind)])
    k = rng.choice([8, 16, 32, 64], n, p=[0.4, 0.2, 0.2, 0.2]).astype("|u1")
    s = rng.choice([0, 8, 16, 32], n, p=[0.4, 0.2, 0.2, 0.2]).astype("|u1")
    counts = {"k": k, "s": s}
    arrays: Arrays = {}
    for name, column in KINDS[kind].items():
        rows = int(counts[column.per].sum(dtype=np.int64)) if column.per else n
        shape = (rows, column.width) if column.width else (rows,)
        if name in counts:
            arrays[name] = counts[name]
        elif column.dtype == "<f4":
            arrays[name] = -rng.exponential(2.0, shape).astype("<f4")
        elif column.dtype == "|u1":
            arrays[name] = rng.integers(0, 2, shape).astype("|u1")
        else:
            arrays[name] = rng.zipf(1.3, shape).clip(1, VOCABULARY - 1).astype(column.dtype)
    return arrays


def equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name], equal_nan=True) for name in one
    )


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def token_bytes(ids: Sequence[int]) -> list[bytes]:
    return [b"<%d>" % token for token in ids]


def record(kind: str = "lane", name: str = "int4 kv", **values: object) -> LaneRecord:
    return LaneRecord(-1, name, kind, {"engine": "transformers", "kv": "int4"}, **values)  # type: ignore[arg-type]


def write_session(path: Path, n: int = 600, lanes: int = 2) -> None:
    with SavedSession.create(
        path, {"title": "A session", "messages": [{"role": "user"}]}, {"tokenizer_hash": "ab12"}
    ) as saved:
        stream = make_rows("stream", n)
        saved.set_stream({name: stream[name] for name in STREAM})
        reference = saved.add_lane(record("reference", "bf16"))
        saved.append(reference.id, "trace", 1, make_rows("trace", n - 1))
        for number in range(lanes):
            lane = saved.add_lane(record(stats={"peak_memory_bytes": 123_456_789}))
            saved.append(lane.id, "rows", 1, make_rows("rows", n - 1, number))
            saved.append(lane.id, "continuation", 0, make_rows("continuation", 64, number))
        saved.add_tokens({number: b"<%d>" % number for number in range(300)})
