"""What detectors that learn have in common: losses, recipes, and resumable trainings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from advdet import fitting, nets, plans, results, training
from advdet.detectors.base import Detector
from advdet.recipes import Recipe
from advdet.types import Batch, FitData, InputError, PyTree

_STARTS = 3
_LEARNED = 0.02  # accuracy above that of the commonest label


def binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of logits that speak for label 1.

    Args:
      logits: [B].
      labels: [B] of 0 and 1.

    Returns:
      (mean cross-entropy [], share of rows on the right side of 0 []).
    """
    wanted = labels.astype(logits.dtype)
    hits = ((logits > 0) == (labels > 0)).astype(jnp.float32)
    return (jax.nn.softplus(logits) - wanted * logits).mean(), hits.mean()


@dataclasses.dataclass(frozen=True)
class BinaryLoss:
    """`fit`'s loss for a network with one output: clean (0) or adversarial (1)."""

    net: Any

    def __call__(self, params: PyTree, state: PyTree, key: jax.Array, batch: Batch):
        outputs, state = nets.train_apply(self.net, variables(params, state), batch.images, key)
        loss, accuracy = binary_cross_entropy(outputs.logits[:, 0], batch.labels)
        return loss, (state, {"accuracy": accuracy})


def variables(params: PyTree, batch_stats: PyTree) -> dict[str, PyTree]:
    """A network's variables."""
    return {"params": params} | ({"batch_stats": batch_stats} if batch_stats else {})


def recipe_for(net: Any, epochs: int) -> Recipe:
    """The recipe of the classifiers of this kind, for so many epochs."""
    kind = "cifar10" if isinstance(net, nets.ResNet32) else "mnist"
    return dataclasses.replace(plans.PLANS[kind, "fast"].recipe, epochs=epochs)


def careful_recipe_for(net: Any, epochs: int) -> Recipe:
    """The same for a network that is to tell adversarial images from clean ones.

    They differ little at first sight, and the network without normalisation stalled from some
    starts (one answer for all images) or lost what it had learned; with clipped gradients it
    learned from all that were tried.
    """
    recipe = recipe_for(net, epochs)
    if isinstance(net, nets.ResNet32):
        return recipe
    return dataclasses.replace(recipe, nesterov=True, clip_norm=1.0)


def fit(
    key: jax.Array,
    name: str,
    detector: Detector,
    recipe: Recipe,
    loss: fitting.LossFn,
    params: PyTree,
    state: PyTree,
    rows: Batch,
    data: FitData,
) -> fitting.Fitted:
    """`fitting.fit` on `rows`, resumable and shown as `data` says.

    Args:
      key: consumed.
      name: of the training, on the progress bar and in the folder `data.work`.
      detector: whose training it is.
      recipe: with a batch that is cut down where there are fewer rows.
      loss, params, state: see `fitting.fit`.
      rows: what is learned from.
      data: for `work` and `progress`.
    """
    recipe = dataclasses.replace(recipe, batch_size=min(recipe.batch_size, len(rows.labels)))
    checkpoint, facts = None, None
    if data.work is not None:
        checkpoint = data.work / name.replace(" ", "_")
        start = {f"start{place}": leaf for place, leaf in enumerate(jax.tree.leaves(state))}
        facts = {
            "detector": dataclasses.asdict(detector),
            "key": jax.random.key_data(key).tolist(),
            "data": results.digest({**rows._asdict(), **start}),
        }
    return fitting.fit(
        key, recipe, loss, params, state, rows,
        checkpoint=checkpoint, settings=facts, progress=name if data.progress else None,
    )  # fmt: skip


def train_network(
    key: jax.Array,
    name: str,
    detector: Detector,
    net: Any,
    loss: fitting.LossFn,
    rows: Batch,
    data: FitData,
    recipe: Recipe,
) -> dict[str, PyTree]:
    """Trains a network of its own for a detector.

    A training that has learned nothing, not even on its own images, begins again from another
    start; some networks without normalisation stall.

    Args:
      key: consumed.
      name: see `fit`.
      detector: see `fit`.
      net: a Linen network.
      loss: of that network.
      rows: what is learned from, well mixed where it has BatchNorm.
      data: see `fit`.
      recipe: see `fit`.

    Returns:
      Its variables, NumPy arrays.

    Raises:
      InputError: it learned nothing from any start.
    """
    commonest = float(np.bincount(np.asarray(rows.labels)).max() / len(rows.labels))
    for start_number, key_start in enumerate(jax.random.split(key, _STARTS), 1):
        key_init, key_fit = jax.random.split(key_start)
        start = nets.init(key_init, net, rows.images.shape[1:])
        state, params = start.variables.get("batch_stats", {}), start.variables["params"]
        called = name if start_number == 1 else f"{name} start {start_number}"
        found = fit(key_fit, called, detector, recipe, loss, params, state, rows, data)
        if found.metrics["accuracy"] > commonest + _LEARNED:
            trained = dataclasses.replace(start, variables=variables(found.params, found.state))
            return jax.device_get(training.reestimate_statistics(trained, rows.images).variables)
    raise InputError(
        f"{name} learned nothing from {_STARTS} starts: its last training says right what "
        f"{found.metrics['accuracy']:.1%} of its images are, and giving them all the commonest "
        f"label does for {commonest:.1%}; train it for more epochs, or on another --train_attack"
    )


def num_outputs(fitted: PyTree) -> int:
    """How many logits a network of `train_network` gives."""
    return fitted["params"]["logits"]["bias"].shape[0]


def variables_in(fitted: PyTree) -> dict[str, PyTree]:
    """The network's variables, where a fit holds other arrays beside them."""
    return variables(fitted["params"], fitted.get("batch_stats"))


def image_logits(fitted: PyTree, images: jax.Array) -> jax.Array:
    """Logits of the network for images [B, H, W, C] that `train_network` trained; no dropout."""
    net = nets.net_for("", num_outputs(fitted), images.shape[1:])
    return nets.NetApply(net)(fitted, images).logits


def image_logit(fitted: PyTree, images: jax.Array) -> jax.Array:
    """The logit [B] of a network of `train_network` with one output, for images [B, H, W, C].

    The last product is written as a sum: XLA:CPU rounds a product of matrix and vector one way in
    most rows and another in the last ones, and no score may depend on its place in a batch.
    """
    net = nets.net_for("", 1, images.shape[1:])
    hidden = nets.NetApply(net)(fitted, images).features["penultimate"]
    last = fitted["params"]["logits"]
    return jnp.sum(hidden * last["kernel"][:, 0][None], axis=-1) + last["bias"][0]
