"""Weights files seen from outside: headers checked before anything loads them, hashes, and the facts of a model folder.

Nothing here reads a tensor. Formats: safetensors (8-byte header length, JSON, data) and GGUF versions 2 and 3.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from workbench.errors import ModelError
from workbench.paths import cache_dir
from workbench.session.tokenizer import read_object

Progress = Callable[[str, int, int], None]
"""Told a phase and how far it is, `done` of `total` (0: unknown)."""

_DTYPES = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20
_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a safetensors header says: bytes by dtype, the number of tensors, and the shape of each by its name."""

    bytes_by_dtype: dict[str, int]
    count: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


def read_safetensors(path: Path) -> Tensors:
    """Check the header of a safetensors file against the file's length. Raises ModelError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"its header would take {length:,} of {size:,} bytes", "safetensors")
            header: Any = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})", "safetensors") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object", "safetensors")
    entries = cast(dict[str, Any], header)
    sizes: Counter[str] = Counter()
    spans: list[tuple[int, int]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            bits = _DTYPES[dtype]
            for side in shape:
                bits *= side
            right = 0 <= begin <= end and (end - begin) * 8 == bits and all(side >= 0 for side in shape)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"the entry of tensor {name!r} is {entry!r:.80}", "safetensors") from error
        if not right:
            raise _damaged(
                path, f"tensor {name!r} ({dtype} {shape}) does not fill its {end - begin:,} bytes", "safetensors"
            )
        sizes[dtype] += end - begin
        spans.append((begin, end))
        shapes[name] = tuple(shape)
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise _damaged(path, f"there is a hole or an overlap at byte {position:,} of its data", "safetensors")
        position = end
    if 8 + length + position != size:
        raise _damaged(path, f"it has {size:,} bytes, its header names {8 + length + position:,}", "safetensors")
    return Tensors(dict(sizes), len(spans), shapes)


def weights_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, all that its index names. Raises ModelError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named: Any = read_object(index).get("weight_map")
        if not isinstance(named, dict):
            raise _damaged(index, "it has no weight_map", "safetensors index")
        names = {str(name) for name in cast(dict[str, Any], named).values()}
        if bad := [name for name in names if Path(name).name != name]:
            raise _damaged(index, f"it names {bad[0]!r}, which is no file beside it", "safetensors index")
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{missing[0]} is missing", where=str(folder), next="Fetch the model again.")
    if files:
        return files
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth")) + sorted(folder.glob("*.pt"))
    what = f"its weights are pickled ({pickled[0].name}), which is never loaded" if pickled else "it has no weights"
    raise ModelError(what, where=str(folder), next="Use a model whose weights are *.safetensors, or a GGUF file.")


def file_hash(path: Path, progress: Progress | None = None) -> str:
    """sha256 of a file, in blocks. Raises ModelError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        total = path.stat().st_size
        done = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                if progress:
                    progress(f"hashing {path.name}", done, total)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    return digest.hexdigest()


def file_hashes(files: list[Path], progress: Progress | None = None) -> dict[str, str]:
    """sha256 of each file by its name; those of unchanged size and time come from a cache."""
    cache = cache_dir() / "hashes.json"
    known: dict[str, Any] = {}
    with contextlib.suppress(ModelError):  # a damaged cache is made anew
        known = read_object(cache, missing={})
    out: dict[str, str] = {}
    changed = False
    for path in files:
        stat = path.stat()
        key = str(path.resolve())
        entry: Any = known.get(key)
        stamp = [stat.st_size, stat.st_mtime_ns]
        if not (isinstance(entry, list) and cast(list[Any], entry)[:2] == stamp and len(cast(list[Any], entry)) == 3):
            entry = [*stamp, file_hash(path, progress)]
            known[key] = entry
            changed = True
        out[path.name] = str(cast(list[Any], entry)[2])
    if changed:
        write_json(cache, known)
    return out


def weights_hash(folder: Path, progress: Progress | None = None) -> str:
    """One sha256 for the weights of a model folder: over its files' names and sha256s."""
    hashes = file_hashes(weights_files(folder), progress)
    lines = "".join(f"{name} {value}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def model_facts(folder: Path) -> dict[str, Any]:
    """What a model folder says of itself, its headers checked. Raises ModelError.

    model_type, architecture, context_limit (tokens, 0 unknown), vocabulary (of the logits), layers, kv_layers (those
    with a KV cache of their own), kv_heads, head_dim, dtype (of most bytes), parameter_bytes; quantized_by (the
    method), where the weights are stored quantized.
    """
    config = read_object(folder / "config.json")
    text = cast(dict[str, Any], config.get("text_config") or config)
    sizes: Counter[str] = Counter()
    for path in weights_files(folder):
        sizes.update(read_safetensors(path).bytes_by_dtype)
    heads = _number(text, "num_attention_heads")
    head_dim = _number(text, "head_dim") or (_number(text, "hidden_size") // heads if heads else 0)
    architectures: Any = config.get("architectures") or [""]
    stored: Any = config.get("quantization_config")
    return {
        **({"quantized_by": str(cast(dict[str, Any], stored).get("quant_method"))} if isinstance(stored, dict) else {}),
        "model_type": str(config.get("model_type", "")),
        "architecture": str(architectures[0]),
        "context_limit": _number(text, "max_position_embeddings"),
        "vocabulary": _number(text, "vocab_size"),
        "layers": _number(text, "num_hidden_layers"),
        "kv_layers": _layers_with_a_cache(text),
        "kv_heads": _number(text, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "dtype": max(sizes, key=lambda name: sizes[name], default="").lower(),
        "parameter_bytes": sum(sizes.values()),
    }


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file as a whole: another process sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def locked(path: Path, progress: Progress | None = None) -> Generator[int]:
    """Hold a lock file against other processes; says so through `progress` where it has to wait.

    Gives the lock's descriptor: a child that inherits it holds the lock for as long as it runs.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("waiting for another process", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _layers_with_a_cache(text: dict[str, Any]) -> int:
    """Of all layers those without linear attention and without another layer's keys and values."""
    layers = _number(text, "num_hidden_layers")
    kinds: Any = text.get("layer_types")
    if isinstance(kinds, list):
        own = cast(list[Any], kinds)[: layers - _number(text, "num_kv_shared_layers")]
        return sum("attention" in str(kind) and kind != "linear_attention" for kind in own)
    if _number(text, "linear_num_value_heads"):
        return layers // (_number(text, "full_attention_interval") or 4)
    return layers - _number(text, "num_kv_shared_layers")


def _number(config: dict[str, Any], key: str) -> int:
    value: Any = config.get(key)
    return value if isinstance(value, int) else 0


def _damaged(path: Path, what: str, kind: str) -> ModelError:
    return ModelError(
        f"not a whole {kind} file: {what}", where=str(path), next="It is cut off or damaged: fetch it again."
    )
