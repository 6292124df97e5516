"""Projected gradient descent at a fixed radius, for one goal or several, in three forms.

    x' = project(x' - length * steepest(slope(x')))       to within epsilon of x, and to the box

They differ in the slope that a step follows. With losses l_1 ... l_G of the objective, the
classifier's first, of which a goal is open while its loss is above 0:

    pgd             the gradient of the joint loss, sum_g max(0, l_g): of all open goals together
    selective_pgd   the gradient of one goal, the first that is open: the classifier's while its
                    label is not the wanted one, else the detector's
    orthogonal_pgd  the same, less its components along the gradients of all other goals, so that to
                    first order a step for one goal leaves the others as they are

A joint loss needs a weight, and where the goals pull apart each weight can be wrong: descent on
f + lambda g ends at the bottom of f or of g. Hinges, which drop a goal once it is reached, cure the
plain cases; selective and orthogonal steps need no weight at all. Orthogonal ones give away what
serves both goals: where the gradients are nearly parallel (a density under the class aimed at, say)
little is left to follow. None is the best one throughout; take the best of all for each image
(`--attack=fixed_radius`).

All minimise: a loss is above 0 where something is left to do, targeted or not, so no sign depends
on that. Where none is above 0 and still there is no success (goals that are random, or an objective
whose loss is not what decides), `pgd` follows all of them and the others the largest. With one loss
all three are the same.

An attack looks at its start, then begins at a random image of the ball around it, and stops at the
first success: inside the radius one image is as good as another. Ask for `confidence` or a
`detector_margin` where it has to be a clear one.

Source: Madry et al. 2018 (arXiv 1706.06083), section 2.1; Bryniarski et al. 2022 (arXiv
2106.15023), section 4: equation 6 as printed leaves nothing of the gradient, so the projection is
that of the released code. Several detector goals, and L2 balls (their "l2" normalises the step and
clips to an L-infinity ball), are this project's.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.attacks import balls, base
from advdet.attacks.variables import Bounds
from advdet.types import pytree

_START = 2**31 - 1  # folded into the key; steps fold in their count
_NOTHING_LEFT = 1e-4  # of a gradient's length: less is rounding


class State(NamedTuple):
    """One image under attack.

    Attributes:
      walk: `base.Walk`.
      begin: [H, W, C] the random image that the first step starts from.
      over: [] bool, whether the attack has ended.
    """

    walk: base.Walk
    begin: jax.Array
    over: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class PGD:
    """Settings of the attack; norm, random start and box are static.

    Attributes:
      epsilon: the radius, in pixel values.
      steps: gradient steps.
      travel: the length of all steps together, in radii.
      norm: "linf" or "l2".
      random_start: begin at a uniform draw from the ball, not at the image.
      bounds: the box.
    """

    epsilon: float = 0.3
    steps: int = 200
    travel: float = 10.0
    norm: str = dataclasses.field(default="linf", metadata={"static": True})
    random_start: bool = dataclasses.field(default=True, metadata={"static": True})
    bounds: Bounds = dataclasses.field(default=(0.0, 1.0), metadata={"static": True})

    def init(self, key, image_id, image, target, start, free) -> State:
        """A fresh state; `image`, `start`, `free` are [H, W, C], `target` [] int32."""
        del image_id
        start = self._project(start, image, free)
        begin = start
        if self.random_start:
            key_start = jax.random.fold_in(key, _START)
            noise = balls.draw(key_start, free, norm=self.norm, epsilon=self.epsilon)
            begin = self._project(start + noise, image, free)
        return State(base.begin(image, target, start, free), begin, jnp.bool_(False))

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at the goals at the current image, records it, and moves on."""
        walk = state.walk
        key_goals, key_accept = jax.random.split(jax.random.fold_in(key, walk.iteration))

        def losses_fn(image):
            goals = objective(key_goals, defense, image, walk.target)
            return goals.losses, goals

        losses, pull_back, goals = jax.vjp(losses_fn, walk.current, has_aux=True)
        slope, cost = self._slope(losses, pull_back, walk.free)
        best, accepted = base.look(key_accept, objective, defense, walk, goals)

        length = self.travel * self.epsilon / self.steps
        moved = walk.current - length * balls.steepest(slope, self.norm)
        current = self._project(moved, walk.image, walk.free)
        followed = jnp.bool_(True)
        if self.random_start:
            followed = walk.iteration > 0
            current = jnp.where(followed, current, state.begin)
        # The image after the last step is looked at, too; its gradient is not followed.
        over = accepted | (walk.iteration + 1 >= self.max_looks())
        walk = walk._replace(
            current=jnp.where(over, walk.current, current),
            iteration=walk.iteration + 1,
            best=best,
            num_gradients=walk.num_gradients + jnp.where(followed & ~over, cost, 0),
        )
        return state._replace(walk=walk, over=over)

    def done(self, state: State) -> jax.Array:
        """Whether the attack has ended; [] bool."""
        return state.over

    def result(self, state: State) -> base.AttackResult:
        """The first success."""
        return base.report(state.walk.best, state.walk.num_gradients)

    def max_steps(self) -> int:
        """The most looks that one image can take."""
        return int(self.max_looks())

    def max_looks(self):
        """The same, traced: one after each step and, with a random start, one before it."""
        return self.steps + 1 + int(self.random_start)

    def _project(self, proposal, image, free):
        return balls.project(
            proposal, image, free, norm=self.norm, epsilon=self.epsilon, bounds=self.bounds
        )

    def _slope(self, losses, pull_back, free) -> tuple[jax.Array, int]:
        """What a step descends: [H, W, C], 0 at frozen pixels; and its backward passes."""
        is_open = losses > 0
        (gradient,) = pull_back(jnp.where(jnp.any(is_open), is_open, True).astype(losses.dtype))
        return jnp.where(free, gradient, 0.0), 1


@pytree
@dataclasses.dataclass(frozen=True)
class SelectivePGD(PGD):
    """PGD in which each step serves one goal.

    Attributes:
      slack: a goal is open until its loss is below minus this, so that a step for the next one does
        not undo it at once. In units of the losses: logits for the classifier.
    """

    slack: float = 0.05

    def _slope(self, losses, pull_back, free):
        chosen = self._chosen(losses).astype(losses.dtype)
        (gradient,) = pull_back(chosen)
        return jnp.where(free, gradient, 0.0), 1

    def _chosen(self, losses) -> jax.Array:
        """[G] bool, true at one goal: the first that is open, or the largest where none is."""
        is_open = losses > -self.slack
        first = jnp.where(jnp.any(is_open), jnp.argmax(is_open), jnp.argmax(losses))
        return jnp.arange(losses.shape[0]) == first


@pytree
@dataclasses.dataclass(frozen=True)
class OrthogonalPGD(SelectivePGD):
    """Selective PGD whose steps are orthogonal to the gradients of the other goals.

    A gradient that lies in the span of the others is followed as it is.
    """

    def _slope(self, losses, pull_back, free):
        (gradients,) = jax.vmap(pull_back)(jnp.eye(losses.shape[0], dtype=losses.dtype))
        units = jax.vmap(balls.normalised)(jnp.where(free[None], gradients, 0.0))
        chosen = self._chosen(losses).reshape(-1, 1, 1, 1)
        own = jnp.sum(jnp.where(chosen, units, 0.0), axis=0)
        return without(own, jnp.where(chosen, 0.0, units)), losses.shape[0]


def without(direction: jax.Array, others: jax.Array) -> jax.Array:
    """The part of a direction that is orthogonal to others; the direction where there is none.

    Args:
      direction: [...] of length 1, or 0.
      others: [G, ...] of length 1, or 0 for one that is not there.
    """
    basis: list[jax.Array] = []
    for other in others:
        rest = _orthogonal_to(other, basis)
        basis.append(jnp.where(_length(rest) > _NOTHING_LEFT, balls.normalised(rest), 0.0))
    rest = _orthogonal_to(direction, basis)
    return jnp.where(_length(rest) > _NOTHING_LEFT, rest, direction)


def _orthogonal_to(direction: jax.Array, basis: list[jax.Array]) -> jax.Array:
    for _ in range(2):  # a second round takes off what rounding left
        for unit in basis:
            direction = direction - jnp.sum(direction * unit) * unit
    return direction


def _length(direction: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(direction)))
