"""The Square Attack: random search at a fixed radius, by the values of the goals alone.

Each try repaints a square of the best image so far, at a random place and at the edge of the ball;
it is kept where the loss, the sum of the goals' hinges, does not rise. No gradient is taken, so a
score that has none, or a misleading one, is attacked like any other; and where this attack does
better than those by gradients, they were misled.

    linf  start: vertical stripes of +-epsilon; a try sets a square to +-epsilon, a sign a channel
    l2    start: a grid of bumps of random sign; a try adds a bump to a square and gives it the
          length of a second one, which is set to 0

Squares shrink with the tries. The attack looks at its start first, and stops at the first success.
`num_gradients` is 0: what counts here is the looks, at most one more than `steps`. Where goals are
random, the image kept is looked at again at each try, by the same draws as the new one: an old
lucky value would never be beaten.

Departures: a loss that is equal is taken, too (a score in steps has plateaus); so are the start's
stripes or bumps, but only where they are not worse than the image; squares reach the last row and
column.

Source: Andriushchenko et al. 2020 (arXiv 1912.00049), algorithms 1 to 3 and supplement B.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from advdet.attacks import balls, base
from advdet.attacks.variables import Bounds
from advdet.types import pytree

# After so many tries of 10,000 squares have half the area; fewer tries shorten all of it alike.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_SMALLEST_BUMP = 3  # pixels a side
_BUMPS = 5  # a side, of the start


class State(NamedTuple):
    """One image under attack.

    Attributes:
      walk: `base.Walk`, with the try to be looked at.
      kept: [H, W, C] the best image so far.
      loss: [] its sum of hinges; inf where nothing was looked at.
      over: [] bool, whether the attack has ended.
    """

    walk: base.Walk
    kept: jax.Array
    loss: jax.Array
    over: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class Square:
    """Settings of the attack; norm and box are static.

    Attributes:
      epsilon: the radius, in pixel values.
      steps: tries after the first look.
      share: of the pixels, in the first squares.
      norm: "linf" or "l2".
      bounds: the box.
    """

    epsilon: float = 0.3
    steps: int = 1000
    share: float = 0.8
    norm: str = dataclasses.field(default="linf", metadata={"static": True})
    bounds: Bounds = dataclasses.field(default=(0.0, 1.0), metadata={"static": True})

    def init(self, key, image_id, image, target, start, free) -> State:
        """A fresh state; `image`, `start`, `free` are [H, W, C], `target` [] int32."""
        del key, image_id
        start = self._project(start, image, free)
        walk = base.begin(image, target, start, free)
        return State(walk, start, jnp.float32(jnp.inf), jnp.bool_(False))

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at a try, keeps it where it is not worse, and makes the next."""
        walk = state.walk
        keys = jax.random.split(jax.random.fold_in(key, walk.iteration), 3)
        key_goals, key_accept, key_try = keys
        look = lambda image: objective(key_goals, defense, image, walk.target)
        hinges = lambda goals: jnp.sum(jnp.maximum(goals.losses, 0.0))

        if objective.is_random(defense):  # both by the same draws
            both = jax.vmap(look)(jnp.stack([walk.current, state.kept]))
            goals, again = (jax.tree.map(lambda leaf, at=at: leaf[at], both) for at in (0, 1))
            known = jnp.where(walk.iteration > 0, hinges(again), state.loss)
        else:
            goals, known = look(walk.current), state.loss
        loss = hinges(goals)
        best, accepted = base.look(key_accept, objective, defense, walk, goals)
        better = loss <= known
        kept = jnp.where(better, walk.current, state.kept)

        over = accepted | (walk.iteration >= self.steps)
        proposal = self._try(key_try, kept, walk)
        walk = walk._replace(
            current=jnp.where(over, walk.current, proposal),
            iteration=walk.iteration + 1,
            best=best,
        )
        return State(walk, kept, jnp.where(better, loss, known), over)

    def done(self, state: State) -> jax.Array:
        """Whether the attack has ended; [] bool."""
        return state.over

    def result(self, state: State) -> base.AttackResult:
        """The first success."""
        return base.report(state.walk.best, state.walk.num_gradients)

    def max_steps(self) -> int:
        """The most looks that one image can take."""
        return int(self.steps) + 1

    def _project(self, proposal, image, free):
        return balls.project(
            proposal, image, free, norm=self.norm, epsilon=self.epsilon, bounds=self.bounds
        )

    def _try(self, key, kept, walk: base.Walk) -> jax.Array:
        """The next image: stripes or bumps after the first look, then one square repainted."""
        key_first, key_square = jax.random.split(key)
        first = walk.iteration == 0
        if self.norm == "linf":
            shape = walk.image.shape
            stripes = jax.random.rademacher(key_first, (1, *shape[1:]), jnp.float32)
            begin = self._project(walk.image + self.epsilon * stripes, walk.image, walk.free)
            return jnp.where(first, begin, self._repainted(key_square, kept, walk))
        move = jnp.where(
            first, _grid_of_bumps(key_first, walk.image.shape),
            self._shifted(key_square, kept - walk.image, walk),
        )  # fmt: skip
        move = self.epsilon * balls.normalised(jnp.where(walk.free, move, 0.0))
        return self._project(walk.image + move, walk.image, walk.free)

    def _repainted(self, key, kept, walk: base.Walk) -> jax.Array:
        """A square set to epsilon above or below the clean image, a sign for each channel."""
        height, width, channels = walk.image.shape
        key_place, key_sign = jax.random.split(key)
        side = jnp.clip(self._side(walk), 1, max(1, min(height, width) - 1))
        inside = _square(key_place, side, height, width)
        signs = jax.random.rademacher(key_sign, (1, 1, channels), jnp.float32)

        def painted(signs):
            new = jnp.where(inside, walk.image + self.epsilon * signs, kept)
            return self._project(new, walk.image, walk.free)

        proposal = painted(signs)
        same = jnp.max(jnp.abs(proposal - kept)) < 1e-6  # it was of these colours already
        return jnp.where(same, painted(-signs), proposal)

    def _shifted(self, key, move, walk: base.Walk) -> jax.Array:
        """A perturbation with one square's length moved into another; [H, W, C]."""
        height, width, channels = move.shape
        key_to, key_from, key_sign, key_turn = jax.random.split(key, 4)
        side = jnp.maximum(self._side(walk), _SMALLEST_BUMP)
        side = jnp.clip(side + (side + 1) % 2, 1, min(height, width))  # odd, but for tiny images
        to = _square(key_to, side, height, width)
        given = _square(key_from, side, height, width)
        length = lambda part: jnp.sqrt(jnp.sum(jnp.square(part), axis=(0, 1), keepdims=True))
        inside = jnp.where(to, move, 0.0)
        unused = jnp.maximum(jnp.square(self.epsilon) - jnp.sum(jnp.square(move)), 0.0)
        available = jnp.sqrt(
            unused / channels + jnp.square(length(jnp.where(to | given, move, 0.0)))
        )
        signs = jax.random.rademacher(key_sign, (1, 1, channels), jnp.float32)
        fresh = signs * _bump(key_turn, to, side) + inside / (1e-10 + length(inside))
        fresh = fresh / jnp.maximum(length(fresh), 1e-10) * available
        return jnp.where(to, fresh, jnp.where(given, 0.0, move))

    def _side(self, walk: base.Walk) -> jax.Array:
        """The side of the next square, by the schedule; [] int32."""
        height, width, _ = walk.image.shape
        progress = 10_000.0 * (walk.iteration - 1).astype(jnp.float32) / self.steps
        halvings = jnp.sum(progress > jnp.asarray(_HALVINGS, jnp.float32)).astype(jnp.float32)
        area = self.share * height * width * 0.5**halvings
        return jnp.round(jnp.sqrt(area)).astype(jnp.int32)


def _square(key, side: jax.Array, height: int, width: int) -> jax.Array:
    """[H, W, 1] bool, a square of that side at a uniform place inside the image."""
    key_row, key_column = jax.random.split(key)
    place = lambda key, size: jax.random.randint(key, (), 0, size - side + 1)
    row, column = place(key_row, height), place(key_column, width)
    within = lambda index, first: (index >= first) & (index < first + side)
    rows = within(jnp.arange(height), row)[:, None]
    return (rows & within(jnp.arange(width), column)[None])[..., None]


def _bump(key, inside: jax.Array, side: jax.Array) -> jax.Array:
    """[H, W, 1] of length 1 in a square: a hill in one half, a hollow in the other."""
    height, width, _ = inside.shape
    from_first = lambda lines: jnp.cumsum(jnp.any(inside, axis=lines)) - 1
    rows, columns = from_first((1, 2))[:, None], from_first((0, 2))[None]
    turned = jax.random.bernoulli(key)
    along = jnp.where(turned, columns, rows) + jnp.zeros((height, width), jnp.int32)
    across = jnp.where(turned, rows, columns) + jnp.zeros((height, width), jnp.int32)
    half = side // 2
    upper = jnp.where(along < half, _hill(along, across, half, side), 0.0)
    lower = jnp.where(along >= half, _hill(along - half, across, side - half, side), 0.0)
    mask = lambda hill: balls.normalised(jnp.where(inside[..., 0], hill, 0.0))
    return balls.normalised(mask(upper) - mask(lower))[..., None]


def _hill(row, column, height, width) -> jax.Array:
    """Rings around the middle of a rectangle: at ring r the sum of 1 / (k + 1)^2 from r outwards.

    Args:
      row, column: [H, W] int, from the rectangle's corner.
      height, width: [] int, of the rectangle.
    """
    most = max(row.shape)
    sums = jnp.asarray(np.r_[0.0, np.cumsum(1.0 / np.arange(1, most + 2) ** 2)], jnp.float32)
    ring = jnp.maximum(jnp.abs(row - height // 2), jnp.abs(column - width // 2))
    rings = jnp.maximum(height // 2, width // 2) + 1
    return sums[rings] - sums[jnp.minimum(ring, rings)]


def _grid_of_bumps(key, shape) -> jax.Array:
    """[H, W, C] bumps side by side, each with a sign of its own in each channel."""
    height, width, channels = shape
    side = max(1, min(height, width) // _BUMPS)
    rows, columns = height // side, width // side
    top, left = (height - rows * side) // 2, (width - columns * side) // 2
    key_sign, key_turn = jax.random.split(key)
    signs = jax.random.rademacher(key_sign, (rows, columns, 1, 1, channels), jnp.float32)
    whole = jnp.ones((side, side, 1), bool)
    keys = jax.random.split(key_turn, rows * columns)
    bumps = jax.vmap(lambda k: _bump(k, whole, jnp.int32(side)))(keys)
    tiles = signs * bumps.reshape(rows, columns, side, side, 1)
    grid = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, channels)
    margins = ((top, height - rows * side - top), (left, width - columns * side - left), (0, 0))
    return jnp.pad(grid, margins)
