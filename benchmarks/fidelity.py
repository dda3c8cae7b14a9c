"""Which quantization, at which depth, with which attention, against which noise floor? Prints README's fidelity table.

Every lane runs the demo session on the embedded model against its bf16 reference, forced, on the prefill path; the
4-bit weights of the comparison are all symmetric in groups of 64. The weights are made where they are not there yet,
which takes minutes. Exit code 1 where a lane did not finish, or an order that must hold does not:
floor < W8A16 < W4A16 by AWQ and by GPTQ < W4A16 by round to nearest; KV int8 near the floor < int4 < int2.

`--quick` prints what the last whole run saved, and exits with code 2 where there is none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from workbench.engines.environments import environment_for
from workbench.paths import saved_dir
from workbench.report.compare import compare
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession

SESSION = "demo"
ATTENTION = {"eager": "attention eager", "sdpa-math": "attention sdpa, math kernel", "flex": "attention flex"}
WEIGHTS = {
    "int8": "int8, our own",
    "w8a16": "W8A16",
    "w4a16-awq,w_group=64": "W4A16 AWQ, g64",
    "w4a16-gptq,w_group=64": "W4A16 GPTQ, g64",
    "w4a16,w_group=64": "W4A16 round to nearest, g64",
    "nvfp4a16": "NVFP4A16",
}
KV = {
    "int8": "KV int8",
    "int4": "KV int4",
    "int2": "KV int2",
    "fp8": "KV fp8",
    "k8v4": "KV int8 keys, int4 values",
    "int2,kv_keys=channel,kv_window=128": "KV int2, keys per channel, 128 exact",
}
GGUF = ("BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
GGUF_KV = ("q8_0", "q4_0")
LANES: dict[str, str] = {
    **{f"transformers:weights={spec}": f"weights {name}" for spec, name in WEIGHTS.items()},
    **{f"transformers:kv={kv}": about for kv, about in KV.items()},
    **{f"llamacpp:weights={scheme}": f"llama.cpp {scheme}" for scheme in GGUF},
    **{f"llamacpp:weights=BF16,kv={kv}": f"llama.cpp BF16, KV {kv}" for kv in GGUF_KV},
    **{f"transformers:attn={name}": about for name, about in ATTENTION.items()},
}
"""A lane's SPEC → what the table calls it."""
NEEDS = ("transformers", "llamacpp", "llmcompressor")
AT_FLOOR = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="print what the last whole run saved")
    parser.add_argument("-o", "--output", metavar="FILE.wbs", help="where the session is saved, and read by --quick")
    options = parser.parse_args()
    path = Path(options.output) if options.output else saved_dir() / "fidelity.wbs"
    if options.quick and not path.is_file():
        print(f"there is no {path.name} yet: python benchmarks/fidelity.py makes it", file=sys.stderr)
        return 2
    if not options.quick:
        run(path)
    with SavedSession.open(path) as saved:
        comparison = compare(load_state(saved))
    lanes = {lane["configuration"]: lane for lane in comparison["lanes"]}
    rows = {name: lanes.get(line(spec), {}) for spec, name in LANES.items()}
    print_conditions(comparison)
    print_floor(comparison["floor"])
    print_lanes(comparison, rows)
    return report(comparison["floor"]["value"], rows)


def run(path: Path) -> None:
    """Measure what is not in the file yet, through the command line, as a user does it."""
    for engine in NEEDS:
        environment = environment_for(engine)
        if environment is None or not environment.usable:
            raise SystemExit(f"{engine} is not installed: workbench engines install {engine}")
    command = [sys.executable, "-m", "workbench", "run", SESSION, "--floor", "--json", "-o", str(path)]
    command += [word for spec in LANES for word in ("--lane", spec)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.returncode)


def line(spec: str) -> str:
    """A SPEC as the comparison writes it."""
    from workbench.config.lane import parse_spec

    return parse_spec(spec).to_line()


def print_conditions(comparison: dict[str, Any]) -> None:
    reference = comparison["reference"]
    versions = ", ".join(f"{name} {version}" for name, version in reference["versions"].items())
    print(f"{comparison['session']}: {reference['scored_positions']:,} positions, of which")
    print(f"{reference['headline_positions']:,} written by the assistant (the headline); {reference['configuration']};")
    print(f"{versions}; {reference['processor']}, {reference['threads']} threads, chunks of {reference['chunk']}\n")


def print_floor(floor: dict[str, Any]) -> None:
    print("| the reference against itself | KL mean | flips |\n| --- | ---: | ---: |")
    for row in floor["rows"]:
        print(f"| {row['name']} | {number(row['kl_mean'])} | {percent(row['flip_rate'])} |")
    print(f"\nnoise floor {number(floor['value'])}\n")


def print_lanes(comparison: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    bins = sorted({(part["from"], part["to"]) for row in rows.values() for part in row.get("by_depth") or []})
    depths = [f"{start // 1024}–{stop // 1024}k" for start, stop in bins]
    headers = ["lane", "KL mean", "± se", "p99", "flips", *depths, "prefill tok/s", "decode tok/s", "GiB"]
    print(f"| {' | '.join(headers)} |\n| --- |{' ---: |' * (len(headers) - 1)}")
    for name, row in {"bf16 (reference)": comparison["reference"], **rows}.items():
        print(f"| {' | '.join(cells(name, row, bins))} |")
    print()


def cells(name: str, row: dict[str, Any], bins: list[tuple[int, int]]) -> list[str]:
    kl = row.get("kl") or {}
    parts = {(part["from"], part["to"]): part for part in row.get("by_depth") or []}
    flips = [percent(parts[key]["flip_rate"]) if key in parts else "" for key in bins]
    memory = row.get("peak_memory_bytes")
    mark = " ≈ floor" if row.get("at_floor") else ""
    if row.get("status") not in ("done", None):
        mark = f" ({row['status']}: {row['reason']})"
    speeds = [f"{row[key]:.1f}" if row.get(key) else "" for key in ("prefill_tps", "decode_tps")]
    figures = [
        number(kl.get("mean")) + mark,
        number(kl.get("se")),
        number(kl.get("p99")),
        percent(row.get("flip_rate")),
    ]
    return [name, *figures, *flips, *speeds, f"{memory / 2**30:.2f}" if memory else ""]


def report(floor: float | None, rows: dict[str, dict[str, Any]]) -> int:
    """Print which orders hold; the exit code."""
    unfinished = [name for name, row in rows.items() if row.get("status") != "done"]
    for name in unfinished:
        print(f"{name} did not finish: {rows[name].get('reason') or 'it is not in the file'}")
    if floor is None or unfinished:
        return 1
    kl = {name: float(row["kl"]["mean"]) for name, row in rows.items()}
    rtn, awq, gptq = (f"weights {WEIGHTS[f'w4a16{kind},w_group=64']}" for kind in ("", "-awq", "-gptq"))
    w8 = "weights W8A16"
    orders = {
        "floor < W8A16": floor < kl[w8],
        "W8A16 < W4A16 AWQ": kl[w8] < kl[awq],
        "W8A16 < W4A16 GPTQ": kl[w8] < kl[gptq],
        "AWQ < round to nearest": kl[awq] < kl[rtn],
        "GPTQ < round to nearest": kl[gptq] < kl[rtn],
        f"KV int8 within {AT_FLOOR:g}x of the floor": kl["KV int8"] <= AT_FLOOR * floor,
        "KV int8 < int4": kl["KV int8"] < kl["KV int4"],
        "KV int4 < int2": kl["KV int4"] < kl["KV int2"],
        **{f"{about} within {AT_FLOOR:g}x": kl[about] <= AT_FLOOR * floor for about in ATTENTION.values()},
    }
    print(" · ".join(f"{name}: {'yes' if holds else 'NO'}" for name, holds in orders.items()))
    return 0 if all(orders.values()) else 1


def number(value: float | None) -> str:
    return "" if value is None else "0" if not value else f"{value:.2g}" if value < 0.01 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    raise SystemExit(main())
