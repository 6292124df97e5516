"""What learned detectors learn from: rows clean and adversarial, and a classifier's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from advdet.types import Batch, Classifier, InputError, Outputs, PyTree


def with_sources(
    clean: Batch, crafted: Batch | None, owner: str, field: str = "adversarial_train"
) -> tuple[Batch, Batch]:
    """Adversarial images and, row by row, the clean images that they were made from.

    Args:
      clean: [N] images with the sources among them.
      crafted: [M] adversarial images.
      owner: the detector's name, for messages.
      field: of `FitData`, for messages.

    Returns:
      (sources [M], crafted [M]).

    Raises:
      InputError: no adversarial images, or a source that is not among the clean ones.
    """
    if crafted is None or len(crafted.labels) == 0:
        raise InputError(f"{owner} learns from adversarial images: FitData needs {field}")
    row_of = {int(i): row for row, i in enumerate(np.asarray(clean.ids))}
    ids = np.asarray(crafted.ids).tolist()
    if missing := [i for i in ids if i not in row_of]:
        raise InputError(
            f"{field} of {owner} holds {len(missing)} images, such as id {missing[0]}, whose "
            "sources are not among the clean images; an adversarial row keeps its source's id"
        )
    return clean.take(np.array([row_of[i] for i in ids])), crafted


def repeated(batch: Batch, count: int) -> Batch:
    """The batch's rows over and over again, `count` in all."""
    return batch.take(np.arange(count) % len(batch.labels))


def mixed(one: Batch, other: Batch) -> Batch:
    """The rows of two batches of one length in turns, so that any stretch holds as many of each."""
    alternate = lambda a, b: np.stack([a, b], 1).reshape(-1, *np.shape(a)[1:])
    return jax.tree.map(alternate, one, other)


def clean_or_not(clean: Batch, crafted: Batch) -> Batch:
    """`mixed`, with label 0 for clean and 1 for adversarial rows."""
    label = lambda batch, value: batch._replace(labels=np.full(len(batch.labels), value, np.int32))
    return mixed(label(clean, 0), label(crafted, 1))


def outputs_of(classifier: Classifier, image_shape: Sequence[int]) -> Outputs:
    """Shapes and dtypes of what a classifier says about one image of shape (H, W, C)."""
    return jax.eval_shape(
        lambda images: classifier(images), jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    )


def num_classes(classifier: Classifier, image_shape: Sequence[int]) -> int:
    """How many classes a classifier tells apart."""
    return outputs_of(classifier, image_shape).logits.shape[-1]


def choose_features(
    owner: str, features: dict[str, Any], choices: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """The first of several groups of feature names that a classifier has.

    Args:
      owner: the detector's name, for messages.
      features: name -> [B, ...], arrays or their shapes.
      choices: groups of names.

    Raises:
      InputError: it has none of the groups, or a feature without height and width.
    """
    for names in choices:
        if all(name in features for name in names):
            break
    else:
        wanted = " or ".join(" + ".join(names) for names in choices)
        found = ", ".join(sorted(features)) or "none"
        raise InputError(f"{owner} wants the features {wanted}; this classifier has: {found}")
    for name in names:
        if len(features[name].shape) != 4:
            raise InputError(
                f"{owner} wants features with height, width and channels; {name} has the shape "
                f"{list(features[name].shape[1:])} an image"
            )
    return names


def in_batches(
    function: Callable[[jax.Array], PyTree], images: np.ndarray, size: int = 250
) -> PyTree:
    """Arrays [N, ...] that `function` gives for N images.

    Args:
      function: takes images [size, H, W, C], gives a pytree of arrays [size, ...].
      images: [N, H, W, C].
      size: of a batch; the last one is filled up with black images.
    """
    size, found = min(size, len(images)), []
    for start in range(0, len(images), size):
        part = np.asarray(images[start : start + size], np.float32)
        full = np.zeros((size, *part.shape[1:]), np.float32)
        full[: len(part)] = part
        found.append(jax.device_get(function(full)))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(images)], *found)
