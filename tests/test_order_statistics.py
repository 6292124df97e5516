"""Values by rank: those of a sort, with the slope of the entries they stand at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from advdet.order_statistics import order_statistics


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 16, 36, 196])
def test_they_are_those_of_a_sort_to_the_bit(rng, count):
    values = rng.normal(size=(3, count, 5)).astype(np.float32)
    values[:, ::3] = values[:, :1]  # ties, which have no order
    found = order_statistics(values, tuple(range(count)))
    np.testing.assert_array_equal(found, np.sort(values, axis=1))


def test_a_slope_goes_to_the_entry_of_that_rank(rng):
    values = jnp.asarray(rng.normal(size=(2, 10, 3)), jnp.float32)
    ranks, weights = (0, 4, 5, 9), jnp.array([1.0, 2.0, 3.0, 4.0])
    total = lambda v: jnp.sum(order_statistics(v, ranks) * weights[None, :, None])
    gradient = np.asarray(jax.jit(jax.grad(total))(values))
    wanted = np.zeros_like(gradient)
    order = np.argsort(np.asarray(values), axis=1)
    for rank, weight in zip(ranks, np.asarray(weights)):
        np.put_along_axis(wanted, order[:, rank : rank + 1], weight, axis=1)
    np.testing.assert_allclose(gradient, wanted)


def test_ties_share_a_slope():
    values = jnp.array([0.5, 2.0, 0.5, 1.0]).reshape(1, 4, 1)
    gradient = jax.grad(lambda v: 3.0 * order_statistics(v, (0, 3)).sum())(values)
    np.testing.assert_allclose(gradient.ravel(), [1.5, 3.0, 1.5, 0.0])
