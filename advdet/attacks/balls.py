"""The sets of images that an attack may reach: all within a radius of the clean one, in the box.

Norms are over all pixels and channels: "linf" is the largest change, "l2" the Euclidean length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from advdet.attacks.variables import Bounds

NORMS = ("linf", "l2")


def length(move: jax.Array) -> jax.Array:
    """[] its L2 norm, over all pixels and channels."""
    return jnp.sqrt(jnp.sum(jnp.square(move)))


def normalised(direction: jax.Array) -> jax.Array:
    """The direction at L2 length 1; zero stays zero."""
    # Scaled first: squares of entries near 1e-20 would vanish in float32.
    largest = jnp.max(jnp.abs(direction))
    scaled = direction / jnp.where(largest > 0, largest, 1.0)
    norm = length(scaled)
    return scaled / jnp.where(norm > 0, norm, 1.0)


def steepest(gradient: jax.Array, norm: str) -> jax.Array:
    """The move of norm 1 along which a linear function rises most; zero for a zero gradient."""
    return jnp.sign(gradient) if norm == "linf" else normalised(gradient)


def project(
    proposal: jax.Array,
    image: jax.Array,
    free: jax.Array,
    *,
    norm: str,
    epsilon: jax.Array,
    bounds: Bounds,
) -> jax.Array:
    """The proposal brought into the box and to within epsilon of the image, frozen pixels put back.

    Clipping to the box brings each pixel nearer to the image, which lies in it; so the radius
    holds, though in L2 the result need not be the nearest such point.

    Args:
      proposal, image: [H, W, C].
      free: [H, W, C] bool.
      norm: in `NORMS`.
      epsilon: [] the radius.
      bounds: the box.
    """
    if norm == "linf":
        near = jnp.clip(proposal, image - epsilon, image + epsilon)
    else:
        move = jnp.where(free, proposal - image, 0.0)
        far = length(move)
        near = image + move * jnp.where(far > epsilon, epsilon / jnp.maximum(far, 1e-30), 1.0)
    return jnp.where(free, jnp.clip(near, *bounds), image)


def draw(key: jax.Array, free: jax.Array, *, norm: str, epsilon: jax.Array) -> jax.Array:
    """A uniform draw [H, W, C] from the ball around 0 in the free pixels."""
    if norm == "linf":
        moves = jax.random.uniform(key, free.shape, minval=-1.0, maxval=1.0)
        return epsilon * jnp.where(free, moves, 0.0)
    key_direction, key_length = jax.random.split(key)
    direction = normalised(jnp.where(free, jax.random.normal(key_direction, free.shape), 0.0))
    dimensions = jnp.maximum(jnp.sum(free), 1).astype(jnp.float32)
    return epsilon * direction * jax.random.uniform(key_length) ** (1.0 / dimensions)
