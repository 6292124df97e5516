"""Principal components of the input (Hendrycks & Gimpel 2017): the fourth of the ten detectors.

Idea: natural images hardly vary along the last principal components. Divided by what little spread
each of them has in training, the coefficients of a natural image are small and alike, and those of
an adversarial image are large: the score is their variance.

What the attacker adds: on MNIST nothing but restraint. Pixels that are constant in training have
components of eigenvalue 0, where a change is magnified some 316,000 times; an attack that leaves
alone the pixels that hardly vary in training (`std` below 0.02 to 0.2) is not seen.

Why it fails: the statistic asks whether a pixel of the border was touched, not whether the image is
adversarial. Invisible, harmless noise of 1e-4 is flagged; noise a hundred times as strong within
the digit's area is not. On colour images, without constant pixels, it tells little.

Source: Carlini & Wagner 2017, section 4.1; Hendrycks & Gimpel 2017 (arXiv 1608.00530).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from advdet import statistics
from advdet.detectors.base import Detector
from advdet.types import Classifier, FitData, InputError, PyTree

_TAILS = {784: 700, 3072: 2500}  # the authors' choices for MNIST and CIFAR-10
_OTHER_TAIL = 0.9


@dataclasses.dataclass(frozen=True)
class InputPca(Detector):
    """Flags images whose whitened late principal coefficients vary much.

    Attributes:
      tail: the first component that counts, from 0; 0 stands for the authors' 700 of 784 and 2500
        of 3072, and for nine tenths of the components of images of another size.
      epsilon: added to the eigenvalues before the square root.
    """

    tail: int = 0
    epsilon: float = 1e-11

    def __post_init__(self):
        if self.tail < 0:
            raise ValueError(f"tail must be 0 (automatic) or a component's number, not {self.tail}")
        if not 0 < self.epsilon < np.inf:
            raise ValueError(f"epsilon must be a number above 0, not {self.epsilon}")

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Learns the components from clean training images.

        Returns:
          `mean` [D], `whitening` [D, T] (the T late components, each divided by its spread) and
          `std` [H, W, C], each pixel's standard deviation in training, 0 where it is constant.

        Raises:
          InputError: images have too few pixels for this tail.
        """
        del key, classifier
        images = np.asarray(data.train.images)
        rows = images.reshape(len(images), -1)
        size = rows.shape[1]
        tail = self.tail or _TAILS.get(size, round(_OTHER_TAIL * size))
        if size - tail < 2:
            raise InputError(
                f"tail={tail} leaves {max(size - tail, 0)} of {size} components: a variance needs "
                "two; choose a smaller tail"
            )
        mean, components, eigenvalues = statistics.pca(rows)
        spread = np.sqrt(eigenvalues[tail:].astype(np.float64) + self.epsilon)
        # Pixel by pixel, since all of them in float64 would not fit small machines.
        std = np.array([np.std(pixel, dtype=np.float64) for pixel in rows.T])
        return {
            "mean": mean,
            "whitening": (components[:, tail:] / spread[None]).astype(np.float32),
            "std": std.reshape(images.shape[1:]).astype(np.float32),
        }

    def score(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """Variances [B] of the whitened late coefficients of images [B, H, W, C].

        Without bound: 1e-3 for most digits, 1e7 and more once a constant pixel is touched.
        """
        del key, classifier
        # The mean comes off before the product: a constant pixel left alone then adds exactly 0.
        centred = images.reshape(images.shape[0], -1) - fitted["mean"][None]
        coefficients = jnp.matmul(centred, fitted["whitening"], precision="highest")
        return jnp.var(coefficients, axis=1)
