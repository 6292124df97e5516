"""Decoupled direction and norm, for one goal or several.

The perturbation has a direction, which follows the goals' gradients, and a norm, which shrinks by a
fixed factor while all goals are reached and grows while one is not. There is no constant to search
for, and with a detector in the loop each goal's gradient is normalised on its own, so scores of any
scale can stand beside logits.

Source: Rony et al. 2019 (arXiv 1811.09600), algorithm 1, without its quantisation; several goals
are this project's extension.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.attacks import base
from advdet.attacks.variables import Bounds
from advdet.types import pytree


class State(NamedTuple):
    """One image under attack.

    Attributes:
      image: [H, W, C] clean.
      current: [H, W, C] the image to look at next.
      free: [H, W, C] bool, pixels that may change.
      target: [] int32.
      radius: [] the norm of the perturbation.
      iteration: [] int32.
      best: `base.Best`.
      num_gradients: [] int32.
    """

    image: jax.Array
    current: jax.Array
    free: jax.Array
    target: jax.Array
    radius: jax.Array
    iteration: jax.Array
    best: base.Best
    num_gradients: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class DDN:
    """Settings of the attack; all but the box are traced.

    Attributes:
      steps: gradient steps.
      initial_radius: the first norm; from a start that is farther away, that start's own.
      gamma: by what share the norm shrinks or grows in a step.
      first_step, last_step: step length along the direction, between them a cosine.
      bounds: the box.
    """

    steps: int = 300
    initial_radius: float = 1.0
    gamma: float = 0.05
    first_step: float = 1.0
    last_step: float = 0.01
    bounds: Bounds = dataclasses.field(default=(0.0, 1.0), metadata={"static": True})

    def init(self, key, image_id, image, target, start, free) -> State:
        """A fresh state; `image`, `start`, `free` are [H, W, C], `target` [] int32."""
        del key, image_id
        current = jnp.where(free, start, image)
        away = jnp.sqrt(jnp.sum(jnp.square(current - image)))
        return State(
            image=image,
            current=current,
            free=free,
            target=target,
            radius=jnp.maximum(jnp.asarray(self.initial_radius, jnp.float32), away),
            iteration=jnp.int32(0),
            best=base.nothing_yet(image),
            num_gradients=jnp.int32(0),
        )

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at the goals at the current image, records it, and moves on."""
        key_goals, key_accept = jax.random.split(jax.random.fold_in(key, state.iteration))

        def losses_fn(image):
            goals = objective(key_goals, defense, image, state.target)
            return goals.losses, goals

        losses, pull_back, goals = jax.vjp(losses_fn, state.current, has_aux=True)
        (gradients,) = jax.vmap(pull_back)(jnp.eye(losses.shape[0], dtype=losses.dtype))
        goals, accepted = objective.accept(key_accept, defense, state.current, state.target, goals)
        squared_distance = jnp.sum(jnp.square(state.current - state.image))
        best = base.keep_best(
            state.best, state.current, squared_distance, jnp.float32(jnp.nan), goals, accepted
        )

        open_goals = losses > 0
        weights = jnp.where(jnp.any(open_goals), open_goals.astype(losses.dtype), 1.0)
        units = jax.vmap(_normalised)(jnp.where(state.free[None], gradients, 0.0))
        direction = _normalised(-jnp.tensordot(weights, units, axes=1))

        progress = state.iteration.astype(jnp.float32) / self.steps
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        length = self.last_step + (self.first_step - self.last_step) * cosine
        radius = state.radius * jnp.where(accepted, 1.0 - self.gamma, 1.0 + self.gamma)
        moved = state.current - state.image + length * direction
        proposal = jnp.clip(state.image + radius * _normalised(moved), *self.bounds)
        return state._replace(
            current=jnp.where(state.free, proposal, state.image),
            radius=radius,
            iteration=state.iteration + 1,
            best=best,
            num_gradients=state.num_gradients + losses.shape[0],
        )

    def done(self, state: State) -> jax.Array:
        """Whether all steps are taken; [] bool."""
        return state.iteration >= self.steps

    def result(self, state: State) -> base.AttackResult:
        """The nearest success."""
        return base.report(state.best, state.num_gradients)

    def max_steps(self) -> int:
        """The steps that one image takes."""
        return int(self.steps)


def _normalised(direction: jax.Array) -> jax.Array:
    """The direction at length 1; zero stays zero."""
    # Scaled first: squares of entries near 1e-20 would vanish in float32.
    largest = jnp.max(jnp.abs(direction))
    scaled = direction / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.sqrt(jnp.sum(jnp.square(scaled)))
    return scaled / jnp.where(norm > 0, norm, 1.0)
