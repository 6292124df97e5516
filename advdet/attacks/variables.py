"""The change of variables that keeps an image inside its box.

x = lo + (hi - lo) (tanh(w) + 1) / 2, written as a logistic: (tanh(w) + 1) / 2 = sigmoid(2 w). In
float32 tanh(w)'s own derivative, 1 - tanh(w)^2, is rounded to a few digits where most pixels of a
digit lie (w near -7) and to 0 soon after; 4 sigmoid(2 w) sigmoid(-2 w) / 2 keeps its digits at both
ends, so a saturated pixel can come back.

Source: Carlini & Wagner 2017 (S&P), section V-B.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

Bounds = tuple[float, float]

# How far from +-1 an edge pixel starts, as in the paper's code; the edge itself is at infinity.
SQUEEZE = 0.999999


def _shares(variables: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sigmoid(2 w) and sigmoid(-2 w), both to full relative precision, by one exponential."""
    small = jnp.exp(-2.0 * jnp.abs(variables))
    high = 1.0 / (1.0 + small)
    low = small * high
    return jnp.where(variables >= 0, high, low), jnp.where(variables >= 0, low, high)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def to_box(variables: jax.Array, bounds: Bounds = (0.0, 1.0)) -> jax.Array:
    """Images in [lo, hi], exactly, of unbounded variables of the same shape."""
    low, high = bounds
    return jnp.clip(low + (high - low) * _shares(variables)[0], low, high)


@to_box.defjvp
def _to_box_jvp(bounds, primals, tangents):
    (variables,), (tangent,) = primals, tangents
    low, high = bounds
    up, down = _shares(variables)
    images = jnp.clip(low + (high - low) * up, low, high)
    return images, 2.0 * (high - low) * up * down * tangent


def from_box(images: jax.Array, bounds: Bounds = (0.0, 1.0)) -> jax.Array:
    """Finite variables whose `to_box` is the image, up to the squeeze of 5e-7 at the edges."""
    low, high = bounds
    return jnp.arctanh(SQUEEZE * (2.0 * (images - low) / (high - low) - 1.0))
