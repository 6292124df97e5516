"""NumPy functions as JAX functions, with the gradients of a stand-in; see `bridges`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from advdet import functions, host_calls
from advdet.types import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class NumpyFunction:
    """A NumPy function of images, callable from JAX; see `numpy_score`."""

    function: Callable
    gradient: Callable | str | None
    name: str
    random: bool
    on_host = True

    @property
    def differentiable(self) -> bool:
        return self.gradient is not None

    def __call__(self, images: jax.Array, fitted: Any = None, key: jax.Array | None = None):
        images = jnp.asarray(images)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(fitted)):
            raise InputError(
                "NumPy code was handed arrays of a compiled program; let `fit` return an object "
                "that is no dict or list of arrays"
            )
        seeds = jnp.zeros(len(images), jnp.uint32)
        if self.random:
            if key is None:
                raise InputError("the NumPy score draws random numbers and was given no key")
            seeds = jax.random.bits(key, (len(images),), "uint32")
        rows = functools.partial(self._rows, fitted)
        shape = images.shape[1:] if self.gradient == "straight_through" else ()
        self._trial(rows, images.shape[1:], shape)
        value = lambda x, seeds: host_calls.call(rows, [(shape, np.float32)], x, seeds)[0]
        stand_in = self.gradient
        if callable(stand_in):
            stand_in = lambda x: functions.call(
                self.gradient, "gradient", {"images": x}, {"fitted": fitted}
            )
        return surrogate_gradient(value, stand_in)(images, seeds)

    def _rows(self, fitted, images, seeds):
        """The callback: answers for rows [N, ...]."""
        ask = lambda x, **others: np.asarray(
            functions.call(
                self.function, "the NumPy score", {"images": x}, {"fitted": fitted, **others}
            )
        )
        if not self.random:
            return (ask(images),)
        one_by_one = [ask(x[None], seed=int(seed)) for x, seed in zip(images, seeds)]
        return (np.concatenate(one_by_one),)

    def _trial(self, rows, of_a_row, wanted) -> None:
        """Runs it on one empty image, so that what is wrong is said before anything is run."""
        try:
            (found,) = rows(np.zeros((1, *of_a_row), np.float32), np.zeros(1, np.uint32))
        except InputError:
            raise
        except Exception as error:  # foreign code can raise anything
            raise InputError(
                f"the NumPy score cannot be called on an array of shape {(1, *of_a_row)}: "
                f"{functions.first_line(error)}"
            ) from error
        column = not wanted and found.shape == (1, 1)  # as scikit-learn and networks give it
        if found.shape != (1, *wanted) and not column:
            two = not wanted and found.shape == (1, 2)
            hint = " (of two logits z, z[:, 1] - z[:, 0] is a score)" if two else ""
            raise InputError(
                f"the NumPy score gives an array of shape {found.shape} for 1 image; wanted "
                f"{(1, *wanted)}{hint}"
            )


def numpy_score(
    fn: Callable, gradient: Callable | str | None = None, *, name: str | None = None
) -> Callable:
    """A NumPy or scikit-learn function for `Detector.from_function`.

    Args:
      fn: images [B, H, W, C] (a NumPy array, or whatever the function is called with) -> [B],
        higher is more suspicious, each row on its own. It may ask for `fitted`, what `fit` returned
        (any object), and for `seed`, a whole number; it then gets its images one by one.
      gradient: what the attacker follows, since NumPy has no gradients (backward pass
        differentiable approximation, BPDA):
          a JAX function like `fn`, of the same arguments, whose slope stands in; values stay fn's;
          "straight_through" where fn is a step inside a score that gives back an array of the shape
          it got (rounding, a median filter): its slope is taken to be the identity;
          None: no gradient. Only an attack that needs none can be used then.
      name: what results are filed under.

    Returns:
      The function as JAX takes it.

    Raises:
      InputError: an unknown gradient, or a parameter that nothing is known for.

    Source: Athalye, Carlini and Wagner 2018 (arXiv 1802.00420), section 4.1.
    """
    if functions.takes(fn, "classifier"):
        raise InputError(
            "a NumPy score cannot call the classifier, which is JAX; write a JAX function "
            "score(images, classifier) that hands classifier(images).logits to numpy_score(fn)"
        )
    functions.asked_for(fn, "the NumPy score", ("images",), ("fitted", "seed"))
    if callable(gradient):
        functions.asked_for(gradient, "gradient", ("images",), ("fitted",))
    elif gradient not in (None, "straight_through"):
        raise InputError(
            f"unknown gradient {gradient!r}; give a JAX function, 'straight_through' or None"
        )
    if name is None:
        name = getattr(fn, "__name__", "")
        name = name if re.fullmatch(r"\w+", name) else "numpy_score"
    return NumpyFunction(fn, gradient, name, functions.takes(fn, "seed"))


def surrogate_gradient(fn: Callable, gradient: Callable | str | None) -> Callable:
    """A JAX function with the values of one function and the slope of another (BPDA).

    Args:
      fn: an array [...] (and others, which get no gradient) -> an array; need not be
        differentiable.
      gradient: a differentiable JAX function of the first array; "straight_through" for the
        identity; None for a function that refuses to be differentiated.

    Raises:
      InputError: on differentiation, where there is no gradient.

    Source: Athalye, Carlini and Wagner 2018 (arXiv 1802.00420), section 4.1.
    """
    if gradient == "straight_through":
        gradient = lambda images: images
    both = jax.custom_vjp(fn)

    def forward(images, *others):
        if gradient is None:
            raise InputError(
                "this score has no gradient: use an attack that needs none (attack='square'), or "
                "give numpy_score a `gradient` to follow"
            )
        return fn(images, *others), (images, others)

    def backward(kept, pull):
        images, others = kept
        with functions.foreign_code():  # run later than `fn`, out of reach of what surrounds it
            _, pull_back = jax.vjp(gradient, images)
        return *pull_back(pull), *(None for _ in others)

    both.defvjp(forward, backward)
    return both
