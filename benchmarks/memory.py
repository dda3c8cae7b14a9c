"""Does the peak memory of scoring grow by more than the KV cache? Scores 2,048, 4,096 and 8,192 tokens and says.

Each run is a fresh engine process, sdpa, chunks of 512, whole distributions turned into rows. The peak is the process's
resident set (or the device's allocator) from the start of scoring on, model and cache included. The cache is made for
as many tokens as are scored, so its bytes are those of the depth. Peaks are medians of repeated runs; equal runs differ
by a few MiB (libraries, the heap's holes), and that spread, printed, is what a peak is known to. Exit code 1 where,
from the shortest depth to a longer one, the peak grew by more than the cache (with the one layer that a quantised
cache is read through) and the spread.

The last column is what the peak grew by less what the cache did: a chunk's mask and attention's scratch grow too, but
are freed within the pass, before the logits take more than they did.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from workbench.config.lane import EMBEDDED_MODEL, Configuration, parse_spec
from workbench.engines.environments import environment_for
from workbench.engines.models import Model, find_model
from workbench.engines.process import EngineProcess
from workbench.protocol.events import Failed, Score, Scored, Start, Started
from workbench.worker.quant.gguf import convert

LENGTHS = (2048, 4096, 8192)
SCHEMES = ("bf16", "int8", "int4")
MIB = 1 << 20
Answer = TypeVar("Answer", Started, Scored)


@dataclass(frozen=True)
class Run:
    """What one process took, in bytes."""

    tokens: int
    peak: int
    cache: int
    workspace: int
    kind: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of scoring by depth, beside the KV cache.")
    parser.add_argument("--quick", action="store_true", help="bf16 KV only")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="the embedded model by default")
    parser.add_argument("--kv", action="append", default=[], help=f"a KV scheme; {', '.join(SCHEMES)} by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    model = find_model(chosen.model, convert)
    ids = stream(model, max(LENGTHS))
    exceeded = False
    for scheme in chosen.kv or (SCHEMES[:1] if chosen.quick else SCHEMES):
        lane = parse_spec(f"transformers:weights=bf16,kv={scheme},attn=sdpa,chunk=512,threads={chosen.threads}")
        exceeded |= show(lane, [[measure(lane, model, ids[:n]) for _ in range(chosen.rounds)] for n in LENGTHS])
    return 1 if exceeded else 0


def stream(model: Model, length: int) -> NDArray[np.int32]:
    """Token ids (length,) of Python sources."""
    text = "".join(inspect.getsource(module) for module in (argparse, ast))
    ids = Tokenizer.from_file(str(model.folder / "tokenizer.json")).encode(text).ids[:length]
    assert len(ids) == length
    return np.array(ids, dtype="<i4")


def measure(lane: Configuration, model: Model, ids: NDArray[np.int32]) -> Run:
    """Score ids in a new process, as a reference is recorded. Raises RuntimeError where it fails."""
    environment = environment_for("transformers")
    assert environment is not None
    process = EngineProcess(environment.python, "transformers")
    try:
        process.send(Start(1, lane.to_json(), str(model.folder), len(ids)))
        wait(process, Started)
        process.send(Score(2, 1, True, arrays={"ids": ids}))
        stats = wait(process, Scored).stats
    finally:
        process.stop()
    return Run(
        len(ids), stats["peak_memory_bytes"], stats["kv_cache_bytes"], stats["kv_workspace_bytes"], stats["memory_kind"]
    )


def wait(process: EngineProcess, kind: type[Answer]) -> Answer:
    """The event of a kind. Raises RuntimeError with the engine's words where it fails."""
    while True:
        event = process.receive()
        if isinstance(event, kind):
            return event
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.what} {event.next}")


def show(lane: Configuration, depths: list[list[Run]]) -> bool:
    """Print the table of one scheme; whether the peak grew by more than the cache."""
    first = depths[0][0]
    base = median(run.peak for run in depths[0])
    spread = max(max(run.peak for run in runs) - min(run.peak for run in runs) for runs in depths)
    print(
        f"{lane.to_line()}: memory counted is {first.kind}, MiB; medians of {len(depths[0])} fresh processes,"
        f" equal runs differ by up to {spread / MIB:.1f}"
    )
    print(f"{'tokens':>8}{'peak':>10}{'cache':>9}{'layer':>9}{'peak grew':>11}{'cache grew':>12}{'beside':>9}")
    exceeded = False
    for runs in depths:
        run = runs[0]
        highest = median(each.peak for each in runs)
        peak, cache = highest - base, run.cache + run.workspace - first.cache - first.workspace
        values = (highest, run.cache, run.workspace, peak, cache, peak - cache)
        cells = [f"{value / MIB:{width}.1f}" for value, width in zip(values, (10, 9, 9, 11, 12, 9), strict=True)]
        print(f"{run.tokens:8,}{''.join(cells)}", flush=True)
        exceeded |= peak > cache + spread
    return exceeded


if __name__ == "__main__":
    sys.exit(main())
