"""An extra class for adversarial images (Grosse et al. 2017): the first of the ten detectors.

Idea: train the same network once more with K + 1 classes, on clean images with their labels and on
adversarial ones with the label K + 1. That network is the defended classifier, and an image is
flagged where the extra class wins.

What the attacker adds: nothing. The detector is one more logit, so the usual attack on the network
of K + 1 logits (`joined_logits`), aimed at one of the first K, passes both goals at once.

Why it fails: the new class learns where one attack's images lie, not where the network errs. In
the paper the attack on the new network always succeeds, at 10 % more distance on MNIST than
without a defence.

Source: Carlini & Wagner 2017, section 3.1; Grosse et al. 2017 (arXiv 1702.06280).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from advdet import nets, training
from advdet.detectors import learned_rows, learning
from advdet.detectors.base import Detector, require_at_least_one
from advdet.types import Classifier, FitData, PyTree


@dataclasses.dataclass(frozen=True)
class OutlierClass(Detector):
    """Answers by a network of its own with one class more, for adversarial images.

    Attributes:
      epochs: passes over clean and adversarial images. The paper trained for 30 with one
        adversarial image for each clean one; here the fewer of the two are repeated until they are
        as many as the others, and the recipe is the classifiers' own.
    """

    needs_adversarial: ClassVar[bool] = True
    logit_score: ClassVar[bool] = True

    epochs: int = 6

    def __post_init__(self):
        require_at_least_one(self, "epochs")

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Trains the network; the classifier gives no more than its number of classes.

        Returns:
          The variables of a network with K + 1 logits.

        Raises:
          InputError: no adversarial images, or such as are not made from `data.train`.
        """
        _, crafted = learned_rows.with_sources(data.train, data.adversarial_train, "outlier_class")
        shape = data.train.images.shape[1:]
        classes = learned_rows.num_classes(classifier, shape)
        extra = np.full(len(crafted.labels), classes, np.int32)
        parts = (data.train, crafted._replace(labels=extra))
        count = max(len(part.labels) for part in parts)
        rows = learned_rows.mixed(*(learned_rows.repeated(part, count) for part in parts))
        net = nets.net_for("", classes + 1, shape)
        loss = training.ClassifierLoss(net)
        return learning.train_network(
            key,
            "outlier_class",
            self,
            net,
            loss,
            rows,
            data,
            learning.careful_recipe_for(net, self.epochs),
        )

    def joined_logits(self, fitted: PyTree, classifier: Classifier, images: jax.Array) -> jax.Array:
        """All logits [B, K + 1] for images [B, H, W, C]; the last is that of the extra class."""
        del classifier
        return learning.image_logits(fitted, images)

    def logits(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """The first K logits [B, K] of the network, for images [B, H, W, C]."""
        del key
        return self.joined_logits(fitted, classifier, images)[:, :-1]

    def score(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """The extra class's logit minus the best other one [B], for images [B, H, W, C]."""
        del key
        joined = self.joined_logits(fitted, classifier, images)
        return joined[:, -1] - jnp.max(joined[:, :-1], axis=-1)

    def native_threshold(self, fitted: PyTree) -> float:
        """0: above it the extra class wins."""
        del fitted
        return 0.0
