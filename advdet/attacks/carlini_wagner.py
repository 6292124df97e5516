"""The C&W L2 attack, one image at a time.

    minimise |x' - x|^2 + c sum_g max(0, loss_g(x'))        over w, with x' = (tanh(w) + 1) / 2

by Adam, with a search over c: times ten until the first success, then bisection. Constant, bracket,
Adam's state and early abort are the image's own. The best image is kept at every iterate, with the
success test of the goals themselves (confidence and detector included); distances are measured from
the true image, not from its squeezed copy.

One departure: while no c has brought a success, the next one starts from the image with a little
noise. From the image itself each larger c follows the same path (Adam does not feel the scale), and
where that path ends in a local minimum all of them fail.

Source: Carlini & Wagner 2017 (S&P), sections V and VI; the released code's 9 steps and 0.9999 rule.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.attacks import base
from advdet.attacks.variables import Bounds, from_box, to_box
from advdet.types import pytree

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_RESTART = 2**31 - 1  # folded into the key; steps fold in their count
# Below this much travel in w an edge pixel (w = 7.25) does not come loose: measured, 1 is frozen,
# 3 to 5 partial, 10 fine.
MINIMUM_TRAVEL = 5.0


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
      step_success: [] bool, whether this search step has seen a success.
      checkpoint_loss: [] the loss at the last early-abort check.
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
    step_success: jax.Array
    checkpoint_loss: jax.Array
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
        a c without success; 0 is the attack as published.
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
            step_success=jnp.bool_(False),
            checkpoint_loss=jnp.float32(jnp.inf),
            best=base.nothing_yet(image),
            num_gradients=jnp.int32(0),
        )

    def step(self, key, objective, defense, state: State) -> State:
        """Looks at the goals at the current image, records it, and takes one Adam step."""
        key_goals, key_accept = jax.random.split(jax.random.fold_in(key, state.num_gradients))

        def loss_fn(w):
            image = jnp.where(state.free, to_box(w, self.bounds), state.image)
            goals = objective(key_goals, defense, image, state.target)
            squared_distance = jnp.sum(jnp.square(image - state.image))
            hinges = jnp.sum(jnp.maximum(goals.losses, 0.0))
            return squared_distance + state.const * hinges, (image, squared_distance, goals)

        (loss, (image, squared_distance, goals)), gradient = jax.value_and_grad(
            loss_fn, has_aux=True
        )(state.w)
        goals, accepted = objective.accept(key_accept, defense, image, state.target, goals)
        best = base.keep_best(state.best, image, squared_distance, state.const, goals, accepted)
        state = self._adam_step(state, gradient)._replace(
            best=best,
            step_success=state.step_success | accepted,
            num_gradients=state.num_gradients + 1,
        )

        at_check = (state.iteration - 1) % jnp.maximum(self.steps // 10, 1) == 0
        stalled = at_check & (loss > 0.9999 * state.checkpoint_loss)
        if not self.abort_early or objective.is_random(defense):
            stalled = jnp.bool_(False)
        state = state._replace(checkpoint_loss=jnp.where(at_check, loss, state.checkpoint_loss))
        return self._next_const(state, stalled | (state.iteration >= self.steps))

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
        move = self.learning_rate * unbiased_mean / (jnp.sqrt(unbiased_square) + _EPSILON)
        return state._replace(
            w=state.w - move, adam_mean=mean, adam_square=square, iteration=iteration
        )

    def _next_const(self, state: State, ended: jax.Array) -> State:
        """Where a search step has ended: the next c, and a fresh start for it."""
        won = state.step_success
        upper = jnp.where(won, jnp.minimum(state.upper, state.const), state.upper)
        lower = jnp.where(won, state.lower, jnp.maximum(state.lower, state.const))
        # Open above until the first success. The released code calls 1e10 open, and runs away from
        # a success beyond 1e9.
        const = jnp.where(jnp.isfinite(upper), 0.5 * (lower + upper), 10.0 * state.const)

        # The two in turn, each time nearer to the image: no two starts are the same.
        lean = 0.5 ** (state.search_step // 2).astype(jnp.float32)
        odd = state.search_step % 2 == 1
        away = jnp.where(odd, state.restarts[1], state.restarts[0])  # an index would be a gather
        noisy = state.start + lean * (away - state.start)
        begin = jnp.where(jnp.isfinite(upper), state.start, noisy)

        pick = lambda new, old: jnp.where(ended, new, old)
        return state._replace(
            w=pick(begin, state.w),
            adam_mean=pick(0.0, state.adam_mean),
            adam_square=pick(0.0, state.adam_square),
            iteration=pick(0, state.iteration),
            search_step=state.search_step + ended.astype(jnp.int32),
            lower=pick(lower, state.lower),
            upper=pick(upper, state.upper),
            const=pick(const, state.const),
            step_success=state.step_success & ~ended,
            checkpoint_loss=pick(jnp.inf, state.checkpoint_loss),
        )
