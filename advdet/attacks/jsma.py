"""The Jacobian-based saliency map attack: two pixels at a time, as few as possible.

At each step every pair of pixels (p, q) has two numbers: alpha, by how much raising both raises the
logit aimed at, and beta, by how much it raises the sum of all other logits. Of the pairs with
alpha > 0 and beta < 0 the one with the largest -alpha beta is raised by theta. The attack ends
with success, when a share gamma of the pixels has been used, or where no pair is left: all pixels
that may change are at the upper end of the box, or no pair helps the class and hurts the others.

It seeks few changed pixels, not a short distance, and does not see detectors: where one flags an
image that has the wanted label, the attack goes on towards more of the same. Logits are those
that the defence gives. An untargeted run aims at the wrong class that is likeliest where it begins.

Source: Papernot et al. 2016 (arXiv 1511.07528), algorithms 2 and 3.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.attacks import base
from advdet.attacks.variables import Bounds
from advdet.types import pytree

_ROWS = 64


class State(NamedTuple):
    """One image under attack.

    Attributes:
      walk: `base.Walk`.
      aim: [] int32, the class whose logit is raised.
      over: [] bool, whether the attack has ended.
    """

    walk: base.Walk
    aim: jax.Array
    over: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class Jsma:
    """Settings of the attack; all but the box are traced.

    Attributes:
      theta: by how much a pixel is raised, in pixel values.
      gamma: the share of all pixels that may be raised; one that is raised twice counts twice.
      steps: the most pairs, however many gamma allows.
      bounds: the box.
    """

    theta: float = 1.0
    gamma: float = 0.1
    steps: int = 1000
    bounds: Bounds = dataclasses.field(default=(0.0, 1.0), metadata={"static": True})

    def init(self, key, image_id, image, target, start, free) -> State:
        """A fresh state; `image`, `start`, `free` are [H, W, C], `target` [] int32."""
        del key, image_id
        return State(base.begin(image, target, start, free), target, jnp.bool_(False))

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at the goals at the current image, records it, and raises one pair of pixels."""
        walk = state.walk
        keys = jax.random.split(jax.random.fold_in(key, walk.iteration), 3)
        key_goals, key_accept, key_logits = keys
        goals = objective(key_goals, defense, walk.current, walk.target)
        best, accepted = base.look(key_accept, objective, defense, walk, goals)

        logits, pull_back = jax.vjp(
            lambda image: defense.logits(key_logits, image[None])[0], walk.current
        )
        aim = state.aim
        if not objective.targeted:
            wrong = jnp.where(jnp.arange(logits.shape[0]) == walk.target, -jnp.inf, logits)
            likeliest = jnp.argmax(wrong).astype(jnp.int32)
            aim = jnp.where(walk.iteration == 0, likeliest, state.aim)
        is_aim = (jnp.arange(logits.shape[0]) == aim).astype(logits.dtype)
        (towards,), (others,) = pull_back(is_aim), pull_back(1.0 - is_aim)

        domain = walk.free & (walk.current < self.bounds[1])
        pair, admissible = best_pair(towards, others, domain)
        allowed = jnp.floor(0.5 * self.gamma * walk.image.size + 1e-4).astype(jnp.int32)
        spent = walk.iteration >= jnp.minimum(allowed, self.steps)
        over = accepted | spent | ~admissible
        raised = jnp.clip(walk.current + self.theta, *self.bounds)
        walk = walk._replace(
            current=jnp.where(pair & ~over, raised, walk.current),
            iteration=walk.iteration + 1,
            best=best,
            num_gradients=walk.num_gradients + jnp.where(accepted | spent, 0, 2),
        )
        return State(walk, aim, over)

    def done(self, state: State) -> jax.Array:
        """Whether the attack has ended; [] bool."""
        return state.over

    def result(self, state: State) -> base.AttackResult:
        """The nearest success: there is at most one."""
        return base.report(state.walk.best, state.walk.num_gradients)

    def max_steps(self) -> int:
        """The most looks that one image can take."""
        return int(self.steps) + 1


def best_pair(
    towards: jax.Array, others: jax.Array, domain: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The most salient pair of pixels.

    Args:
      towards: [H, W, C] gradient of the logit aimed at.
      others: [H, W, C] gradient of the sum of all other logits.
      domain: [H, W, C] bool, pixels that may be raised.

    Returns:
      [H, W, C] bool, true at the two pixels; and [] bool, whether there is an admissible pair
      (without one the pair is meaningless). Of equal pairs it is the first in row order.

    Source: Papernot et al. 2016, algorithm 3.
    """
    towards, others, inside = towards.ravel(), others.ravel(), domain.ravel()
    places = jnp.arange(inside.shape[0])

    def saliency(alpha, beta, allowed):
        """Of pairs, elementwise; -inf where one is not admissible."""
        admissible = allowed & (alpha > 0) & (beta < 0)
        return jnp.where(admissible, -alpha * beta, -jnp.inf)

    def best_with(pixel):
        alpha, beta, allowed, place = pixel
        row = saliency(towards + alpha, others + beta, inside & allowed & (places != place))
        return jnp.max(row)

    # Some rows of the matrix of all pairs at a time: CIFAR-10's takes 36 MiB for each image.
    by_first = jax.lax.map(best_with, (towards, others, inside, places), batch_size=_ROWS)
    first = places == jnp.argmax(by_first)
    at_first = lambda values: jnp.sum(jnp.where(first, values, 0.0))
    with_first = saliency(towards + at_first(towards), others + at_first(others), inside & ~first)
    second = places == jnp.argmax(with_first)
    return (first | second).reshape(domain.shape), jnp.max(by_first) > -jnp.inf
