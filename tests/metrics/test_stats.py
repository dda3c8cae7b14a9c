from __future__ import annotations

import numpy as np
import pytest

from workbench.metrics import stats


def test_clustered_error_equals_the_brute_force_sandwich() -> None:
    random = np.random.default_rng(0)
    clusters = random.integers(0, 12, 300)
    values = random.normal(0, 1, 300) + random.normal(0, 1, 12)[clusters]
    got = stats.clustered_mean(values, clusters)
    residual = values - values.mean()
    meat = sum(residual[i] * residual[j] for i in range(300) for j in range(300) if clusters[i] == clusters[j])
    assert got is not None and got.se is not None
    assert got.se == pytest.approx(np.sqrt(12 / 11 * meat) / 300)
    assert got.mean == pytest.approx(values.mean())
    assert got.se > 1.5 * values.std() / np.sqrt(300)


def test_singleton_clusters_give_the_ordinary_standard_error() -> None:
    values = np.random.default_rng(1).normal(0, 1, 50)
    got = stats.clustered_mean(values, np.arange(50))
    assert got is not None and got.se == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_fewer_than_five_clusters_give_no_interval_and_say_so() -> None:
    got = stats.clustered_mean(np.arange(8.0), np.repeat([0, 1, 2, 3], 2))
    share = stats.rate(np.ones(8, bool), np.repeat([0, 1, 2, 3], 2))
    assert got is not None and share is not None
    assert got.se is got.low is got.high is share.low is share.high is None
    assert got.method == share.method == "none: 4 clusters, fewer than 5"


def test_nothing_to_average_gives_none() -> None:
    assert stats.clustered_mean(np.zeros(0), np.zeros(0, int)) is None
    assert stats.rate(np.zeros(0, bool), np.zeros(0, int)) is None
    assert stats.quantiles(np.zeros(0))["max"] is None
    assert stats.top_share(np.zeros(0)) is None


def test_flip_rate_interval_is_seeded_and_covers_clusters_not_tokens() -> None:
    clusters = np.repeat(np.arange(20), 50)
    events = clusters < 4
    one, two = stats.rate(events, clusters, seed=3), stats.rate(events, clusters, seed=3)
    assert one == two
    assert one is not None and one.low is not None and one.high is not None
    assert one.rate == 0.2 and one.count == 200
    assert one.low < 0.1 and one.high > 0.3


def test_no_flips_at_all_give_three_over_the_effective_count() -> None:
    none = np.zeros(1000, bool)
    clusters = np.repeat(np.arange(10), 100)
    by_clusters = stats.rate(none, clusters)
    by_count = stats.rate(none, clusters, effective_n=500)
    assert by_clusters is not None and by_clusters.high == pytest.approx(0.3)
    assert by_count is not None and by_count.high == pytest.approx(0.006) and by_count.method == "3/n_eff"


def test_effective_count_lies_between_clusters_and_values() -> None:
    clusters = np.repeat(np.arange(20), 50)
    assert stats.effective_count(clusters.astype(float), clusters) == pytest.approx(20, rel=0.06)
    independent = np.random.default_rng(0).normal(size=1000)
    found = stats.effective_count(independent, clusters)
    assert found is not None and 300 < found <= 1000


def test_paired_difference_is_tighter_than_two_separate_errors() -> None:
    random = np.random.default_rng(2)
    clusters = np.repeat(np.arange(15), 20)
    common = random.exponential(1, 300)
    a, b = common + random.normal(0, 0.01, 300) + 0.02, common
    paired, alone = stats.paired_difference(a, b, clusters), stats.clustered_mean(b, clusters)
    assert paired is not None and paired.se is not None and paired.low is not None
    assert alone is not None and alone.se is not None
    assert paired.mean == pytest.approx((a - b).mean())
    assert paired.se < alone.se / 10
    assert paired.low > 0
    with pytest.raises(ValueError, match="cannot be paired"):
        stats.paired_difference(a, b[1:], clusters)


def test_quantiles_give_p999_only_from_a_thousand_values_on() -> None:
    values = np.arange(1000.0)
    assert stats.quantiles(values[:999])["p999"] is None
    found = stats.quantiles(values)
    assert found["p999"] == pytest.approx(998.001)
    assert (found["median"], found["max"]) == (499.5, 999.0)


def test_top_share_is_the_part_of_the_sum_in_the_largest_one_percent() -> None:
    values = np.ones(200)
    values[7] = 801
    values[9] = 500
    assert stats.top_share(values) == pytest.approx(1301 / 1499)
    assert stats.top_share(np.zeros(10)) is None
    assert stats.top_share(np.ones(3)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("freedom", "table"), [(4, 2.776445), (9, 2.262157), (17, 2.109816), (200, 1.971896)])
def test_student_quantile_agrees_with_tables(freedom: int, table: float) -> None:
    assert stats.student_975(freedom) == pytest.approx(table, rel=1e-3)
