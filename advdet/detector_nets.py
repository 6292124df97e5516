"""The networks that only detectors learn: Metzen's subnetwork, and a perceptron.

With `nets.py` the only file that imports flax. Both take their input where a classifier takes
images, so that the loops of `training.py` serve them too.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from advdet.nets import Conv
from advdet.types import Outputs

_LARGEST_SIDE = 8  # of Metzen's map before the average
_POOLINGS = 2


def halved(x: jax.Array) -> jax.Array:
    """Max-pooling 2 x 2 of [B, H, W, C] as a maximum of four strided slices.

    An odd last row or column is left out. (XLA:CPU takes ten times as long for the gradient of
    `reduce_window`.)
    """
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    x = x[:, :height, :width]
    above = jnp.maximum(x[:, ::2, ::2], x[:, ::2, 1::2])
    below = jnp.maximum(x[:, 1::2, ::2], x[:, 1::2, 1::2])
    return jnp.maximum(above, below)


class Subnetwork(nn.Module):
    """Detector on a hidden feature [B, H, W, C] of a classifier; one logit.

    Convolutions of 96, 192 and 192 channels, each with BatchNorm and ReLU, one of 1 x 1 with
    BatchNorm, and the average over all positions. After the first and after the second of them the
    map is halved if its side is above 8: on CIFAR-10's `ad1` ... `ad4` that is Metzen's rule.

    Source: Carlini & Wagner 2017, section 3.2; Metzen et al. 2017 (arXiv 1702.04267).
    """

    precision: str = "highest"
    momentum: float = 0.99
    epsilon: float = 1e-3

    @nn.compact
    def __call__(self, features, key=None, train=False) -> Outputs:
        """Features [B, H, W, C] -> logits [B, 1]; `train` takes BatchNorm by this batch."""
        del key
        form = functools.partial(Conv, precision=self.precision)

        def norm(x, place):
            options = {"momentum": self.momentum, "epsilon": self.epsilon}
            return nn.BatchNorm(not train, name=f"norm{place}", **options)(x)

        x = features
        for place, width in enumerate((96, 192, 192), start=1):
            x = nn.relu(norm(form(width, 3, name=f"conv{place}")(x), place))
            if place <= _POOLINGS and min(x.shape[1:3]) > _LARGEST_SIDE:
                x = halved(x)
        x = norm(form(1, 1, padding="VALID", name="conv4")(x), 4)
        return Outputs(x.mean((1, 2)), {})


class Perceptron(nn.Module):
    """Two hidden layers of 100 units with ReLU (the paper's network on PCA coefficients)."""

    num_classes: int
    width: int = 100
    precision: str = "highest"

    @nn.compact
    def __call__(self, coefficients, key=None, train=False) -> Outputs:
        """Coefficients [B, D] -> logits [B, K]; no dropout, no batch statistics."""
        del key, train
        dense = functools.partial(
            nn.Dense, precision=self.precision, kernel_init=nn.initializers.glorot_uniform()
        )
        x = nn.relu(dense(self.width, name="dense1")(coefficients))
        x = nn.relu(dense(self.width, name="dense2")(x))
        return Outputs(dense(self.num_classes, name="logits")(x), {})
