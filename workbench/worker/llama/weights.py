"""The weights of a GGUF file in llama.cpp's memory, or its vocabulary alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import ModelError
from workbench.worker.backends.base import OutOfMemory
from workbench.worker.llama.binding import api, has_amx
from workbench.worker.llama.header import Header, read_header
from workbench.worker.llama.log import Log

ALL_LAYERS = -1
_UNUSED = 1 << 1  # llama_token_attr
_PROGRESS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


class Weights:
    """A loaded model. `lines` are what llama.cpp said while it loaded; `free()` once, after its contexts."""

    def __init__(self, path: Path, header: Header, model: Any, lines: list[str]) -> None:
        self.path, self.header, self.model, self.lines = path, header, model, lines
        self.vocab: Any = api.llama_model_get_vocab(model)
        self.width: int = api.llama_vocab_n_tokens(self.vocab)
        self.vocabulary = self.width
        has_tokens = api.llama_vocab_type(self.vocab) != api.LLAMA_VOCAB_TYPE_NONE
        while has_tokens and self.vocabulary > 1 and self._unused(self.vocabulary - 1):
            self.vocabulary -= 1  # rows of the embedding beyond the tokenizer's ids are filled with unused tokens

    @property
    def context_limit(self) -> int:
        """Tokens that the model was made for."""
        return int(api.llama_model_n_ctx_train(self.model))

    def free(self) -> None:
        """Give the memory back."""
        if self.model:
            api.llama_model_free(self.model)
            self.model = None

    def _unused(self, token: int) -> bool:
        return bool(api.llama_vocab_get_attr(self.vocab, token) & _UNUSED)


def open_weights(
    path: Path,
    log: Log,
    *,
    gpu_layers: int = 0,
    main_gpu: int | None = None,
    vocab_only: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> Weights:
    """Load a file; `progress` is told the part done, and may raise to give up.

    Raises ModelError for a file that is damaged or that llama.cpp cannot load, OutOfMemory.
    """
    header = read_header(path, log)
    log.begin()
    raised: list[BaseException] = []

    def report(done: float, _: object) -> bool:
        try:
            progress(done)
        except BaseException as error:  # an exception cannot pass through the library: it is raised again below
            raised.append(error)
            return False
        return True

    callback = _PROGRESS(report)
    params = api.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.vocab_only = vocab_only
    params.use_extra_bufts = not has_amx()  # goes for repacked weights too: llama.cpp has one switch for both
    params.progress_callback = ctypes.cast(callback, api.llama_progress_callback)
    if main_gpu is not None:
        params.main_gpu, params.split_mode = main_gpu, api.LLAMA_SPLIT_MODE_NONE
    model = api.llama_model_load_from_file(str(path).encode(), params)
    if raised:
        if model:
            api.llama_model_free(model)
        raise raised[0]
    if not model:
        if log.says_memory():
            raise OutOfMemory(f"out of memory while loading {path.name}: {log.complaint()}")
        raise ModelError(f"llama.cpp cannot load it: {log.complaint()}", where=str(path))
    return Weights(path, header, model, log.lines)
