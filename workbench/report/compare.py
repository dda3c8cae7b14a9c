"""The comparison of a saved session's lanes as one JSON object: what `compare --json` and `run --json` print.

Absent values are null. Every lane carries its manifest; forced and free lanes are never mixed in one number. Of a lane
whose estimator is `bounded` only `kl.lower_bound_mean` and `lower_bound_p99`, `tv` and the flips are given.
"""

from __future__ import annotations

from typing import Any

from workbench.config.lane import from_json
from workbench.metrics.speed import tokens_per_second
from workbench.metrics.summary import lane_summary
from workbench.protocol.columns import ROWS
from workbench.store.effective import (
    acceptance,
    engine_words,
    sentences,
    settings,
    without_effect,
)
from workbench.store.state import LaneRecord, LaneState, SessionState
from workbench.store.trace import margins

_FROM_ROWS: tuple[str, ...] = (
    "valid", "n", "excluded", "kl", "severe", "tv_mean", "tv", "flips", "flip_rate", "flips_beyond_floor", "at_floor",
    "by_depth", "by_role", "leaves_floor",
)  # fmt: skip
_ACCEPTANCE: tuple[str, ...] = ("pooled", "per_request", "by_slot", "source")


def compare(state: SessionState) -> dict[str, Any]:
    """The object of `compare --json` for one session."""
    reference = state.reference
    manifest: dict[str, Any] = {}
    if reference is not None:
        manifest = {
            **reference.record.manifest,
            "name": reference.record.name,
            "configuration": from_json(reference.record.configuration).to_line(),
            "status": reference.record.status,
            "reason": reference.record.reason or None,
            "ran": ran(reference.record),
            **_speeds(reference),
        }
    return {
        "file": state.path or None,
        "session": state.title,
        "reference": manifest,
        "floor": state.floor or {"value": None, "rows": []},
        "lanes": [lane_object(state, lane) for lane in state.lanes if lane.record.kind == "lane"],
    }


def lane_object(state: SessionState, lane: LaneState) -> dict[str, Any]:
    """One entry of `lanes`; a lane without rows has null measurements."""
    record = lane.record
    summary = summarize(state, lane)
    problem: str | None = summary.get("problem")
    status = "invalid" if problem and record.status == "done" else record.status
    if status == "invalid":  # its figures stay, but say nothing about quality
        summary |= {"valid": False, "at_floor": None, "severe": None}
    accepted = acceptance(record.stats)
    return {
        "name": record.name,
        "configuration": from_json(record.configuration).to_line(),
        "mode": record.mode,
        "path": record.path,
        "estimator": record.estimator,
        "logits": record.manifest.get("logits"),
        "status": status,
        "reason": record.reason or problem,
        **{key: summary.get(key) for key in _FROM_ROWS},
        **_speeds(lane),
        "acceptance": {key: accepted.get(key) for key in _ACCEPTANCE},
        "tool_verdicts": None,
        "determinism": record.stats.get("determinism"),
        "no_effect": record.stats.get("no_effect") or None,
        "no_effect_reason": without_effect(record, [other.record for other in state.lanes]) or None,
        "differs": sentences(record.manifest, "differs"),
        "runs": record.manifest.get("runs"),
        "ran": ran(record),
        **{key: value for key, value in summary.items() if key not in _FROM_ROWS},
        "manifest": record.manifest,
    }


def summarize(state: SessionState, lane: LaneState) -> dict[str, Any]:
    """The measurements of a lane's rows so far, over the positions that the reference has too; {} without rows."""
    reference = state.reference
    if reference is None or reference.entropy is None or not len(lane.rows):
        return {}
    start = lane.rows.first - reference.rows.first
    n = min(len(lane.rows), len(reference.rows) - start)
    if n <= 0:
        return {}
    floor = state.floor or {}
    return lane_summary(
        {name: lane.rows.column(name)[:n] for name in ROWS},
        reference.entropy[start : start + n],
        margins(reference.rows)[start : start + n],
        state.stream,
        floor=floor.get("value"),
        tau=floor.get("tau"),
        clusters=None,
        trace_logprob=reference.rows.column("logprob")[start : start + n],
        vocabulary=reference.record.manifest.get("vocabulary"),
        first=lane.rows.first,
        estimator=lane.record.estimator,
    )


def ran(record: LaneRecord) -> dict[str, str]:
    """The engine and its settings in words: what ran, or `asked → ran` where that is another word; `?` where an engine
    cannot read a setting back, nothing where it has not started."""
    found = settings(record.configuration, record.manifest)
    return {
        "engine": engine_words(record.manifest, record.configuration),
        **{name: setting.text if setting.ran else "" for name, setting in found.items()},
    }


def _first_token(stats: dict[str, Any], decode: dict[str, Any]) -> float | None:
    """Seconds from the whole context to the first token: its forward passes and one step.

    None where the passes were not all of one run on the prefill path, or the sample began before the context's end.
    """
    step, first = stats.get("prefill_seconds"), decode.get("first_token_seconds")
    whole = decode.get("from") == stats.get("prefill_tokens")
    return step + first if whole and step and first else None


def _speeds(lane: LaneState) -> dict[str, Any]:
    stats = lane.record.stats
    decode: dict[str, Any] = stats.get("decode") or {}
    seconds, tokens = stats.get("prefill_seconds"), stats.get("prefill_tokens")
    return {
        "prefill_tps": tokens_per_second(tokens, seconds) if seconds and tokens else None,
        "decode_tps": decode.get("median_tps"),
        "ttft_s": _first_token(stats, decode),
        "peak_memory_bytes": stats.get("peak_memory_bytes"),
    }
