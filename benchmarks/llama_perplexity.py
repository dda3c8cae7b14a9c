"""Our numbers and llama-perplexity's, of the same GGUF files, text and base file; and what each takes.

llama-perplexity is built once from the source that this llama-cpp-python was built from (its sdist; needs pip, cmake
and a C++ compiler) with the package's own options. Then, in windows of 512 tokens of a sample session's text:

1. Both write a base file of the BF16 model; the codes of the two are compared.
2. Both score each quantization against llama-perplexity's base file: the statistics that it prints, side by side. They
   agree where they differ by no more than half a step of the file's 16 bits (for Δp, in p ≤ 1; for the same top, by
   rows whose two best ids lie within a step), and what was cut off in print.
3. One quantization is scored against our base file by llama-perplexity: it must read it, with the same result.
4. Time and memory of 2, runs taken in turn, medians: the wall's seconds from the command's start to its end; the peak
   resident set of all processes (ours are two), less the model file and the KV cache.

Exit code 1 where numbers do not agree, our time is above theirs, or our memory is not under half of theirs. Where
llama.cpp would use AMX both run without it and without repacked weights (`--no-repack`), as the llamacpp engine always
does there. `--quick`: one quantization, few windows; it uses what is built, and names the command where nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.config.lane import EMBEDDED_MODEL, parse_spec
from workbench.engines.models import find_model
from workbench.paths import cache_dir
from workbench.protocol.logits_file import LogitsFile
from workbench.run.weights import find_weights
from workbench.session.script import load_session
from workbench.worker.quant.gguf import convert

WINDOW = 512
QUANTIZATIONS = ("Q8_0", "Q4_K_M", "Q4_0")
SESSION = "refactor-long"
TIME_BAR, MEMORY_BAR = 1.0, 0.5
POLL_SECONDS = 0.1
PRINTED = 1e-6
MIB = 1 << 20
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_MTMD=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a command printed, the seconds it took, and the sum of its processes' peak resident sets in bytes."""

    text: str
    seconds: float
    peak: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Q4_K_M only, 8 windows, one run each")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--weights", action="append", default=[], help=f"default: {' '.join(QUANTIZATIONS)}")
    parser.add_argument("--binary", type=Path, help="a llama-perplexity that is built already")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.windows, chosen.rounds, chosen.weights = 8, 1, ["Q4_K_M"]
    binary = chosen.binary or built(may_build=not chosen.quick)
    if binary is None:
        return 1
    files = {scheme: gguf(scheme) for scheme in ("BF16", *(chosen.weights or QUANTIZATIONS))}
    with tempfile.TemporaryDirectory(prefix="llama-perplexity-") as folder:
        return Bench(binary, files, Path(folder), chosen.threads, chosen.windows, chosen.rounds).run()


@dataclass
class Bench:
    """The runs, and whether each bar held."""

    binary: Path
    files: dict[str, Path]
    folder: Path
    threads: int
    windows: int
    rounds: int
    good: bool = True

    def run(self) -> int:
        text = self.folder / "text.txt"
        text.write_text("\n".join(str(message["content"]) for message in load_session(SESSION).messages))
        base, mine = self.folder / "theirs.kld", self.folder / "ours.kld"
        self.theirs("BF16", base, "-f", str(text), "--chunks", str(self.windows))
        lane = ["--lane", self.lane("BF16"), "--windows", str(self.windows), "--window", str(WINDOW)]
        ours("record", str(text), "-o", str(mine), *lane)
        self.compare_files(base, mine)
        with LogitsFile(base) as file:
            step, ties = spread(file)
            print(f"\n{file.shape.windows} windows of {WINDOW} tokens of {SESSION}, {file.shape.rows:,} rows,", end=" ")
            print(f"{self.threads} threads, half a step of the base file {step / 2:.2e}, {ties} rows with near-ties")
            rows = file.shape.rows
        costs: list[list[str]] = []
        for scheme in list(self.files)[1:]:
            found: dict[str, list[Run]] = {"theirs": [], "ours": []}
            for _ in range(self.rounds):  # in turn: a machine that changes its speed changes both alike
                found["theirs"].append(self.theirs(scheme, base, "--kl-divergence"))
                found["ours"].append(ours("score", str(base), "--lane", self.lane(scheme), "--json"))
            result = json.loads(found["ours"][0].text)
            self.compare_numbers(scheme, printed(found["theirs"][0].text), result["statistics"], step, ties / rows)
            costs.append(self.cost(scheme, found, result["stats"]["kv_cache_bytes"]))
        first = next(iter(list(self.files)[1:]))
        again = printed(self.theirs(first, mine, "--kl-divergence").text)
        result = json.loads(ours("score", str(mine), "--lane", self.lane(first), "--json").text)
        self.compare_numbers(f"{first} against our base file", again, result["statistics"], step, ties / rows)
        table(("weights", "s theirs", "s ours", "ours / theirs", "MiB theirs", "MiB ours", "ours / theirs"), costs)
        print("\neverything within its bar" if self.good else "\nNOT within its bar: see the rows marked !")
        return 0 if self.good else 1

    def lane(self, scheme: str) -> str:
        return f'llamacpp:model="{self.files[scheme]}",weights=file,threads={self.threads}'

    def theirs(self, scheme: str, base: Path, *more: str) -> Run:
        command = [str(self.binary), "-m", str(self.files[scheme]), "-c", str(WINDOW)]
        command += ["-t", str(self.threads), "-tb", str(self.threads), "--kl-divergence-base", str(base), *more]
        return measured([*command, *(["--no-repack"] if has_amx() else [])])

    def compare_files(self, base: Path, mine: Path) -> None:
        """How many codes differ between the two base files of one model."""
        with LogitsFile(base) as one, LogitsFile(mine) as other:
            same = one.shape == other.shape and np.array_equal(
                one.tokens(0, one.shape.windows), other.tokens(0, other.shape.windows)
            )
            print(f"base files of BF16: header and tokens {'equal' if same else 'DIFFERENT'}", end="")
            if not same:
                self.good = False
                print()
                return
            differ = most = count = 0
            for row in range(0, one.shape.rows, 64):
                n = min(64, one.shape.rows - row)
                codes = [file.read_rows(row, n).codes.astype(np.int32) for file in (one, other)]
                gap = np.abs(codes[0] - codes[1])
                differ, most, count = differ + int((gap > 0).sum()), max(most, int(gap.max())), count + gap.size
            print(f", {differ:,} of {count:,} codes differ, by {most} at most")

    def compare_numbers(
        self, name: str, theirs: dict[str, float], mine: dict[str, Any], step: float, ties: float
    ) -> None:
        """A row a statistic; the allowed difference is the base file's own error, and of what print leaves."""
        kl, dp, ppl = mine["kl"], mine["dp"], mine["ppl"]
        found = {
            "Mean PPL(Q)": (ppl["lane"]["value"], step / 2 * ppl["lane"]["value"]),
            "Mean PPL(base)": (ppl["base"]["value"], step / 2 * ppl["base"]["value"]),
            "Mean KLD": (kl["mean"], step / 2),
            "Maximum KLD": (kl["max"], step / 2),
            **{f"{float(at):.1f}% KLD": (value, step / 2) for at, value in kl["percentiles"].items() if at != "50"},
            "Median KLD": (kl["percentiles"]["50"], step / 2),
            "Minimum KLD": (kl["min"], step / 2),
            "Mean Δp": (100 * dp["mean"], 50 * step + 1e-3),
            "Maximum Δp": (100 * dp["max"], 50 * step + 1e-3),
            **{
                f"{float(at):.1f}% Δp": (100 * value, 50 * step + 1e-3)
                for at, value in dp["percentiles"].items()
                if at != "50"
            },
            "Minimum Δp": (100 * dp["min"], 50 * step + 1e-3),
            "RMS Δp": (100 * dp["rms"], 50 * step + 1e-3),
            "Same top p": (100 * mine["same_top"]["rate"], 100 * ties + 1e-3),
        }
        rows: list[list[str]] = []
        for label, (value, allowed) in found.items():
            gap = abs(value - theirs[label])
            held = gap <= allowed + PRINTED
            self.good &= held
            rows.append(
                [label, f"{theirs[label]:.6f}", f"{value:.6f}", f"{gap:.1e}", f"{allowed:.1e}" + "!" * (not held)]
            )
        print()
        table((name, "llama-perplexity", "workbench", "difference", "allowed"), rows)

    def cost(self, scheme: str, found: dict[str, list[Run]], kv: int) -> list[str]:
        """Seconds and bytes of both. llama-perplexity holds windows side by side, as many as fit 2,048 tokens."""
        size, cells = self.files[scheme].stat().st_size, {"ours": 1, "theirs": max(1, 2048 // WINDOW)}
        seconds = {name: median(run.seconds for run in runs) for name, runs in found.items()}
        bytes_ = {name: median(run.peak for run in runs) - size - kv * cells[name] for name, runs in found.items()}
        time_ratio, memory_ratio = (part["ours"] / part["theirs"] for part in (seconds, bytes_))
        self.good &= time_ratio <= TIME_BAR and memory_ratio < MEMORY_BAR
        return [
            scheme,
            *(f"{seconds[name]:.2f}" for name in ("theirs", "ours")),
            f"{time_ratio:.3f}" + "!" * (time_ratio > TIME_BAR),
            *(f"{bytes_[name] / MIB:.0f}" for name in ("theirs", "ours")),
            f"{memory_ratio:.3f}" + "!" * (memory_ratio >= MEMORY_BAR),
        ]


def ours(*arguments: str) -> Run:
    return measured([sys.executable, "-m", "workbench", "logits", *arguments])


def measured(command: list[str]) -> Run:
    """Run a command to its end, and look at the memory of its processes meanwhile. Raises SystemExit where it fails."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err)
        peaks: dict[int, int] = {}
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                for pid in (child.pid, *children(child.pid)):
                    peaks[pid] = max(peaks.get(pid, 0), peak_of(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        child.wait()
        seconds = time.perf_counter() - began
        ended.set()
        watcher.join()
        texts: list[str] = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{texts[1][-2000:]}")
    # llama-perplexity prints its statistics on either, by its version; our JSON stands alone on the first.
    return Run(texts[0] if command[0] == sys.executable else "\n".join(texts), seconds, sum(peaks.values()))


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def peak_of(pid: int) -> int:
    """The peak resident set of a process in bytes; 0 for one that has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def printed(text: str) -> dict[str, float]:
    """The statistics that llama-perplexity printed, by their names with single blanks."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^\s*([\w.%() /]*(?:PPL\(\w+\)|KLD|Δp|top p))\s*:\s*(-?[\d.]+)", text, re.MULTILINE):
        found[" ".join(name.split())] = float(value)
    if "Same top p" not in found:
        raise SystemExit(f"llama-perplexity printed no statistics:\n{text[-2000:]}")
    return found


def spread(file: LogitsFile) -> tuple[float, int]:
    """The largest step between two codes, in nats, and how many rows have their two best ids within one."""
    step, ties = 0.0, 0
    for row in range(0, file.shape.rows, 64):
        rows = file.read_rows(row, min(64, file.shape.rows - row))
        best = np.partition(rows.codes, rows.codes.shape[1] - 2, axis=1)[:, -2:].astype(np.int32)
        step, ties = max(step, float(rows.scale.max())), ties + int((np.diff(np.sort(best)) <= 1).sum())
    return step, ties


def gguf(scheme: str) -> Path:
    """The embedded model's file with these weights, made once."""
    model = find_model(EMBEDDED_MODEL, convert)
    return find_weights(parse_spec(f"llamacpp:weights={scheme}"), model, sys.executable, lambda *_: None)[0]


def built(may_build: bool) -> Path | None:
    """llama-perplexity of the vendored source, built where it is not there yet."""
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    folder = cache_dir() / f"llama-perplexity-{version('llama-cpp-python')}"
    binary = folder / "build" / "bin" / "llama-perplexity"
    if binary.is_file():
        return binary
    if not may_build:
        print("llama-perplexity is not built here; this builds it: python benchmarks/llama_perplexity.py")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.tar.gz")):
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*download, "-d", str(folder), package], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    subprocess.run(["cmake", "-S", str(source), "-B", str(folder / "build"), *OPTIONS], check=True)
    jobs = str(os.cpu_count() or 1)
    target = ["--target", "llama-perplexity", "--parallel", jobs]
    subprocess.run(["cmake", "--build", str(folder / "build"), "--config", "Release", *target], check=True)
    return binary


def has_amx() -> bool:
    """Whether llama.cpp would use AMX here; see `worker.llama.binding.has_amx` for why it must not."""
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def table(heads: tuple[str, ...], rows: list[list[str]]) -> None:
    print("| " + " | ".join(heads) + " |\n|" + "|".join([" --- ", *[" ---: "] * (len(heads) - 1)]) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
