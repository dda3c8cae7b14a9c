"""What measuring costs: scoring, recording and decoding through our worker, beside the engine driven bare.

Runs are interleaved, so that a machine that changes its speed changes all sides alike; the figures are medians of the
ratios of neighbouring runs. `bare` has what each engine is compared with, in the same process and on the same weights.
Frames are packed as they would be sent. With one thread on a CPU, seconds are the process's CPU seconds, which other
programs hardly disturb; else they are the wall's. Exit code 1 where a bar is missed: scoring at most 1.15, recording at
most 1.3, decoding at least 0.97 times bare. An engine that is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import argparse as source_of_text
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import bare
import numpy as np
from tokenizers import Tokenizer

from workbench.config.lane import EMBEDDED_MODEL, Configuration, parse_spec
from workbench.engines.models import Model, find_model
from workbench.protocol.columns import cut, join
from workbench.protocol.events import Generate, Rows, Score, Tokens, encode
from workbench.protocol.wire import Arrays, pack
from workbench.run.weights import find_weights
from workbench.worker.quant.gguf import convert

CLOCK: Callable[[], float] = time.perf_counter
BARS = {"scoring": 1.15, "recording": 1.3, "decoding": 0.97}
LANES = ("transformers:weights=bf16", "llamacpp:weights=BF16")
PACKAGES = {"transformers": "transformers", "llamacpp": "llama_cpp"}


class Discard:
    """A job whose frames are packed and thrown away; `trace` is what a lane compares with."""

    number = 1

    def __init__(self, trace: Arrays | None = None) -> None:
        self.kept: list[Arrays] = []
        self.times: list[float] = []
        self.trace_rows = trace

    def check(self) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def rows(self, first: int, arrays: Arrays) -> None:
        pack(*encode(Rows(1, first, arrays)))
        self.kept.append(arrays)

    def tokens(self, first: int, arrays: Arrays) -> None:
        pack(*encode(Tokens(1, first, arrays)))
        self.kept.append(arrays)
        self.times.append(CLOCK())

    @property
    def speed(self) -> float:
        """Tokens/s after the first batch."""
        return sum(len(x["ids"]) for x in self.kept[1:]) / (self.times[-1] - self.times[0])

    def trace(self, first: int, stop: int) -> Arrays:
        assert self.trace_rows is not None
        return cut("trace", self.trace_rows, first - 1, stop - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="What scoring, recording and decoding cost beside the bare engine.")
    parser.add_argument("--quick", action="store_true", help="fewer positions and tokens")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="the embedded model by default")
    parser.add_argument("--lane", action="append", default=[], help="a configuration to measure; one of each engine")
    parser.add_argument("--threads", type=int, default=1, help="1 by default: steady on a machine that others use too")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    model = find_model(chosen.model, convert)
    missed = False
    for lane in chosen.lane or LANES:
        configuration = parse_spec(f"{lane},threads={chosen.threads}")
        if find_spec(PACKAGES[configuration.engine]) is None:
            print(f"without {configuration.engine}: not installed here (workbench engines)")
            continue
        missed |= measure(configuration, model, chosen.quick, chosen.rounds)
    return 1 if missed else 0


def measure(configuration: Configuration, model: Model, quick: bool, rounds: int) -> bool:
    """Print the figures of one engine; whether a bar was missed."""
    positions, prompt, tokens = (1537, 128, 13) if quick else (4097, 1024, 65)
    text = Path(source_of_text.__file__).read_text(encoding="utf-8")
    ids = np.array(Tokenizer.from_file(str(model.folder / "tokenizer.json")).encode(text).ids[:positions], dtype="<i4")
    weights, _ = find_weights(configuration, model, sys.executable, lambda phase, done, total: None)
    kind = bare.Transformers if configuration.engine == "transformers" else bare.LlamaCpp
    engine = kind(configuration, weights, len(ids) + tokens, Discard())
    global CLOCK
    CLOCK = time.process_time if engine.on_cpu and configuration.threads == 1 else time.perf_counter
    print(
        f"conditions: model {model.name}, {configuration.to_line()}, {len(ids) - 1} positions in chunks of"
        f" {configuration.chunk}, {tokens - 1} tokens after {prompt}, {rounds} interleaved rounds, {engine.versions},"
        f" {'CPU' if CLOCK is time.process_time else 'wall'} seconds"
    )
    results = {
        **measure_scoring(engine, ids, rounds),
        **measure_decoding(engine, ids[:prompt], tokens, rounds),
    }
    engine.backend.stop()
    print(f"{'':12}{'bare /s':>10}{'ours /s':>10}{'ratio':>9}{'lowest':>9}{'highest':>9}{'bar':>9}")
    missed: list[str] = []
    for name, (slow, fast, ratios) in results.items():
        ratio, bar = median(ratios), BARS[name]
        at_least = name == "decoding"
        if ratio < bar if at_least else ratio > bar:
            missed.append(name)
        sign = ">=" if at_least else "<="
        print(f"{name:12}{slow:10.1f}{fast:10.1f}{ratio:9.3f}{min(ratios):9.3f}{max(ratios):9.3f}{sign:>5}{bar:g}")
    figures = ", ".join(f"{name} {median(ratios):.3f}x" for name, (_, _, ratios) in results.items())
    print(f"{configuration.engine}: {figures} of bare" + (f"; bar missed: {', '.join(missed)}" if missed else ""))
    return bool(missed)


def measure_scoring(
    engine: bare.Bare, ids: np.ndarray[Any, Any], rounds: int
) -> dict[str, tuple[float, float, list[float]]]:
    """Positions/s bare and ours, and our seconds over the bare ones, for scoring against a trace and for recording."""

    def ours(job: Discard) -> Discard:
        engine.backend.score(Score(1, 1, job.trace_rows is None, arrays={"ids": ids}), job)
        return job

    trace = join("trace", ours(Discard()).kept)
    runs: dict[str, Callable[[], object]] = {
        "bare": lambda: engine.score(ids, engine.backend.configuration.chunk),
        "scoring": lambda: ours(Discard(trace)),
        "recording": lambda: ours(Discard()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            began = CLOCK()
            run()
            seconds[name].append(CLOCK() - began)
    n = len(ids)
    return {
        name: (
            n / median(seconds["bare"]),
            n / median(seconds[name]),
            [a / b for a, b in zip(seconds[name], seconds["bare"], strict=True)],
        )
        for name in ("scoring", "recording")
    }


def measure_decoding(
    engine: bare.Bare, ids: np.ndarray[Any, Any], tokens: int, rounds: int
) -> dict[str, tuple[float, float, list[float]]]:
    """Tokens/s bare and ours, and their ratio; each side's first token is left out."""

    def ours() -> float:
        job = Discard()
        engine.backend.generate(Generate(1, tokens, arrays={"ids": ids}), job)
        return job.speed

    engine.decode(ids, tokens, CLOCK)
    ours()
    pairs = [(engine.decode(ids, tokens, CLOCK), ours()) for _ in range(rounds)]
    slow, fast = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    return {"decoding": (slow, fast, [pair[1] / pair[0] for pair in pairs])}


if __name__ == "__main__":
    sys.exit(main())
