"""What measuring costs: scoring, recording and decoding through our worker, beside the engine driven bare.

Runs are interleaved, so that a machine that changes its speed changes all sides alike; the figures are medians of the
ratios of neighbouring runs. Bare scoring is the model's own forward pass with full logits, in the same chunks and with
transformers' DynamicCache; bare decoding is transformers' `generate`. Frames are packed as they would be sent. With one
thread on a CPU, seconds are the process's CPU seconds, which other programs hardly disturb; else they are the wall's.
Exit code 1 where a bar is missed: scoring at most 1.15, recording at most 1.3, decoding at least 0.97 times bare.
"""

from __future__ import annotations

import argparse
import argparse as source_of_text
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import DynamicCache

from workbench.config.lane import EMBEDDED_MODEL, parse_spec
from workbench.engines.models import find_model
from workbench.protocol.columns import cut, join
from workbench.protocol.events import Generate, Rows, Score, Tokens, encode
from workbench.protocol.wire import Arrays, pack
from workbench.worker.backends.transformers import TransformersBackend, make
from workbench.worker.devices import cpu_features, device_name
from workbench.worker.loaded import Loaded
from workbench.worker.quant.gguf import convert

CLOCK: Callable[[], float] = time.perf_counter
BARS = {"scoring": 1.15, "recording": 1.3, "decoding": 0.97}


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


class Clock:
    """A streamer of transformers' `generate` that only notes when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(CLOCK())

    def end(self) -> None:
        pass

    @property
    def speed(self) -> float:
        """Tokens/s, prompt and first token left out."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="What scoring, recording and decoding cost beside the bare engine.")
    parser.add_argument("--quick", action="store_true", help="fewer positions and tokens")
    parser.add_argument("--model", default="", help="a safetensors folder; the embedded model by default")
    parser.add_argument("--lane", default="transformers:weights=bf16", help="the configuration to measure")
    parser.add_argument("--threads", type=int, default=1, help="1 by default: steady on a machine that others use too")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    folder = Path(chosen.model) if chosen.model else find_model(EMBEDDED_MODEL, convert).folder
    positions, prompt, tokens = (1537, 128, 13) if chosen.quick else (4097, 1024, 65)
    text = Path(source_of_text.__file__).read_text(encoding="utf-8")
    ids = np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:positions], dtype="<i4")
    backend = make()
    configuration = parse_spec(f"{chosen.lane},threads={chosen.threads}")
    backend.start(configuration, folder, len(ids) + tokens, Discard())  # pyright: ignore[reportArgumentType]
    loaded = backend.loaded
    assert loaded is not None
    global CLOCK
    if loaded.device.type == "cpu" and chosen.threads == 1:
        CLOCK = time.process_time
    print(
        f"conditions: model {folder.name}, {configuration.to_line()}, {len(ids) - 1} positions in chunks of"
        f" {configuration.chunk}, {tokens - 1} tokens after {prompt}, {chosen.rounds} interleaved rounds, torch"
        f" {torch.__version__}, transformers {transformers.__version__}, {device_name(loaded.device)} {cpu_features()},"
        f" {torch.get_num_threads()} threads, {'CPU' if CLOCK is time.process_time else 'wall'} seconds"
    )
    results = {
        **measure_scoring(backend, loaded, ids, chosen.rounds),
        **measure_decoding(backend, loaded, ids[:prompt], tokens, chosen.rounds),
    }
    print(f"{'':12}{'bare /s':>10}{'ours /s':>10}{'ratio':>9}{'lowest':>9}{'highest':>9}{'bar':>9}")
    missed: list[str] = []
    for name, (bare, ours, ratios) in results.items():
        ratio, bar = median(ratios), BARS[name]
        at_least = name == "decoding"
        if ratio < bar if at_least else ratio > bar:
            missed.append(name)
        sign = ">=" if at_least else "<="
        print(f"{name:12}{bare:10.1f}{ours:10.1f}{ratio:9.3f}{min(ratios):9.3f}{max(ratios):9.3f}{sign:>5}{bar:g}")
    figures = ", ".join(f"{name} {median(ratios):.3f}x" for name, (_, _, ratios) in results.items())
    print(f"{figures} of bare" + (f"; bar missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


def measure_scoring(
    backend: TransformersBackend, loaded: Loaded, ids: np.ndarray[Any, Any], rounds: int
) -> dict[str, tuple[float, float, list[float]]]:
    """Positions/s bare and ours, and our seconds over the bare ones, for scoring against a trace and for recording."""
    chunk = backend.configuration.chunk
    tensor = torch.from_numpy(ids).long().to(loaded.device)[None]

    def bare() -> None:
        cache = DynamicCache(config=loaded.model.config)
        with torch.inference_mode():
            for start in range(0, len(ids), chunk):
                loaded.model(input_ids=tensor[:, start : start + chunk], cache=cache, use_cache=True)
        loaded.synchronize()

    def ours(job: Discard) -> Discard:
        backend.score(Score(1, 1, job.trace_rows is None, arrays={"ids": ids}), job)  # pyright: ignore[reportArgumentType]
        return job

    trace = join("trace", ours(Discard()).kept)
    runs: dict[str, Callable[[], object]] = {
        "bare": bare,
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
    backend: TransformersBackend, loaded: Loaded, ids: np.ndarray[Any, Any], tokens: int, rounds: int
) -> dict[str, tuple[float, float, list[float]]]:
    """Tokens/s bare and ours, and their ratio; each side's first token is left out."""
    prompt = torch.from_numpy(ids).long().to(loaded.device)[None]

    def bare() -> float:
        clock = Clock()
        loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        return clock.speed

    def ours() -> float:
        job = Discard()
        backend.generate(Generate(1, tokens, arrays={"ids": ids}), job)  # pyright: ignore[reportArgumentType]
        return job.speed

    loaded.model.generation_config.eos_token_id = None
    bare(), ours()
    pairs = [(bare(), ours()) for _ in range(rounds)]
    slow, fast = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    return {"decoding": (slow, fast, [pair[1] / pair[0] for pair in pairs])}


if __name__ == "__main__":
    sys.exit(main())
