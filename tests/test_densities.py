"""Class-wise kernel densities against direct sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from advdet import densities, statistics
from advdet.densities import NO_CENTRES
from advdet.types import InputError

VALUE_AND_SLOPE = jax.jit(jax.value_and_grad(statistics.log_density))


def direct_squares(a, b):
    """[N, M] squared distances in float64, from direct differences."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.square(a[:, None] - b[None]).sum(-1)


def cloud(rng, count=120, size=5, classes=3, offset=0.0):
    """Float32 centres around one place for each class, and labels."""
    labels = np.arange(count, dtype=np.int32) % classes
    places = 3.0 * rng.randn(classes, size)
    return (places[labels] + rng.randn(count, size) + offset).astype(np.float32), labels


def direct_density(point, centres, labels, label, sigma):
    """Log density in float64 by direct differences."""
    squares = direct_squares(point[None], centres[labels == label])[0]
    return np.logaddexp.reduce(-squares / sigma) - np.log(len(squares))


def test_squared_distances_equal_direct_differences_far_from_the_origin(rng):
    centres, _ = cloud(rng, offset=100.0)
    points = jnp.asarray(centres[:4] + np.float32(0.5))
    found = jax.vmap(densities.squared_distances, (0, None))(points, jnp.asarray(centres))
    np.testing.assert_allclose(found, direct_squares(points, centres), rtol=1e-4, atol=1e-4)
    assert densities.squared_distances(jnp.asarray(centres[3]), jnp.asarray(centres)).min() >= 0


@pytest.mark.parametrize("distance", [0.0, 1.0, 100.0, 1e5])
@pytest.mark.parametrize("sigma", [1.0, 20.0])
def test_log_density_and_gradient_equal_a_direct_sum(rng, distance, sigma):
    centres, labels = cloud(rng)
    point = (centres[4] + distance * np.eye(5)[1]).astype(np.float32)
    value, gradient = VALUE_AND_SLOPE(point, centres, labels, jnp.int32(1), sigma)
    wide = point.astype(np.float64)
    np.testing.assert_allclose(
        value, direct_density(wide, centres, labels, 1, sigma), rtol=2e-6, atol=1e-4
    )
    own = centres[labels == 1].astype(np.float64)
    weights = -direct_squares(wide[None], own)[0] / sigma
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    exact = -2 / sigma * (wide - weights @ own)
    # Far away rounding turns the weights over, and the centres are as one point.
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=2e-5 * (1 + distance) / sigma)


def test_the_gradient_of_the_log_density_is_numerically_right(rng):
    centres, labels = cloud(rng)
    _, gradient = VALUE_AND_SLOPE(centres[0], centres, labels, jnp.int32(2), 9.0)
    steps = 1e-5 * np.eye(5)
    density = lambda x: direct_density(centres[0] + x, centres, labels, 2, 9.0)
    wanted = [(density(step) - density(-step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4)


def test_a_centre_itself_has_the_slope_of_the_other_centres():
    """At a centre the squared distance is 0, where a clipped value alone would lose its slope."""
    centres, labels = np.float32([[0.3, 0.7], [0.7, 0.1]]), np.zeros(2, np.int32)
    for point in centres:
        _, gradient = VALUE_AND_SLOPE(point, centres, labels, jnp.int32(0), 1.0)
        wide = centres.astype(np.float64)
        weights = np.exp(-direct_squares(point[None], centres)[0])
        exact = -2 * (point - weights @ wide / weights.sum())
        np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-6)


def test_a_class_without_centres_has_a_finite_density_without_slope(rng):
    centres, labels = cloud(rng)
    value, gradient = VALUE_AND_SLOPE(centres[0], centres, labels, jnp.int32(7), 1.0)
    np.testing.assert_allclose(value, NO_CENTRES)
    np.testing.assert_array_equal(gradient, np.zeros(5))


def test_densities_of_many_points_hold_no_array_of_all_differences(rng):
    points, count, size = 16, 2000, 32
    centres = jnp.asarray(rng.rand(count, size), jnp.float32)
    labels = jnp.arange(count, dtype=jnp.int32) % 10
    one = lambda x, label: statistics.log_density(x, centres, labels, label, 1.0)
    total = jax.grad(lambda x, label: jax.vmap(one)(x, label).sum())
    compiled = jax.jit(total).lower(centres[:points], labels[:points]).compile()
    needed = compiled.memory_analysis().temp_size_in_bytes
    assert 0 < needed < 4 * points * count * size / 2


def test_left_out_densities_equal_direct_sums_in_any_chunks(rng):
    rows, labels = cloud(rng, count=31)
    labels[5] = 9  # alone in its class
    wanted = [
        direct_density(rows[i], np.delete(rows, i, 0), np.delete(labels, i), labels[i], 4.0)
        for i in range(len(rows))
        if i != 5
    ]
    for chunk in (256, 4, 1):
        found = statistics.left_out_log_densities(rows, labels, 4.0, chunk)
        np.testing.assert_allclose(np.delete(found, 5), wanted, rtol=1e-6)
        np.testing.assert_allclose(found[5], NO_CENTRES)


def direct_bandwidth(points, point_labels, centres, labels):
    """The bandwidth of the paper's script, by loops in float64."""
    squares, best = direct_squares(points, centres), (-np.inf, None)
    classes = np.unique(labels)
    for power in range(50):
        sigma = 10 ** (power / 10)
        kernel = np.exp(-squares / sigma)
        logs = [
            [
                np.log(1e-30 + kernel[point_labels == i][:, labels == j].mean(1)).mean()
                for j in classes
            ]
            for i in classes
        ]
        logs = np.array(logs)
        equal = np.eye(len(classes), dtype=bool)
        gap = logs[equal].mean() - np.where(equal, 0.0, logs).mean()  # over all cells
        best = max(best, (gap, sigma))
    return best[1]


@pytest.mark.parametrize("spread", [3.0, 12.0])
def test_the_bandwidth_is_that_of_a_search_by_hand_in_any_chunks(rng, spread):
    rows, labels = cloud(rng, count=91)
    rows = spread * rows
    points, centres = rows[:31], rows[31:]
    wanted = direct_bandwidth(points, labels[:31], centres, labels[31:])
    assert 1 < wanted < densities.BANDWIDTHS[-1]  # not at an end of the range
    for chunk in (64, 7):
        found = statistics.bandwidth(points, labels[:31], centres, labels[31:], chunk)
        np.testing.assert_allclose(found, wanted)


def test_the_bandwidth_leaves_out_classes_that_only_one_side_has(rng):
    rows, labels = cloud(rng, count=90)
    points, centres = slice(0, 30), slice(30, 90)
    wanted = statistics.bandwidth(rows[points], labels[points], rows[centres], labels[centres])
    more = np.concatenate([rows[points], 50 * rows[:2]])
    more_labels = np.concatenate([labels[points], np.int32([8, 9])])
    assert statistics.bandwidth(more, more_labels, rows[centres], labels[centres]) == wanted
    with pytest.raises(InputError, match="two classes"):
        statistics.bandwidth(rows[points], np.zeros(30), rows[centres], labels[centres])
