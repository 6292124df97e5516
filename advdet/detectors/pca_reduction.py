"""Only the first principal components (Bhagoji et al. 2017): the fifth of the ten methods.

Idea: classify what is left of an image after projection on the first k principal components of the
training images. Adversarial changes were thought to need the others. It is a smaller input space
rather than a detector: it flags nothing.

What the attacker adds: nothing. The projection is a linear layer in front of the network, and the
usual attack goes through both.

Why it fails: the network on k components is a network as any other, and the attack succeeds on it.
Distances are largest near k = 25. In the paper they are there about three times those of a dense
network on 784 components, and still below those of the plain convolutional network. Here they are
1.4 times the former, and a tenth above the latter.

Source: Carlini & Wagner 2017, section 4.2; Bhagoji et al. 2017 (arXiv 1704.02654).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from advdet import nets, statistics, training
from advdet.detector_nets import Perceptron
from advdet.detectors import learned_rows, learning
from advdet.detectors.base import Detector, require_at_least_one
from advdet.types import Classifier, FitData, InputError, PyTree

_VARIANTS = ("fc", "cnn")


def project(fitted: PyTree, images: jax.Array) -> jax.Array:
    """The first k PCA coefficients of images.

    Args:
      fitted: with `mean` [D] and `components` [D, k].
      images: [B, H, W, C] with D = H W C values.

    Returns:
      [B, k], in the pixels' units.

    Source: Carlini & Wagner 2017, section 4.2.
    """
    centred = images.reshape(images.shape[0], -1) - fitted["mean"][None]
    return jnp.matmul(centred, fitted["components"], precision="highest")


def reconstruct(fitted: PyTree, coefficients: jax.Array, image_shape: Sequence[int]) -> jax.Array:
    """The images [B, H, W, C] that k coefficients [B, k] stand for; not clipped to [0, 1].

    Source: Carlini & Wagner 2017, section 4.2.
    """
    flat = jnp.matmul(coefficients, fitted["components"].T, precision="highest")
    return (flat + fitted["mean"][None]).reshape(-1, *image_shape)


@dataclasses.dataclass(frozen=True)
class PcaReduction(Detector):
    """Answers by a network of its own that sees the first principal components alone.

    Attributes:
      variant: "fc": k coefficients, two hidden layers of 100 units; "cnn": the coefficients are
        turned back into an image, for a network as the classifier's.
      components: k.
      epochs: passes over the training images.
    """

    kind: ClassVar[str] = "corrector"

    variant: str = "cnn"
    components: int = 25
    epochs: int = 8

    def __post_init__(self):
        if self.variant not in _VARIANTS:
            raise ValueError(f"variant must be fc or cnn, not {self.variant!r}")
        require_at_least_one(self, "components", "epochs")

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Takes the components of the training images and trains the network on them.

        Args:
          key: consumed.
          classifier: gives no more than its number of classes.
          data: only `train` is used.

        Returns:
          {"mean": [D], "components": [D, k]} and the network's variables.

        Raises:
          InputError: more components than an image has values.
        """
        images = np.asarray(data.train.images, np.float32)
        shape = images.shape[1:]
        flat = images.reshape(len(images), -1)
        if self.components > flat.shape[1]:
            raise InputError(
                f"pca_reduction should keep {self.components} components, but an image has only "
                f"{flat.shape[1]} values: use at most as many"
            )
        found = statistics.pca(flat)
        basis = {
            "mean": np.asarray(found.mean),
            "components": np.ascontiguousarray(np.asarray(found.components)[:, : self.components]),
        }
        inputs = (flat - basis["mean"][None]) @ basis["components"]
        if self.variant == "cnn":
            flat = inputs @ basis["components"].T + basis["mean"][None]
            inputs = flat.reshape(images.shape)
        net = self._net(learned_rows.num_classes(classifier, shape), shape)
        rows = data.train._replace(images=inputs)
        loss = training.ClassifierLoss(net)
        return basis | learning.train_network(
            key, "pca_reduction", self, net, loss, rows, data, learning.recipe_for(net, self.epochs)
        )

    def logits(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """Logits [B, K] of the network behind the projection, for images [B, H, W, C]."""
        del key, classifier
        shape = images.shape[1:]
        inputs = project(fitted, images)
        if self.variant == "cnn":
            inputs = reconstruct(fitted, inputs, shape)
        net = self._net(learning.num_outputs(fitted), shape)
        return nets.NetApply(net)(learning.variables_in(fitted), inputs).logits

    def _net(self, classes: int, image_shape: Sequence[int]) -> Any:
        if self.variant == "fc":
            return Perceptron(classes)
        return nets.net_for("", classes, image_shape)
