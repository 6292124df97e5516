"""Values by rank, fast on CPUs and with a cheap gradient.

XLA:CPU sorts value by value. A sorting network takes minima and maxima of whole halves instead,
which vectorise: five times as fast for 196 positions of 64 channels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def order_statistics(values: jax.Array, ranks: tuple[int, ...]) -> jax.Array:
    """The values of given ranks along axis 1, as a sort would put them.

    The gradient of each goes to the entries that equal it, in equal parts.

    Args:
      values: [B, P, C], finite.
      ranks: 0 for the smallest, P - 1 for the largest.

    Returns:
      [B, len(ranks), C].

    Source: bitonic sorting, Batcher 1968.
    """
    return _sorted(values)[:, jnp.array(ranks)]


def _forward(values, ranks):
    found = order_statistics(values, ranks)
    return found, (values, found)


def _backward(ranks, residuals, cotangent):
    values, found = residuals
    gradient = jnp.zeros_like(values)
    for place in range(len(ranks)):
        equal = (values == found[:, place, None]).astype(values.dtype)
        gradient += equal * (cotangent[:, place] / jnp.sum(equal, axis=1))[:, None]
    return (gradient,)


order_statistics.defvjp(_forward, _backward)


def _sorted(values: jax.Array) -> jax.Array:
    """[B, P, C] by rising value along axis 1."""
    batch, count, channels = values.shape
    size = 1 << (count - 1).bit_length()
    pad = ((0, 0), (0, size - count), (0, 0))
    values = jnp.pad(values, pad, constant_values=jnp.inf)
    width = 2
    while width <= size:  # runs of half that width are in order; two make one
        pairs = values.reshape(batch, size // width, 2, width // 2, channels)
        low, high = pairs[:, :, 0], pairs[:, :, 1, ::-1]
        parts = [jnp.minimum(low, high), jnp.maximum(low, high)[:, :, ::-1]]
        values = jnp.stack(parts, axis=2)
        reach = width // 4
        while reach:
            pairs = values.reshape(batch, size // (2 * reach), 2, reach, channels)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
            values = jnp.stack([jnp.minimum(low, high), jnp.maximum(low, high)], axis=2)
            reach //= 2
        values = values.reshape(batch, size, channels)
        width *= 2
    return values[:, :count]
