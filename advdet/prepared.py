"""Image sets as TensorFlow Datasets prepares them, read without TensorFlow and kept as arrays.

Decoding PNG files takes seconds at every start and importing TFDS half a second more, so a set is
decoded once and kept in the cache folder as uint8 arrays, whose hashes are checked at each load.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence

import numpy as np
import tqdm

from advdet import paths
from advdet.types import InputError

_CACHE_FORMAT = 1
_CHUNK = 1000
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names for so many channels
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


@dataclasses.dataclass(frozen=True)
class RawSet:
    """A whole set in its own order.

    Attributes:
      class_names: one name for each class.
      arrays: "<split>_images" -> [N, H, W, C] uint8 and "<split>_labels" -> [N] int32.
    """

    class_names: tuple[str, ...]
    arrays: dict[str, np.ndarray]


def cache_dir() -> pathlib.Path:
    """The folder of decoded data and compiled programs; made by whoever writes to it first.

    Returns:
      $ADVDET_CACHE, else $XDG_CACHE_HOME/advdet, else ~/.cache/advdet.
    """
    if path := os.environ.get("ADVDET_CACHE"):
        return paths.given(path)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return paths.given(base) / "advdet"


def default_data_dir() -> pathlib.Path:
    """$TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    return paths.given(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def found(data_dir: pathlib.Path) -> list[str]:
    """Names (`set` or `set/config`) of the complete prepared sets in a folder, sorted."""
    infos = [*data_dir.glob("*/*/dataset_info.json"), *data_dir.glob("*/*/*/dataset_info.json")]
    folders = [info.parent for info in infos if _VERSION.fullmatch(info.parent.name)]
    return sorted({folder.parent.relative_to(data_dir).as_posix() for folder in folders})


def locate(name: str, data_dir: pathlib.Path) -> pathlib.Path | None:
    """The folder of the newest prepared version of a set, or None where there is none.

    Args:
      name: `set` or `set/config`.
      data_dir: the folder of all prepared sets.

    Raises:
      InputError: there is only a half-written set, or one that needs a configuration's name.
    """
    root = data_dir / name
    if not _NAME.fullmatch(name) or not root.is_dir():
        return None
    folders = [path for path in root.iterdir() if path.is_dir()]
    versions = [path for path in folders if _VERSION.fullmatch(path.name)]
    complete = [path for path in versions if (path / "dataset_info.json").is_file()]
    if complete:
        return max(complete, key=lambda path: tuple(map(int, path.name.split("."))))
    broken = versions + [path for path in folders if "incomplete" in path.name]
    if broken:
        raise InputError(
            f"{broken[0]} is half-written (no dataset_info.json in place: preparing it was cut "
            f"short, or still runs); delete it, then {how_to_prepare(name, data_dir)}"
        )
    configs = [path for path in found(data_dir) if path.startswith(f"{name}/")]
    if configs:
        raise InputError(f"{name} comes in configurations; name one of them: {', '.join(configs)}")
    return None


def how_to_prepare(name: str, data_dir: pathlib.Path, more: str = "") -> str:
    """What a user can do to get a set in prepared form, as the end of a sentence."""
    if name in ("mnist", "cifar10"):
        return (
            f"run `python -m experiments.prepare_data --dataset={name}{more} --data_dir={data_dir}`"
        )
    return f"prepare {name} with TensorFlow Datasets and file_format='array_record'"


def read(name: str, folder: pathlib.Path) -> RawSet:
    """A prepared set as arrays, from the cache where it is there.

    Args:
      name: for messages and the cache folder.
      folder: a version's folder, as `locate` gives it.

    Raises:
      InputError: the set is damaged, or is not one of images of one size with one class each.
    """
    identity = hashlib.sha256(str(folder.resolve()).encode())
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        status = path.stat()
        identity.update(f"|{path.name}|{status.st_size}|{status.st_mtime_ns}".encode())
    key = f"{name.replace('/', '-')}-{folder.name}-{identity.hexdigest()[:16]}"
    return cached(key, lambda: _decode(name, folder))


def cached(key: str, build: Callable[[], RawSet]) -> RawSet:
    """What `build()` returns, kept in the cache folder under `key`.

    A damaged entry is said in one line on stderr and built anew; a cache that cannot be written
    costs time, nothing else.
    """
    folder = cache_dir() / "datasets" / key
    if folder.is_dir():
        try:
            return _read_cache(folder)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            print(f"advdet: rebuilding {folder}, which is damaged: {error}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
    raw = build()
    try:
        _write_cache(folder, raw)
    except OSError as error:
        print(f"advdet: decoded images are not kept: {error}", file=sys.stderr)
    return raw


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _read_cache(folder: pathlib.Path) -> RawSet:
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["format"] != _CACHE_FORMAT:
        raise ValueError(f"format {manifest['format']}, not {_CACHE_FORMAT}")
    arrays = {}
    for key, expected in manifest["sha256"].items():
        arrays[key] = np.load(folder / f"{key}.npy", allow_pickle=False)
        if _digest(arrays[key]) != expected:
            raise ValueError(f"the contents of {key}.npy have changed")
    return RawSet(tuple(manifest["class_names"]), arrays)


def _write_cache(folder: pathlib.Path, raw: RawSet) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place, then renamed: another process never sees half of it.
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="incomplete-", dir=folder.parent))
    try:
        for key, array in raw.arrays.items():
            np.save(temporary / f"{key}.npy", array)
        manifest = {
            "format": _CACHE_FORMAT,
            "class_names": list(raw.class_names),
            "sha256": {key: _digest(array) for key, array in raw.arrays.items()},
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        try:
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same contents
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _decode(name: str, folder: pathlib.Path) -> RawSet:
    import tensorflow_datasets as tfds  # here, not above: half a second that the cache saves

    remedy = how_to_prepare(name, folder.parents[name.count("/") + 1])

    def damaged(what) -> InputError:
        return InputError(f"{folder} is damaged: {what}; delete it, then {remedy}")

    try:
        builder = tfds.builder_from_directory(folder)
        info = builder.info
        file_format = info.file_format.value if info.file_format else "unknown"
    except Exception as error:  # whatever TFDS makes of a broken description
        raise damaged(_one_line(error)) from error
    if file_format != "array_record":
        raise InputError(
            f"{folder} is stored as {file_format}, which needs TensorFlow to be read; {remedy}"
        )
    image_key, label_key = _image_and_label(name, info.features, info.supervised_keys, tfds)
    shape = info.features[image_key].shape
    class_names = tuple(info.features[label_key].names)
    splits = {"train": "train", "test": "test" if "test" in info.splits else "validation"}
    missing = sorted(set(splits.values()) - set(info.splits))
    if missing:
        raise InputError(
            f"{name} has the splits {', '.join(info.splits)} and lacks {', '.join(missing)}; "
            "a set needs train and one of test and validation"
        )

    arrays = {}
    for split, stored in splits.items():
        count = info.splits[stored].num_examples
        try:
            # The description says how many records there should be, the files how many there are.
            actual = _count_records(info.splits[stored].filepaths)
            if actual != count:
                raise damaged(f"{stored} holds {actual} records, dataset_info.json says {count}")
            if not count:
                raise damaged(f"{stored} is empty")
            source = builder.as_data_source(
                stored, decoders={image_key: tfds.decode.SkipDecoding()}
            )
            images, labels = np.empty((count, *shape), np.uint8), np.empty(count, np.int64)
            for start in tqdm.trange(0, count, _CHUNK, desc=f"{name} {split}", disable=None):
                rows = range(start, min(start + _CHUNK, count))
                for row, record in zip(rows, source.__getitems__(list(rows)), strict=True):
                    images[row] = _pixels(record[image_key], shape)
                    labels[row] = record[label_key]
        except InputError:
            raise
        except Exception as error:  # array_record, protobuf and Pillow each raise their own
            raise damaged(f"{stored}: {_one_line(error)}") from error
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise InputError(
                f"{folder}: {stored} has labels {labels.min()} ... {labels.max()}, which do not "
                f"fit its {len(class_names)} classes (is it an unlabelled test set?)"
            )
        arrays |= {f"{split}_images": images, f"{split}_labels": labels.astype(np.int32)}
    return RawSet(class_names, arrays)


def _image_and_label(name, features, supervised, tfds) -> tuple[str, str]:
    """The names of the image and of the class among a set's features."""
    kinds = (tfds.features.Image, tfds.features.ClassLabel)
    chosen = []
    for kind, what, preferred in zip(kinds, ("image", "class label"), supervised or (0, 0)):
        keys = [key for key, feature in features.items() if isinstance(feature, kind)]
        if preferred not in keys and len(keys) != 1:
            raise InputError(f"{name} has {len(keys)} {what} features; advdet needs exactly one")
        chosen.append(preferred if preferred in keys else keys[0])
    image = features[chosen[0]]
    if None in image.shape or len(image.shape) != 3:
        raise InputError(f"the images of {name} have no fixed size (shape {image.shape})")
    if np.dtype(image.np_dtype) != np.uint8:
        raise InputError(f"the images of {name} are {np.dtype(image.np_dtype)}; advdet reads uint8")
    return chosen[0], chosen[1]


def _count_records(paths: Sequence[os.PathLike]) -> int:
    from array_record.python.array_record_module import ArrayRecordReader

    total = 0
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{os.path.basename(path)} is missing")
        # An unreadable file counts as 0 records, and only then closing it raises.
        reader = ArrayRecordReader(os.fspath(path))
        if count := reader.num_records():
            reader.close()
        total += count
    return total


def _pixels(encoded: bytes, shape: tuple[int, ...]) -> np.ndarray:
    from PIL import Image

    opened = Image.open(io.BytesIO(encoded))
    if opened.mode.startswith("I;16"):  # a grey PNG of 16 bits, of which TFDS keeps the high eight
        opened = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    # Sets mix grey, palette and RGBA files under one number of channels.
    image = np.asarray(opened.convert(_MODES[shape[-1]]) if shape[-1] in _MODES else opened)
    image = image[..., None] if image.ndim == 2 else image
    if image.shape != shape:
        raise ValueError(f"an image of shape {image.shape} where {shape} was announced")
    return image


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
