"""Does the transformers engine compute on CUDA what it computes on a CPU in float32? One GPU, at most 8 minutes.

A small Llama with random weights is made here, so nothing is downloaded; torch, triton, transformers and this package
are all it needs. The reference is the engine in float32 on the CPU (attention by torch's math kernel). Every row is the
engine on the device: each attention in float32 and bfloat16, each read back, int8 and int4 KV, one token at a time
against one pass, a repeated run, and a greedy loop in which a drafter's tokens are verified, which must give the
target's own greedy tokens. What a row may differ by is not chosen freely: float32 by rounding, bfloat16 and quantised
KV by what the CPU itself differs by in them. Rows of packages that are not installed are refused by name, and pass.

Exit code 1 where a row fails or was not reached in time, 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from workbench.config.lane import Configuration, parse_spec
from workbench.errors import ConfigurationError
from workbench.protocol.columns import cut, join
from workbench.protocol.events import Generate, Score
from workbench.protocol.wire import Arrays
from workbench.run.determinism import FIGURES, differing
from workbench.worker.backends.transformers import TransformersBackend, make
from workbench.worker.devices import device_name
from workbench.worker.loaded import Loaded

LIMIT_SECONDS = 8 * 60.0
VOCABULARY = 2048
CHUNK = 128
ROUNDING = 1e-7
"""Mean KL in nats that float32 may differ by in sums of another order; TF32 would differ by more."""
AS_MUCH = 3.0
"""Another device's bfloat16 rounds elsewhere: at most so many times what the CPU's own differs from float32."""
ALIKE = 0.15
"""A quantised KV cache rounds alike everywhere: mean KL within this share of the CPU's."""
WIDTH = 4
"""Tokens that the drafter proposes at once."""
NEAR_TIE = 1e-4
"""Nats between the best two tokens, under which a batch of tokens and a single one may choose differently."""
ATTENTIONS = {
    "fp32": ("sdpa", "sdpa-math", "sdpa-efficient", "eager", "flex"),
    "bf16": (
        "sdpa", "sdpa-math", "sdpa-flash", "sdpa-efficient", "eager", "flash_attention_2", "flash_attention_3", "flex",
    ),
}  # fmt: skip
ON_CPU = ("sdpa", "sdpa-math", "sdpa-flash", "eager")
OPTIONAL = ("flash_attention_2", "flash_attention_3")


class NoJob:
    """A job whose rows are kept here; `trace` is what they are compared with."""

    number = 1

    def __init__(self, trace: Arrays | None = None) -> None:
        self.kept: list[Arrays] = []
        self.ids: list[int] = []
        self._trace = trace

    def check(self) -> None:
        """Nobody cancels."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Nobody watches."""

    def rows(self, first: int, arrays: Arrays) -> None:
        """Rows from position `first` on."""
        self.kept.append(arrays)

    def tokens(self, first: int, arrays: Arrays) -> None:
        """Generated tokens."""
        self.ids += arrays["ids"].tolist()

    def trace(self, first: int, stop: int) -> Arrays:
        """The reference's rows."""
        assert self._trace is not None
        return cut("trace", self._trace, first - 1, stop - 1)


@dataclass
class Row:
    """A line of the table. `bound` is what the figure may be at most; `failed` says why it may not."""

    name: str
    ran: str = ""
    figure: float | None = None
    bound: str = ""
    flips: int | None = None
    speed: float | None = None
    failed: str = ""
    said: str = ""


@dataclass
class Check:
    """The model, the stream, the CPU's reference and the rows so far."""

    folder: Path
    drafter: Path
    device: str
    ids: NDArray[np.int32]
    began: float
    limit: float
    backend: TransformersBackend = field(default_factory=make)
    trace: Arrays = field(default_factory=dict[str, Any])
    rows: list[Row] = field(default_factory=list[Row])

    def row(self, name: str, measure: Callable[[Row], None], *, may_lack: bool = False) -> Row:
        """One row, measured where there is time; what goes wrong is its result."""
        row = Row(name)
        self.rows.append(row)
        if time.monotonic() - self.began > self.limit:
            row.failed = "not reached in time"
            return row
        try:
            measure(row)
        except ConfigurationError as error:
            row.said = f"refused: {error.what}"
            row.failed = "" if may_lack else "refused"
        except Exception as error:  # a kernel may raise anything, and the other rows are wanted
            row.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(line(row), flush=True)
        return row

    def start(self, spec: str, device: str, folder: Path | None = None) -> dict[str, Any]:
        """The engine in a configuration; what it says that runs."""
        configuration = parse_spec(f"transformers:{spec},device={device}", Configuration(chunk=CHUNK))
        room = len(self.ids) + 64
        return self.backend.start(configuration, folder or self.folder, room, NoJob())  # pyright: ignore[reportArgumentType]

    def score(self, *, record: bool = False, single: int = 0) -> tuple[Arrays, dict[str, Any]]:
        """All rows of the stream on what was started; the last `single` tokens alone, each in a pass of its own."""
        alone = np.zeros(len(self.ids), np.uint8)
        alone[len(self.ids) - single :] = 1
        job = NoJob(self.trace or None)
        request = Score(1, 1, record, path="decode" if single else "prefill", arrays={"ids": self.ids, "single": alone})
        stats = self.backend.score(request, job)  # pyright: ignore[reportArgumentType]
        return join("trace" if record else "rows", job.kept), stats

    def divergence(self, spec: str, device: str, row: Row, single: int = 0) -> float:
        """Mean KL (nats) of a configuration against the reference, with what ran and how fast written into `row`."""
        ran = self.start(spec, device)
        if single == 0:
            self.score()  # first calls compile and choose kernels
        rows, stats = self.score(single=single)
        row.ran = f"{ran['attn'] or '?'} ({', '.join(ran['attn_kernels'])})"
        if not rows["valid"].all():
            row.failed = f"{int((rows['valid'] == 0).sum())} rows are not finite"
        elif ran["attn"] is None:
            row.failed = "another kernel ran than the one asked for"
        row.flips = int((rows["rank"] != 1).sum())
        kind = "decode" if single else "prefill"
        row.speed = stats[f"{kind}_tokens"] / max(stats[f"{kind}_seconds"], 1e-9)
        row.figure = float(rows["kl"][-single:].mean())
        return row.figure

    def compared(self, spec: str, low: float, high: float, single: int = 0) -> Callable[[Row], None]:
        """Measures a configuration on the device; its KL must lie in `low` to `high`."""

        def measure(row: Row) -> None:
            row.bound = f"≤ {high:.1e}" if low == 0 else f"{low:.1e} to {high:.1e}"
            found = self.divergence(spec, self.device, row, single)
            if not row.failed and not low <= found <= high:
                row.failed = "KL out of bounds"

        return measure

    def repeated(self, row: Row) -> None:
        """Two passes in bfloat16: the same bits."""
        row.ran = str(self.start("weights=bf16,attn=sdpa", self.device)["attn"])
        one, other = self.score()[0], self.score()[0]
        count = int(differing(one, other, FIGURES).sum())
        row.said = f"{count} of {len(one['kl'])} positions differ in a second run"
        row.failed = "not bit-identical" if count else ""

    def verified(self, spec: str, count: int) -> Callable[[Row], None]:
        """Measures the drafter loop against plain greedy decoding by the same target, on the device."""

        def measure(row: Row) -> None:
            row.ran = str(self.start(spec, self.device)["attn"])
            target = self.backend.loaded
            assert target is not None
            other = make()
            room = len(self.ids) + count + WIDTH + 1
            configuration = parse_spec(f"transformers:{spec},device={self.device}", Configuration(chunk=CHUNK))
            other.start(configuration, self.drafter, room, NoJob())  # pyright: ignore[reportArgumentType]
            assert other.loaded is not None
            half = self.ids[: len(self.ids) // 2]
            job = NoJob()
            self.backend.generate(Generate(1, count, arrays={"ids": half}), job)  # pyright: ignore[reportArgumentType]
            with torch.inference_mode():
                found, accepted, proposed, margin = draft_and_verify(target, other.loaded, half, count, job.ids)
            row.said = f"{count} tokens, {accepted} of {proposed} drafted ones accepted"
            if found != job.ids and margin > NEAR_TIE:
                row.failed = f"other tokens than greedy decoding, {margin:.1e} nats apart"
            elif found != job.ids:
                row.said += f"; parts at a near-tie of {margin:.1e} nats"
            if not 0 < accepted < proposed:
                row.failed = row.failed or "the drafter was always right or never: the loop was not tried"

        return measure


def draft_and_verify(
    target: Loaded, drafter: Loaded, ids: NDArray[np.int32], count: int, greedy: list[int]
) -> tuple[list[int], int, int, float]:
    """`count` tokens after `ids` (n,): the drafter proposes WIDTH greedy ones, the target runs them in one pass and
    keeps those that it would have chosen, and its own next one; rejected ones leave both KV caches.

    Also drafted tokens accepted, drafted tokens, and the target's margin (nats) where the tokens first part from
    `greedy`, 0 where they do not.
    """
    job = NoJob()
    for model in (target, drafter):
        model.prefill(ids[:-1].tolist(), CHUNK, job)
    text, accepted, proposed, margin = ids.tolist(), 0, 0, 0.0
    while len(text) - len(ids) < count:
        known = len(text)
        drafted: list[int] = []
        while len(drafted) < WIDTH:
            fresh = np.array((text + drafted)[drafter.cache.length :])
            drafted.append(int(drafter.forward(fresh, 1)[-1].argmax()))
        logits = target.forward(np.array([text[-1], *drafted]), WIDTH + 1).float()
        choices = logits.argmax(-1).tolist()
        right = next((i for i, token in enumerate(drafted) if token != choices[i]), WIDTH)
        accepted, proposed = accepted + right, proposed + WIDTH
        for step, token in enumerate(choices[: right + 1]):
            place = len(text) - len(ids)
            if not margin and place < count and token != greedy[place]:
                best = torch.log_softmax(logits[step], -1).topk(2).values
                margin = max(float(best[0] - best[1]), 1e-12)
            text.append(token)
        target.cache.truncate(len(text) - 1)
        drafter.cache.truncate(min(drafter.cache.length, known + right))
    return text[len(ids) :][:count], accepted, proposed, margin


def make_models(folder: Path, layers: int) -> tuple[Path, Path]:
    """A Llama with random weights in float32, and a drafter: the same with its weights disturbed."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Keys and queries are larger, so that attention looks somewhere, and rounding shows.
                wide = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.normal_(0, wide * parameter.shape[1] ** -0.5 * (4 if "embed" in name else 1))
        model.save_pretrained(folder / "target")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.015)
    model.save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"


def line(row: Row) -> str:
    """A row of the table as text."""
    figure = "" if row.figure is None else f"{row.figure:.2e}"
    flips = "" if row.flips is None else str(row.flips)
    speed = "" if row.speed is None else f"{row.speed:,.0f}"
    result = f"FAILED: {row.failed}" if row.failed else "refused" if row.said.startswith("refused") else "ok"
    cells = (row.name, row.ran, figure, row.bound, flips, speed, " · ".join(filter(None, (result, row.said))))
    return "| " + " | ".join(cells) + " |"


def run(check: Check, attentions: dict[str, tuple[str, ...]], new: int) -> None:
    """The reference on the CPU, what the CPU's own bfloat16 and KV differ by, and every row on the device."""
    check.start("weights=fp32,kv=fp32,attn=sdpa-math", "cpu")
    check.trace = check.score(record=True)[0]
    scratch = Row("")
    own = check.divergence("weights=bf16,attn=sdpa-math", "cpu", scratch)
    kv = {name: check.divergence(f"weights=fp32,kv={name},attn=sdpa", "cpu", scratch) for name in ("int8", "int4")}
    print(f"on the CPU against float32: bfloat16 {own:.2e}, KV int8 {kv['int8']:.2e}, KV int4 {kv['int4']:.2e} nats\n")
    print("| row | attention that ran | KL mean | may be | flips | tok/s | result |\n" + "| --- " * 7 + "|", flush=True)
    last = [(weights, name) for weights in attentions for name in attentions[weights] if name == "flex"]
    first = [(weights, name) for weights in attentions for name in attentions[weights] if name != "flex"]

    def attend(weights: str, name: str) -> None:
        high = ROUNDING if weights == "fp32" else AS_MUCH * own
        # CUDA's flash kernel takes no mask, so that it can run one chunk only.
        chunk = f",chunk={len(check.ids) + 64}" if name == "sdpa-flash" else ""
        measure = check.compared(f"weights={weights},kv={weights},attn={name}{chunk}", 0, high)
        check.row(f"{weights} {name}", measure, may_lack=name in OPTIONAL)

    for weights, name in first:
        attend(weights, name)
    for name, found in kv.items():
        measure = check.compared(f"weights=fp32,kv={name},attn=sdpa", (1 - ALIKE) * found, (1 + ALIKE) * found)
        check.row(f"fp32, KV {name}", measure)
    check.row("fp32, one token a pass", check.compared("weights=fp32,kv=fp32,attn=sdpa", 0, ROUNDING, single=new))
    check.row("bf16, repeated", check.repeated)
    for spec in ("kv=fp32", "kv=int8"):
        check.row(f"fp32 {spec}, drafter verified", check.verified(f"weights=fp32,{spec},attn=sdpa", new))
    for weights, name in last:  # compiles, so it comes last
        attend(weights, name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The transformers engine on CUDA beside itself in float32 on the CPU.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script itself")
    parser.add_argument("--tokens", type=int, default=1024, help="positions that are scored")
    parser.add_argument("--new", type=int, default=48, help="tokens that are generated, or run one at a time")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=LIMIT_SECONDS / 60, help="no row begins after so many")
    chosen = parser.parse_args(arguments)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here; --device cpu tries the script itself.", file=sys.stderr)
        return 2
    began = time.monotonic()
    attentions = ATTENTIONS
    if chosen.device == "cpu":
        attentions = {weights: tuple(name for name in names if name in ON_CPU) for weights, names in ATTENTIONS.items()}
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = make_models(Path(folder), chosen.layers)
        ids = np.random.default_rng(1).integers(0, VOCABULARY, chosen.tokens).astype("<i4")
        check = Check(target, drafter, chosen.device, ids, began, chosen.minutes * 60)
        device = torch.device(chosen.device if chosen.device != "cuda" else "cuda:0")
        print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device_name(device)}")
        print(f"random Llama of {chosen.layers} layers, {len(ids):,} tokens in chunks of {CHUNK}")
        run(check, attentions, chosen.new)
        check.backend.stop()
    failed = [row for row in check.rows if row.failed]
    seconds = time.monotonic() - began
    print(f"\n{len(check.rows) - len(failed)} of {len(check.rows)} rows as they should be, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
