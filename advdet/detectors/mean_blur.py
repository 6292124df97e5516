"""Mean blur (Li & Li 2017): the last of the ten detectors, in two forms.

Idea: an average over 3 by 3 pixels changes little of what an image shows, and was expected to wipe
out the fine pattern that fools the classifier.

What the attacker adds: the filter is one more layer of the network, so the attack goes end to end
through it. Against the form that compares both answers, the difference is a second goal.

Why it fails: an image that fools the network behind the filter costs no more distance than before;
and an image made with high confidence fools both networks without knowing of the filter.

Source: Carlini & Wagner 2017, section 6.2; Li & Li 2017 (arXiv 1612.07767).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from advdet.detectors.base import Detector
from advdet.types import Classifier, PyTree


def blur(images: jax.Array, size: int = 3) -> jax.Array:
    """Averages over size x size pixels, each channel by itself.

    Beyond the border stand copies of the pixels at it, so that a constant image stays what it is;
    the paper's script pads with mid-grey and, in colour, adds up the channels.

    Args:
      images: [B, H, W, C] in [0, 1].
      size: odd.

    Returns:
      [B, H, W, C] in [0, 1].

    Source: Carlini & Wagner 2017, section 6.2.
    """
    height, width = images.shape[1:3]
    reach = (size // 2, size // 2)
    padded = jnp.pad(images, ((0, 0), reach, reach, (0, 0)), mode="edge")
    # Shifted slices, rows and then columns: cheaper on CPU than a depthwise convolution.
    rows = sum(padded[:, k : k + height] for k in range(size))
    return sum(rows[:, :, k : k + width] for k in range(size)) / size**2


def _check(size):
    if size < 3 or size % 2 == 0:
        raise ValueError(f"size must be an odd number of pixels, 3 or more, not {size}")


@dataclasses.dataclass(frozen=True)
class MeanBlur(Detector):
    """Classifies the blurred image; flags nothing (the paper's form).

    Attributes:
      size: side of the square that is averaged over.
    """

    kind: ClassVar[str] = "corrector"

    size: int = 3

    def __post_init__(self):
        _check(self.size)

    def logits(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """Logits [B, K] of the blurred images [B, H, W, C]."""
        del key, fitted
        return classifier(blur(images, self.size)).logits


@dataclasses.dataclass(frozen=True)
class MeanBlurDetector(Detector):
    """Flags images that the classifier sees differently once they are blurred.

    The paper gives this form no threshold.

    Attributes:
      size: side of the square that is averaged over.
    """

    size: int = 3

    def __post_init__(self):
        _check(self.size)

    def score(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """L1 distances [B], 0 to 2, of the softmax of images [B, H, W, C] as given and blurred."""
        del key, fitted
        softmax = lambda x: jax.nn.softmax(classifier(x).logits)
        return jnp.sum(jnp.abs(softmax(images) - softmax(blur(images, self.size))), axis=1)
