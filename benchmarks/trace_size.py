"""How many bytes does a stored reference trace take, beside llama.cpp's 2V + 8 a position?

Reads a real saved session: FILE, or the newest cached trace. Exit code 1 where a position takes more than 1,000 bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench.paths import traces_dir
from workbench.protocol.columns import TRACE
from workbench.store.saved import SavedSession

BAR_BYTES = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a saved session; the newest cached trace by default")
    parser.add_argument("--quick", action="store_true", help="only the first chunks")
    parser.add_argument("--vocabulary", type=int, default=0, help="where the file does not say it")
    options = parser.parse_args()
    file = options.file or newest_trace()
    if file is None:
        print("There is no cached trace; make one: workbench record SESSION", file=sys.stderr)
        return 1
    with SavedSession.open(file) as saved:
        reference = next((lane for lane in saved.lanes() if lane.kind == "reference"), None)
        chunks = saved.chunks(reference.id, "trace") if reference else []
        if reference is None or not chunks:
            print(f"{file} holds no trace.", file=sys.stderr)
            return 1
        chunks = chunks[:4] if options.quick else chunks
        raw = dict.fromkeys(TRACE, 0)
        for chunk in chunks:
            for name, array in saved.read(reference.id, "trace", chunk.first, chunk.stop).items():
                raw[name] += array.nbytes
        vocabulary = options.vocabulary or int(reference.manifest.get("vocabulary", 0))
        rows, stored = sum(chunk.rows for chunk in chunks), sum(chunk.size for chunk in chunks)
        print(f"file        {file}")
        print(f"reference   {reference.name}, {rows:,} positions in {len(chunks)} chunks, vocabulary {vocabulary:,}")
        heads, samples = raw["head_ids"] / 4 / rows, raw["sample_ids"] / 4 / rows
        print(f"kept        {heads:.1f} ids of the head and {samples:.1f} samples of the tail a position\n")
        print(f"{'':34}{'bytes a position':>18}")
        print(f"{'llama.cpp, 2V + 8':34}{2 * vocabulary + 8 if vocabulary else float('nan'):>18,.0f}")
        print(f"{'ours, before compression':34}{sum(raw.values()) / rows:>18,.1f}")
        print(f"{'ours, as stored':34}{stored / rows:>18,.1f}")
        print(f"{'the whole file':34}{file.stat().st_size / rows:>18,.1f}\n")
    if vocabulary:
        print(f"{(2 * vocabulary + 8) / (stored / rows):,.0f} times smaller than 2V + 8")
    print(f"bytes a token: {stored / rows:.1f} (bar: {BAR_BYTES:,})")
    return int(stored / rows > BAR_BYTES)


def newest_trace() -> Path | None:
    """The cached trace that was written last."""
    return max(traces_dir().glob("[!.]*.wbs"), key=lambda path: path.stat().st_mtime, default=None)


if __name__ == "__main__":
    sys.exit(main())
