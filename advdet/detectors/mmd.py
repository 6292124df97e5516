"""Maximum mean discrepancy (Grosse et al. 2017): the seventh of the ten detectors.

Idea: a two-sample test. If a set of images is adversarial, it does not come from the distribution
of the training images, and a kernel statistic shows that. One image alone cannot be judged.

What the attacker adds: in the paper nothing, since the attack on the undefended classifier is not
found. Here (objective `jointly`) each image also keeps down to its clean original's share of the
statistic, for little more distance.

Why it fails: an attack that knows of the test takes back the little that its images have in common.
In the paper not even that is needed: sets of 100 (MNIST) or 10,000 (CIFAR-10) by a plain attack are
not told from natural ones. That does not hold here: compared with 1,000 training images the test
finds most sets of 100 that a plain attack made on MNIST, and few compared with 100. Where a set is
rejected, a natural set from the test split is the control: the splits themselves may differ.

Source: Carlini & Wagner 2017, section 5.1; Grosse et al. 2017 (arXiv 1702.06280); Gretton et al.
2012.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from advdet import statistics
from advdet.detectors.base import Detector, require_at_least_one
from advdet.types import Classifier, FitData, InputError, PyTree


@dataclasses.dataclass(frozen=True)
class Mmd(Detector):
    """Tests whether a set of images comes from the distribution of the training images.

    Attributes:
      sigma2: squared width of the kernel exp(-|a - b|^2 / sigma2) on pixels in [0, 1].
      num_permutations: random splits that the observed one is compared with.
      num_reference: training images that sets are compared with.
      set_size: images in a set that is tested.
    """

    kind: ClassVar[str] = "set"

    sigma2: float = 100.0
    num_permutations: int = 1000
    num_reference: int = 1000
    set_size: int = 100

    def __post_init__(self):
        if not 0 < self.sigma2 < np.inf:
            raise ValueError(f"sigma2 must be a number above 0, not {self.sigma2}")
        require_at_least_one(self, "num_permutations")
        if min(self.num_reference, self.set_size) < 2:
            raise ValueError(
                "num_reference and set_size must be at least 2, not "
                f"{self.num_reference} and {self.set_size}"
            )

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Keeps random training images.

        Returns:
          `reference` [num_reference, H * W * C].

        Raises:
          InputError: there are fewer training images than asked for.
        """
        del classifier
        images = np.asarray(data.train.images, np.float32)
        if len(images) < self.num_reference:
            raise InputError(
                f"num_reference={self.num_reference}, but there are {len(images)} training images: "
                "choose a smaller num_reference"
            )
        chosen = np.asarray(jax.random.permutation(key, len(images)))[: self.num_reference]
        return {"reference": images[chosen].reshape(self.num_reference, -1)}

    def p_value(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """How likely training images look as different as this set does.

        Args:
          key: decides the permutations; consumed.
          fitted: what `fit` returned.
          classifier: not used.
          images: [n, H, W, C] in [0, 1], at least two; for sets of many thousands use
            `statistics.mmd_test_in_chunks`.

        Returns:
          [] in [1 / (num_permutations + 1), 1]; the paper rejects below 0.05.

        Raises:
          InputError: the set has a single image.
        """
        del classifier
        if images.shape[0] < 2:
            raise InputError(f"a set of images to test has at least 2, not {images.shape[0]}")
        rows = images.reshape(images.shape[0], -1)
        test = statistics.mmd_test(
            key, rows, fitted["reference"], self.sigma2, self.num_permutations
        )
        return test.p_value
