"""A network on a hidden layer (Metzen et al. 2017): the third of the ten detectors.

Idea: freeze the classifier and train a small network on one of its inner feature maps to tell clean
from adversarial images.

What the attacker adds: the subnetwork's logit as a second goal; or, as the paper did, classifier
and detector joined to one network of K + 1 logits (objective `combined`).

Why it fails: as every other network, the detector can be fooled, and together with its classifier.
In the paper even the best of 100 trainings found 81 % of the attack's images at 28 % false
positives on CIFAR-10, and fooling both costs 34 % more distance.

Source: Carlini & Wagner 2017, section 3.2; Metzen et al. 2017 (arXiv 1702.04267).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from advdet import nets, training
from advdet.detector_nets import Subnetwork
from advdet.detectors import learned_rows, learning
from advdet.detectors.base import Detector, require_at_least_one
from advdet.recipes import Recipe
from advdet.types import Batch, Classifier, FitData, Outputs, PyTree

_BATCH_SIZES = (32, 64, 128)
_KERNEL_PENALTY = 1e-3  # Metzen's, times |kernel|^2
_HELD_OUT = 500  # clean images, and as many adversarial ones: the paper's 1,000
_STATISTICS_ROWS = 500


@dataclasses.dataclass(frozen=True)
class Attached:
    """The classifier as it is with a subnetwork on one feature, as `Classifier.apply`.

    Variables are {"trunk": the classifier's, "subnetwork": the subnetwork's}.
    """

    trunk: Callable[[PyTree, jax.Array, jax.Array | None], Outputs]
    net: Subnetwork
    feature: str

    def __call__(
        self, variables: PyTree, images: jax.Array, key: jax.Array | None = None
    ) -> Outputs:
        del key  # the trunk never drops units here
        return nets.NetApply(self.net)(variables["subnetwork"], self.seen(variables, images))

    def seen(self, variables: PyTree, images: jax.Array) -> jax.Array:
        """The feature [B, H', W', C'] of images [B, H, W, C]; inference mode."""
        return self.trunk(variables["trunk"], images, None).features[self.feature]


@dataclasses.dataclass(frozen=True)
class SubnetworkLoss:
    """`fit`'s loss for the subnetwork; the trunk travels in the state and comes back unchanged."""

    attached: Attached

    def __call__(self, params: PyTree, state: PyTree, key: jax.Array, batch: Batch):
        del key
        seen = jax.lax.stop_gradient(self.attached.seen(state, batch.images))
        variables = learning.variables(params, state["batch_stats"])
        outputs, statistics = nets.train_apply(self.attached.net, variables, seen, None)
        loss, accuracy = learning.binary_cross_entropy(outputs.logits[:, 0], batch.labels)
        return loss, (state | {"batch_stats": statistics}, {"accuracy": accuracy})


def draw_recipe(key: jax.Array) -> Recipe:
    """A training setting at random: learning rate, momentum and batch size; one epoch.

    The paper drew the rate from 1e-5 to 1e-1 and the momentum from 0 to 1, for trainings 50 times
    as long, a third of them by Adam or RMSprop; here all are SGD with rates fit for short runs.
    """
    key_rate, key_momentum, key_batch = jax.random.split(key, 3)
    exponent = float(jax.random.uniform(key_rate, minval=-2.5, maxval=-0.5))
    return Recipe(
        epochs=1,
        batch_size=_BATCH_SIZES[int(jax.random.randint(key_batch, (), 0, len(_BATCH_SIZES)))],
        learning_rate=10.0**exponent,
        momentum=float(jax.random.uniform(key_momentum, maxval=0.95)),
        weight_decay=2 * _KERNEL_PENALTY,
        decay_ndim=4,
    )


@dataclasses.dataclass(frozen=True)
class InnerLayer(Detector):
    """Flags images that a subnetwork on one of the classifier's feature maps objects to.

    Attributes:
      feature: name of the feature map; "" takes `ad2` (the paper's) or else `conv1`.
      trials: short trainings from one start, with settings drawn at random. (The paper: 100.)
      trial_images: that one of them sees once.
      epochs: for which the best of them then goes on, on all images.
    """

    needs_adversarial: ClassVar[bool] = True
    logit_score: ClassVar[bool] = True

    feature: str = ""
    trials: int = 8
    trial_images: int = 2000
    epochs: int = 2

    def __post_init__(self):
        require_at_least_one(self, "trials", "trial_images", "epochs")

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Searches by accuracy on held-out images, then trains on; the classifier is frozen.

        Args:
          key: consumed.
          classifier: with a feature map of the wanted name.
          data: `select` and `adversarial_select` are the held-out images.

        Returns:
          The subnetwork's variables.

        Raises:
          InputError: no such feature, or adversarial images that are missing or of other sources.
        """
        pairs = learned_rows.with_sources(data.train, data.adversarial_train, "inner_layer")
        rows = learned_rows.clean_or_not(*pairs)
        held_out = learned_rows.with_sources(
            data.select, data.adversarial_select, "inner_layer", "adversarial_select"
        )
        held_out = learned_rows.clean_or_not(*(part.take(slice(_HELD_OUT)) for part in held_out))
        features = learned_rows.outputs_of(classifier, rows.images.shape[1:]).features
        attached = self._attached(classifier, features)
        trunk = {"trunk": classifier.variables}
        view = jax.jit(lambda images: attached.seen(trunk, images))
        maps = learned_rows.in_batches(view, rows.images[:_STATISTICS_ROWS])
        # Momentum 0 leaves the statistics of these rows; compiled once for all trainings.
        exact = attached.net.clone(momentum=0.0)
        statistics = jax.jit(lambda *given: nets.train_apply(exact, *given, None).batch_stats)

        def train(key, name, recipe, start, rows):
            """(accuracy on held-out images, the subnetwork's variables)."""
            state = trunk | {"batch_stats": start["batch_stats"]}
            loss = SubnetworkLoss(attached)
            found = learning.fit(key, name, self, recipe, loss, start["params"], state, rows, data)
            variables = learning.variables(found.params, found.state["batch_stats"])
            variables |= {"batch_stats": statistics(variables, maps)}
            whole = Classifier(trunk | {"subnetwork": variables}, attached)
            flagged = training.logits(whole, held_out.images)[:, 0] > 0
            return float((flagged == (held_out.labels > 0)).mean()), jax.device_get(variables)

        key_start, key_search, key_final = jax.random.split(key, 3)
        start = nets.init(key_start, attached.net, features[attached.feature].shape[1:]).variables
        best, recipe = (-1.0, None), None
        few = rows.take(slice(self.trial_images))
        for trial, key_trial in enumerate(jax.random.split(key_search, self.trials), start=1):
            key_recipe, key_fit = jax.random.split(key_trial)
            drawn = draw_recipe(key_recipe)
            found = train(key_fit, f"inner_layer trial {trial}", drawn, start, few)
            if found[0] > best[0]:
                best, recipe = found, drawn
        recipe = dataclasses.replace(recipe, epochs=self.epochs)
        final = train(key_final, "inner_layer", recipe, best[1], rows)
        return final[1] if final[0] >= best[0] else best[1]

    def score(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """The subnetwork's logit [B] for images [B, H, W, C]."""
        del key
        outputs = classifier(images)
        attached = self._attached(classifier, outputs.features)
        feature = outputs.features[attached.feature]
        return nets.NetApply(attached.net)(fitted, feature).logits[:, 0]

    def native_threshold(self, fitted: PyTree) -> float:
        """0: above it an adversarial image is the more likely."""
        del fitted
        return 0.0

    def _attached(self, classifier, features) -> Attached:
        choices = ((self.feature,),) if self.feature else (("ad2",), ("conv1",))
        (name,) = learned_rows.choose_features("inner_layer", features, choices)
        return Attached(classifier.apply, Subnetwork(), name)
