"""Keras 3 models on its JAX backend; see `bridges`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from advdet import functions
from advdet.detectors import Detector
from advdet.types import Classifier, InputError, Outputs, PyTree

_Channels = Sequence[float] | float | None


@dataclasses.dataclass(frozen=True)
class KerasApply:
    """A classifier's `apply` from a model; equal where the model is the same object."""

    model: Any
    mean: _Channels
    std: _Channels
    bounded_logits: bool = False

    def __call__(self, variables: PyTree, images: jax.Array, key: jax.Array | None) -> Outputs:
        if key is not None:
            raise InputError(
                "this defence switches the classifier's dropout on by a key, which a Keras model "
                "does not take"
            )
        logits = _outputs(self.model, variables, images, self.mean, self.std)
        return Outputs(functions.as_rows("the Keras model", logits, (len(images), None)), {})


def keras_classifier(
    model, *, mean: _Channels = None, std: _Channels = None, bounded_logits: bool = False
) -> Classifier:
    """A classifier from a Keras model that gives logits.

    Its weights are taken as they are now; it runs in inference mode.

    Args:
      model: images [B, H, W, C] -> logits [B, K]; the last layer without softmax.
      mean, std: what images in [0, 1] are normalised by; None where the model does it, or nothing.
      bounded_logits: whether its logits lie in [0, 1] by their nature, see
        `Classifier.from_function`.

    Raises:
      InputError: no Keras, or not on its JAX backend.
    """
    apply = KerasApply(model, _hashable(mean), _hashable(std), bounded_logits)
    return Classifier(_variables(model), apply)


def keras_detector(
    model=None,
    *,
    score: Callable | None = None,
    fit: Callable | None = None,
    mean: _Channels = None,
    std: _Channels = None,
    name: str | None = None,
) -> Detector:
    """A detector from a Keras model.

    Args:
      model: images [B, H, W, C] -> whatever `score` needs; None where `fit` returns the model.
      score: images, the model's outputs -> suspicion [B], in JAX or keras.ops; None where the model
        gives it itself, as [B] or [B, 1].
      fit: training images [N, H, W, C] in [0, 1], labels [N] -> a model; it may ask for `seed`,
        `classifier` and `data`, see `Detector.from_function`.
      mean, std: as in `keras_classifier`; `score` gets the images in [0, 1].
      name: what results are filed under.

    Raises:
      InputError: as `keras_classifier`, or not exactly one of `model` and `fit` is given.
    """
    if (model is None) == (fit is None):
        raise InputError("keras_detector needs a model, or a fit that returns one")
    if score is not None:
        functions.asked_for(score, "score", ("images", "outputs"), ())
    variables = None if model is None else _variables(model)

    def score_fn(images, fitted):
        its_model, its_variables = fitted or (model, variables)
        outputs = _outputs(its_model, its_variables, images, mean, std)
        if score is not None:
            ours = {"images": images, "outputs": outputs}
            return functions.call(score, "score", ours, {})
        return outputs[:, 0] if jnp.ndim(outputs) == 2 and outputs.shape[1] == 1 else outputs

    def own_fit(images, labels, seed, classifier, data):
        ours = {"images": images, "labels": labels}
        others = {"seed": seed, "classifier": classifier, "data": data}
        found = functions.call(fit, "fit", ours, others)
        return found, _variables(found)

    if fit is not None:
        functions.asked_for(fit, "fit", ("images", "labels"), ("seed", "classifier", "data"))
    name = name or getattr(score or fit, "__name__", "").strip("<>") or "keras_detector"
    name = "keras_detector" if name == "lambda" else name
    return Detector.from_function(score_fn, fit=fit and own_fit, name=name)


def _outputs(model, variables, images, mean, std):
    """The model's outputs in inference mode, with the given variables."""
    if mean is not None:
        images = images - jnp.asarray(mean, jnp.float32)
    if std is not None:
        images = images / jnp.asarray(std, jnp.float32)
    with functions.foreign_code():
        outputs, _ = model.stateless_call(*variables, images, training=False)
    return outputs


def _variables(model) -> tuple[list[jax.Array], list[jax.Array]]:
    """Its trainable and other variables as arrays.

    Raises:
      InputError: it is no built Keras model on the JAX backend.
    """
    try:
        import keras
    except ImportError as error:
        raise InputError(
            f"Keras cannot be imported ({error}): pip install 'advdet[keras]'"
        ) from None
    if keras.backend.backend() != "jax":
        raise InputError(
            f"Keras runs on {keras.backend.backend()} here; set the environment variable "
            "KERAS_BACKEND=jax before Keras is imported (a model on torch is a torch module: "
            "bridges.torch_classifier takes it)"
        )
    if not isinstance(model, keras.Model):
        raise InputError(f"a Keras model is wanted, not {type(model).__name__}")
    if not model.built:
        raise InputError("the Keras model is not built yet: call it on an image first")
    take = lambda variables: [jnp.asarray(variable.value) for variable in variables]
    return take(model.trainable_variables), take(model.non_trainable_variables)


def _hashable(value: _Channels) -> _Channels:
    return value if value is None or isinstance(value, (int, float)) else tuple(value)
