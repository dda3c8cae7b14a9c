"""Do the engines agree, and what does each quantization do? Runs them on one session and prints the tables of README.

1. float32 in llama.cpp and vLLM against float32 in transformers: a mean KL under 1e-6 and no flip that is not a tie
   prove that tokens, templates and metrics agree. Each flip is printed with the margin of the reference there.
2. bf16 in all three engines, and the quantizations of llama.cpp and vLLM, against bf16 in transformers with its floor.

Exit code 1 where a lane did not finish or float32 does not agree. Engines that are not installed are left out by name.
`--quick` takes the short session and llama.cpp only. `--checkpoint PATH` adds a quantized folder as a vLLM lane.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from workbench.engines.environments import environment_for
from workbench.report import table
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.store.trace import margins

AGREE = 1e-6
TIE = 1e-3
"""Nats between the reference's two best below which float32 itself decides: rotary angles of thousands of radians are
rounded to 1e-4, each engine in its own order."""
FP32 = "transformers:weights=fp32,kv=fp32"
LLAMA_FP32 = "llamacpp:weights=F32,kv=f32,fa=off"
VLLM_FP32 = "vllm:weights=fp32"
LLAMA = (
    "llamacpp:weights=BF16,kv=bf16", "llamacpp:weights=Q8_0", "llamacpp:weights=Q6_K", "llamacpp:weights=Q4_K_M",
    "llamacpp:weights=BF16,kv=q8_0", "llamacpp:weights=BF16,kv=q4_0",
)  # fmt: skip
VLLM = ("vllm:weights=bf16", "vllm:kv=fp8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the short session, llama.cpp only")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="PATH", help="a vLLM lane more")
    options = parser.parse_args()
    environment = environment_for("vllm")
    vllm = not options.quick and environment is not None and environment.usable
    if not vllm:
        print(
            "without vLLM" + ("" if options.quick else ": not installed (workbench engines install vllm)"), flush=True
        )
    session = "dice" if options.quick else "demo"
    exact = run(session, FP32, [LLAMA_FP32, *([VLLM_FP32] if vllm else [])])
    lanes = [*LLAMA, *(VLLM if vllm else ())]
    lanes += [f"vllm:model={path},weights=checkpoint" for path in options.checkpoint if vllm]
    quantized = run(session, "transformers:weights=bf16", lanes, *([] if options.quick else ["--floor"]))
    for comparison in (exact, quantized):
        print(table.markdown(comparison), flush=True)
    agree = exact["lanes"]
    finished = all(lane["status"] == "done" for lane in (*agree, *quantized["lanes"]))
    gaps = flip_gaps(Path(exact["file"]))
    for name, found in gaps.items():
        for position, gap in found:
            print(f"{name}: flip at position {position}, the reference's two best are {gap:.1e} nats apart")
    print(" · ".join(f"{lane['configuration']}: KL {mean(lane):.1e}, {lane['flips']} flips" for lane in agree))
    clear = all(gap < TIE for found in gaps.values() for _, gap in found)
    return 0 if finished and clear and all(mean(lane) < AGREE for lane in agree) else 1


def flip_gaps(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Of each lane of a saved session: the positions of its flips, any role, and the reference's margin there."""
    with SavedSession.open(path) as saved:
        state = load_state(saved)
    assert state.reference is not None
    margin = margins(state.reference.rows)
    return {
        lane.record.name: [
            (int(row) + lane.rows.first, float(margin[row])) for row in np.flatnonzero(lane.rows.column("rank") > 1)
        ]
        for lane in state.lanes
        if lane.record.kind == "lane"
    }


def run(session: str, reference: str, lanes: list[str], *more: str) -> dict[str, Any]:
    """One comparison through the command line, as a user gets it."""
    command = [sys.executable, "-m", "workbench", "run", session, "--reference", reference, "--json", *more]
    command += [word for lane in lanes for word in ("--lane", lane)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{session} {lanes}: exit code {done.returncode}")
    return json.loads(done.stdout)


def mean(lane: dict[str, Any]) -> float:
    """The lane's mean KL; infinite where it measured nothing."""
    value = (lane["kl"] or {}).get("mean")
    return float("inf") if value is None else float(value)


if __name__ == "__main__":
    raise SystemExit(main())
