"""The C&W L2 attack, one image at a time.

    minimise |x' - x|^2 + c sum_g max(0, loss_g(x'))        over w, with x' = (tanh(w) + 1) / 2

by Adam, with a search over c: times ten until the first success, then bisection. Constant, bracket,
Adam's state and early abort are the image's own. The best image is kept at every iterate, with the
success test of the goals themselves (confidence and detector included); distances are measured from
the true image, not from its squeezed copy.

Departures, all of which restart_noise=0 turns off:

- While there has been no success, the next c starts from the image with a little noise. From the
  image itself each larger c follows the same path (Adam does not feel the scale), and where that
  path ends in a local minimum all of them fail. After a success the search goes on from the image:
  noise can lie on the far side of a boundary that is not the nearest.
- A c has worked if a success came after the last check (a tenth of the steps). In the released
  code any success will do, even that of a start which is adversarial as it is (a natural image,
  noise), or of the first move of Adam, learning_rate / 2 sqrt(D) long whatever c is. Both halve a c
  that is too small already. Such successes count as images found, and say nothing of c.
- Where there are four or more search steps, the last one refines the best image: its moves are
  shares of the best distance, which fall when they bring nothing more, and c is set at each look so
  that the goals' pull keeps step with the distance's. At a constant rate an optimum nearer than
  Adam's first move is never resolved, nor is a success from noise ever brought nearer.

Source: Carlini & Wagner 2017 (S&P), sections V and VI; the released code's 9 steps and 0.9999 rule.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.attacks import balls, base
from advdet.attacks.variables import Bounds, from_box, to_box
from advdet.types import pytree

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_RESTART = 2**31 - 1  # folded into the key; steps fold in their count
# Below this much travel in w an edge pixel (w = 7.25) does not come loose: measured, 1 is frozen,
# 3 to 5 partial, 10 fine.
MINIMUM_TRAVEL = 5.0
# Refining: the first and last length of a move as a share of the best distance, and the factor
# between two lengths; windows in which progress is looked for; how much of the squared best
# distance may be left after a window that counts as progress.
_FIRST_SHARE, _LAST_SHARE, _FALL = 0.3, 0.002, 0.5
_WINDOWS, _PROGRESS = 30, 0.99
_TINY = 1e-30  # keeps quotients of zeros finite
# Pulls towards the goals and towards the image are in balance where half of the looks are successes
# at 2; each success makes it smaller, each failure larger.
_PUSH, _PUSH_FACTOR = 2.0, 1.05


class State(NamedTuple):
    """One image under attack.

    Attributes:
      image: [H, W, C] clean.
      start: [H, W, C] variables at which each search step begins.
      restarts: [2, H, W, C] variables of the image plus noise, and minus the same noise.
      free: [H, W, C] bool, pixels that may change.
      target: [] int32.
      w: [H, W, C] variables; adam_mean, adam_square: Adam's moments of them.
      iteration: [] int32 within the search step; search_step: [] int32.
      lower, upper, const: [] the bracket of c, and c.
      worked: [] bool, whether this search step has seen a success since its last check.
      refining: [] bool, whether it refines the best image.
      share: [] length of a refining move, as a share of the best distance.
      push: [] how much stronger the goals pull than the distance when refining.
      checkpoint: [] at the last check, the loss, or when refining the best squared distance.
      best: `base.Best`.
      num_gradients: [] int32.
    """

    image: jax.Array
    start: jax.Array
    restarts: jax.Array
    free: jax.Array
    target: jax.Array
    w: jax.Array
    adam_mean: jax.Array
    adam_square: jax.Array
    iteration: jax.Array
    search_step: jax.Array
    lower: jax.Array
    upper: jax.Array
    const: jax.Array
    worked: jax.Array
    refining: jax.Array
    share: jax.Array
    push: jax.Array
    checkpoint: jax.Array
    best: base.Best
    num_gradients: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class CarliniWagner:
    """Settings of the attack; all but the flags are traced.

    Attributes:
      binary_search_steps: values of c that are tried.
      steps: Adam steps for each.
      learning_rate: Adam's, in w.
      initial_const: the first c.
      restart_noise: standard deviation, in the box's width, of the noise on the start that follows
        a c without success; 0 is the attack as published, without any of the departures.
      abort_early: give up a value of c when a tenth of the steps brought less than 0.01 %. Never
        done where the goals are random, whose loss is noisy.
      bounds: the box.
    """

    binary_search_steps: int = 9
    steps: int = 1000
    learning_rate: float = 0.01
    initial_const: float = 1e-3
    restart_noise: float = 0.1
    abort_early: bool = dataclasses.field(default=True, metadata={"static": True})
    bounds: Bounds = dataclasses.field(default=(0.0, 1.0), metadata={"static": True})

    def init(self, key, image_id, image, target, start, free) -> State:
        """A fresh state; `image`, `start`, `free` are [H, W, C], `target` [] int32."""
        del image_id
        w = from_box(start, self.bounds)
        low, high = self.bounds
        noise = jax.random.normal(jax.random.fold_in(key, _RESTART), (1, *image.shape))
        noise = (high - low) * self.restart_noise * jnp.concatenate([noise, -noise])
        return State(
            image=image,
            start=w,
            restarts=from_box(jnp.clip(start[None] + noise, low, high), self.bounds),
            free=free,
            target=target,
            w=w,
            adam_mean=jnp.zeros_like(w),
            adam_square=jnp.zeros_like(w),
            iteration=jnp.int32(0),
            search_step=jnp.int32(0),
            lower=jnp.float32(0.0),
            upper=jnp.float32(jnp.inf),
            const=jnp.asarray(self.initial_const, jnp.float32),
            worked=jnp.bool_(False),
            refining=jnp.bool_(False),
            share=jnp.float32(_FIRST_SHARE),
            push=jnp.float32(_PUSH),
            checkpoint=jnp.float32(jnp.inf),
            best=base.nothing_yet(image),
            num_gradients=jnp.int32(0),
        )

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at the goals at the current image, records it, and takes one Adam step."""
        key_goals, key_accept = jax.random.split(jax.random.fold_in(key, state.num_gradients))

        current, pull = jax.vjp(lambda w: to_box(w, self.bounds), state.w)
        image = jnp.where(state.free, current, state.image)

        def hinges_fn(image):
            goals = objective(key_goals, defense, image, state.target)
            return jnp.sum(jnp.maximum(goals.losses, 0.0)), goals

        (hinges, goals), upwards = jax.value_and_grad(hinges_fn, has_aux=True)(image)
        away = image - state.image
        squared_distance = jnp.sum(jnp.square(away))
        loss = squared_distance + state.const * hinges
        outwards, upwards = (
            jnp.where(state.free, pull(change)[0], 0.0) for change in (2.0 * away, upwards)
        )
        gradient = self._gradient(state, outwards, upwards)
        goals, accepted = objective.accept(key_accept, defense, image, state.target, goals)
        best = base.keep_best(state.best, image, squared_distance, state.const, goals, accepted)
        state = self._adam_step(state, gradient)._replace(
            best=best,
            worked=state.worked | accepted,
            push=state.push * jnp.where(accepted, 1.0 / _PUSH_FACTOR, _PUSH_FACTOR),
            num_gradients=state.num_gradients + 1,
        )

        at_check = (state.iteration - 1) % jnp.maximum(self.steps // 10, 1) == 0
        stalled = at_check & (loss > 0.9999 * state.checkpoint)
        if not self.abort_early or objective.is_random(defense):
            stalled = jnp.bool_(False)

        look = state.iteration % jnp.maximum(self.steps // _WINDOWS, 1) == 0
        still = look & (best.squared_distance > _PROGRESS * state.checkpoint)
        share = jnp.where(state.refining & still, _FALL * state.share, state.share)
        stalled = jnp.where(state.refining, share < _LAST_SHARE, stalled)

        at_check = jnp.where(state.refining, look, at_check)
        value = jnp.where(state.refining, best.squared_distance, loss)
        checkpoint = jnp.where(at_check, value, state.checkpoint)
        ended = stalled | (state.iteration >= self.steps)
        return self._next_const(state._replace(share=share, checkpoint=checkpoint), ended, at_check)

    def done(self, state: State) -> jax.Array:
        """Whether all values of c have been tried; [] bool."""
        return state.search_step >= self.binary_search_steps

    def result(self, state: State) -> base.AttackResult:
        """The nearest success over all values of c."""
        return base.report(state.best, state.num_gradients)

    def max_steps(self) -> int:
        """The most steps that one image can take."""
        return int(self.binary_search_steps * self.steps)

    def _adam_step(self, state: State, gradient: jax.Array) -> State:
        # Bias correction first, then epsilon, as in the Adam paper's algorithm 1 (TensorFlow 1
        # folds the correction into the rate, which holds back pixels with gradients near 1e-7).
        iteration = state.iteration + 1
        count = iteration.astype(jnp.float32)
        mean = _BETA1 * state.adam_mean + (1.0 - _BETA1) * gradient
        square = _BETA2 * state.adam_square + (1.0 - _BETA2) * jnp.square(gradient)
        unbiased_mean = mean / (1.0 - _BETA1**count)
        unbiased_square = square / (1.0 - _BETA2**count)
        move = self._rate(state) * unbiased_mean / (jnp.sqrt(unbiased_square) + _EPSILON)
        return state._replace(
            w=state.w - move, adam_mean=mean, adam_square=square, iteration=iteration
        )

    def _slope(self, image: jax.Array) -> jax.Array:
        """How much each pixel of an image moves with its variable."""
        low, high = self.bounds
        place = (image - low) / (high - low)
        return 2.0 * (high - low) * place * (1.0 - place)

    def _gradient(self, state: State, outwards: jax.Array, upwards: jax.Array) -> jax.Array:
        """What Adam descends, of the slopes of the squared distance and of the hinges."""
        away = 2.0 * (state.best.image - state.image) * self._slope(state.best.image)
        size = balls.length(jnp.where(state.free, away, 0.0))
        balanced = outwards / jnp.maximum(size, _TINY)
        balanced += state.push * upwards / jnp.maximum(balls.length(upwards), _TINY)
        return jnp.where(state.refining, balanced, outwards + state.const * upwards)

    def _rate(self, state: State) -> jax.Array:
        """Adam's rate; when refining, such that a full move is a share of the best distance."""
        slope = self._slope(to_box(state.w, self.bounds))
        reach = balls.length(jnp.where(state.free, slope, 0.0))
        wanted = state.share * jnp.sqrt(state.best.squared_distance) / jnp.maximum(reach, 1e-12)
        fall = state.share / _FIRST_SHARE
        rate = jnp.minimum(wanted, self.learning_rate * fall)
        return jnp.where(state.refining, rate, self.learning_rate)

    def _next_const(self, state: State, ended: jax.Array, at_check: jax.Array) -> State:
        """Where a search step has ended: the next c, and a fresh start for it."""
        won = state.worked
        found = jnp.isfinite(state.best.squared_distance)
        upper = jnp.where(won, jnp.minimum(state.upper, state.const), state.upper)
        lower = jnp.where(won, state.lower, jnp.maximum(state.lower, state.const))
        # Open above until the first success. The released code calls 1e10 open, and runs away from
        # a success beyond 1e9.
        const = jnp.where(jnp.isfinite(upper), 0.5 * (lower + upper), 10.0 * state.const)

        # The two in turn, each time nearer to the image: no two starts are the same.
        lean = 0.5 ** (state.search_step // 2).astype(jnp.float32)
        odd = state.search_step % 2 == 1
        away = jnp.where(odd, state.restarts[1], state.restarts[0])  # an index would be a gather
        begin = jnp.where(found, state.start, state.start + lean * (away - state.start))

        search_step = state.search_step + ended.astype(jnp.int32)
        last = (search_step == self.binary_search_steps - 1) & (self.binary_search_steps >= 4)
        refining = last & found & (self.restart_noise > 0)
        first = jnp.where(refining, from_box(state.best.image, self.bounds), begin)

        pick = lambda new, old: jnp.where(ended, new, old)
        return state._replace(
            w=pick(first, state.w),
            adam_mean=pick(0.0, state.adam_mean),
            adam_square=pick(0.0, state.adam_square),
            iteration=pick(0, state.iteration),
            search_step=search_step,
            lower=pick(lower, state.lower),
            upper=pick(upper, state.upper),
            const=pick(const, state.const),
            worked=state.worked & ~ended & (~at_check | (self.restart_noise == 0)),
            refining=pick(refining, state.refining),
            share=pick(_FIRST_SHARE, state.share),
            push=pick(_PUSH, state.push),
            checkpoint=pick(jnp.inf, state.checkpoint),
        )
