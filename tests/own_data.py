"""Real digits of 8 x 8 pixels, and small classifiers of them: what a stranger would bring."""

from __future__ import annotations

import functools

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import advdet

CLASSES, SHAPE = 10, (8, 8, 1)
_TRAIN, _CLEAN, _TEST = slice(0, 1200), slice(1200, 1600), slice(1600, None)


@functools.cache
def arrays() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """train, clean and test: images [N, 8, 8, 1] in [0, 1] and labels [N]."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, *SHAPE)
    parts = {"train": _TRAIN, "clean": _CLEAN, "test": _TEST}
    return {name: (images[rows], labels[rows]) for name, rows in parts.items()}


@functools.cache
def splits(with_train: bool = True) -> advdet.Splits:
    """The digits as a data set."""
    given = arrays()
    return advdet.Splits.from_arrays(
        test=given["test"], clean=given["clean"], train=given["train"] if with_train else None,
        name="digits8",
    )  # fmt: skip


@functools.cache
def linear(half: str = "full") -> tuple[np.ndarray, np.ndarray]:
    """Weights [64, 10] and bias [10] of a linear classifier trained on a half of the images."""
    train = splits().half(half).train
    found = LogisticRegression(C=1.0, max_iter=200).fit(
        train.images.reshape(len(train.labels), -1), train.labels
    )
    return found.coef_.T.astype(np.float32), found.intercept_.astype(np.float32)


@functools.cache
def jax_classifier(half: str = "full") -> advdet.Classifier:
    """The linear classifier as a plain JAX function."""
    weights, bias = linear(half)
    return advdet.Classifier.from_function(lambda x: x.reshape(len(x), -1) @ weights + bias)
