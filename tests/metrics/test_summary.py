from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from workbench.metrics.summary import FloorRow, floor_summary, lane_summary
from workbench.protocol.wire import Arrays

N = 3000


def stream_of(n: int = N) -> Arrays:
    role = np.zeros(n + 1, np.uint8)
    generated = np.zeros(n + 1, np.uint8)
    turn = (np.arange(n + 1) // 100).astype(np.int32)
    role[np.arange(n + 1) % 2 == 0] = 4
    generated[role == 4] = 1
    return {
        "ids": np.zeros(n + 1, np.int32),
        "role": role,
        "generated": generated,
        "turn": turn,
        "message": np.zeros(n + 1, np.int32),
    }


def rows_of(n: int = N, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    kl = random.exponential(0.01, n).astype(np.float32)
    return {
        "kl": kl,
        "kl_low": (kl * 0.9).astype(np.float32),
        "tv": np.sqrt(kl / 4).astype(np.float32),
        "tv_high": np.sqrt(kl / 4).astype(np.float32),
        "rank": (1 + (random.random(n) < 0.03)).astype(np.int32),
        "logprob": -random.exponential(1.0, n).astype(np.float32),
        "top_ids": np.tile(np.arange(4, dtype=np.int32), (n, 1)),
        "top_logprobs": np.tile(np.log([0.5, 0.3, 0.1, 0.05]).astype(np.float32), (n, 1)),
        "ties": np.zeros(n, np.uint8),
        "valid": np.ones(n, np.uint8),
        "seconds": np.zeros(n, np.float32),
    }


def summarise(rows: Arrays, **changes: Any) -> dict[str, Any]:
    n = len(rows["kl"])
    values: dict[str, Any] = {"floor": None, "tau": None, "clusters": None} | changes
    entropy, margin = np.full(n, 2.0, np.float32), np.linspace(0, 1, n, dtype=np.float32)
    found = lane_summary(rows, entropy, margin, stream_of(), **values)
    json.dumps(found, allow_nan=False)
    return found


def test_the_headline_is_over_generated_positions_and_roles_cover_all() -> None:
    rows = rows_of()
    found = summarise(rows)
    head = np.arange(1, N + 1) % 2 == 0
    assert found["n"] == N // 2 and found["valid"] and found["problem"] is None
    assert found["kl"]["mean"] == pytest.approx(rows["kl"][head].mean(dtype=np.float64))
    assert found["kl"]["lower_bound_mean"] == pytest.approx(0.9 * found["kl"]["mean"], rel=1e-4)
    assert found["flips"] == (rows["rank"][head] > 1).sum()
    assert found["flip_rate"] == found["flips"] / found["n"]
    assert found["flip_rate_low"] < found["flip_rate"] < found["flip_rate_high"]
    assert {name: part["n"] for name, part in found["by_role"].items()} == {"system": N // 2, "content": N // 2}
    assert [(part["from"], part["to"], part["n"]) for part in found["by_depth"]] == [
        (0, 2048, 1023),
        (2048, 4096, 477),
    ]
    assert all(part["entropy_mean"] == 2.0 for part in found["by_depth"])
    assert found["turns"] == found["interval"]["clusters"] == 31
    assert found["interval"]["kl"] == "CR1 by turn"
    keys = {"mean", "se", "median", "p90", "p99", "p999", "max", "lower_bound_mean", "lower_bound_p99", "top1pct_share"}
    assert found["kl"].keys() == keys and None not in found["kl"].values()
    assert found["tv"]["low"] == found["tv"]["high"] == found["tv_mean"] > 0
    assert found["severe"] is False


def test_without_a_floor_there_is_no_word_about_it_and_with_one_two_times_counts_as_at_it() -> None:
    rows = rows_of()
    mean = summarise(rows)["kl"]["mean"]
    assert summarise(rows)["at_floor"] is None and summarise(rows)["flips_beyond_floor"] is None
    assert summarise(rows, floor=mean / 1.99)["at_floor"] is True
    assert summarise(rows, floor=mean / 2.01)["at_floor"] is False
    found = summarise(rows, tau=0.5)
    assert 0 < found["flips_beyond_floor"] < found["flips"]
    assert summarise(rows, tau=2.0)["flips_beyond_floor"] == 0


def bounded_rows() -> Arrays:
    rows = rows_of()
    rows["kl_low"][:] = rows["kl"]
    rows["tv_high"][:] = rows["tv"] + 0.05
    return rows


def test_nothing_of_a_bounded_lane_stands_under_the_name_of_what_it_is_not() -> None:
    rows = bounded_rows()
    head = np.arange(1, N + 1) % 2 == 0
    found = summarise(rows, estimator="bounded")
    low = rows["kl"][head].astype(np.float64)
    named = {name: value for name, value in found["kl"].items() if value is not None}
    assert named == {
        "lower_bound_mean": pytest.approx(low.mean()),
        "lower_bound_p99": pytest.approx(np.quantile(low, 0.99)),
    }
    assert found["tv_mean"] is None and found["interval"]["kl"] is None
    assert found["tv"]["high"] - found["tv"]["low"] == pytest.approx(0.05, abs=1e-6)
    for part in (*found["by_depth"], *found["by_role"].values()):
        assert part["kl_mean"] is part["kl_se"] is part["kl_p99"] is part["tv_mean"] is None
        assert part["tv_low"] < part["tv_high"] and part["kl_low_mean"] > 0
    assert found["flips"] == summarise(rows)["flips"] and found["flip_rate_high"] > found["flip_rate"]


def test_a_lower_bound_can_lie_clear_of_the_floor_or_be_severe_but_never_near_or_mild() -> None:
    rows = bounded_rows()
    mean = summarise(rows)["kl"]["mean"]
    assert summarise(rows, estimator="bounded", floor=mean)["at_floor"] is None
    assert summarise(rows, estimator="bounded", floor=mean / 3)["at_floor"] is False
    assert summarise(rows, estimator="bounded")["severe"] is None
    rows["kl"][:] = rows["kl_low"][:] = 1.2
    assert summarise(rows, estimator="bounded")["severe"] is True


def test_a_mean_above_one_nat_is_severe_and_valid() -> None:
    rows = rows_of()
    rows["kl"][:] = 1.0
    assert summarise(rows)["severe"] is False
    rows["kl"][:] = 1.01
    found = summarise(rows)
    assert found["severe"] is True and found["valid"] and found["problem"] is None


def test_likelihoods_of_some_tokens_alone_are_not_given_as_those_of_all() -> None:
    rows = rows_of()
    rows["logprob"][1] = np.nan
    found = summarise(rows, trace_logprob=rows["logprob"], vocabulary=10)
    names = ("nll", "ref_nll", "perplexity_ratio", "delta_p_mean", "delta_p_rms")
    assert [found[name] for name in names] == [None] * 5
    assert found["valid"]


def test_likelihood_figures_compare_both_sides_on_the_recorded_tokens() -> None:
    rows = rows_of()
    reference = rows["logprob"] + np.float32(0.1)
    found = summarise(rows, trace_logprob=reference)
    assert found["nll"] - found["ref_nll"] == pytest.approx(0.1, abs=1e-5)
    assert found["perplexity_ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)
    assert found["delta_p_mean"] < 0 < found["delta_p_rms"]
    assert summarise(rows)["ref_nll"] is None


def test_a_likelihood_worse_than_uniform_is_refused_as_an_off_by_one() -> None:
    rows = rows_of()
    rows["logprob"][:] = -12.0
    found = summarise(rows, vocabulary=49152)
    assert not found["valid"] and "off by one" in found["problem"]
    assert summarise(rows, vocabulary=500_000)["valid"]


def test_excluded_positions_are_counted_and_more_than_one_in_a_thousand_makes_the_lane_invalid() -> None:
    rows = rows_of()
    rows["valid"][1] = 0
    rows["kl"][1] = 50.0
    few = summarise(rows)
    assert few["excluded"] == few["excluded_any_role"] == 1 and few["valid"]
    assert few["kl"]["max"] < 1 and few["by_role"]["content"]["excluded"] == 1
    rows["valid"][[3]] = 0
    many = summarise(rows)
    assert many["excluded"] == 2 and not many["valid"] and "2 of 1500 generated" in many["problem"]


def test_rows_that_stop_early_or_begin_late_keep_their_positions() -> None:
    rows = {name: values[:200] for name, values in rows_of().items()}
    late = summarise(rows, first=2500)
    assert [(part["from"], part["n"]) for part in late["by_depth"]] == [(2048, 100)]
    assert late["kl"]["p999"] is None
    assert late["kl"]["se"] is None and late["interval"]["kl"] == "none: 2 clusters, fewer than 5 by turn"


def test_a_lane_without_headline_positions_has_nulls_not_errors() -> None:
    rows = {name: values[:1] for name, values in rows_of().items()}
    found = summarise(rows)
    assert found["n"] == 0 and found["kl"]["mean"] is None and found["flip_rate"] is None
    empty = summarise({name: values[:0] for name, values in rows_of().items()})
    assert empty["n"] == 0 and empty["by_depth"] == [] and empty["by_role"] == {}


def test_clusters_may_be_sessions() -> None:
    sessions = (np.arange(N + 1) // 250).astype(np.int64)
    found = summarise(rows_of(), clusters=sessions, cluster_name="session")
    assert found["interval"] == {"kl": "CR1 by session", "flips": "cluster bootstrap by session", "clusters": 13}


def test_the_floor_is_the_largest_mean_without_the_repeat_and_tau_follows_signed_margins() -> None:
    n = 400
    same, other = rows_of(n), rows_of(n, seed=1)
    same["kl"][:] = 0
    same["rank"][:] = 1
    other["top_ids"][:, :2] = other["top_ids"][:, [1, 0]]
    other["top_ids"][::10] = [9, 8, 1, 7]
    best = np.tile(np.array([0, 1], np.int32), (n, 1))
    margin = np.full(n, np.log(0.5 / 0.3), np.float32)
    found = floor_summary(
        [
            FloorRow("repeat", same, best, margin, repeat=True),
            FloorRow("chunk 256", other, best, margin),
            FloorRow("decode path", {k: v[:50] for k, v in other.items()}, best[:50], margin[:50], first=2000),
        ],
        stream_of(),
    )
    json.dumps(found, allow_nan=False)
    means = [row["kl_mean"] for row in found["rows"]]
    assert found["value"] == max(means[1:]) and means[0] == 0
    assert found["tau"] == pytest.approx(2 * np.log(0.5 / 0.3), rel=1e-6)
    assert found["rows"][0]["zero_divergence"] and not found["rows"][1]["zero_divergence"]
    assert found["rows"][0]["margin_p99"] == pytest.approx(0, abs=1e-6)
    assert [row["margin_unseen"] for row in found["rows"]] == [0, 0, 5]


def test_a_floor_of_nothing_but_the_repeat_has_no_value() -> None:
    rows = rows_of(10)
    found = floor_summary([FloorRow("repeat", rows, rows["top_ids"][:, :2], rows["kl"], repeat=True)], stream_of())
    assert found["value"] is None and found["tau"] is None
