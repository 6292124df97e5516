"""What `fitting.fit` is told: epochs, batches, learning rate, momentum, weight decay, averaging."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from advdet.types import InputError


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
      epochs: passes over the data; an incomplete last batch of an epoch is left out.
      batch_size: images a step, over all devices.
      learning_rate: the highest one.
      schedule: "one_cycle": linear warm-up, then half a cosine to zero; "halving": the paper's
        learning_rate * 0.5^(10 epoch / epochs); "constant".
      warm_up: share of the steps that "one_cycle" takes to reach `learning_rate`.
      momentum: of SGD.
      nesterov: whether the momentum is Nesterov's.
      weight_decay: L2 penalty's gradient is weight_decay * weight, on arrays of at least
        `decay_ndim` axes (2: all kernels, 4: those of convolutions).
      decay_ndim: see weight_decay.
      clip_norm: longer gradients are cut to this global norm, before weight decay; 0 cuts none.
      average: decay of the moving average of the weights that `fit` returns; 0 returns the last.
    """

    epochs: int
    batch_size: int = 128
    learning_rate: float = 0.1
    schedule: str = "one_cycle"
    warm_up: float = 0.2
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_ndim: int = 2
    clip_norm: float = 0.0
    average: float = 0.0


def learning_rate(recipe: Recipe, steps_per_epoch: int) -> Callable[[jax.Array], jax.Array]:
    """The recipe's schedule as a function from step [] to rate []."""
    total = recipe.epochs * steps_per_epoch
    if recipe.schedule == "constant":
        return lambda step: jnp.float32(recipe.learning_rate)
    if recipe.schedule == "halving":

        def halving(step):
            epoch = (step // steps_per_epoch).astype(jnp.float32)
            return recipe.learning_rate * jnp.exp2(-10.0 * epoch / recipe.epochs)

        return halving
    if recipe.schedule != "one_cycle":
        raise InputError(f"no schedule {recipe.schedule!r}: use one_cycle, halving or constant")

    def one_cycle(step):
        done = (step.astype(jnp.float32) + 1.0) / total
        up = done / max(recipe.warm_up, 1e-6)
        down = (done - recipe.warm_up) / (1.0 - recipe.warm_up)
        fraction = jnp.where(up < 1.0, up, 0.5 * (1.0 + jnp.cos(jnp.pi * down)))
        return recipe.learning_rate * fraction

    return one_cycle


def optimizer(recipe: Recipe, steps_per_epoch: int) -> optax.GradientTransformation:
    """SGD with the recipe's schedule, momentum, clipping and weight decay."""

    def decays(params):
        return jax.tree.map(lambda leaf: leaf.ndim >= recipe.decay_ndim, params)

    sgd = optax.sgd(learning_rate(recipe, steps_per_epoch), recipe.momentum, recipe.nesterov)
    parts = [sgd]
    if recipe.weight_decay:
        parts.insert(0, optax.add_decayed_weights(recipe.weight_decay, mask=decays))
    if recipe.clip_norm:
        parts.insert(0, optax.clip_by_global_norm(recipe.clip_norm))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)
