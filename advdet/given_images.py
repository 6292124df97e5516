"""Images that someone else made, read from npz files and checked.

    images   [N, H, W, C] floats in [0, 1], or uint8
    labels   [N] true classes
    targets  [N] wanted classes; where there are none, any wrong class is a success
    ids      [N] of the source images in the data set's test split

The npz of a record of ours (`image`, `label`, `target_class`, `id`) is read, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from advdet import paths
from advdet.box import in_box
from advdet.splits import Splits
from advdet.types import Batch, InputError

_NAMES = {"images": "image", "labels": "label", "targets": "target_class", "ids": "id"}


class GivenImages(NamedTuple):
    """What a file holds; None where it does not.

    Attributes:
      path: of the file.
      images: [N, H, W, C] float32 in [0, 1].
      labels, targets, ids: [N] int32.
      was_uint8: whether the images were stored as 0 ... 255.
      of_a_record: whether it is the npz of a record, whose images are adversarial.
    """

    path: Path
    images: np.ndarray
    labels: np.ndarray | None
    targets: np.ndarray | None
    ids: np.ndarray | None
    was_uint8: bool
    of_a_record: bool


class Pair(NamedTuple):
    """Clean images and what an attacker made of them, row by row.

    Attributes:
      clean: [N] with true labels and ids.
      adversarial: [N, H, W, C].
      goal: [N] wanted classes, or the true ones where not targeted.
      targeted: which of the two.
    """

    clean: Batch
    adversarial: np.ndarray
    goal: np.ndarray
    targeted: bool


def read(path: str | Path, image_shape: tuple[int, int, int], num_classes: int) -> GivenImages:
    """Reads a file of images.

    Args:
      path: an npz.
      image_shape: (H, W, C) of the data set.
      num_classes: of the data set.

    Raises:
      InputError: the file, or an array in it, cannot be used; the message says why.
    """
    path = paths.given(path)
    arrays = _arrays(path)
    record = "images" not in arrays and {"image", "label", "id"} <= set(arrays)
    get = lambda name: arrays.get(_NAMES[name] if record else name)
    if get("images") is None:
        held = ", ".join(sorted(arrays)) or "nothing"
        raise InputError(f"{path} has no array `images`; it holds {held}")
    images = _images(path, get("images"), image_shape)
    count = len(images)
    classes = {name: _numbers(path, name, get(name), count, num_classes)
               for name in ("labels", "targets")}  # fmt: skip
    ids = _numbers(path, "ids", get("ids"), count, None)
    if ids is not None and len(np.unique(ids)) < count:
        raise InputError(f"{path}: some ids occur twice; each image has one of its own")
    return GivenImages(path, images, **classes, ids=ids, was_uint8=get("images").dtype == np.uint8,
                       of_a_record=record)  # fmt: skip


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            start = file.read(2)
            if start != b"PK":
                what = "is a pickle, which could run code, and" if start[:1] == b"\x80" else ""
                raise InputError(
                    f"{path} {what} is no npz file; write it by np.savez".replace("  ", " ")
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None
    except InputError:
        raise
    except Exception as error:  # a damaged zip can raise anything
        if "allow_pickle" in str(error):
            raise InputError(
                f"{path} holds Python objects, which are not loaded since that can run code; "
                "save plain arrays of numbers"
            ) from None
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is damaged ({said})") from None


def _images(path: Path, images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    if images.ndim != 4 or not len(images):
        raise InputError(f"{path}: images have the shape {images.shape}, wanted [N, H, W, C]")
    if images.shape[1:] != tuple(shape):
        first = images.shape[1:] == (shape[2], *shape[:2])
        hint = "; channels come last here" if first else ""
        raise InputError(
            f"{path}: images are {images.shape[1:]}, those of the data set {tuple(shape)}{hint}"
        )
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    if not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"{path}: images are {images.dtype}; give floats in [0, 1], or uint8")
    if bad := int((~np.isfinite(images)).any(axis=(1, 2, 3)).sum()):
        raise InputError(f"{path}: {bad} of {len(images)} images hold NaN or infinite values")
    hint = "undo the normalisation, or clip"
    if images.min() >= 0 and 1.5 < images.max() <= 255:
        hint = "divide by 255, or store them as uint8"
    return in_box(images, f"{path}: images", f"wanted [0, 1]: {hint}")


def _numbers(path: Path, name: str, array, count: int, num_classes: int | None):
    """[N] int32, or None where the file has none."""
    if array is None:
        return None
    if array.shape != (count,):
        hint = " (one-hot? give labels.argmax(1))" if array.ndim == 2 else ""
        raise InputError(f"{path}: {name} have the shape {array.shape} for {count} images{hint}")
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{path}: {name} are {array.dtype}, wanted whole numbers")
    if num_classes is not None and (array.min() < 0 or array.max() >= num_classes):
        raise InputError(
            f"{path}: {name} go from {array.min()} to {array.max()}, wanted 0 to {num_classes - 1}"
        )
    return array.astype(np.int32)


def pair(clean: GivenImages | None, adversarial: GivenImages, splits: Splits) -> Pair:
    """Puts clean and adversarial images together.

    Args:
      clean: None takes them from the test split, by the adversarial images' ids.
      adversarial: labels and targets that it lacks are taken from `clean`.
      splits: the data set.

    Raises:
      InputError: they do not belong together, or something is missing.
    """
    path, count = adversarial.path, len(adversarial.images)
    if clean is None:
        source = _from_test(adversarial, splits.test)
    else:
        if clean.of_a_record:
            raise InputError(
                f"{clean.path} is the npz of a record, whose images are adversarial: leave "
                "--clean out, and the clean ones are taken from the data set"
            )
        if len(clean.images) != count:
            raise InputError(
                f"{clean.path} holds {len(clean.images)} images, {path} {count}; they must be as "
                "many, row by row"
            )
        labels = clean.labels if clean.labels is not None else adversarial.labels
        if labels is None:
            raise InputError(f"neither {clean.path} nor {path} has an array `labels`")
        ids = clean.ids if clean.ids is not None else adversarial.ids
        ids = np.arange(count, dtype=np.int32) if ids is None else ids
        source = Batch(clean.images, labels, ids)
    for name, ours in (("labels", source.labels), ("ids", source.ids)):
        theirs = getattr(adversarial, name)
        if theirs is not None and (other := theirs != ours).any():
            raise InputError(
                f"{path}: {name} differ from those of the clean images in {other.sum()} rows (the "
                f"first is {np.argmax(other)})"
            )
    goal = adversarial.targets
    if goal is None and clean is not None:
        goal = clean.targets
    if goal is None or (goal == source.labels).all():  # as a record of an untargeted run has it
        return Pair(source, adversarial.images, np.asarray(source.labels), False)
    if (same := goal == source.labels).any():
        raise InputError(
            f"{path}: {same.sum()} targets are the true labels; nothing is wanted there"
        )
    return Pair(source, adversarial.images, goal, True)


def _from_test(adversarial: GivenImages, test: Batch) -> Batch:
    if adversarial.ids is None:
        raise InputError(
            f"{adversarial.path} has no array `ids`, by which the clean images could be found in "
            "the data set; give them by --clean"
        )
    row_of = {int(i): row for row, i in enumerate(np.asarray(test.ids))}
    if missing := [int(i) for i in adversarial.ids if int(i) not in row_of]:
        raise InputError(
            f"{adversarial.path}: {len(missing)} ids, such as {missing[0]}, are not of the data "
            "set's test images"
        )
    return test.take(np.array([row_of[int(i)] for i in adversarial.ids]))
