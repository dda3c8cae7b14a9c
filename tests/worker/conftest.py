"""Tiny models with random weights, and a job that records what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from workbench.errors import Cancelled
from workbench.protocol.columns import cut, join
from workbench.protocol.wire import Arrays
from workbench.worker.backends.transformers import make
from workbench.worker.loaded import Loaded
from workbench.worker.quant.kvcache import make_cache

torch.set_num_threads(1)

VOCABULARY = 300


def _save(folder: Path, kind: str) -> Path:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "llama",
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of three layers, float32, tied embeddings."""
    return _save(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen3 of three layers, float32."""
    return _save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(params=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest, tiny_llama: Path, tiny_qwen3: Path) -> Path:
    """Both kinds of tiny model."""
    return tiny_llama if request.param == "llama" else tiny_qwen3


@pytest.fixture
def stream() -> np.ndarray[Any, Any]:
    """Token ids (100,)."""
    return np.random.default_rng(3).integers(0, VOCABULARY, 100).astype("<i4")


class Recorder:
    """A job in this process: keeps what was sent, feeds a trace, is cancelled after so many checks."""

    number = 1

    def __init__(self, trace: Arrays | None = None, checks: int = -1) -> None:
        self.sent: list[tuple[int, Arrays]] = []
        self.batches: list[tuple[int, Arrays]] = []
        self.phases: list[str] = []
        self._trace, self._checks = trace, checks

    def check(self) -> None:
        if self._checks == 0:
            raise Cancelled("cancelled")
        self._checks -= 1

    def progress(self, phase: str, done: int, total: int) -> None:
        self.phases.append(phase)

    def rows(self, first: int, arrays: Arrays) -> None:
        self.sent.append((first, arrays))

    def tokens(self, first: int, arrays: Arrays) -> None:
        self.batches.append((first, arrays))

    def trace(self, first: int, stop: int) -> Arrays:
        assert self._trace is not None
        return cut("trace", self._trace, first - 1, stop - 1)

    def joined(self, kind: str) -> Arrays:
        """All rows as one, having come in order without a gap."""
        position = self.sent[0][0]
        for first, arrays in self.sent:
            assert first == position
            position += len(arrays["logprob"])
        return join(kind, [arrays for _, arrays in self.sent])


@pytest.fixture
def recorder() -> type[Recorder]:
    """The class of recording jobs."""
    return Recorder


@pytest.fixture
def backend() -> Any:
    """A transformers backend in this process."""
    return make()


@pytest.fixture
def loaded() -> Any:
    """A function: folder, KV scheme, attention and context to a model in float32 with an empty cache."""

    def load(
        folder: Path, kv: str = "fp32", attention: str = "sdpa", context: int = 128, group: int = 32, **own: Any
    ) -> Loaded:
        kind = LlamaForCausalLM if folder.name == "llama" else Qwen3ForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        model.eval()
        cache = make_cache(kv, model.config, context, torch.float32, torch.device("cpu"), group, **own)
        return Loaded(model, cache, torch.device("cpu"), VOCABULARY)

    return load
