"""How llama.cpp reads a prompt by itself: its tokens, the file's template, and the sampling that its users get."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError
from workbench.protocol.wire import Arrays
from workbench.worker.llama.binding import api
from workbench.worker.llama.weights import Weights

PROGRAM_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What llama.cpp's own programs (llama-server, llama-cli) sample with where nobody says otherwise."""

_FILE_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_SAMPLING = "general.sampling."
_TEMPLATE = "tokenizer.chat_template"
_NONE = -1


def inspect(weights: Weights, text: str) -> tuple[dict[str, Any], Arrays]:
    """The facts and arrays of `protocol.events.Inspected`. Raises ConfigurationError for a file without tokens."""
    vocab, metadata = weights.vocab, weights.header.metadata
    recommended = {
        _FILE_NAMES.get(name.removeprefix(_SAMPLING), name.removeprefix(_SAMPLING)): value
        for name, value in metadata.items()
        if name.startswith(_SAMPLING)
    }
    source = "defaults of llama.cpp's programs" + (", overruled by the file" if recommended else "")
    ids = {
        "bos": api.llama_vocab_bos(vocab),
        "eos": api.llama_vocab_eos(vocab),
        "pad": api.llama_vocab_pad(vocab),
    }
    facts = {
        "template": metadata.get(_TEMPLATE),
        "template_from": "the GGUF file",
        "rendered": None,
        "adds_bos": bool(api.llama_vocab_get_add_bos(vocab)),
        "specials": {name: token_text(weights, token) for name, token in ids.items() if token != _NONE},
        "vocabulary": weights.vocabulary,
        "sampling": {**PROGRAM_DEFAULTS, **recommended, "source": source},
    }
    return facts, {"ids": tokenize(weights, text)}


def bos(weights: Weights) -> int | None:
    """The token that llama.cpp's programs put in front of a text; None where they put none there."""
    if api.llama_vocab_type(weights.vocab) == api.LLAMA_VOCAB_TYPE_NONE:
        return None
    token = int(api.llama_vocab_bos(weights.vocab))
    return token if token != _NONE and api.llama_vocab_get_add_bos(weights.vocab) else None


def tokenize(weights: Weights, text: str) -> NDArray[np.int32]:
    """Ids of a rendered prompt: control tokens are parsed, nothing is added in front.

    Raises ConfigurationError where the file holds no tokenizer.
    """
    if not text:
        return np.zeros(0, "<i4")
    if api.llama_vocab_type(weights.vocab) == api.LLAMA_VOCAB_TYPE_NONE:
        raise ConfigurationError("the GGUF file holds no tokenizer", where=str(weights.path))
    data = text.encode("utf-8")
    room = len(data) + 8
    for _ in range(2):
        ids = np.zeros(room, np.int32)
        tokens = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = int(api.llama_tokenize(weights.vocab, data, len(data), tokens, room, False, True))
        if count >= 0:
            return ids[:count].astype("<i4")
        room = -count  # what it needs
    raise ConfigurationError("llama.cpp cannot tokenise this text", where=str(weights.path))


def token_text(weights: Weights, token: int) -> str:
    """A token's text as the vocabulary writes it."""
    return (api.llama_vocab_get_text(weights.vocab, token) or b"").decode("utf-8", "replace")
