"""Rates, intervals and distances against published and hand-made values."""

import numpy as np
import pytest

from advdet import metrics


@pytest.mark.parametrize(
    "successes, n, wanted",
    [
        (8, 10, (0.490162, 0.943318)),
        (81, 263, (0.255255, 0.366214)),  # Newcombe 1998, table I, method 3: 0.2553 to 0.3662
        (15, 148, (0.062386, 0.160468)),  # 0.0624 to 0.1605
        (0, 20, (0.0, 0.161125)),  # 0.0000 to 0.1611
        (1, 29, (0.006114, 0.171755)),  # 0.0061 to 0.1718
        (20, 20, (0.838875, 1.0)),
    ],
)
def test_wilson_gives_the_published_intervals(successes, n, wanted):
    np.testing.assert_allclose(metrics.wilson(successes, n), wanted, atol=5e-5)


def test_wilson_stays_within_zero_and_one_and_is_none_without_observations():
    for n in range(1, 50):
        for successes in range(n + 1):
            low, high = metrics.wilson(successes, n)
            assert 0 <= low <= successes / n + 1e-12 and successes / n - 1e-12 <= high <= 1
    assert metrics.wilson(0, 0) is None


def test_wilson_takes_sums_of_shares():
    low, high = metrics.wilson(7.5, 10)
    assert metrics.wilson(7, 10)[0] < low < metrics.wilson(8, 10)[0]
    assert metrics.wilson(7, 10)[1] < high < metrics.wilson(8, 10)[1]


def test_the_bootstrap_interval_holds_the_mean_and_narrows_with_more_values(rng):
    widths = []
    for count in (20, 2000):
        values = rng.gamma(2.0, 1.0, count)
        low, high = metrics.mean_interval(values)
        assert low < values.mean() < high
        widths.append(high - low)
    # The normal interval of so many values: 2 x 1.96 standard errors.
    np.testing.assert_allclose(widths[1], 2 * 1.96 * values.std() / np.sqrt(2000), rtol=0.1)
    assert widths[0] > 5 * widths[1]


def test_the_bootstrap_interval_repeats_and_is_none_below_two_values(rng):
    values = rng.randn(30)
    assert metrics.mean_interval(values) == metrics.mean_interval(values)
    assert metrics.mean_interval(values[:1]) is None
    assert metrics.mean_interval(values[:0]) is None
    assert metrics.mean_interval(np.full(4, 2.5)) == [2.5, 2.5]


def test_a_mean_of_nothing_is_none():
    assert metrics.mean_or_none(np.array([])) is None
    assert metrics.mean_or_none([]) is None
    assert metrics.mean_or_none(np.array([1.0, 2.0, 6.0])) == 3.0
    assert metrics.mean_or_none(np.array([True, False, False, False])) == 0.25


@pytest.mark.parametrize(
    "distances, succeeded, wanted",
    [
        ([1, 2, 3], [1, 1, 1], 2.0),
        ([1, 2, 9], [1, 1, 0], 2.0),
        ([1, 0, 0], [1, 0, 0], None),  # over half fail
        ([1, 4, 0], [0, 1, 1], 4.0),  # ranked 0, 4, inf
        ([1, 3, 5, 7], [1, 1, 1, 0], 4.0),
        ([1, 3, 5, 7], [1, 1, 0, 0], None),  # the middle lies between 3 and infinity
        ([0, 0], [0, 0], None),
        ([], [], None),
    ],
)
def test_the_median_counts_failures_as_infinite(distances, succeeded, wanted):
    found = metrics.median_l2(np.array(distances, float), np.array(succeeded, bool))
    assert found == wanted


def test_l2_is_the_plain_norm_over_pixels_and_channels():
    clean = np.zeros((2, 2, 2, 3), np.float32)
    images = clean.copy()
    images[0, 0, 0, 0], images[0, 1, 1, 2] = 3.0, -4.0
    np.testing.assert_array_equal(metrics.l2(images, clean), [5.0, 0.0])


def test_l2_does_not_lose_small_differences_of_many_pixels():
    clean = np.zeros((1, 1000, 1000, 1), np.float32)
    images = clean + np.float32(1e-4)
    np.testing.assert_allclose(metrics.l2(images, clean), 0.1, rtol=1e-6)


def test_auc_is_the_share_of_rightly_ordered_pairs_with_ties_as_halves():
    # Pairs (negative, positive): of 1, 2, 2 and 2, 3 there are 4 + 2 halves of 6 right.
    assert metrics.auc(np.array([1.0, 2, 2]), np.array([2.0, 3])) == pytest.approx(5 / 6)
    assert metrics.auc(np.array([0.0, 1]), np.array([2.0])) == 1.0
    assert metrics.auc(np.array([2.0]), np.array([0.0, 1])) == 0.0
    assert metrics.auc(np.ones(3), np.ones(4)) == 0.5


def test_auc_is_none_where_one_side_is_empty():
    some, none = np.ones(3), np.array([])
    assert metrics.auc(some, none) is None
    assert metrics.auc(none, some) is None


def test_few_images_have_no_auc():
    many, few = np.arange(10.0), np.arange(9.0)
    assert metrics.auc_of_many(many, many) == 0.5
    assert metrics.auc_of_many(few, many) is None and metrics.auc_of_many(many, few) is None


def test_a_paired_ratio_has_an_interval_about_it(rng):
    other = rng.gamma(4.0, 1.0, 200)
    ratio, (low, high) = metrics.paired_ratio(1.5 * other, other)
    assert ratio == pytest.approx(1.5) and low == pytest.approx(1.5) == high
    own = other * rng.uniform(1.0, 2.0, 200)
    ratio, (low, high) = metrics.paired_ratio(own, other)
    assert ratio == pytest.approx(own.mean() / other.mean()) and low < ratio < high
    assert metrics.paired_ratio(own, other) == (ratio, [low, high])
    assert metrics.paired_ratio(own[:1], other[:1])[1] is None
    for nothing in (own[:0], 0.0 * own):
        assert metrics.paired_ratio(own[: len(nothing)], nothing) == (None, None)
