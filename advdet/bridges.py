"""Classifiers and detectors in torch, Keras, NumPy or scikit-learn, as advdet takes them.

    classifier = bridges.torch_classifier(net, mean=0.1307, std=0.3081)
    detector = bridges.torch_detector(lambda x: reconstruction_error(autoencoder, x))
    print(advdet.evaluate(detector, classifier=classifier, data=splits).records["best"]["verdict"])

Images reach foreign code as it wants them: advdet's own are float32 in [0, 1], channels last. Code
that is not JAX is called back from compiled attacks, with its exact gradients (torch) or with those
of a stand-in (NumPy, scikit-learn). Such code must not call JAX itself: it would wait for threads
that wait for it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from advdet import functions, host_calls, torch_bridge
from advdet.detectors import Detector
from advdet.keras_bridge import keras_classifier, keras_detector
from advdet.types import Classifier, InputError

__all__ = [
    "keras_classifier",
    "keras_detector",
    "numpy_score",
    "surrogate_gradient",
    "torch_classifier",
    "torch_detector",
]

_Channels = Sequence[float] | float | None
_LAYOUTS = ("NCHW", "NHWC")


def torch_classifier(
    module: Callable,
    *,
    layout: str = "NCHW",
    mean: _Channels = None,
    std: _Channels = None,
    device: str = "cpu",
    differentiable: bool = True,
) -> Classifier:
    """A classifier from a torch module (or function) that gives logits.

    A module is copied, put into evaluation mode, and stays as it is now whatever becomes of the
    original.

    Args:
      module: images [B, C, H, W] (or as `layout` says) -> logits [B, K], not probabilities.
      layout: "NCHW", torch's own, or "NHWC".
      mean, std: what images in [0, 1] are normalised by, (x - mean) / std; one number or one a
        channel. None where the module does that itself, or nothing.
      device: where the module runs.
      differentiable: whether it has useful gradients.

    Raises:
      InputError: no torch, an unknown layout, a function that uses a module in training mode.
    """
    ask = _torch_function(
        module, None, "the torch classifier", layout, mean, std, device, False, differentiable
    )
    return Classifier.from_function(ask)


def torch_detector(
    score: Callable | None = None,
    *,
    fit: Callable | None = None,
    layout: str = "NCHW",
    mean: _Channels = None,
    std: _Channels = None,
    device: str = "cpu",
    differentiable: bool = True,
    random: bool = False,
    name: str | None = None,
) -> Detector:
    """A detector from torch code.

    Args:
      score: images as a tensor [B, C, H, W] -> suspicion [B] (or [B, 1]), higher is more
        suspicious: a module, or a function, which may ask for `fitted`, what `fit` returned. None
        where `fit` returns the module that scores.
      fit: training images as a tensor, labels [N] -> a module, or anything `score` needs. It may
        ask for `seed`, `classifier` and `data`, see `Detector.from_function`; torch's own random
        numbers are seeded.
      layout, mean, std, device: as in `torch_classifier`.
      differentiable: whether the score has useful gradients.
      random: whether it draws random numbers (torch's); each image then goes through alone, with a
        seed of its own, so that no draw depends on the batch.
      name: what results are filed under.

    Raises:
      InputError: as `torch_classifier`, or neither `score` nor `fit` is given.
    """
    if score is None and fit is None:
        raise InputError("torch_detector needs a score, or a fit that returns a module")
    ask = _torch_function(
        score, 0, "the torch score", layout, mean, std, device, random, differentiable
    )
    own_fit = fit and _TorchFit(fit, ask)
    if name is None:
        named = fit if score is None else score
        name = getattr(named, "__name__", type(named).__name__)
        name = name if re.fullmatch(r"\w+", name) else "torch_detector"
    return Detector.from_function(ask, fit=own_fit, name=name)


def _torch_function(
    function, width, what, layout, mean, std, device, random, differentiable
) -> torch_bridge.TorchFunction:
    torch = torch_bridge.imported()
    if layout not in _LAYOUTS:
        raise InputError(f"unknown layout {layout!r}; known: {', '.join(_LAYOUTS)}")
    if std is not None and not np.all(np.asarray(std, np.float64) > 0):
        raise InputError(f"std must be above 0, not {std}")
    if isinstance(function, torch.nn.Module):
        function = torch_bridge.frozen(function)
    elif function is not None:
        functions.asked_for(function, what, ("images",), ("fitted",) if width == 0 else ())
        torch_bridge.refuse_training(torch, function, what)
    return torch_bridge.TorchFunction(
        function, width, what, layout, mean, std, device, random, differentiable
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _TorchFit:
    """A torch user's `fit`, given tensors; equal where the user's function is."""

    function: Callable
    ask: torch_bridge.TorchFunction

    def __post_init__(self):
        functions.asked_for(
            self.function, "fit", ("images", "labels"), ("seed", "classifier", "data")
        )

    def __call__(self, images, labels, seed, classifier, data) -> Any:
        torch = torch_bridge.imported()
        with torch.random.fork_rng([] if self.ask.device == "cpu" else [self.ask.device]):
            torch.manual_seed(seed)
            found = functions.call(
                self.function, "fit",
                {"images": self.ask.to_tensor(images),
                 "labels": torch.from_numpy(np.array(labels, np.int64)).to(self.ask.device)},
                {"seed": seed, "classifier": classifier, "data": data},
            )  # fmt: skip
        if isinstance(found, torch.nn.Module):
            return torch_bridge.frozen(found)
        if self.ask.function is None:
            raise InputError(
                f"fit returns {type(found).__name__}; without a score it must return a module"
            )
        return found


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
        if found.shape != (1, *wanted):
            raise InputError(
                f"the NumPy score gives an array of shape {found.shape} for 1 image; wanted "
                f"{(1, *wanted)}"
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
