"""Components, the kernel and the two-sample test against float64 twins and known laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from advdet import statistics
from advdet.types import InputError

# ---- principal components


def test_components_of_points_on_a_line_are_as_by_hand():
    rows = np.float32([[1, 2, 0.3], [3, 4, 0.3], [5, 6, 0.3]])
    found = statistics.pca(rows)
    np.testing.assert_array_equal(found.mean, np.float32([3, 4, 0.3]))
    np.testing.assert_allclose(found.eigenvalues, [16 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(np.abs(found.components[:, 0]), [0.5**0.5, 0.5**0.5, 0], atol=1e-6)
    assert {a.dtype for a in found} == {np.dtype(np.float32)}


def test_components_diagonalise_the_covariance(rng):
    rows = (rng.randn(200, 6) * [5, 3, 1, 0.1, 0.01, 0]).dot(rng.randn(6, 6)).astype(np.float32)
    found = statistics.pca(rows)
    wide = rows.astype(np.float64)
    turned = found.components.T @ np.cov(wide.T, bias=True) @ found.components
    scale = found.eigenvalues[0]
    np.testing.assert_allclose(turned, np.diag(found.eigenvalues), atol=1e-6 * scale)
    assert (np.diff(found.eigenvalues) <= 0).all() and (found.eigenvalues >= 0).all()
    np.testing.assert_allclose(found.components.T @ found.components, np.eye(6), atol=1e-6)


def test_components_do_not_depend_on_chunks(rng):
    rows = rng.rand(50, 5).astype(np.float32)
    for one, other in zip(statistics.pca(rows), statistics.pca(rows, chunk=7)):
        np.testing.assert_allclose(one, other, atol=1e-6)
    whole = statistics.pca(rows)
    coefficients = statistics.mean_coefficients(rows, whole)
    np.testing.assert_allclose(coefficients, statistics.mean_coefficients(rows, whole, chunk=7))


def test_the_mean_of_a_constant_column_is_exact():
    rows = np.tile(np.float32([0.1, 1 / 3, 0.7]), (5000, 1))
    np.testing.assert_array_equal(statistics.pca(rows).mean, rows[0])


def test_components_of_nothing_are_refused():
    with pytest.raises(InputError, match="at least one row"):
        statistics.pca(np.zeros((0, 3)))


def test_mean_coefficients_are_those_of_the_unwhitened_components():
    axes = statistics.Pca(np.float32([1, 1]), np.float32([[0, 1], [1, 0]]), np.float32([4, 1]))
    rows = np.float32([[1, 3], [2, -3]])
    np.testing.assert_allclose(statistics.mean_coefficients(rows, axes), [3.0, 0.5])


# ---- two samples


TEST = jax.jit(statistics.mmd_test, static_argnums=4)


def direct_mmd2(x, y, sigma2):
    """The unbiased estimate, by loops over pairs in float64."""
    kernel = lambda a, b: np.exp(-np.square(a - b).sum() / sigma2)
    within = lambda s: np.mean([
        kernel(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j
    ])  # fmt: skip
    return within(x) + within(y) - 2 * np.mean([kernel(a, b) for a in x for b in y])


def test_the_kernel_is_that_of_direct_differences(rng):
    a, b = (rng.rand(count, 3).astype(np.float32) for count in (4, 6))
    squares = np.square(a[:, None].astype(np.float64) - b[None]).sum(-1)
    found = statistics.rbf_kernel(jnp.asarray(a), jnp.asarray(b), 0.5)
    np.testing.assert_allclose(found, np.exp(-squares / 0.5), rtol=1e-5)


def pair(rng):
    """Two samples, of one shape for all tests."""
    return (rng.rand(count, 3).astype(np.float32) for count in (9, 8))


def test_mmd_equals_a_sum_over_pairs(rng):
    x, y = pair(rng)
    wanted = direct_mmd2(x.astype(np.float64), y.astype(np.float64), 0.5)
    np.testing.assert_allclose(jax.jit(statistics.mmd2)(x, y, 0.5), wanted, rtol=1e-4, atol=1e-6)
    test = TEST(jax.random.key(0), x, y, 0.5, 99)
    np.testing.assert_allclose(test.observed, wanted, rtol=1e-4, atol=1e-6)


def test_block_sums_give_the_mmd_of_every_permutation(rng):
    x, y = pair(rng)
    pooled = np.concatenate([x, y]).astype(np.float64)
    signs = np.asarray(statistics._signs(jax.random.key(1), 9, 8, 99))
    assert all((s > 0).sum() == 9 for s in signs.T[:-1])
    wanted = [direct_mmd2(pooled[s > 0], pooled[s < 0], 0.5) for s in signs.T[:-1]]
    test = TEST(jax.random.key(1), x, y, 0.5, 99)
    np.testing.assert_allclose([test.observed, *test.null], wanted, rtol=1e-4, atol=1e-6)
    reached = sum(value >= wanted[0] for value in wanted[1:])
    np.testing.assert_allclose(test.p_value, (reached + 1) / 100, rtol=1e-6)


@pytest.mark.parametrize("values", [2**32, 5, 1])
def test_a_permutation_chooses_the_rows_of_the_lowest_numbers_ties_by_place(values, monkeypatch):
    drawn = np.random.RandomState(0).randint(values, size=(50, 23), dtype=np.uint64)
    drawn = drawn.astype(np.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(drawn))
    signs = np.asarray(statistics._signs.__wrapped__(jax.random.key(0), 9, 14, 50))
    wanted = -np.ones((50, 23))
    for row, numbers in zip(wanted, drawn):
        row[np.argsort(numbers, kind="stable")[:9]] = 1
    np.testing.assert_array_equal(signs[:, 1:-1].T, wanted)


def test_permutations_choose_every_row_equally_often():
    signs = np.asarray(statistics._signs(jax.random.key(3), 30, 70, 4000))[:, 1:-1]
    share, error = (signs > 0).mean(axis=1), np.sqrt(0.3 * 0.7 / 4000)
    assert np.abs(share - 0.3).max() < 4 * error
    pairs = ((signs[0] > 0) & (signs[99] > 0)).mean()
    assert abs(pairs - 0.3 * 29 / 99) < 4 * np.sqrt(0.09 / 4000)


@pytest.mark.parametrize("chunk", [1000, 5])
def test_the_test_in_chunks_gives_the_same_answer(rng, chunk):
    x, y = pair(rng)
    small = TEST(jax.random.key(2), x, y, 1.0, 99)
    large = statistics.mmd_test_in_chunks(jax.random.key(2), x, y, 1.0, 99, chunk)
    for one, other in zip(small, large):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert large.observed.dtype == np.float64


def test_p_values_are_uniform_where_both_samples_come_from_one_distribution():
    key_x, key_y, key_test = jax.random.split(jax.random.key(3), 3)
    x, y = jax.random.normal(key_x, (200, 15, 4)), jax.random.normal(key_y, (200, 10, 4))
    test = lambda key, a, b: statistics.mmd_test(key, a, b, 4.0, 199).p_value
    p_values = np.asarray(jax.jit(jax.vmap(test))(jax.random.split(key_test, 200), x, y))
    assert p_values.min() >= np.float32(1 / 200)
    # They fall on multiples of 1/200; the middle of each step is compared with the uniform law.
    # One key in a thousand fails by chance.
    assert stats.kstest(p_values.astype(np.float64) - 0.5 / 200, "uniform").pvalue > 1e-3


def test_well_separated_samples_get_the_smallest_p_value(rng):
    x, y = pair(rng)
    for test in (TEST, statistics.mmd_test_in_chunks):
        found = test(jax.random.key(4), x, y + np.float32(3.0), 4.0, 99)
        np.testing.assert_allclose(found.p_value, 1 / 100, rtol=1e-6)
