"""What the numbers of a comparison stand on: engines, what was asked and what ran, and what a reader must know beside.

Lines about one lane are merged where several lanes share them, so that many lanes on many engines stay readable.
"""

from __future__ import annotations

from typing import Any

from workbench.metrics.divergence import BOUNDED
from workbench.run.determinism import sentence
from workbench.session.text import one_line
from workbench.store.effective import UNREAD, engine_words, logits_words, sentences

Lane = dict[str, Any]

SAME_ENGINE = ("version", "torch")
"""Keys of a manifest that only lanes of one engine can share."""

CONDITIONS = ("threads", "device", "processor")
"""Keys of a manifest in which a lane and its reference should be alike, whatever their engines."""

RAN = ("weights", "kv", "attn", "draft", "device", "threads", "chunk")
ASKED = "→"


def reference_lines(comparison: dict[str, Any]) -> list[str]:
    """The session, the reference and the unit, in three lines."""
    reference: Lane = comparison["reference"]
    positions = reference.get("scored_positions")
    stream = f"{positions:,} scored positions" if positions else "no trace yet"
    if headline := reference.get("headline_positions"):
        stream += f", {headline:,} of them the assistant's (headline)"
    lines = [
        f"session    {one_line(str(comparison['session']))} · {stream}",
        f"reference  {reference.get('configuration', 'none')} · {reference.get('model_name', '')}"
        f" · {engine_words(reference)} · {reference.get('device', '')} · {reference.get('threads', '?')} threads"
        f" · chunk {reference.get('chunk', '?')}",
        "KL(p‖q) in nats, p the reference · forced · flips: the lane's top token differs from the reference's",
    ]
    return [one_line(line) for line in lines]


def ran_table(comparison: dict[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """What every lane's engine runs, asked → ran where the words differ; None where all run as the reference's engine.

    A last column says how much of its distributions an engine gives.
    """
    reference: Lane = comparison["reference"]
    lanes: list[Lane] = [lane for lane in comparison["lanes"] if lane.get("ran")]
    own = _ran(reference)
    engines = {_ran(lane).get("engine", "") for lane in lanes} - {own.get("engine", "")}
    other_words = any(mark in text for lane in lanes for text in _ran(lane).values() for mark in (ASKED, UNREAD))
    if not lanes or not (engines or other_words):
        return None
    rows = [(f"{reference.get('name', '')} (reference)", own, reference), *((x["name"], _ran(x), x) for x in lanes)]
    names = [name for name in RAN if name != "draft" or any(ran.get(name) for _, ran, _ in rows)]
    cells = [
        [
            one_line(str(name)),
            one_line(ran.get("engine", "")) or "–",
            *(one_line(ran.get(key, "")) or "–" for key in names),
            one_line(logits_words(lane.get("manifest") or lane)) or "–",
        ]
        for name, ran, lane in rows
    ]
    return ["what ran (asked → ran)", "engine", *names, "the engine gives"], cells


def notes(comparison: dict[str, Any]) -> list[str]:
    """What a reader has to know beside the numbers."""
    reference: Lane = comparison["reference"]
    lanes: list[Lane] = comparison["lanes"]
    lines = [*_floor(comparison), *_reference(reference)]
    about: list[tuple[str, str]] = []
    for lane in [*([reference] if reference else []), *lanes]:
        about += [(one_line(lane["name"]), one_line(text)) for text in _of_lane(lane, reference)]
    merged: dict[str, list[str]] = {}
    for name, text in about:
        merged.setdefault(text, []).append(name)
    lines += [f"{', '.join(names)}: {text}" for text, names in merged.items()]
    return [*lines, *_keys(comparison)]


def status(lane: Lane) -> str:
    """The lane's status; one whose numbers must not be used is invalid, also where it ran to its end."""
    return "invalid" if lane.get("valid") is False else str(lane.get("status", "done"))


def bounded(lane: Lane) -> bool:
    """Whether the lane gives nothing but bounds."""
    return lane.get("estimator") == BOUNDED


def _ran(lane: Lane) -> dict[str, str]:
    return lane.get("ran") or {}


def _of_lane(lane: Lane, reference: Lane) -> list[str]:
    manifest: Lane = lane.get("manifest") or {}
    said: list[str] = []
    if lane.get("reason"):
        said.append(f"{status(lane)}: {str(lane['reason']).splitlines()[0]}")
    reason = str(lane.get("reason") or "")
    said += [f"runs other than asked: {text}" for text in sentences(lane, "differs") if text not in reason]
    if bounded(lane) and lane.get("n"):
        said.append(_interval(lane, manifest))
    if lane.get("no_effect"):
        said.append(lane.get("no_effect_reason") or f"bit-identical to {lane['no_effect']}: a setting had no effect")
    if lane.get("determinism"):
        said.append(sentence(lane["determinism"], str(lane.get("path"))))
    if lane.get("runs"):
        said.append(f"two runs: {lane['runs']}")
    if unlike := _unlike(lane, reference):
        said.append(f"not under the reference's conditions: {unlike}")
    if lane.get("excluded"):
        said.append(f"{lane['excluded']} positions excluded (non-finite)")
    return [*said, *sentences(manifest, "engine_notes")]


def _interval(lane: Lane, manifest: Lane) -> str:
    tv: dict[str, float | None] = lane.get("tv") or {}
    gives = logits_words(manifest)
    words = f"bounded ({gives})" if gives else "bounded"
    low, high = tv.get("low"), tv.get("high")
    interval = f"TV {low:.3f}–{high:.3f}, " if low is not None and high is not None else ""
    return f"{words}: {interval}KL has no upper bound"


def _floor(comparison: dict[str, Any]) -> list[str]:
    floor = comparison["floor"]
    if floor.get("value") is None:
        return ["noise floor not measured: small differences may be the reference's own noise (workbench floor FILE)"]
    named = ", ".join(f"{row['name']} {number(row.get('kl_mean'))}" for row in floor["rows"])
    lines = [f"noise floor {number(floor['value'])} (the reference against itself: {named})"]
    if floor.get("failed"):
        lines.append(f"rows of the floor that did not finish: {', '.join(map(one_line, floor['failed']))}")
    return [*lines, "~ at the floor: within 2x of it, so not told apart from the reference's own noise"]


def _reference(reference: Lane) -> list[str]:
    lines: list[str] = []
    if reference.get("reused_from"):
        lines.append("the reference was recorded in an earlier run; its speed and memory are of then")
    if reference.get("headline_positions") == 0:
        lines.append("no token of this session is an assistant's: there is no headline, other roles are in --json")
    return lines


def _keys(comparison: dict[str, Any]) -> list[str]:
    """What the signs in the table mean, where they stand."""
    lanes: list[Lane] = comparison["lanes"]
    lines: list[str] = []
    if any(bounded(lane) for lane in lanes):
        lines.append("≥ a lower bound, of KL as of its p99: such a lane is not ranked, and never called at the floor")
    if any(status(lane) == "invalid" for lane in lanes):
        lines.append("! invalid: shown, but says nothing about quality")
    if any(lane.get("severe") for lane in lanes):
        lines.append("severe: mean KL above 1 nat; the measurement stands")
    if any(UNREAD in text for lane in lanes for text in _ran(lane).values()):
        lines.append(f"{UNREAD} the engine cannot read it back")
    return lines


def _unlike(lane: Lane, reference: Lane) -> str:
    """The conditions, beyond the axes, in which a lane and the reference were not the same.

    Versions are compared within one engine only: across engines the engine itself is the condition, and stands in the
    table of what ran.
    """
    mine: Lane = lane.get("manifest") or {}
    engines = mine.get("engine"), reference.get("engine")
    keys = CONDITIONS + SAME_ENGINE if None in engines or engines[0] == engines[1] else CONDITIONS
    pairs = ((key, mine.get(key), reference.get(key)) for key in keys)
    return ", ".join(f"{key} {a}, not {b}" for key, a, b in pairs if a and b and a != b)


def number(value: float | None) -> str:
    """A KL with three digits or so that say something."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-4 else f"{value:.5f}" if value < 0.1 else f"{value:.3f}"
