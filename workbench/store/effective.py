"""What a lane's engine read back as running, beside what was asked for, in the same few words everywhere.

A record's manifest holds the engine's own readings (`protocol.events.Started`); its configuration what was asked.
Everything here is text from engines and servers: whoever shows it makes it harmless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from workbench.config.lane import Configuration, from_json
from workbench.errors import ConfigurationError
from workbench.metrics.divergence import BOUNDED
from workbench.store.state import LaneRecord

OPEN_VALUES: tuple[str, ...] = ("auto", "file", "checkpoint", "served", "0")
"""Requests that leave the choice to the engine: whatever runs fulfils them."""

UNREAD = "?"
"""Stands where an engine could not read a setting back."""

SETTINGS: tuple[str, ...] = ("weights", "kv", "attn", "draft", "device", "threads", "chunk")
_NOT_ALWAYS_ASKED = ("device", "threads", "chunk")
_OF_A_DRAFTER = ("draft", "width", "lookup_min", "lookup_max")
"""Divergence is measured without it: what these change is acceptance and speed."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One axis: what was asked for and what ran; `ran` is empty before the engine has started, UNREAD where it cannot
    be read back."""

    name: str
    asked: str
    ran: str

    @property
    def unread(self) -> bool:
        return self.ran == UNREAD

    @property
    def text(self) -> str:
        """The value in one word, or `asked → ran` where the words differ."""
        if not self.ran or self.ran == self.asked:
            return self.asked
        if self.unread:
            taken = self.asked in OPEN_VALUES or self.name in _NOT_ALWAYS_ASKED
            return UNREAD if taken else f"{self.asked} ({UNREAD})"
        if self.asked in ("", "0") or (self.name == "device" and self.asked == "auto"):
            return self.ran
        return f"{self.asked} → {self.ran}"


def settings(configuration: dict[str, Any], manifest: Manifest) -> dict[str, Setting]:
    """Every setting of a lane by name; a configuration of a newer version counts as not asked."""
    asked = configuration_of(configuration)
    started = bool(manifest.get("engine"))
    found: dict[str, Setting] = {}
    for name in SETTINGS:
        wanted = str(getattr(asked, name)) if asked is not None else ""
        said = scheme(manifest.get(name))
        expected = name != "draft" or (name in manifest and wanted != "none")  # the drafter has a run of its own
        if not said and started and expected:
            said = UNREAD
        found[name] = Setting(name, wanted, said)
    return found


def configuration_of(values: dict[str, Any]) -> Configuration | None:
    """A record's configuration; None where a newer version wrote it."""
    try:
        return from_json(values)
    except (ConfigurationError, TypeError):
        return None


def scheme(value: Any) -> str:
    """An effective value in one word: engines give a word, or an object whose `scheme` is the word."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("scheme")
    return "" if value is None else str(value)


def engine_words(manifest: Manifest, configuration: dict[str, Any] | None = None) -> str:
    """`llamacpp 0.3.36`, `server vllm 0.32.0`; the engine's name alone where it has not started yet."""
    engine = str(manifest.get("engine") or (configuration or {}).get("engine") or "")
    dialect = str(manifest.get("dialect") or "") if engine == "server" else ""
    return " ".join(part for part in (engine, dialect, str(manifest.get("version") or "")) if part)


def bounded(record: LaneRecord) -> bool:
    """Whether the lane's rows hold bounds only: KL at least, total variation within an interval."""
    return record.estimator == BOUNDED


def named_only(manifest: Manifest) -> int | None:
    """How many ids of its own an engine names at a position (`top-256`), or None where it gives more than that."""
    match = re.fullmatch(r"top-([0-9]+)", str(manifest.get("logits") or ""))
    return int(match.group(1)) if match else None


def logits_words(manifest: Manifest) -> str:
    """What an engine gave of its distributions, in words."""
    kind = str(manifest.get("logits") or "")
    top = named_only(manifest)
    if top is not None:
        return f"its own top {top} only"
    return {"full": "whole distributions", "trace ids": "at the trace's ids"}.get(kind, kind)


def sentences(manifest: Manifest, key: str) -> list[str]:
    """A manifest's list of sentences (`differs`, `notes`); one sentence stands for itself."""
    value: Any = manifest.get(key)
    if isinstance(value, str):
        return [value] if value else []
    return [str(item) for item in cast("list[Any]", value)] if isinstance(value, list) else []


def differing(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The settings in which two configurations differ, an engine's own keys among them."""
    extra, theirs = (cast("dict[str, Any]", each.get("extra") or {}) for each in (mine, other))
    names = [name for name in mine if name != "extra" and mine[name] != other.get(name)]
    return names + sorted(key for key in {*extra, *theirs} if extra.get(key) != theirs.get(key))


def without_effect(record: LaneRecord, others: Iterable[LaneRecord]) -> str:
    """Why a lane is marked as without effect, as a sentence; empty where it is not.

    `stats["no_effect"]` names the lane whose rows these are bit by bit; `reference` is the reference of any name.
    """
    twin = str(record.stats.get("no_effect") or "")
    if not twin:
        return ""
    shown = [item for item in others if item.kind != "floor"]
    other = next((item for item in shown if twin in (item.name, item.kind if item.kind == "reference" else "")), None)
    names = differing(record.configuration, other.configuration) if other is not None else []
    names = [name for name in names if name not in _OF_A_DRAFTER]
    subject = "the reference" if other is not None and other.kind == "reference" else twin
    if not names:
        return f"bit-identical to {subject} although a setting differs: it had no effect"
    verb, rest = ("differs", "the setting") if len(names) == 1 else ("differ", "the settings")
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"bit-identical to {subject} although {listed} {verb}: {rest} had no effect"


def acceptance(stats: dict[str, Any]) -> dict[str, Any]:
    """What a lane's decode sample says of its drafter (`metrics.acceptance`); empty where it says nothing."""
    decode: Any = stats.get("decode")
    found: Any = cast("dict[str, Any]", decode).get("acceptance") if isinstance(decode, dict) else None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
