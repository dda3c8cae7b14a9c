"""One lane's rows, and a noise floor's, as the plain numbers that tables, `--json` and reports show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.metrics import changepoint, depth, stats
from workbench.metrics.divergence import BOUNDED, HEAD_AND_SAMPLES
from workbench.protocol.wire import Arrays
from workbench.session.regions import ROLE_NAMES

MAX_EXCLUDED = 1e-3
"""The share of excluded positions above which a lane is invalid."""

AT_FLOOR = 2.0
"""A mean KL up to this many times the floor is not told apart from it."""

SEVERE = 1.0
"""Nats. A mean KL above it is shown as severe: another model in all but name; its numbers stay valid."""

Mask = NDArray[np.bool_]


def at_floor(mean: float | None, floor: float | None, *, bounded: bool = False) -> bool | None:
    """Whether a mean KL is not told apart from the noise floor; None where that cannot be said.

    Of a bounded lane `mean` is the lower bound's: it can lie clear of the floor, but never be at it.
    """
    if mean is None or floor is None:
        return None
    near = mean <= AT_FLOOR * floor
    return None if near and bounded else near


def is_severe(mean: float | None, *, bounded: bool = False) -> bool | None:
    """Whether a mean KL is above SEVERE; None where that cannot be said (a lower bound below it says nothing)."""
    if mean is None:
        return None
    return True if mean > SEVERE else None if bounded else False


def worse_than_uniform(nll: float | None, vocabulary: int | None, side: str = "lane") -> str | None:
    """What is wrong with a mean NLL (nats) above ln of the vocabulary's size, or None."""
    if not vocabulary or nll is None or nll <= math.log(vocabulary):
        return None
    return (
        f"the {side}'s mean NLL of {nll:.2f} is worse than uniform ({math.log(vocabulary):.2f}):"
        " targets and rows are off by one"
    )


def lane_summary(  # noqa: PLR0913
    rows: Arrays,
    trace_entropy: NDArray[np.float32],
    trace_margin: NDArray[np.float32],
    stream: Arrays,
    *,
    floor: float | None,
    tau: float | None,
    clusters: NDArray[np.integer] | None,
    cluster_name: str = "turn",
    trace_logprob: NDArray[np.float32] | None = None,
    vocabulary: int | None = None,
    first: int = 1,
    estimator: str = HEAD_AND_SAMPLES,
) -> dict[str, Any]:
    """The part of a lane's `compare --json` entry that its rows give, and a few keys more.

    `rows` are columns of `protocol.columns.ROWS`, row 0 being position `first`; `trace_entropy`, `trace_margin` (the
    reference's top-1 less top-2 log-probability) and `trace_logprob` belong to the same rows; `stream`
    and `clusters` are indexed by position. Without `clusters` errors are clustered by turn. The headline is over
    generated positions; `by_role` over all. A mean NLL worse than uniform over `vocabulary` ids means that targets and
    rows are shifted against each other: the lane is then not valid, and `problem` says so.

    Of the estimator `bounded` nothing stands under a name that it is not: `kl` holds only the lower bound's mean and
    99th percentile (each a lower bound of KL's own), `tv` the interval's two mean ends, `tv_mean` nothing.
    """
    n = len(rows["kl"])
    bounded = estimator == BOUNDED
    here = slice(first, first + n)
    valid = rows["valid"] == 1
    generated = stream["generated"][here] == 1
    head = generated & valid
    labels = (stream["turn"] if clusters is None else clusters)[here]
    flips = rows["rank"] > 1
    mean = stats.clustered_mean(rows["kl"][head], labels[head])
    flip_rate = stats.rate(flips[head], labels[head], effective_n=stats.effective_count(rows["kl"][head], labels[head]))
    excluded = int((generated & ~valid).sum())
    likelihood = _likelihood(rows, trace_logprob, head)
    problem = _problem(valid, generated, likelihood, vocabulary)
    return _plain(
        {
            "n": int(head.sum()),
            "excluded": excluded,
            "excluded_any_role": int((~valid).sum()),
            "valid": not problem,
            "problem": problem,
            "kl": {
                "mean": mean and mean.mean,
                "se": mean and mean.se,
                **stats.quantiles(rows["kl"][head]),
                "top1pct_share": stats.top_share(rows["kl"][head]),
                **(dict.fromkeys(_OF_KL) if bounded else {}),
                "lower_bound_mean": _mean(rows["kl_low"], head),
                "lower_bound_p99": stats.quantiles(rows["kl_low"][head])["p99"],
            },
            "severe": is_severe(mean and mean.mean, bounded=bounded),
            "tv_mean": None if bounded else _mean(rows["tv"], head),
            "tv": {"low": _mean(rows["tv"], head), "high": _mean(rows["tv_high"], head)},
            "flips": int(flips[head].sum()),
            "flip_rate": flip_rate and flip_rate.rate,
            "flip_rate_low": flip_rate and flip_rate.low,
            "flip_rate_high": flip_rate and flip_rate.high,
            "flips_beyond_floor": None if tau is None else int((flips & (trace_margin > tau))[head].sum()),
            "at_floor": at_floor(mean and mean.mean, floor, bounded=bounded),
            "ties": int((rows["ties"] > 0)[head].sum()),
            **likelihood,
            "turns": len(np.unique(stream["turn"][here][head])),
            "interval": {
                "kl": f"{mean.method} by {cluster_name}" if mean and not bounded else None,
                "flips": f"{flip_rate.method} by {cluster_name}" if flip_rate else None,
                "clusters": mean.clusters if mean else 0,
            },
            "by_depth": [
                {
                    "from": start,
                    "to": stop,
                    **_part(rows, trace_entropy, labels, index, bounded),
                    "margin_mean": _mean(trace_margin, index),
                    "flips_beyond_floor": None if tau is None else int((flips & (trace_margin > tau))[index].sum()),
                    "turns": len(np.unique(stream["turn"][here][index])),
                }
                for start, stop, index in _depth_bins(head, first)
            ],
            "leaves_floor": _leaves(rows["kl"], head, stream["turn"][here], first, floor, bounded),
            "by_role": _by_role(rows, trace_entropy, labels, stream["role"][here], bounded),
        }
    )


@dataclass(frozen=True, slots=True)
class FloorRow:
    """The reference against itself in one other way: rows from position `first` on, and the trace's best two there.

    `repeat` marks the identical repeat, which is expected to be bit-equal and does not set the floor.
    """

    name: str
    rows: Arrays
    best_ids: NDArray[np.int32]
    margin: NDArray[np.float32]
    first: int = 1
    repeat: bool = False


def floor_summary(measured: Sequence[FloorRow], stream: Arrays) -> dict[str, Any]:
    """`value`, the largest mean KL of the rows without the repeat; `tau`; and `rows`, what each of them showed.

    All over generated positions. The margin is that between the reference's own two best ids a and b: it is
    ln p_a − ln p_b there and ln q_a − ln q_b in the other run (negative after a flip to b), and tau is the largest of
    the rows' 99th percentiles of its absolute change. Positions where a or b is not among the other run's four best
    count as `margin_unseen` and are left out.
    """
    entries: list[dict[str, Any]] = []
    for item in measured:
        chosen = (stream["generated"][item.first : item.first + len(item.rows["kl"])] == 1) & (item.rows["valid"] == 1)
        change = _margin_change(item)[chosen]
        seen = change[np.isfinite(change)]
        kl = item.rows["kl"][chosen]
        entries.append(
            {
                "name": item.name,
                "repeat": item.repeat,
                "n": len(kl),
                "excluded": int((item.rows["valid"] != 1).sum()),
                "kl_mean": _mean(item.rows["kl"], chosen),
                "kl_p99": stats.quantiles(kl)["p99"],
                "kl_max": stats.quantiles(kl)["max"],
                "flips": int((item.rows["rank"] > 1)[chosen].sum()),
                "flip_rate": _mean(item.rows["rank"] > 1, chosen),
                "margin_p99": stats.quantiles(seen)["p99"],
                "margin_unseen": len(change) - len(seen),
                "zero_divergence": bool((item.rows["valid"] == 1).all()) and not item.rows["kl"].any(),
            }
        )
    varied = [entry for entry in entries if not entry["repeat"]]
    return _plain(
        {
            "value": max((entry["kl_mean"] for entry in varied if entry["kl_mean"] is not None), default=None),
            "tau": max((entry["margin_p99"] for entry in varied if entry["margin_p99"] is not None), default=None),
            "rows": entries,
        }
    )


def _margin_change(item: FloorRow) -> NDArray[np.float64]:
    """|Δ(ln of the two best)| of each row, NaN where one of the two is not among the run's four best."""
    values: list[NDArray[np.float64]] = []
    for column in range(2):
        same = item.rows["top_ids"] == item.best_ids[:, column, None]
        found = np.where(same, item.rows["top_logprobs"], 0).sum(1, dtype=np.float64)
        values.append(np.where(same.sum(1) == 1, found, np.nan))
    return np.abs(values[0] - values[1] - item.margin.astype(np.float64))


_OF_KL: tuple[str, ...] = ("mean", "se", "median", "p90", "p99", "p999", "max", "top1pct_share")
"""What a lane with nothing but bounds cannot say of its KL."""


def _leaves(
    kl: NDArray[np.float32], head: Mask, turns: NDArray[np.int32], first: int, floor: float | None, bounded: bool
) -> dict[str, Any] | None:
    """From which depth on the lane stays above what counts as the floor."""
    if bounded or floor is None:
        return None
    index = np.flatnonzero(head)
    found = changepoint.leaves_floor(kl[index], turns[index], index + first, AT_FLOOR * floor)
    return found and found.to_json()


def _part(
    rows: Arrays, entropy: NDArray[np.float32], labels: NDArray[np.integer], index: NDArray[np.intp], bounded: bool
) -> dict[str, Any]:
    """Means over the rows at `index`; the error is None with too few clusters."""
    mean = None if bounded else stats.clustered_mean(rows["kl"][index], labels[index])
    return {
        "n": len(index),
        "kl_mean": mean and mean.mean,
        "kl_se": mean and mean.se,
        "kl_p99": None if bounded else stats.quantiles(rows["kl"][index])["p99"],
        "kl_low_mean": _mean(rows["kl_low"], index),
        "tv_mean": None if bounded else _mean(rows["tv"], index),
        "tv_low": _mean(rows["tv"], index),
        "tv_high": _mean(rows["tv_high"], index),
        "flips": int((rows["rank"][index] > 1).sum()),
        "flip_rate": _mean(rows["rank"] > 1, index),
        "entropy_mean": _mean(entropy, index),
    }


def _by_role(
    rows: Arrays, entropy: NDArray[np.float32], labels: NDArray[np.integer], roles: NDArray[np.uint8], bounded: bool
) -> dict[str, Any]:
    valid = rows["valid"] == 1
    out: dict[str, Any] = {}
    for role in np.unique(roles).tolist():
        mine = roles == role
        part = _part(rows, entropy, labels, np.flatnonzero(mine & valid), bounded)
        out[ROLE_NAMES[role]] = {**part, "excluded": int((mine & ~valid).sum())}
    return out


def _depth_bins(head: Mask, first: int) -> list[tuple[int, int, NDArray[np.intp]]]:
    index = np.flatnonzero(head)
    return [(start, stop, index[part]) for start, stop, part in depth.bins(index + first)]


def _likelihood(rows: Arrays, trace_logprob: NDArray[np.float32] | None, head: Mask) -> dict[str, float | None]:
    """Mean NLL of both sides, their perplexity ratio, and Δp = q(t) − p(t) of the recorded tokens: mean and RMS.

    All None where an engine did not give the log-probability of every recorded token: the likely ones alone flatter.
    """
    keys = ("nll", "ref_nll", "perplexity_ratio", "delta_p_mean", "delta_p_rms")
    out: dict[str, float | None] = dict.fromkeys(keys)
    lane = rows["logprob"][head].astype(np.float64)
    if not len(lane) or np.isnan(lane).any():
        return out
    out["nll"] = -float(lane.mean())
    if trace_logprob is not None:
        reference = trace_logprob[head].astype(np.float64)
        delta = np.exp(lane) - np.exp(reference)
        out["ref_nll"] = -float(reference.mean())
        out["perplexity_ratio"] = math.exp(min(700.0, float((reference - lane).mean())))
        out["delta_p_mean"] = float(delta.mean())
        out["delta_p_rms"] = math.sqrt(float(np.square(delta).mean()))
    return out


def _problem(valid: Mask, generated: Mask, likelihood: dict[str, float | None], vocabulary: int | None) -> str | None:
    """Why the lane's numbers must not be used, or None."""
    for where, chosen in (("generated", generated), ("scored", np.ones_like(generated))):
        lost, total = int((chosen & ~valid).sum()), int(chosen.sum())
        if lost > MAX_EXCLUDED * total:
            return f"{lost} of {total} {where} positions are excluded, more than {MAX_EXCLUDED:.1%}"
    lane, reference = likelihood["nll"], likelihood["ref_nll"]
    return worse_than_uniform(lane, vocabulary) or worse_than_uniform(reference, vocabulary, "reference")


def _mean(values: NDArray[Any], chosen: NDArray[Any]) -> float | None:
    part = values[chosen]
    return float(part.mean(dtype=np.float64)) if len(part) else None


def _plain(value: Any) -> Any:
    """The same value in JSON's types: no numpy scalars, and None for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, list):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
