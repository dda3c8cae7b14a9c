"""What `Started.effective` holds of a vLLM lane: read back from its configuration, its layers and its tensors."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from workbench.config.lane import Configuration
from workbench.metrics.divergence import BOUNDED, HEAD_AND_SAMPLES
from workbench.worker.loading import vocabulary_size
from workbench.worker.vllm.engine import Engine
from workbench.worker.vllm.readback import kv_word, weights_word
from workbench.worker.vllm.scoring import Way
from workbench.worker.vllm.settings import context_limit, read_config
from workbench.worker.vllm.versions import versions

TAPPED = "whole logits, read in vLLM's runner; each row is checked against the log-probability that vLLM reports"
FORCED = (
    "assistant tokens are forced one at a time; the last of a turn's, fewer than a block of the KV cache, run again in"
    " a chunk when the next turn's context is read, as vLLM does when it serves"
)
UNSEEN = "this side of the backend follows vLLM's source; it was written where there is no GPU"


def describe(engine: Engine, configuration: Configuration, model: Path, way: Way, best: int) -> dict[str, Any]:
    """The facts of a start; `way` and `best` say how rows are made."""
    found, running, known = engine.describe(), engine.config, versions()
    width = int(running.model_config.get_vocab_size())
    speculative, parallel = running.speculative_config, running.parallel_config
    drafter = {}
    if speculative is not None:
        drafter = {"draft": str(speculative.method), "width": int(speculative.num_speculative_tokens)}
        drafter["drafter"] = found["drafter"]
    return {
        "engine": "vllm",
        "version": known["version"],
        "build": f"{known['distribution']} {known['version']}, torch {known['torch']}",
        "runner": "V2" if engine.v2 else "V1",
        "weights": {
            "scheme": weights_word(found["linears"], found["tensors"], running.model_config.quantization or ""),
            "linears": found["linears"],
            "tensors_by_dtype": found["tensors"],
        },
        "dtype": str(running.model_config.dtype).removeprefix("torch."),
        "kv": kv_word(found),
        "kv_tensors": "+".join(found["kv_tensors"]),
        "kv_cache_bytes": found["kv_bytes"],
        "attn": "+".join(sorted(found["attention"])) or None,
        "device": str(running.device_config.device_type),
        "threads": found["threads"],
        "chunk": engine.chunk,
        "estimator": BOUNDED if way == "top" else HEAD_AND_SAMPLES,
        "logits": {"logits": "full", "whole": "full", "ids": "trace ids", "top": f"top-{best}"}[way],
        "vocabulary": vocabulary_size(model, SimpleNamespace(vocab_size=width)),
        "logits_width": width,
        "context_limit": context_limit(read_config(model)),
        "cpu": f"{platform.machine()} {found['cpu']}",
        "eager": bool(running.model_config.enforce_eager),
        "parallel": [int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)],
        "notes": _notes(engine, configuration, found, way),
        **drafter,
    }


def _notes(engine: Engine, configuration: Configuration, found: dict[str, Any], way: Way) -> list[str]:
    notes = [TAPPED] if way == "logits" else []
    if configuration.path == "decode" and engine.config.speculative_config is None:
        notes.append(FORCED)
    if str(engine.config.device_config.device_type) != "cpu":
        notes.append(UNSEEN)
    ran = "+".join(sorted(found["attention"]))
    if configuration.attn not in ("auto", ran):
        notes.append(f"vLLM took attn={configuration.attn} without an error and runs {ran}")
    if kv_word(found) is None:
        words = "+".join(found["kv_types"]) or "nothing"
        notes.append(f"what runs as KV cache is unknown: the layers say {words}, which {ran} does not declare")
    return notes
