"""Is the mean KL that a compact trace gives the exact one? Full-vocabulary values by plain torch, beside our estimate.

Two lanes against the bf16 model: int8 weights, and an int4 KV cache, forced over the same real text in chunks of 512.
The exact KL(p||q) of every position comes from float64 log-softmaxes over all logits, with none of our metric code; the
estimate from `workbench.worker.scoring` on the same logits. Exit code 1 where a mean is more than 1 % off, or KL_low
lies above an exact value by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from workbench.config.lane import EMBEDDED_MODEL
from workbench.engines.models import find_model
from workbench.protocol.columns import join
from workbench.worker.quant.gguf import convert
from workbench.worker.quant.kvcache import DEFAULT_GROUP, make_cache
from workbench.worker.quant.weights import quantize_linears
from workbench.worker.scoring import lane_rows, record_rows

CHUNK = 512
BAR_PERCENT = 1.0
ROUNDING = 1e-5  # nats: log-probabilities are stored in float32, about 1e-6 apart at −10
SESSIONS = Path(__file__).resolve().parents[1] / "sessions"


def main() -> int:
    parser = argparse.ArgumentParser(description="The mean KL from a compact trace beside the exact one.")
    parser.add_argument("--model", default="", help="a safetensors folder; the embedded model by default")
    parser.add_argument("--text", default="", help="a text file or a session's JSON; the shipped sessions by default")
    parser.add_argument("--quick", action="store_true", help="2,048 positions instead of 6,144")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    folder = Path(chosen.model) if chosen.model else find_model(EMBEDDED_MODEL, convert).folder
    n = 2048 if chosen.quick else 6144
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(read_text(chosen.text), verbose=False)["input_ids"])[: n + 1]
    if len(ids) < 2001:
        parser.error(f"the text has {len(ids)} tokens; at least 2,001 are needed")
    n = len(ids) - 1
    vocab = len(tokenizer)
    print(
        f"conditions: model {folder.name}, {n} positions, chunk {CHUNK}, vocabulary {vocab}, torch {torch.__version__},"
        f" transformers {transformers.__version__}, {chosen.threads} threads, reference bf16 weights and bf16 KV"
    )
    with torch.inference_mode():
        plain = load(folder)
        reference = list(logits_of(plain, ids, DynamicCache(config=plain.config)))
        starts = range(0, n, CHUNK)
        trace = [
            record_rows(part, ids[start + 1 : start + 1 + len(part)], start + 1, 0, vocab)
            for start, part in zip(starts, reference, strict=True)
        ]
        cache = make_cache("int4", plain.config, n, torch.bfloat16, torch.device("cpu"), DEFAULT_GROUP)
        results = [compare("int4 KV", logits_of(plain, ids, cache), reference, trace, ids, vocab)]
        quantize_linears(plain)
        lane = logits_of(plain, ids, DynamicCache(config=plain.config))
        results.append(compare("int8 weights", lane, reference, trace, ids, vocab))
    print(f"{'lane':14}{'exact KL':>12}{'estimate':>12}{'error %':>10}{'KL_low':>12}{'KL_low over exact, max':>25}")
    for name, exact, estimate, low, over in results:
        error = 100 * (estimate / exact - 1)
        print(f"{name:14}{exact:12.6f}{estimate:12.6f}{error:10.3f}{low:12.6f}{over:25.2e}")
    print(f"{time.perf_counter() - began:.0f} s")
    worst = max(abs(100 * (estimate / exact - 1)) for _, exact, estimate, _, _ in results)
    over = max(result[-1] for result in results)
    if over > ROUNDING:
        print(f"KL_low is above an exact value by {over:.1e} nats, more than rounding ({ROUNDING:.0e})")
    print(f"worst error of the mean KL: {worst:.3f} % (bar {BAR_PERCENT:g} %)")
    return int(not worst <= BAR_PERCENT or not over <= ROUNDING)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def logits_of(model: Any, ids: torch.Tensor, cache: Any) -> Iterator[torch.Tensor]:
    """Logits (chunk, V) that predict tokens 1 to n, chunk by chunk."""
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
        yield model(input_ids=chunk[None], cache=cache, use_cache=True).logits[0]


def compare(
    name: str, lane: Iterator[torch.Tensor], reference: list[torch.Tensor], trace: list[Any], ids: Any, vocab: int
) -> tuple[str, float, float, float, float]:
    """Mean exact KL, mean estimate, mean KL_low, and the most by which KL_low lies above the exact value."""
    exact: list[torch.Tensor] = []
    rows: list[Any] = []
    position = 1
    for part, recorded, kept in zip(lane, trace, reference, strict=True):
        targets = ids[position : position + len(part)]
        rows.append(lane_rows(part, targets, recorded, 0.0, vocab))
        for p, q in zip(kept[:, :vocab].split(64), part[:, :vocab].split(64), strict=True):
            log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            exact.append((log_p.exp() * (log_p - log_q)).sum(-1))
        position += len(part)
    kl, joined = torch.cat(exact).numpy(), join("rows", rows)
    if not joined["valid"].all():
        raise SystemExit(f"{name}: {int((joined['valid'] == 0).sum())} positions are excluded")
    over = float((joined["kl_low"] - kl).max())
    return name, float(kl.mean()), float(joined["kl"].mean(dtype="f8")), float(joined["kl_low"].mean(dtype="f8")), over


def read_text(source: str) -> str:
    """What the messages of a session, or of all shipped ones, say; or a text file as it is."""
    paths = [Path(source)] if source else sorted(SESSIONS.glob("*.json"))
    if not paths:
        raise SystemExit("there are no shipped sessions; name a text with --text")
    return "\n".join(_said(path.read_text(encoding="utf-8"), path.suffix) for path in paths)


def _said(text: str, suffix: str) -> str:
    if suffix != ".json":
        return text
    messages: list[dict[str, Any]] = json.loads(text)["messages"]
    parts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        parts.append(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
        parts += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
