"""Decoupled direction and norm, for one goal or several.

The perturbation has a direction, which follows the goals' gradients, and a norm, which shrinks by a
fixed factor while all goals are reached and grows while one is not. There is no constant to search
for, and with a detector in the loop each goal's gradient is normalised on its own, so scores of any
scale can stand beside logits.

Source: Rony et al. 2019 (arXiv 1811.09600), algorithm 1, without its quantisation. With one goal it
is followed to the letter. Several goals are this project's extension, with two differences. Where
the perturbation was clipped to the box it stays behind its norm, so the norm shrinks from what was
reached, not from what was asked for. And no norm is larger than that of the farthest image in the
box: after a long way without a success it would take as long to come back from it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.attacks import balls, base
from advdet.attacks.variables import Bounds
from advdet.types import pytree


class State(NamedTuple):
    """One image under attack.

    Attributes:
      walk: `base.Walk`.
      radius: [] the norm of the perturbation.
    """

    walk: base.Walk
    radius: jax.Array


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
        walk = base.begin(image, target, start, free)
        away = balls.length(walk.current - image)
        return State(walk, jnp.maximum(jnp.asarray(self.initial_radius, jnp.float32), away))

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at the goals at the current image, records it, and moves on."""
        walk = state.walk
        key_goals, key_accept = jax.random.split(jax.random.fold_in(key, walk.iteration))

        def losses_fn(image):
            goals = objective(key_goals, defense, image, walk.target)
            return goals.losses, goals

        losses, pull_back, goals = jax.vjp(losses_fn, walk.current, has_aux=True)
        (gradients,) = jax.vmap(pull_back)(jnp.eye(losses.shape[0], dtype=losses.dtype))
        best, accepted = base.look(key_accept, objective, defense, walk, goals)

        open_goals = losses > 0
        weights = jnp.where(jnp.any(open_goals), open_goals.astype(losses.dtype), 1.0)
        units = jax.vmap(balls.normalised)(jnp.where(walk.free[None], gradients, 0.0))
        direction = balls.normalised(-jnp.tensordot(weights, units, axes=1))

        progress = walk.iteration.astype(jnp.float32) / self.steps
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        length = self.last_step + (self.first_step - self.last_step) * cosine
        radius = state.radius
        if losses.shape[0] > 1:
            radius = self._within_reach(radius, walk, accepted)
        radius = radius * jnp.where(accepted, 1.0 - self.gamma, 1.0 + self.gamma)
        moved = walk.current - walk.image + length * direction
        proposal = jnp.clip(walk.image + radius * balls.normalised(moved), *self.bounds)
        walk = walk._replace(
            current=jnp.where(walk.free, proposal, walk.image),
            iteration=walk.iteration + 1,
            best=best,
            num_gradients=walk.num_gradients + losses.shape[0],
        )
        return State(walk, radius)

    def _within_reach(self, radius, walk: base.Walk, accepted) -> jax.Array:
        """The norm that the next one counts from: no larger than what the box allows."""
        low, high = self.bounds
        reached = balls.length(walk.current - walk.image)
        farthest = balls.length(jnp.maximum(walk.image - low, high - walk.image))
        # A clean image that is a success already has no norm to shrink from.
        shrunk = jnp.where(accepted & (reached > 0), jnp.minimum(radius, reached), radius)
        return jnp.minimum(shrunk, farthest)

    def done(self, state: State) -> jax.Array:
        """Whether all steps are taken; [] bool."""
        return state.walk.iteration >= self.steps

    def result(self, state: State) -> base.AttackResult:
        """The nearest success."""
        return base.report(state.walk.best, state.walk.num_gradients)

    def max_steps(self) -> int:
        """The steps that one image takes."""
        return int(self.steps)
