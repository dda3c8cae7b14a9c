"""The columns of everything that is recorded per position; the same names travel in frames and stand in saved sessions.

A column is one little-endian array over consecutive positions. `width` 0 is one value a position; a positive width is
that many; `per` names the column that holds the count of values of each position (ragged, concatenated).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.protocol.wire import Arrays, WireError


@dataclass(frozen=True, slots=True)
class Column:
    """dtype and layout of one column; `since` names the column that a file written before this one has in its place."""

    dtype: str
    width: int = 0
    per: str = ""
    since: str = ""


STREAM: dict[str, Column] = {
    "ids": Column("<i4"),
    "role": Column("|u1"),  # session.regions.Role
    "generated": Column("|u1"),  # 1 where the model itself would write the token (headline positions)
    "turn": Column("<i4"),  # index of the assistant turn that the token belongs to or, as context, leads up to
    "message": Column("<i4"),  # index into the session's messages; -1 for what belongs to none
}
"""The token stream all lanes of a session share, from position 0 on."""

TRACE: dict[str, Column] = {
    "logprob": Column("<f4"),  # ln p of the stream's token
    "lse": Column("<f4"),  # log-sum-exp of the raw logits
    "entropy": Column("<f4"),  # nats
    "tail": Column("<f4"),  # ln of the mass outside the head
    "ties": Column("|u1"),  # ids that share the largest logit, less one (capped at 255)
    "valid": Column("|u1"),  # 0 where the logits held non-finite values
    "k": Column("|u1"),
    "s": Column("|u1"),
    "head_ids": Column("<i4", per="k"),  # most probable first, the lowest id first among equals
    "head_logprobs": Column("<f4", per="k"),
    "sample_ids": Column("<i4", per="s"),
    "sample_logprobs": Column("<f4", per="s"),
}
"""The reference's compact distribution (design notes: head, and samples of the tail), from position 1 on."""

ROWS: dict[str, Column] = {
    "kl": Column("<f4"),  # KL(p||q), nats; of a bounded lane its lower bound
    "kl_low": Column("<f4"),  # its lower bound from the head and the lumped tail
    "tv": Column("<f4"),  # total variation; of a bounded lane the lower end of its interval
    "tv_high": Column("<f4", since="tv"),  # the upper end, or the same
    "rank": Column("<i4"),  # rank of the reference's top-1 in q; 1 = no flip
    "logprob": Column("<f4"),  # ln q of the stream's token
    "top_ids": Column("<i4", width=4),  # q's own best; [:, 0] is the argmax, the lowest id among equals
    "top_logprobs": Column("<f4", width=4),
    "ties": Column("|u1"),
    "valid": Column("|u1"),  # 0: excluded (non-finite, or q = 0 where p > 0)
    "seconds": Column("<f4"),  # since scoring began, when the row came
}
"""A forced lane's measurements against the trace, from position 1 on."""

CONTINUATION: dict[str, Column] = {
    "ids": Column("<i4"),
    "logprobs": Column("<f4"),
    "seconds": Column("<f4"),  # since generation began, when the token was known
}
"""Tokens that a lane generated after its context, from its first on."""

KINDS: dict[str, dict[str, Column]] = {
    "stream": STREAM,
    "trace": TRACE,
    "rows": ROWS,
    "continuation": CONTINUATION,
}


def count_rows(kind: str, arrays: Arrays) -> int:
    """Check that `arrays` are whole rows of a kind and return how many. Raises WireError where they are not."""
    columns = KINDS[kind]
    if arrays.keys() != columns.keys():
        wrong = sorted(arrays.keys() ^ columns.keys())
        raise WireError(f"{kind} rows with missing or unknown columns: {', '.join(wrong)}")
    counts = [len(arrays[name]) for name, column in columns.items() if not column.per]
    rows = counts[0]
    for name, column in columns.items():
        array = arrays[name]
        expected: tuple[int, ...] = (rows,)
        if column.per:
            expected = (int(arrays[column.per].sum(dtype=np.int64)),)
        elif column.width:
            expected = (rows, column.width)
        if array.shape != expected or array.dtype.str != column.dtype:
            raise WireError(
                f"{kind} column {name!r} is {array.dtype.str} {array.shape}, expected {column.dtype} {expected}"
            )
    return rows


def cut(kind: str, arrays: Arrays, start: int, stop: int) -> Arrays:
    """Rows `start` to `stop` (relative) of whole rows of a kind; views where possible."""
    out: Arrays = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, column in KINDS[kind].items():
        if not column.per:
            out[name] = arrays[name][start:stop]
            continue
        if column.per not in offsets:
            counts = arrays[column.per]
            begin = int(counts[:start].sum(dtype=np.int64))
            offsets[column.per] = begin, begin + int(counts[start:stop].sum(dtype=np.int64))
        begin, end = offsets[column.per]
        out[name] = arrays[name][begin:end]
    return out


def join(kind: str, parts: list[Arrays]) -> Arrays:
    """Consecutive rows of a kind as one; an empty list gives no rows."""
    if not parts:
        return {
            name: np.zeros((0, column.width) if column.width else (0,), column.dtype)
            for name, column in KINDS[kind].items()
        }
    return {name: np.concatenate([part[name] for part in parts]) for name in KINDS[kind]}


def dense(arrays: Arrays, column: str, fill: Any) -> np.ndarray[Any, Any]:
    """A ragged trace column as a rectangle (n, widest), the missing values `fill`."""
    counts = arrays[TRACE[column].per].astype(np.int64)
    out = np.full((len(counts), int(counts.max(initial=0))), fill, dtype=arrays[column].dtype)
    out[np.arange(out.shape[1]) < counts[:, None]] = arrays[column]
    return out
