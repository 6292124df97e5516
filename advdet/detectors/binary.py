"""A network that tells adversarial images from clean ones (Gong et al. 2017): the second detector.

Idea: train a second network, as large as the classifier, on clean (0) and adversarial images (1).

What the attacker adds: the network's logit as a second goal; or, as the paper did, both networks
joined to one of K + 1 logits (objective `combined`), to which the usual attack is applied.

Why it fails: the detector is a neural network, as easy to fool as the classifier, and the two can
be fooled together: in the paper always, at 13 % more distance on MNIST than without a defence.
What its authors took for robustness was an attack of a few steps on the detector alone.

Source: Carlini & Wagner 2017, section 3.1; Gong et al. 2017 (arXiv 1704.04960).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from advdet import nets
from advdet.detectors import learned_rows, learning
from advdet.detectors.base import Detector, require_at_least_one
from advdet.types import Classifier, FitData, PyTree


@dataclasses.dataclass(frozen=True)
class Binary(Detector):
    """Flags images that a second network takes for adversarial.

    Attributes:
      epochs: passes over the adversarial images and their clean sources, as many of each.
    """

    needs_adversarial: ClassVar[bool] = True
    logit_score: ClassVar[bool] = True

    epochs: int = 12

    def __post_init__(self):
        require_at_least_one(self, "epochs")

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Trains the network; the classifier is not looked at.

        Returns:
          The variables of a network with one logit.

        Raises:
          InputError: no adversarial images, or such as are not made from `data.train`.
        """
        del classifier
        rows = learned_rows.clean_or_not(
            *learned_rows.with_sources(data.train, data.adversarial_train, "binary")
        )
        net = nets.net_for("", 1, rows.images.shape[1:])
        loss = learning.BinaryLoss(net)
        return learning.train_network(
            key,
            "binary",
            self,
            net,
            loss,
            rows,
            data,
            learning.careful_recipe_for(net, self.epochs),
        )

    def score(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """The network's logit [B] for images [B, H, W, C]."""
        del key, classifier
        return learning.image_logit(fitted, images)

    def native_threshold(self, fitted: PyTree) -> float:
        """0: above it an adversarial image is the more likely."""
        del fitted
        return 0.0
