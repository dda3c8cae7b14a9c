"""A reference to hand on: the trace, the token stream and the manifest in one file (`.wbref`), without any weights.

It is a saved session that holds a reference and nothing else, and beside it what lets another machine see whether its
model reads the same tokens: a checksum of each token id's bytes and of each line of the chat template. Without text it
holds token ids, and no message, title or token's bytes.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from workbench import __version__
from workbench.errors import SavedSessionError
from workbench.store.saved import SavedSession
from workbench.store.state import LaneRecord

SUFFIX = ".wbref"
FORMAT = 1
FACT = "exchange"
TEXT_FACTS = ("title", "notes")
"""Facts that may hold words of the session."""
_AGAIN = "Ask for the file again, or export it anew: workbench record SESSION --export-reference FILE.wbref."


@dataclass(frozen=True, slots=True)
class Exchange:
    """What stands beside the trace: `vocabulary` (n,) uint32 and `template` hold checksums; `text` whether the session
    is in the file."""

    path: Path
    record: LaneRecord
    facts: dict[str, Any]
    vocabulary: NDArray[np.uint32]
    template: tuple[int, ...]
    text: bool


def vocabulary_checksums(tokens: Sequence[bytes]) -> NDArray[np.uint32]:
    """A checksum of each token id's bytes, in the order of the ids."""
    return np.fromiter((zlib.crc32(token) for token in tokens), "<u4", len(tokens))


def template_checksums(source: str) -> tuple[int, ...]:
    """A checksum of each line of a chat template."""
    return tuple(zlib.crc32(line.encode()) for line in source.splitlines())


def export_reference(
    saved: SavedSession, target: Path, tokens: Sequence[bytes], template: str, *, text: bool = True
) -> LaneRecord:
    """Write the reference of a saved session to `target`, whole or not at all; `tokens` are all ids' bytes.

    Raises SavedSessionError where the session has no finished reference, is damaged, or the file cannot be written.
    """
    record = next((lane for lane in saved.lanes() if lane.kind == "reference"), None)
    if record is None or record.status != "done":
        raise SavedSessionError("holds no finished reference", where=str(saved.path), next="Record one first.")
    session: dict[str, Any] = saved.session if text else {"id": "reference", "messages": [], "tools": []}
    facts = {name: value for name, value in saved.facts.items() if text or name not in TEXT_FACTS}
    facts[FACT] = {
        "format": FORMAT,
        "workbench": __version__,
        "text": text,
        "vocabulary": base64.b64encode(vocabulary_checksums(tokens).tobytes()).decode("ascii"),
        "template": list(template_checksums(template)),
    }
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    try:
        with SavedSession.create(part, session, facts) as copy:
            made = copy.copy_reference(saved.path, tokens=text)
            copy.update_lane(_handed_on(made, text))
        part.replace(target)
    except OSError as error:
        raise SavedSessionError(f"cannot be written: {error.strerror or error}", where=str(target)) from error
    finally:
        part.unlink(missing_ok=True)
    return record


def read_exchange(path: Path) -> Exchange:
    """The file, read to its end and checked. Raises SavedSessionError where it is another, damaged or not whole."""
    with SavedSession.open(path) as saved:
        fact: Any = saved.facts.get(FACT)
        if not isinstance(fact, dict):
            raise SavedSessionError(
                "is no exported reference" + (", but a saved session" if saved.lanes() else ""),
                where=str(path),
                next="Export one: workbench record SESSION --export-reference FILE.wbref.",
            )
        held = cast(dict[str, Any], fact)
        if held.get("format") != FORMAT:
            raise SavedSessionError(
                f"has format {held.get('format')!r}, this version reads {FORMAT}",
                where=str(path),
                next="Use the workbench version that wrote it, or a newer one.",
            )
        record = next((lane for lane in saved.lanes() if lane.kind == "reference"), None)
        if (damage := saved.verify()) or record is None or record.status != "done":
            raise SavedSessionError(
                f"is damaged: {damage[0]}" if damage else "holds no finished reference", where=str(path), next=_AGAIN
            )
        positions = len(saved.stream()["ids"])
        spans = saved.spans(record.id, "trace")
        try:
            vocabulary = np.frombuffer(base64.b64decode(str(held["vocabulary"]), validate=True), "<u4")
            template = tuple(int(line) for line in held["template"])
        except (KeyError, ValueError, TypeError) as error:
            raise SavedSessionError(f"is damaged: {error}", where=str(path), next=_AGAIN) from error
        if spans != [(1, positions - 1)]:
            covered = ", ".join(f"{first:,} to {first + count - 1:,}" for first, count in spans) or "none"
            raise SavedSessionError(
                f"covers another window than the session: of positions 1 to {positions - 1:,} it holds {covered}",
                where=str(path),
                next=_AGAIN,
            )
        return Exchange(path, record, saved.facts, vocabulary, template, bool(held.get("text")))


def _handed_on(record: LaneRecord, text: bool) -> LaneRecord:
    """Without what only means something on the machine that recorded it: paths, and that it was taken from a cache."""
    name = str(record.manifest.get("model_name") or "model")
    manifest = {
        key: value
        for key, value in record.manifest.items()
        if key not in ("reused_from", "requested") and (text or key not in TEXT_FACTS)
    }
    stats = {key: value for key, value in record.stats.items() if key != "reused"}
    configuration = {**record.configuration, "model": name}
    return replace(record, manifest=manifest, stats=stats, configuration=configuration)
