"""What a person must know of a lane beside its figures: marks with their reasons, its setting in a few words.

Text from engines and servers passes through here as it is; widgets make it harmless where they draw it.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.metrics.summary import at_floor, worse_than_uniform
from workbench.store.effective import (
    OPEN_VALUES,
    UNREAD,
    acceptance,
    configuration_of,
    logits_words,
    named_only,
    sentences,
    settings,
    without_effect,
)
from workbench.store.state import LaneRecord, Status
from workbench.ui.board import Board, LaneView

HIDDEN_KEYS = ("url", "dialect", "key_env", "timeout", "step", "logprobs", "kv_space", "gpu_memory")
"""An engine's own keys that do not change what it computes: not part of a lane's short form."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A word beside a lane's state, and the sentence behind it. A grave one says: these figures must not be used."""

    word: str
    why: str
    grave: bool = False


def status_of(view: LaneView, board: Board) -> tuple[Status, str]:
    """A lane's status and the reason; one that ended worse than uniform is invalid, never merely bad."""
    record = view.lane.record
    if record.status == "done" and (reference := board.state.reference) is not None:
        vocabulary = reference.record.manifest.get("vocabulary")
        problem = worse_than_uniform(view.measures.nll, vocabulary if isinstance(vocabulary, int) else None)
        if problem:
            return "invalid", problem
    return record.status, record.reason


def marks_of(view: LaneView, board: Board) -> list[Mark]:
    """The marks of a lane, the gravest first."""
    record, measures = view.lane.record, view.measures
    status, reason = status_of(view, board)
    found: list[Mark] = []
    if status == "invalid":
        found.append(Mark("invalid", reason.partition("\n")[0], grave=True))
    found += [Mark("differs", text, grave=True) for text in sentences(record.manifest, "differs") if text not in reason]
    if why := without_effect(record, [lane.record for lane in board.state.shown]):
        found.append(Mark("no effect", why))
    if measures.severe and status != "invalid":
        found.append(Mark("severe", "mean KL above 1 nat, rightly measured"))
    if measures.bounded:
        gives = logits_words(record.manifest)
        found.append(Mark("bounded", (f"{gives}: " if gives else "") + "KL is at least this, TV within the interval"))
    if runs := str(record.manifest.get("runs") or ""):
        found.append(Mark("two runs", runs))
    return found


def near_floor(view: LaneView, board: Board) -> bool:
    """Whether a lane is marked as at the noise floor: never one that is invalid or bounded."""
    value = (board.state.floor or {}).get("value")
    floor = float(value) if isinstance(value, int | float) else None
    said = at_floor(view.measures.kl_mean, floor, bounded=view.measures.bounded)
    return bool(said) and status_of(view, board)[0] != "invalid"


def interval(low: float, high: float, digits: int = 3) -> str:
    """Two shares as `.011–.034`."""
    return "–".join(f"{share:.{digits}f}".removeprefix("0") for share in (low, high))


def rank_words(rank: int, record: LaneRecord) -> str:
    """The rank of the reference's first choice; `>256` where it is not among the ids that the engine names."""
    top = named_only(record.manifest)
    return f">{top}" if top is not None and rank > top else str(rank)


def acceptance_words(record: LaneRecord) -> tuple[str, str]:
    """The acceptance length and where it was counted; or no figure, and why there is none."""
    found = acceptance(record.stats)
    pooled = found.get("pooled")
    if isinstance(pooled, int | float):
        return f"{pooled:.2f}", str(found.get("source") or "")
    if found.get("steps") == 0:
        return "", "nothing drafted"
    asked = configuration_of(record.configuration)
    if asked is None:
        return "", ""
    drafts = settings(record.configuration, record.manifest)["draft"]
    if asked.draft == "none" and drafts.ran in ("", "none"):
        return "", "no drafter" if asked.engine != "server" else "no acceptance given"
    return "", "not counted yet" if record.status in ("queued", "running") else "acceptance not given"


def short_configuration(record: LaneRecord) -> str:
    """A lane's configuration in a few words: what a person switches, the engine only where it is not the usual one.

    Where the engine chooses (`auto`), what it chose; where it runs another value than asked for, both.
    """
    item = configuration_of(record.configuration)
    if item is None:
        return record.name
    found = settings(record.configuration, record.manifest)

    def value(name: str) -> str:
        setting = found[name]
        if setting.ran in ("", UNREAD, setting.asked):
            return setting.asked
        return setting.ran if setting.asked in OPEN_VALUES else f"{setting.asked}→{setting.ran}"

    if item.engine == "server":
        words = [f"server {record.manifest.get('dialect') or dict(item.extra).get('dialect', '')}".rstrip()]
        words.append(_host(dict(item.extra).get("url", "")))
        words += [value(name) for name in ("weights", "kv", "attn") if value(name) not in ("served", UNREAD)]
    else:
        attention = f"fa {value('attn')}" if item.engine == "llamacpp" else value("attn")
        words = [value("weights"), f"{value('kv')} kv"]
        if item.engine != "vllm" or item.attn not in OPEN_VALUES:  # else what it chose is long; `m` shows it
            words.append(attention)
        if item.engine != "transformers":
            words.insert(0, item.engine)
    if item.path != "prefill":
        words.append(item.path)
    draft = found["draft"].ran or item.draft
    if draft not in ("none", UNREAD):
        words.append(draft.partition("@")[0])
    words += [f"{key} {own}" for key, own in item.extra if key not in HIDDEN_KEYS]
    return " · ".join(word for word in words if word)


def _host(url: str) -> str:
    """The address without what may be secret in it."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]
