"""The noise floor: the reference against itself under other chunking, prefix reuse, path and attention backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.config.axes import refusal, values
from workbench.config.lane import Configuration
from workbench.metrics import summary
from workbench.protocol.columns import ROWS
from workbench.protocol.wire import Arrays
from workbench.store.state import LaneState, SessionState
from workbench.store.trace import margins

REPEAT = "repeat"
DECODE_POSITIONS = 256
"""Assistant positions that the decode-path row covers, the session's last ones."""


@dataclass(frozen=True, slots=True)
class FloorRow:
    """One way to run the reference again. Positions before `first` are run but do not count."""

    name: str
    configuration: Configuration
    single: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    reuse_prefix: int = 0
    first: int = 1


def floor_rows(reference: Configuration, stream: Arrays) -> list[FloorRow]:
    """The rows of this reference on this stream; what its engine cannot do is left out."""
    n = len(stream["ids"])
    other_chunk = max(1, reference.chunk * 3 // 4)
    rows = [
        FloorRow(REPEAT, reference),
        FloorRow(f"chunk {other_chunk}", replace(reference, chunk=other_chunk)),
    ]
    if n > 64 and reference.engine != "vllm":  # which keeps no cache of ours
        prefix = n // 2 + 1 if (n // 2) % reference.chunk == 0 else n // 2
        rows.append(FloorRow(f"prefix reuse at {prefix}", reference, reuse_prefix=prefix, first=prefix + 1))
    generated = np.flatnonzero(stream["generated"])
    if reference.path == "prefill" and len(generated):
        first = int(generated[-min(DECODE_POSITIONS, len(generated))])
        single = stream["generated"].copy()
        single[: max(0, first - 1)] = 0
        rows.append(FloorRow("decode path", replace(reference, path="decode"), single=single, first=first))
    for attention in values(reference.engine, "attn"):
        candidate = replace(reference, attn=attention)
        if attention not in (reference.attn, "auto") and refusal(candidate) is None:
            rows.append(FloorRow(f"attention {attention}", candidate))
            break
    return rows


def floor_fact(state: SessionState, measured: list[tuple[FloorRow, LaneState]]) -> dict[str, Any]:
    """The floor of finished rows, as `compare --json` shows it."""
    reference = state.reference
    assert reference is not None
    rows = reference.rows
    summaries = [
        summary.FloorRow(
            row.name,
            {name: lane.rows.column(name) for name in ROWS},
            rows.column("top_ids")[lane.rows.first - rows.first :, :2],
            margins(rows)[lane.rows.first - rows.first :],
            first=lane.rows.first,
            repeat=row.name == REPEAT,
        )
        for row, lane in measured
    ]
    return summary.floor_summary(summaries, state.stream)
