"""A data set in its splits: disjointness by image id, halves for two parties, hashes.

Every permutation comes from numpy's legacy `RandomState`, whose stream is frozen, so that splits
are the same in every version.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import sys
import zipfile
from pathlib import Path

import numpy as np

from advdet import copies, paths
from advdet.box import in_box
from advdet.types import Batch, InputError

_SPLITS = ("train", "select", "threshold", "test")
_PARTS = ("full", "defender", "attacker")
_HALVES_SEED, _ARRAYS_SEED = 2, 3
_MOST_COPIES = 0.01  # of a split; real sets hold an image twice now and then
_BOX_HINT = (
    "they must lie in [0, 1] (divide by the largest value that a pixel can have, undo any "
    "normalisation)"
)

Arrays = tuple[np.ndarray, np.ndarray] | str | Path


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """A data set, split for training, choosing, setting thresholds and testing.

    Attributes:
      name: the data set; `mnist_5k` for the embedded digits.
      source: "tfds", "embedded" or "arrays".
      class_names: one for each class.
      train: for training.
      select: clean validation images for hyperparameters and early stopping.
      threshold: clean validation images for thresholds, seen by nothing else.
      test: in the set's own order.
      part: "full", or whose half of train, select and threshold this is.
    """

    name: str
    source: str
    class_names: tuple[str, ...]
    train: Batch
    select: Batch
    threshold: Batch
    test: Batch
    part: str = "full"

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return tuple(self.test.images.shape[1:])

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Split -> sha256 over its ids, labels and images."""
        return {split: _hash(getattr(self, split)) for split in _SPLITS}

    @functools.cached_property
    def copies(self) -> list[copies.Copies]:
        """Images that the parts given (train, clean, test) share, or hold more than once."""
        clean = [self.select.images, self.threshold.images]
        parts = {"train": [self.train.images], "clean": clean, "test": [self.test.images]}
        return copies.between(parts)

    @property
    def data_hash(self) -> str:
        """One sha256 over all splits."""
        text = ",".join(f"{split}:{digest}" for split, digest in self.hashes.items())
        return hashlib.sha256(text.encode()).hexdigest()

    def half(self, which: str) -> Splits:
        """The defender's or the attacker's half of train, select and threshold.

        The halves are disjoint and balanced over classes to within one image; test is the same.

        Args:
          which: "full" (this object itself), "defender" or "attacker".
        """
        if which not in _PARTS:
            raise ValueError(f"half must be one of {', '.join(_PARTS)}, not {which!r}")
        if which == self.part or which == "full":
            if self.part != which:
                raise ValueError(f"the {self.part}'s half cannot become the full set again")
            return self
        if self.part != "full":
            raise ValueError(f"the {self.part}'s half has no {which}'s half")
        halves = {
            split: getattr(self, split).take(_half_rows(getattr(self, split).labels, which))
            for split in ("train", "select", "threshold")
        }
        return dataclasses.replace(self, part=which, **halves)

    @staticmethod
    def from_arrays(
        *,
        test: Arrays,
        clean: Arrays | None = None,
        train: Arrays | None = None,
        name: str = "arrays",
        class_names: tuple[str, ...] | None = None,
        num_classes: int | None = None,
    ) -> Splits:
        """Wraps arrays as a data set.

        Args:
          test: images [N, H, W, C] (floats in [0, 1], or uint8 0 ... 255) and labels [N], or the
            path of an .npz that holds them as `x_test` and `y_test`, or `x` and `y`. Copies of
            earlier images are left out, which is said on stderr: each would count again. Ids stay
            those of the rows given.
          clean: the same (`x_clean`, `y_clean`), held out from training: thresholds are set on
            them. With `train`, 2/5 become `select` and 3/5 `threshold`; else all are `threshold`.
          train: the same (`x_train`, `y_train`), or None where nothing is to be trained or fitted.
          name: what results are filed under.
          class_names: one for each class (default: 0, 1, ...).
          num_classes: how many there are (default: up to the largest label).

        Raises:
          InputError: an array cannot be used; the message says which and why.
        """
        if not re.fullmatch(r"[\w.-]+", name):
            raise InputError(f"name {name!r} must be one word: results are filed under it")
        if clean is None:
            raise InputError(
                "clean is missing: (images, labels) that classifier and detector were not trained "
                "on and that are not attacked, to set thresholds on"
            )
        given = {"train": train, "clean": clean, "test": test}
        checked = {what: _check(what, *_pair(what, xy)) for what, xy in given.items()
                   if xy is not None}  # fmt: skip
        shapes = {what: images.shape[1:] for what, (images, _) in checked.items()}
        if len(set(shapes.values())) > 1:
            raise InputError(f"images differ in shape: {shapes}")
        largest = max(int(labels.max()) for _, labels in checked.values())
        if class_names is None:
            class_names = tuple(str(label) for label in range(num_classes or largest + 1))
        if largest >= len(class_names) or num_classes not in (None, len(class_names)):
            raise InputError(f"label {largest} does not fit the {len(class_names)} classes given")
        if len(checked["clean"][1]) < 2:
            raise InputError("clean holds 1 image; it needs 2 or more, to be split in two")

        batches, start = {}, 0
        for what, (images, labels) in checked.items():
            ids = np.arange(start, start + len(labels), dtype=np.int32)
            batches[what], start = Batch(images, labels, ids), start + len(labels)
        batches["test"] = _each_once(batches["test"])
        if train is None:
            batches["train"] = batches["test"].take(slice(0, 0))
        rows = permutation(len(batches["clean"].ids), _ARRAYS_SEED)
        cut = 0 if train is None else max(1, 2 * len(rows) // 5)
        splits = Splits(
            name,
            "arrays",
            tuple(class_names),
            batches["train"],
            batches["clean"].take(rows[:cut]),
            batches["clean"].take(rows[cut:]),
            batches["test"],
        )
        assert_disjoint(splits)
        return splits


def _each_once(test: Batch) -> Batch:
    """Test images without those that are copies of earlier ones, which is said."""
    rows = copies.first_of_each(test.images)
    left_out = np.setdiff1d(np.arange(len(test.labels)), rows)
    if not len(left_out):
        return test
    print(
        f"warning: {len(left_out)} of the {len(test.labels)} test images are copies of earlier "
        f"ones at 8 bits (the first is row {left_out[0]}) and are left out: each counts once; "
        "targets given as an array belong to the rows that stay",
        file=sys.stderr,
    )
    return test.take(rows)


def assert_disjoint(splits: Splits) -> None:
    """Raises AssertionError unless all splits, and the halves of each, share no image id."""
    ids = {split: getattr(splits, split).ids for split in _SPLITS}
    if splits.part == "full":
        for split in ("train", "select", "threshold"):
            batch = getattr(splits, split)
            for which in ("defender", "attacker"):
                ids[f"{split} ({which})"] = batch.ids[_half_rows(batch.labels, which)]
    for one, other in itertools.combinations(ids, 2):
        is_part = other.startswith(f"{one} (")
        if not is_part and np.intersect1d(ids[one], ids[other]).size:
            raise AssertionError(f"{splits.name}: {one} and {other} share images")
    for split, values in ids.items():
        if len(np.unique(values)) != len(values):
            raise AssertionError(f"{splits.name}: {split} holds an image twice")


def check(splits: Splits) -> None:
    """Refuses data put together by hand that cannot be used.

    Raises:
      InputError: images, labels or ids of a split are not as they must be, or a split of arrays
        shares images with another.
    """
    for split in _SPLITS:
        batch = getattr(splits, split)
        ids = np.asarray(batch.ids)
        if ids.shape != (len(batch.images),) or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(
                f"{split} has {len(batch.images)} images but ids of shape {ids.shape} and type "
                f"{ids.dtype}; each image needs a whole number of its own"
            )
        if not len(ids) and split in ("train", "select"):
            continue
        if np.asarray(batch.images).dtype != np.float32:
            raise InputError(
                f"{split} images are {np.asarray(batch.images).dtype}; in a Splits they must be "
                "float32 in [0, 1] (Splits.from_arrays makes them so)"
            )
        if np.ndim(batch.labels) != 1:
            raise InputError(
                f"{split} labels have shape {np.shape(batch.labels)}; in a Splits they must be [N] "
                "(Splits.from_arrays makes them so)"
            )
        images, labels = _check(split, batch.images, batch.labels)
        if not np.array_equal(images, batch.images):
            raise InputError(
                f"{split} images range from {batch.images.min():.9g} to "
                f"{batch.images.max():.9g}, beyond [0, 1] by rounding: clip them "
                "(Splits.from_arrays does)"
            )
        if labels.max() >= splits.num_classes:
            raise InputError(
                f"{split} has the label {labels.max()}, and there are {splits.num_classes} classes"
            )
    try:
        assert_disjoint(splits)
    except AssertionError as error:
        raise InputError(f"ids are wrong: {error}; each image needs one of its own") from None
    if splits.source == "arrays":
        _refuse_copies(splits)


def _refuse_copies(splits: Splits) -> None:
    """Thresholds and figures are worth nothing on images that a detector has learned from."""
    for found in splits.copies:
        if found.among == found.part != "test" or found.count <= _MOST_COPIES * found.total:
            continue
        if found.among == found.part:
            raise InputError(
                f"{found.count} of the {found.total} test images are copies of earlier ones, and "
                "each would count again: leave them out (Splits.from_arrays does)"
            )
        raise InputError(f"{found}; they must be others")


def permutation(count: int, seed: int) -> np.ndarray:
    """The fixed order [count] of 0 ... count - 1 that belongs to a seed."""
    return np.random.RandomState(seed).permutation(count)


def _half_rows(labels: np.ndarray, which: str) -> np.ndarray:
    """The rows [N / 2] of one half, mixed: every other image of each class in turn."""
    rows = permutation(len(labels), _HALVES_SEED)
    by_class = rows[np.argsort(labels[rows], kind="stable")]
    half = by_class[0::2] if which == "defender" else by_class[1::2]
    return rows[np.isin(rows, half)]


def _hash(batch: Batch) -> str:
    """sha256 of a batch; images that are exact multiples of 1/255 are hashed as uint8."""
    digest = hashlib.sha256(f"{batch.images.shape}".encode())
    digest.update(np.ascontiguousarray(batch.ids, np.int32))
    digest.update(np.ascontiguousarray(batch.labels, np.int32))
    for start in range(0, len(batch.ids), 1000):  # in pieces, to need little memory
        images = np.ascontiguousarray(batch.images[start : start + 1000], np.float32)
        whole = np.rint(images * 255).astype(np.uint8)
        exact = np.array_equal(whole.astype(np.float32) / np.float32(255), images)
        digest.update(whole if exact else images)
    return digest.hexdigest()


def _pair(what: str, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels as given, or from the file named."""
    if not isinstance(arrays, (str, Path)):
        if not isinstance(arrays, (tuple, list)) or len(arrays) != 2:
            raise InputError(f"{what} must be (images, labels), or the path of an .npz file")
        return tuple(arrays)
    try:
        with np.load(paths.given(arrays), allow_pickle=False) as stored:
            for names in ((f"x_{what}", f"y_{what}"), ("x", "y")):
                if set(names) <= set(stored.files):
                    return stored[names[0]], stored[names[1]]
            found = ", ".join(stored.files) or "nothing"
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise InputError(f"{what}: {arrays} cannot be read as an .npz file ({error})") from None
    raise InputError(f"{what}: {arrays} holds {found}; wanted x_{what} and y_{what}, or x and y")


def _check(what: str, images, labels) -> tuple[np.ndarray, np.ndarray]:
    """Images as float32 in [0, 1] and labels as int32, or InputError."""
    images, labels = np.ascontiguousarray(images), np.asarray(labels)
    if images.ndim != 4 or not images.size:
        hint = " (grey ones lack their last axis: images[..., None])" if images.ndim == 3 else ""
        raise InputError(
            f"{what} images have shape {images.shape}; they must be [N, H, W, C]{hint}"
        )
    if images.shape[1] in (1, 3) and images.shape[3] > 4:
        raise InputError(f"{what} images have shape {images.shape}: channels must come last")
    if labels.ndim == 2 and labels.shape[1] == 1:  # as the Keras data sets have them
        labels = labels[:, 0]
    if labels.ndim == 2:
        raise InputError(
            f"{what} labels have shape {labels.shape}, as one-hot labels have; give class numbers "
            "(labels.argmax(1))"
        )
    if labels.shape != images.shape[:1]:
        raise InputError(f"{what} has {len(images)} images but labels of shape {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"{what} labels are {labels.dtype}; they must be whole class numbers")
    if labels.min() < 0:
        raise InputError(f"{what} labels go down to {labels.min()}; classes count from 0")
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255), labels.astype(np.int32)
    if not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"{what} images are {images.dtype}; give floats in [0, 1] or uint8")
    if not np.isfinite(images).all():
        raise InputError(f"{what} images hold NaN or infinite values")
    return in_box(images, f"{what} images", _BOX_HINT), labels.astype(np.int32)
