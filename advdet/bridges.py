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
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from advdet import functions, torch_bridge
from advdet.detectors import Detector
from advdet.keras_bridge import keras_classifier, keras_detector
from advdet.numpy_bridge import numpy_score, surrogate_gradient
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
    bounded_logits: bool = False,
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
      bounded_logits: whether its logits lie in [0, 1] by their nature, see
        `Classifier.from_function`.

    Raises:
      InputError: no torch, an unknown layout, a function that uses a module in training mode.
    """
    ask = _torch_function(
        module, None, "the torch classifier", layout, mean, std, device, False, differentiable
    )
    return Classifier.from_function(ask, bounded_logits=bounded_logits)


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
    """A torch user's `fit`, given tensors and seeded."""

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
