"""How long does a seek take in a saved session of 100,000 positions, and how much memory does a lane?

Makes a file of random rows (a reference and four lanes), then reads one position's trace and the rows of all lanes at
random places, each in a chunk that was not read before. Exit code 1 where the slowest seek takes more than 50 ms or a
lane in memory more than 10 MB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from workbench.protocol.columns import KINDS
from workbench.protocol.wire import Arrays
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.state import LaneRecord

BAR_MS = 50.0
BAR_MB = 10.0
LANES = 4
BLOCK = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="a third of the seeks")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seek.wbs"
        began = time.perf_counter()
        write(path, options.positions, rng)
        wrote = time.perf_counter() - began
        with SavedSession.open(path) as saved:
            began = time.perf_counter()
            state = load_state(saved)
            loaded = time.perf_counter() - began
            lane_mb = [
                (lane.rows.nbytes + (0 if lane.entropy is None else lane.entropy.nbytes)) / 1e6 for lane in state.lanes
            ]
        seeks = np.array([seek(path, options.positions, rng) for _ in range(100 if options.quick else 300)])
        size_mb = path.stat().st_size / 1e6
    print(f"{options.positions:,} positions, a reference and {LANES} lanes, {size_mb:.0f} MB, written in {wrote:.1f} s")
    print(f"load_state {loaded * 1e3:.0f} ms; lanes in memory {', '.join(f'{mb:.1f}' for mb in lane_mb)} MB")
    print(f"{'':26}{'median':>10}{'p99':>10}{'slowest':>10}")
    for name, column in (("open the file, ms", 0), ("seek, ms", 1)):
        values = seeks[:, column] * 1e3
        print(f"{name:26}{np.median(values):>10.2f}{np.quantile(values, 0.99):>10.2f}{values.max():>10.2f}")
    slowest = seeks[:, 1].max() * 1e3
    print(f"slowest seek: {slowest:.1f} ms (bar: {BAR_MS:g}); largest lane: {max(lane_mb):.1f} MB (bar: {BAR_MB:g})")
    return int(slowest > BAR_MS or max(lane_mb) > BAR_MB)


def seek(path: Path, positions: int, rng: np.random.Generator) -> tuple[float, float]:
    """Seconds to open the file, and to read one position's trace and every lane's rows with nothing decoded yet."""
    position = int(rng.integers(1, positions))
    began = time.perf_counter()
    with SavedSession.open(path) as saved:
        opened = time.perf_counter()
        saved.read(1, "trace", position, position + 1)
        for lane in range(2, LANES + 2):
            saved.read(lane, "rows", position, position + 1)
        return opened - began, time.perf_counter() - opened


def write(path: Path, positions: int, rng: np.random.Generator) -> None:
    """A saved session of random rows, as large as real ones are."""
    with SavedSession.create(path, {"title": "seek"}) as saved:
        saved.set_stream(rows_of("stream", positions, rng))
        for number in range(LANES + 1):
            lane = saved.add_lane(LaneRecord(0, f"lane {number}", "lane" if number else "reference", {}))
            kind = "rows" if number else "trace"
            for first in range(1, positions, BLOCK):
                saved.append(lane.id, kind, first, rows_of(kind, min(BLOCK, positions - first), rng))


def rows_of(kind: str, n: int, rng: np.random.Generator) -> Arrays:
    """Random rows of a kind."""
    counts = {"k": rng.choice([8, 16, 32, 64], n).astype("|u1"), "s": rng.choice([0, 8, 16, 32], n).astype("|u1")}
    arrays: Arrays = {}
    for name, column in KINDS[kind].items():
        rows = int(counts[column.per].sum(dtype=np.int64)) if column.per else n
        shape = (rows, column.width) if column.width else (rows,)
        if name in counts:
            arrays[name] = counts[name]
        elif column.dtype == "<f4":
            arrays[name] = -rng.exponential(2.0, shape).astype("<f4")
        else:
            arrays[name] = rng.integers(0, 2 if column.dtype == "|u1" else 49_152, shape).astype(column.dtype)
    return arrays


if __name__ == "__main__":
    sys.exit(main())
