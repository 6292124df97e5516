"""Small detectors of every kind, and a data set of 8 x 8 pixels for them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import toys

import advdet
from advdet.types import Outputs


@dataclasses.dataclass(frozen=True)
class Far(advdet.Detector):
    """Squared distance from the mean training image."""

    def fit(self, key, classifier, data):
        del key, classifier
        return {"mean": np.asarray(data.train.images).mean(0)}

    def score(self, key, fitted, classifier, images):
        del key, classifier
        return jnp.sum(jnp.square(images - fitted["mean"][None]), axis=(1, 2, 3))


@dataclasses.dataclass(frozen=True)
class Near(Far):
    """The nearer to the mean image, the more suspicious: toy digits are black and white."""

    def score(self, key, fitted, classifier, images):
        return -super().score(key, fitted, classifier, images)


@dataclasses.dataclass(frozen=True)
class ShakyFar(Far):
    """The same with a random number on it."""

    random: ClassVar[bool] = True

    noise: float = 0.2

    def score(self, key, fitted, classifier, images):
        shake = self.noise * jax.random.normal(key, images.shape[:1])
        return super().score(key, fitted, classifier, images) + shake


@dataclasses.dataclass(frozen=True)
class Fade(advdet.Detector):
    """Classifies a paler image."""

    kind: ClassVar[str] = "corrector"

    share: float = 0.9

    def logits(self, key, fitted, classifier, images):
        del key, fitted
        return classifier(self.share * images).logits


def splits(seed: int = 0, wrong: float = 0.1) -> tuple[advdet.Classifier, advdet.Splits]:
    """A toy network and images that it classifies rightly, but for some."""
    network = toys.network(seed)

    def part(number, count):
        images = toys.digits(number, count)
        labels = toys.predicted(network, images)
        random = np.random.RandomState(number)
        turned = (labels + random.randint(1, toys.CLASSES, count)) % toys.CLASSES
        return images, np.where(random.rand(count) < wrong, turned, labels).astype(np.int32)

    data = advdet.Splits.from_arrays(
        train=part(11, 200), clean=part(12, 300), test=part(13, 150), name="toy",
        class_names=tuple("0123456789"),
    )  # fmt: skip
    return network, data


@dataclasses.dataclass(frozen=True)
class Changed:
    """A classifier's `apply` with its images and its logits changed by two functions."""

    apply: object
    image: object = lambda x: x
    logit: object = lambda x: x

    def __call__(self, variables, images, key=None):
        outputs = self.apply(variables, self.image(images), key)
        return Outputs(self.logit(outputs.logits), outputs.features)
