"""Random small rotations, shifts and flips for training images, in JAX."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Affine:
    """Random rotation about the centre, shift and left-right flip of each image.

    Bilinear sampling; outside the image its nearest pixel continues. Call it as
    `augment(key, images)` with images [B, H, W, C]; values stay in the range they had.

    Source: the paper's CIFAR training (+-10 degrees, +-10 % of each side, flip).

    Attributes:
      degrees: rotation is uniform in +-degrees.
      shift: shifts are uniform in +-shift of the side, for each axis.
      flip: whether half of the images are mirrored.
    """

    degrees: float = 10.0
    shift: float = 0.1
    flip: bool = True

    def __call__(self, key: jax.Array, images: jax.Array) -> jax.Array:
        keys = jax.random.split(key, images.shape[0])
        return jax.vmap(self._one)(keys, images)

    def _one(self, key, image):
        height, width, channels = image.shape
        angle_key, shift_key, flip_key = jax.random.split(key, 3)
        angle = jnp.deg2rad(self.degrees) * jax.random.uniform(angle_key, (), minval=-1.0)
        shift = self.shift * jax.random.uniform(shift_key, (2,), minval=-1.0)
        mirror = jnp.where(jax.random.bernoulli(flip_key), -1.0, 1.0) if self.flip else 1.0

        middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
        y = jnp.arange(height, dtype=jnp.float32).reshape(-1, 1) - middle_y
        x = (jnp.arange(width, dtype=jnp.float32).reshape(1, -1) - middle_x) * mirror
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        y, x = (
            jnp.clip(cos * y - sin * x + middle_y + shift[0] * height, 0.0, height - 1.0),
            jnp.clip(sin * y + cos * x + middle_x + shift[1] * width, 0.0, width - 1.0),
        )
        top = jnp.minimum(jnp.floor(y), height - 2.0)
        left = jnp.minimum(jnp.floor(x), width - 2.0)
        down, right = jnp.expand_dims(y - top, -1), jnp.expand_dims(x - left, -1)
        corner = top.astype(jnp.int32) * width + left.astype(jnp.int32)
        pixels = image.reshape(-1, channels)
        upper = pixels[corner] * (1.0 - right) + pixels[corner + 1] * right
        lower = pixels[corner + width] * (1.0 - right) + pixels[corner + width + 1] * right
        return jnp.clip(upper * (1.0 - down) + lower * down, image.min(), image.max())
