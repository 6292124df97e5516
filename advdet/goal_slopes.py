"""An objective's goals at images: their slopes, finite differences, and whether they are met."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from advdet import slopes
from advdet.attacks.goals import Goals, Objective
from advdet.defenses import Defense, image_keys, in_batches

_BATCH = 32  # as many as a CPU device has lanes: no more memory than the attack took


def goals_and_slopes(
    key, objective: Objective, defense: Defense, images, targets, ids
) -> tuple[Goals, np.ndarray]:
    """Goals of N images, and the gradients [N, G, H, W, C] of all of them, losses last.

    Args:
      key: each image gets its own of it.
      objective, defense: the attacker's.
      images: [N, H, W, C]; targets, ids: [N].
    """
    return _in_batches(_slopes, key, objective, defense, images, targets, ids)


def accepted(key, objective: Objective, defense: Defense, images, targets, ids) -> np.ndarray:
    """[N] bool, whether the attacker would take these images; twice, where goals are random."""
    if not len(images):
        return np.zeros(0, bool)
    keys = jax.random.split(key, 2 if objective.is_random(defense) else 1)
    looks = [_in_batches(_look, k, objective, defense, images, targets, ids) for k in keys]
    return np.all(looks, axis=0)


def compared(
    key, objective: Objective, defense: Defense, images, targets, ids, *, detector: bool
) -> dict[str, slopes.Compared]:
    """Gradients of the goals compared with finite differences, near images [N, H, W, C].

    Args: as of `goals_and_slopes`; of several goals of a detector the one that is missed by most.
      detector: whether those are to be compared, too.
    """
    images = slopes.off_kinks(images)
    goals, gradients = goals_and_slopes(key, objective, defense, images, targets, ids)
    first, rows = goals.classifier.shape[1], np.arange(len(images))
    chosen = {"classifier": np.argmax(goals.classifier, axis=1)}
    if detector and goals.detector.shape[1]:
        chosen["detector"] = first + np.argmax(goals.detector, axis=1)

    def look(goal):
        def values(moved, origins):
            found = _in_batches(
                _values, key, objective, defense, moved, targets[origins], ids[origins]
            )
            return found[np.arange(len(moved)), chosen[goal][origins]]

        return values

    return {
        goal: slopes.compare(look(goal), images, gradients[rows, column])
        for goal, column in chosen.items()
    }


@jax.jit
def _values(key, objective, defense, images, targets, ids):
    def one(key, image, target):
        goals = objective(key, defense, image, target)
        return jnp.concatenate([goals.classifier, goals.detector])

    return jax.vmap(one)(image_keys(key, ids), images, targets)


@jax.jit
def _slopes(key, objective, defense, images, targets, ids):
    def one(key, image, target):
        def goals_fn(image):
            goals = objective(key, defense, image, target)
            return jnp.concatenate(goals), goals

        values, pull_back, goals = jax.vjp(goals_fn, image, has_aux=True)
        (gradients,) = jax.vmap(pull_back)(jnp.eye(values.shape[0], dtype=values.dtype))
        return goals, gradients

    return jax.vmap(one)(image_keys(key, ids), images, targets)


@jax.jit
def _look(key, objective, defense, images, targets, ids):
    def one(key, image, target):
        key_goals, key_accept = jax.random.split(key)
        goals = objective(key_goals, defense, image, target)
        return objective.accept(key_accept, defense, image, target, goals)[1]

    return jax.vmap(one)(image_keys(key, ids), images, targets)


def _in_batches(function, key, objective, defense, images, targets, ids):
    given = np.float32(images), np.int32(targets), np.int32(ids)
    return in_batches(lambda *rows: function(key, objective, defense, *rows), *given, size=_BATCH)
