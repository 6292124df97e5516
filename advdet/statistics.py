"""Principal components, the RBF kernel, and the MMD two-sample test by permutation.

Class-wise kernel densities, which belong here too, are written in `densities` and handed on.

    pca, mean_coefficients           principal components of training images
    rbf_kernel, mmd2                 kernel and the unbiased squared MMD of two samples
    mmd_test, mmd_test_in_chunks     permutation test: in one compiled piece, or for large samples
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from advdet import densities
from advdet.densities import bandwidth, left_out_log_densities, log_density
from advdet.types import InputError

__all__ = ["MmdTest", "Pca", "bandwidth", "left_out_log_densities", "log_density"]
__all__ += ["mean_coefficients", "mmd2", "mmd_test", "mmd_test_in_chunks", "pca", "rbf_kernel"]


class Pca(NamedTuple):
    """Principal components, in float32.

    Attributes:
      mean: [D] of the rows; that of a constant column is this constant, to the last bit.
      components: [D, D] unit columns, by falling eigenvalue.
      eigenvalues: [D] of the covariance, never below 0.
    """

    mean: np.ndarray
    components: np.ndarray
    eigenvalues: np.ndarray


def pca(rows: np.ndarray, chunk: int = 4096) -> Pca:
    """Principal components of the covariance (divided by N), unwhitened.

    Computed in float64, where eigenvalues of 1e-11 beside those of 5 are told from 0, and returned
    in float32.

    Args:
      rows: [N, D].
      chunk: rows taken at a time; bounds the memory.

    Raises:
      InputError: there are no rows.
    """
    rows = np.asarray(rows)
    if len(rows) == 0:
        raise InputError("principal components need at least one row, found none")
    mean = rows.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((len(mean), len(mean)))
    for start in range(0, len(rows), chunk):
        centred = rows[start : start + chunk] - mean
        covariance += centred.T @ centred
    values, vectors = np.linalg.eigh(covariance / len(rows))
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    return Pca(*(np.ascontiguousarray(a, np.float32) for a in (mean, vectors, values)))


def mean_coefficients(rows: np.ndarray, components: Pca, chunk: int = 4096) -> np.ndarray:
    """Mean absolute coefficient of rows [N, D] on each component, unwhitened; [D] float64.

    Source: Carlini & Wagner 2017, section 4.1, figure 2.
    """
    mean, directions = (np.asarray(a, np.float64) for a in components[:2])
    total = np.zeros(len(mean))
    for start in range(0, len(rows), chunk):
        total += np.abs((rows[start : start + chunk] - mean) @ directions).sum(axis=0)
    return total / len(rows)


def rbf_kernel(a: jax.Array, b: jax.Array, sigma2: float) -> jax.Array:
    """exp(-|a - b|^2 / sigma2) for rows a [N, D] and b [M, D]; [N, M] in [0, 1]."""
    return jnp.exp(-jax.vmap(densities.squared_distances, (0, None))(a, b) / sigma2)


def mmd2(x: jax.Array, y: jax.Array, sigma2: float) -> jax.Array:
    """Unbiased estimate [] of the squared maximum mean discrepancy of x [N, D] and y [M, D].

    It may come out negative. Source: Gretton et al. 2012, equation 3; Carlini & Wagner 2017, 5.1.
    """

    def within(a):
        kernel = jnp.where(jnp.eye(len(a), dtype=bool), 0.0, rbf_kernel(a, a, sigma2))
        return jnp.sum(kernel) / (len(a) * (len(a) - 1))

    return within(x) + within(y) - 2.0 * jnp.mean(rbf_kernel(x, y, sigma2))


class MmdTest(NamedTuple):
    """Outcome of a permutation test.

    Attributes:
      observed: [] squared MMD of the two samples.
      null: [P] squared MMD after each of the permutations.
      p_value: [] (k + 1) / (P + 1), where k of the permutations reach the observed value.
    """

    observed: jax.Array
    null: jax.Array
    p_value: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _signs(key, n, m, num_permutations):
    """[n + m, P + 2]: +1 for rows of x, -1 for rows of y, as given, permuted P times; then ones.

    A permutation is only the choice of the n rows: those with the n lowest of random numbers. Their
    limit is found bit by bit, which on a CPU takes a tenth of the time of sorting them.
    """
    given = jnp.concatenate([jnp.ones(n), -jnp.ones(m)])
    drawn = jax.random.bits(key, (num_permutations, n + m), jnp.uint32)

    def one_bit(place, limit):
        higher = limit | (jnp.uint32(1) << (31 - place).astype(jnp.uint32))
        too_few = jnp.sum(drawn < higher[:, None], axis=1, dtype=jnp.int32) < n
        return jnp.where(too_few, higher, limit)

    none = jnp.zeros(num_permutations, jnp.uint32)
    limit = jax.lax.fori_loop(0, 32, one_bit, none)[:, None]  # the n-th lowest
    below, tied = drawn < limit, drawn == limit
    missing = n - jnp.sum(below, axis=1, keepdims=True, dtype=jnp.int32)
    chosen = below | (tied & (jnp.cumsum(tied, axis=1, dtype=jnp.int32) <= missing))
    permuted = jnp.where(chosen, 1.0, -1.0)
    return jnp.concatenate([given[None], permuted, jnp.ones((1, n + m))]).T


def _level(pooled, sigma2):
    """[] a typical value of the kernel: taken off, it leaves less to round, and MMD as it is."""
    spread = jnp.mean(jnp.sum(jnp.square(pooled - jnp.mean(pooled, 0, keepdims=True)), axis=1))
    return jnp.exp(-2.0 * spread / sigma2)


@jax.jit
def _kernel_times_signs(start, rows, pooled, signs, sigma2):
    """[n, P + 2] of n rows that stand in `pooled` from `start` on; the diagonal counts 0."""
    kernel = rbf_kernel(rows, pooled, sigma2) - _level(pooled, sigma2)
    place = start + jnp.arange(len(rows), dtype=jnp.int32)
    itself = place[:, None] == jnp.arange(len(pooled), dtype=jnp.int32)[None]
    return jnp.matmul(jnp.where(itself, 0.0, kernel), signs, precision="highest")


def _block_sums(signs, products):
    """s'Ks and s'K1 of each sign vector [P + 1], and 1'K1 []; sums over the rows at hand."""
    quadratic = (signs[:, :-1] * products[:, :-1]).sum(0)
    linear = (signs[:, :-1] * products[:, -1:]).sum(0)
    return quadratic, linear, products[:, -1].sum()


def _outcome(n, m, quadratic, linear, total):
    # With s = +1 on x and -1 on y these are four times the sums over the blocks xx, yy and xy.
    xx, yy, xy = total + 2 * linear + quadratic, total - 2 * linear + quadratic, total - quadratic
    values = (xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / (n * m)) / 4
    reached = (values[1:] >= values[0]).sum()
    p_value = (reached.astype(values.dtype) + 1) / len(values)
    return MmdTest(values[0], values[1:], p_value)


def mmd_test(
    key: jax.Array, x: jax.Array, y: jax.Array, sigma2: float, num_permutations: int
) -> MmdTest:
    """Permutation test of whether two samples come from one distribution; jit and vmap work.

    The kernel of the pooled rows is computed once; a permutation is a vector of signs, and all of
    them together cost one matrix product.

    Args:
      key: consumed.
      x: [N, D], at least two rows.
      y: [M, D], at least two rows.
      sigma2: squared width of the kernel.
      num_permutations: P.

    Source: Carlini & Wagner 2017, section 5.1; Gretton et al. 2012.
    """
    pooled, signs = jnp.concatenate([x, y]), _signs(key, len(x), len(y), num_permutations)
    products = _kernel_times_signs(jnp.int32(0), pooled, pooled, signs, sigma2)
    return _outcome(len(x), len(y), *_block_sums(signs, products))


def mmd_test_in_chunks(
    key: jax.Array, x, y, sigma2: float, num_permutations: int, chunk: int = 1000
) -> MmdTest:
    """`mmd_test` for large samples, with the same permutations; arrays come back in float64.

    Never more than `chunk` rows of the kernel are held, and sums over rows are taken on the host:
    10,000 against 10,000 rows with 1,000 permutations need less than a gigabyte.
    """
    pooled = jnp.concatenate([jnp.asarray(x), jnp.asarray(y)])
    signs = _signs(key, len(x), len(y), num_permutations)
    sums = (0.0, 0.0, 0.0)
    for start in range(0, len(pooled), chunk):
        part = slice(start, start + chunk)
        products = _kernel_times_signs(jnp.int32(start), pooled[part], pooled, signs, sigma2)
        wide = (np.asarray(a, np.float64) for a in (signs[part], products))
        sums = tuple(old + new for old, new in zip(sums, _block_sums(*wide)))
    return _outcome(len(x), len(y), *sums)
