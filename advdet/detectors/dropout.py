"""Dropout uncertainty (Feinman et al. 2017): the ninth of the ten detectors.

Idea: keep dropout on at test time and look at the spread of the softmax over many random networks.
Natural images lie where all of these networks agree; adversarial ones, found for one network, were
expected to lie where they do not.

What the attacker adds: the uncertainty itself as a second goal, over many fresh masks (objective
`quantile`), or, as the paper did, 20 networks with fixed masks that must all be fooled (`paper`).

Why it fails: an image on which all thinned networks agree on the wrong label exists close by. In
the paper it costs the attacker on MNIST more distance than any other defence but kernel density,
and hardly any success.

Source: Carlini & Wagner 2017, section 6.1; Feinman et al. 2017 (arXiv 1703.00410).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from advdet.detectors.base import Detector
from advdet.types import Classifier, PyTree


def uncertainty(probabilities: jax.Array) -> jax.Array:
    """U(x): the variance of the softmax over draws, as a mean over the classes.

    Written with the mean taken off first, which equals the paper's mean of squares minus squared
    mean, and cannot come out negative. The paper's formula sums over the classes, Feinman's code
    takes the mean. The paper's threshold of 0.02 belongs to the mean: on ten classes it is 0.2 of
    the sum, while 0.02 of the sum flags 30 % of the clean MNIST images.

    Args:
      probabilities: [D, ..., K] softmax outputs of D thinned networks.

    Returns:
      [...] uncertainties in [0, 1 / K).

    Source: Feinman et al. 2017 (their code); Carlini & Wagner 2017, section 6.1 (with the squares
    that the printed formula lacks).
    """
    centred = probabilities - jnp.mean(probabilities, axis=0, keepdims=True)
    return jnp.mean(jnp.square(centred), axis=(0, -1))


@dataclasses.dataclass(frozen=True)
class Dropout(Detector):
    """Flags images on which networks thinned by dropout disagree.

    Attributes:
      num_samples: thinned networks a score is made from (L in the paper).
      tau: the paper's threshold, on the mean over the classes.
    """

    random: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # the mean over the classes, where the sum had been

    num_samples: int = 30
    tau: float = 0.02

    def __post_init__(self):
        if self.num_samples < 2:
            raise ValueError(f"num_samples must be at least 2, not {self.num_samples}")

    def score(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """Uncertainties [B] of images [B, H, W, C]; all images share the masks' shapes."""
        del fitted
        keys = jax.random.split(key, self.num_samples)
        probabilities = jax.vmap(lambda k: jax.nn.softmax(classifier(images, k).logits))(keys)
        return uncertainty(probabilities)

    def native_threshold(self, fitted: PyTree) -> float:
        """The paper's 0.02."""
        del fitted
        return self.tau
