"""What every attack is: a state machine for one image, which the driver vmaps.

    init(key, image_id, image, target, start, free) -> state
    step(key, objective, defense, state) -> state          one look at all goals
    done(state) -> bool
    result(state) -> AttackResult

`key` is the image's own; a step folds in its count. A state holds no key, so an image's result
depends neither on its batch mates nor on when it was run.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class AttackResult(NamedTuple):
    """What an attack found for one image (or, with a leading [N], for many).

    Attributes:
      image: [H, W, C] the nearest image that reached all goals; the clean image where none did.
      success: [] bool, whether one did.
      distance: [] L2 from the clean image; inf where none did.
      const: [] the constant c of the success (C&W), NaN where the attack has none or failed.
      nearest_miss: [H, W, C] the visited image that met the classifier's goals with the least
        violation of the detector's; the clean image where none met them.
      missed: [] bool, whether there is such an image.
      num_gradients: [] backward passes of this one image.
    """

    image: jax.Array
    success: jax.Array
    distance: jax.Array
    const: jax.Array
    nearest_miss: jax.Array
    missed: jax.Array
    num_gradients: jax.Array


class Best(NamedTuple):
    """The best of the visited images so far; carried inside an attack's state.

    Attributes as in `AttackResult`, with squared distance and the violation of the nearest miss.
    """

    image: jax.Array
    squared_distance: jax.Array
    const: jax.Array
    nearest_miss: jax.Array
    violation: jax.Array
    missed: jax.Array


def nothing_yet(image: jax.Array) -> Best:
    """Nothing found yet: the clean image [H, W, C] stands in."""
    infinite = jnp.float32(jnp.inf)
    return Best(image, infinite, jnp.float32(jnp.nan), image, infinite, jnp.bool_(False))


def keep_best(best: Best, image, squared_distance, const, goals, accepted) -> Best:
    """Takes a visited image in where it is better.

    Args:
      best: so far.
      image: [H, W, C] visited.
      squared_distance: [] its squared L2 from the clean image.
      const: [] the constant in force, NaN where there is none.
      goals: its `Goals`.
      accepted: [] bool, whether it counts as a success.
    """
    better = accepted & (squared_distance < best.squared_distance)
    if goals.detector.shape[0] == 0:  # a miss can only be one of the classifier
        nearer, nearest = better, jnp.where(better, image, best.image)
    else:
        nearer = goals.classifier_met() & (~best.missed | (goals.violation() < best.violation))
        nearest = jnp.where(nearer, image, best.nearest_miss)
    return Best(
        image=jnp.where(better, image, best.image),
        squared_distance=jnp.where(better, squared_distance, best.squared_distance),
        const=jnp.where(better, const, best.const),
        nearest_miss=nearest,
        violation=jnp.where(nearer, goals.violation(), best.violation),
        missed=best.missed | nearer,
    )


def report(best: Best, num_gradients: jax.Array) -> AttackResult:
    """The result of an attack that visited these images."""
    return AttackResult(
        image=best.image,
        success=jnp.isfinite(best.squared_distance),
        distance=jnp.sqrt(best.squared_distance),
        const=best.const,
        nearest_miss=best.nearest_miss,
        missed=best.missed,
        num_gradients=num_gradients,
    )


class Walk(NamedTuple):
    """One image moved in pixel space; an attack that carries more has it as a part of its state.

    Attributes:
      image: [H, W, C] clean.
      current: [H, W, C] the image to look at next.
      free: [H, W, C] bool, pixels that may change.
      target: [] int32.
      iteration: [] int32, looks so far.
      best: `Best`.
      num_gradients: [] int32.
    """

    image: jax.Array
    current: jax.Array
    free: jax.Array
    target: jax.Array
    iteration: jax.Array
    best: Best
    num_gradients: jax.Array


def begin(image: jax.Array, target: jax.Array, start: jax.Array, free: jax.Array) -> Walk:
    """A walk from `start`; arguments as those of an attack's `init`."""
    return Walk(
        image=image,
        current=jnp.where(free, start, image),
        free=free,
        target=target,
        iteration=jnp.int32(0),
        best=nothing_yet(image),
        num_gradients=jnp.int32(0),
    )


def look(key: jax.Array, objective, defense, walk: Walk, goals) -> tuple[Best, jax.Array]:
    """Takes the current image in.

    Args:
      key: consumed; of a second look where goals are random.
      objective, defense: as in a step.
      walk: with the image.
      goals: what the objective said of it.

    Returns:
      The best so far, and [] bool, whether this image is a success.
    """
    goals, accepted = objective.accept(key, defense, walk.current, walk.target, goals)
    squared_distance = jnp.sum(jnp.square(walk.current - walk.image))
    no_const = jnp.float32(jnp.nan)
    best = keep_best(walk.best, walk.current, squared_distance, no_const, goals, accepted)
    return best, accepted
