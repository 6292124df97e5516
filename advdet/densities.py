"""Class-wise kernel densities over many centres, as logarithms.

The density of a class at a point is the mean of exp(-|point - centre|^2 / sigma) over the class's
centres. It has no normalising factor: only comparisons under one sigma mean anything. Written in
logs, a point far away keeps a finite value and a useful slope where the density itself is 0.

Source: Carlini & Wagner 2017, section 5.2; Feinman et al. 2017 (arXiv 1703.00410).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from advdet.types import InputError

NO_CENTRES = -1e20  # the log density of a class that has no centre
BANDWIDTHS = 10.0 ** (np.arange(50) / 10)  # those that the paper tries: 10^0, 10^0.1 ... 10^4.9
_FLOOR = 1e-30  # added to densities while bandwidths are compared, as in the paper


def squared_distances(point: jax.Array, centres: jax.Array) -> jax.Array:
    """Squared distances of one point to many; for several points use vmap.

    Written as |a|^2 + |b|^2 - 2ab: many points then cost one matrix product, and no array holds a
    difference for each point, centre and dimension. Both are taken relative to the centres' mean
    first, since the expanded form loses the digits of a common offset.

    Args:
      point: [D].
      centres: [N, D].

    Returns:
      [N], never below 0.
    """
    middle = jnp.mean(centres, axis=0)
    a, b = point - middle, centres - middle[None]
    products = jnp.matmul(a, b.T, precision="highest")
    expanded = jnp.sum(jnp.square(a)) + jnp.sum(jnp.square(b), axis=1) - 2.0 * products
    # Rounding can lead below 0. Only the value is clipped: the slope 2(a - b) holds there too.
    return expanded + jax.lax.stop_gradient(jnp.maximum(expanded, 0.0) - expanded)


def log_density(
    point: jax.Array,
    centres: jax.Array,
    labels: jax.Array,
    label: jax.Array,
    sigma: jax.Array | float,
) -> jax.Array:
    """Log kernel density of one class at one point; for several points use vmap.

    Its gradient, -(2 / sigma) (point - the mean of the class's centres weighted by their kernels),
    is finite at any distance.

    Args:
      point: [D].
      centres: [N, D], of all classes.
      labels: [N] int32, the centres' classes.
      label: [] int32, the class asked for.
      sigma: [] bandwidth in squared units of the points (the paper's sigma, not its square).

    Returns:
      [] at most 0, up to rounding; `NO_CENTRES`, without slope, for a class without centres.

    Source: Carlini & Wagner 2017, section 5.2, with the sign in the exponent that the printed
    formula lacks.
    """
    own = labels == label
    exponents = jnp.where(own, -squared_distances(point, centres) / sigma, NO_CENTRES)
    count = jnp.maximum(jnp.sum(own), 1).astype(jnp.float32)
    return jax.nn.logsumexp(exponents) - jnp.log(count)


def left_out_log_densities(
    rows: np.ndarray, labels: np.ndarray, sigma: float, chunk: int = 256
) -> np.ndarray:
    """Log densities of rows under their own class, each row itself left out.

    A row left in would meet itself at distance 0, and no fresh image does. Computed in float64.

    Args:
      rows: [N, D].
      labels: [N] classes.
      sigma: bandwidth.
      chunk: rows taken at a time; bounds the memory (chunk x the largest class).

    Returns:
      [N] float32; `NO_CENTRES` for a row that is alone in its class.

    Source: Carlini & Wagner 2017, section 5.2.
    """
    rows, labels = np.asarray(rows, np.float64), np.asarray(labels)
    found = np.full(len(rows), NO_CENTRES)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        if len(own) < 2:
            continue
        members = rows[own] - rows[own].mean(axis=0)
        squares = np.square(members).sum(axis=1)
        for start in range(0, len(own), chunk):
            part = slice(start, start + chunk)
            distances = squares[part, None] + squares[None] - 2.0 * members[part] @ members.T
            exponents = np.maximum(distances, 0.0) / -sigma
            place = np.arange(len(exponents))
            exponents[place, start + place] = -np.inf
            top = exponents.max(axis=1)
            sums = np.exp(exponents - top[:, None]).sum(axis=1)
            found[own[part]] = top + np.log(sums) - np.log(len(own) - 1)
    return found.astype(np.float32)


@jax.jit
def _distances(points, centres):
    return jax.vmap(squared_distances, (0, None))(points, centres)


@jax.jit
def _floored_log_densities(distances, shares, sigma):
    # Plain sums do here: what underflows lies far below the floor.
    densities = jnp.matmul(jnp.exp(-distances / sigma), shares, precision="highest")
    return jnp.log(densities + _FLOOR)


def bandwidth(
    points: np.ndarray,
    point_labels: np.ndarray,
    centres: np.ndarray,
    labels: np.ndarray,
    chunk: int = 64,
) -> float:
    """The bandwidth that tells the classes apart best.

    The mean log density is taken for each pair (class of the points, class of the centres); the
    best of `BANDWIDTHS` has the largest mean over the K pairs of equal classes minus the sum over
    the others divided by K^2, as the paper's script has it: it blanks the diagonal of its 10 x 10
    table and takes the mean over all 100 cells, where the mean over the 90 pairs would weigh the
    others by a ninth more. The floor of 1e-30 on densities is part of the method: without it this
    difference grows without end as the bandwidth shrinks.

    Args:
      points: [M, D] points that are not among the centres.
      point_labels: [M] their classes.
      centres: [N, D].
      labels: [N] the centres' classes.
      chunk: points taken at a time; bounds the memory (chunk x N).

    Returns:
      One of `BANDWIDTHS`.

    Raises:
      InputError: points and centres share fewer than two classes.

    Source: Carlini & Wagner 2017, section 5.2; `compute_optimal_sigma` of their script.
    """
    points, centres = np.asarray(points, np.float32), np.asarray(centres, np.float32)
    point_labels, labels = np.asarray(point_labels), np.asarray(labels)
    classes = np.intersect1d(point_labels, labels)
    if len(classes) < 2:
        raise InputError(
            f"a bandwidth search needs two classes among both its points and its centres, found "
            f"{len(classes)}: use more images, or give sigma by hand"
        )
    owns = point_labels[:, None] == classes[None]
    members = (labels[:, None] == classes[None]).astype(np.float32)
    shares = jnp.asarray(members / members.sum(axis=0, keepdims=True))
    centres = jnp.asarray(centres)
    totals = np.zeros((len(BANDWIDTHS), len(classes), len(classes)))
    for start in range(0, len(points), chunk):
        part = points[start : start + chunk]
        padded = np.zeros((chunk, points.shape[1]), np.float32)
        padded[: len(part)] = part
        distances = _distances(padded, centres)
        own = owns[start : start + chunk].astype(np.float64)
        for total, sigma in zip(totals, BANDWIDTHS):
            logs = _floored_log_densities(distances, shares, np.float32(sigma))
            total += own.T @ np.asarray(logs, np.float64)[: len(part)]
    means = totals / owns.sum(axis=0)[None, :, None]
    equal = np.trace(means, axis1=1, axis2=2)
    other = (means.sum(axis=(1, 2)) - equal) / len(classes) ** 2
    return float(BANDWIDTHS[np.argmax(equal / len(classes) - other)])
