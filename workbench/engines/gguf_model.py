"""A GGUF file as a lane's model beside a reference that has a folder: used as it is, of any architecture.

Nothing is converted. The reference's folder gives tokenizer and template, so the file's vocabulary must be the same
token by token; how its tokenizer cuts the session's text is asked of the engine when the lane begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from workbench.engines.gguf import GGUFHeader, read_gguf
from workbench.engines.models import Model
from workbench.engines.weights import Progress, file_hashes
from workbench.errors import ModelError
from workbench.session.tokenizer import Tokenizer


def plain_gguf(path: Path, beside: Model, tokenizer: Tokenizer, tell: Progress) -> Model:
    """The model of a GGUF file whose tokens are those of `tokenizer`. Raises ModelError."""
    header = read_gguf(path)
    _check_vocabulary(header, tokenizer, path)
    digest = file_hashes([path], tell)[path.name]
    facts: dict[str, Any] = {
        **{key: value for key, value in beside.facts.items() if key not in ("conversion", "licence")},
        "name": path.stem,
        "kind": "gguf",
        "source": str(path.resolve()),
        "plain_gguf": str(path.resolve()),
        "file_bytes": path.stat().st_size,
        "gguf_sha256": digest,
        "weights_hash": digest,
        "quantization": header.quantization,
        "architecture": header.architecture,
        "model_type": header.architecture,
        "context_limit": _number(header, "context_length"),
        "layers": _number(header, "block_count"),
        "kv_heads": _number(header, "attention.head_count_kv") or _number(header, "attention.head_count"),
        "head_dim": _number(header, "attention.key_length") or _head_size(header),
        "dtype": header.quantization.lower(),
        "notes": [f"a GGUF file as it is ({header.quantization}), read by llama.cpp alone"],
    }
    return Model(path.stem, "gguf", beside.folder, facts)


def _check_vocabulary(header: GGUFHeader, tokenizer: Tokenizer, path: Path) -> None:
    model = cast(dict[str, Any], tokenizer.definition.get("model") or {})
    entries: Any = model.get("vocab") or {}
    listed = cast(list[list[Any]], entries if isinstance(entries, list) else [])
    written = {index: str(entry[0]) for index, entry in enumerate(listed)}
    if not listed:
        written = {index: text for text, index in cast(dict[str, int], entries).items()}
    written |= tokenizer.added
    for identity, text in sorted(written.items()):
        theirs = header.tokens[identity] if identity < len(header.tokens) else None
        if theirs != text:
            raise ModelError(
                f"its token {identity} is {theirs!r:.40}, the reference's is {text!r:.40}",
                where=str(path),
                next="Distributions over different tokens cannot be compared: take a GGUF of the same model.",
            )


def _number(header: GGUFHeader, key: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0


def _head_size(header: GGUFHeader) -> int:
    heads = _number(header, "attention.head_count")
    return _number(header, "embedding_length") // heads if heads else 0
