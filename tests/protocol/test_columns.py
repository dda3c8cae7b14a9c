from __future__ import annotations

import numpy as np
import pytest

from workbench.protocol import columns
from workbench.protocol.wire import Arrays, WireError


def trace(counts: list[tuple[int, int]]) -> Arrays:
    n = len(counts)
    rng = np.random.default_rng(0)
    k = np.array([pair[0] for pair in counts], np.uint8)
    s = np.array([pair[1] for pair in counts], np.uint8)
    out: Arrays = {}
    for name, column in columns.TRACE.items():
        size = {"k": int(k.sum()), "s": int(s.sum())}.get(column.per, n)
        out[name] = rng.integers(0, 99, size).astype(column.dtype)
    return {**out, "k": k, "s": s}


def test_ragged_rows_are_cut_and_joined_without_loss() -> None:
    whole = trace([(8, 0), (16, 8), (64, 32), (8, 8), (32, 0)])
    assert columns.count_rows("trace", whole) == 5
    parts = [columns.cut("trace", whole, 0, 2), columns.cut("trace", whole, 2, 3), columns.cut("trace", whole, 3, 5)]
    assert [columns.count_rows("trace", part) for part in parts] == [2, 1, 2]
    again = columns.join("trace", parts)
    assert all(np.array_equal(again[name], whole[name]) for name in columns.TRACE)


def test_no_rows_are_rows_too() -> None:
    for kind in columns.KINDS:
        assert columns.count_rows(kind, columns.join(kind, [])) == 0


def test_a_ragged_column_becomes_a_rectangle() -> None:
    whole = trace([(8, 0), (16, 8)])
    head = columns.dense(whole, "head_ids", -1)
    assert head.shape == (2, 16)
    assert (head[0, 8:] == -1).all()
    assert np.array_equal(head[1], whole["head_ids"][8:])
    assert columns.dense(whole, "sample_ids", -1).shape == (2, 8)


@pytest.mark.parametrize("change", ["missing", "extra", "short", "dtype"])
def test_rows_that_are_not_whole_are_refused(change: str) -> None:
    rows = trace([(8, 0), (16, 8)])
    if change == "missing":
        del rows["lse"]
    elif change == "extra":
        rows["more"] = rows["lse"]
    elif change == "short":
        rows["head_ids"] = rows["head_ids"][:-1]
    else:
        rows["lse"] = rows["lse"].astype(np.float64)
    with pytest.raises(WireError):
        columns.count_rows("trace", rows)
