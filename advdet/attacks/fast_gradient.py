"""The fast gradient sign method, in one step or several: the weak attack of many defenders.

    x' = clip(x - epsilon sign(grad loss(x)))        to the box and to within epsilon of x

In one step this is FGSM; in more, of epsilon / steps each, the basic iterative method. It bounds
the largest change of a pixel and looks for no near image, so its L2 distances say little, and a
detector that sees its images has shown nothing yet: it is here because defenders tried it.

The loss is the sum of the objective's, so margins of logits stand where the original has the
cross-entropy.

Source: Goodfellow et al. 2015 (arXiv 1412.6572), section 4; Kurakin et al. 2017 (arXiv 1607.02533),
section 2.2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from advdet.attacks import base
from advdet.attacks.variables import Bounds
from advdet.types import pytree


@pytree
@dataclasses.dataclass(frozen=True)
class FastGradient:
    """Settings of the attack; all but the box are traced.

    Attributes:
      epsilon: the most that a pixel may change, in pixel values.
      steps: gradient steps.
      bounds: the box.
    """

    epsilon: float = 0.3
    steps: int = 1
    bounds: Bounds = dataclasses.field(default=(0.0, 1.0), metadata={"static": True})

    def init(self, key, image_id, image, target, start, free) -> base.Walk:
        """A fresh state; `image`, `start`, `free` are [H, W, C], `target` [] int32."""
        del key, image_id
        return base.begin(image, target, start, free)

    def step(self, key, objective, defense, state: base.Walk) -> base.Walk:
        """Looks at the goals at the current image, records it, and moves on."""
        key_goals, key_accept = jax.random.split(jax.random.fold_in(key, state.iteration))

        def loss_fn(image):
            goals = objective(key_goals, defense, image, state.target)
            return jnp.sum(goals.losses), goals

        gradient, goals = jax.grad(loss_fn, has_aux=True)(state.current)
        best, _ = base.look(key_accept, objective, defense, state, goals)

        moved = state.current - self.epsilon / self.steps * jnp.sign(gradient)
        near = jnp.clip(moved, state.image - self.epsilon, state.image + self.epsilon)
        current = jnp.where(state.free, jnp.clip(near, *self.bounds), state.image)
        last = state.iteration >= self.steps  # this look judges; its gradient is not followed
        return state._replace(
            current=jnp.where(last, state.current, current),
            iteration=state.iteration + 1,
            best=best,
            num_gradients=state.num_gradients + jnp.where(last, 0, 1),
        )

    def done(self, state: base.Walk) -> jax.Array:
        """Whether the image after the last step has been looked at; [] bool."""
        return state.iteration > self.steps

    def result(self, state: base.Walk) -> base.AttackResult:
        """The nearest success: the last image, or one on the way to it."""
        return base.report(state.best, state.num_gradients)

    def max_steps(self) -> int:
        """The looks that one image takes."""
        return int(self.steps) + 1
