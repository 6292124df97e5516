"""MNIST and CIFAR-10 from their original files into TensorFlow Datasets' prepared form.

TensorFlow is not needed: the registered builder (name, version, features, hash shuffle by original
index) writes the set, and only its source of examples is replaced. Images are handed over as open
PNG files, which the builder stores as they are; handing over arrays would need TensorFlow.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import pathlib
import pickle
import struct
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import tqdm

from advdet import prepared
from advdet.types import InputError

_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_CIFAR10_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
# The checksums of the files that TFDS downloads are those in its url_checksums.
_MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    ),
    "train-labels-idx1-ubyte.gz": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
    ),
}
_CIFAR10_SHA256 = {
    "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
}
# Of the unpacked python version only MD5 sums are published.
_CIFAR10_BATCH_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
_PROBE_SECONDS = 5.0
_READ_SECONDS = 20.0

Arrays = dict[str, tuple[np.ndarray, np.ndarray]]  # split -> images [N, H, W, C], labels [N]


def prepare(
    name: str, data_dir: pathlib.Path, from_dir: pathlib.Path | None = None
) -> pathlib.Path:
    """Writes a set in prepared form, all or nothing; one that is there already is left alone.

    Args:
      name: "mnist" or "cifar10".
      data_dir: the folder of prepared sets; made if need be.
      from_dir: a folder with the original files, or None to download them.

    Returns:
      The folder of the prepared version.

    Raises:
      InputError: a file is missing, cannot be fetched, or has the wrong checksum; or the folder
        cannot be written.
    """
    if name not in _READERS:
        raise InputError(f"{name!r} cannot be prepared here; known: {', '.join(NAMES)}")
    if folder := prepared.locate(name, data_dir):
        return folder
    return _write(name, data_dir, _READERS[name](from_dir))


def _write(name: str, data_dir: pathlib.Path, arrays: Arrays) -> pathlib.Path:
    import tensorflow_datasets as tfds  # here, not above: importing it is slow

    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        if name == "cifar10":
            builder.info.features["label"].names = _CIFAR10_CLASSES
        # The stock generators unpack and read the raw files with TensorFlow.
        builder._split_generators = lambda downloads: {
            split: _examples(name, split, *arrays[split]) for split in arrays
        }
        builder.download_and_prepare(download_dir=prepared.cache_dir() / "downloads")
    except OSError as error:
        raise InputError(f"cannot write {name} to {data_dir}: {error}") from error
    return pathlib.Path(builder.data_dir)


def _examples(name: str, split: str, images: np.ndarray, labels: np.ndarray) -> Iterator:
    from PIL import Image

    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        png = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(png, "PNG")
        png.seek(0)
        record = {"image": png, "label": int(label)}
        if name == "cifar10":
            record["id"] = f"{split}_{index:05d}"
        yield index, record  # the key decides the shuffled order, as in the stock builder


def _mnist(from_dir: pathlib.Path | None) -> Arrays:
    files = {
        file: _verified(from_dir / file, sha256)
        if from_dir
        else _fetch(_MNIST_MIRRORS, file, sha256)
        for file, sha256 in _MNIST_SHA256.items()
    }
    arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images = _idx(gzip.decompress(files[f"{stem}-images-idx3-ubyte.gz"]))
        labels = _idx(gzip.decompress(files[f"{stem}-labels-idx1-ubyte.gz"]))
        arrays[split] = images[..., None], labels
    return arrays


def _idx(data: bytes) -> np.ndarray:
    """An array of bytes in the IDX format: magic 0, 0, 8, rank, then the sizes, then the values."""
    rank = data[3]
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _cifar10(from_dir: pathlib.Path | None) -> Arrays:
    binary, python = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"
    if from_dir is None:
        archive = _fetch(_CIFAR10_MIRRORS, binary, _CIFAR10_SHA256[binary])
        return _cifar10_arrays(_members(archive), ".bin")
    for file in (binary, python):
        if (from_dir / file).is_file():
            archive = _verified(from_dir / file, _CIFAR10_SHA256[file])
            return _cifar10_arrays(_members(archive), ".bin" if file == binary else "")
    nested = from_dir / "cifar-10-batches-py"
    folder = nested if nested.is_dir() else from_dir
    if not (folder / "data_batch_1").is_file():
        raise InputError(
            f"{from_dir} holds none of {binary}, {python} and the folder cifar-10-batches-py"
        )
    batches = {
        file: _verified(folder / file, md5, "md5") for file, md5 in _CIFAR10_BATCH_MD5.items()
    }
    return _cifar10_arrays(batches, "")


def _members(archive: bytes) -> dict[str, bytes]:
    """The files of a .tar.gz by their last name; nothing is written to disk."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        files = (member for member in tar if member.isfile())
        return {pathlib.PurePosixPath(m.name).name: tar.extractfile(m).read() for m in files}


def _cifar10_arrays(files: dict[str, bytes], suffix: str) -> Arrays:
    arrays = {}
    for split, stems in (
        ("train", [f"data_batch_{number}" for number in range(1, 6)]),
        ("test", ["test_batch"]),
    ):
        rows = [_cifar10_rows(files[f"{stem}{suffix}"], bool(suffix)) for stem in stems]
        pixels, labels = (np.concatenate(parts) for parts in zip(*rows))
        arrays[split] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
    return arrays


def _cifar10_rows(data: bytes, binary: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [N, 3072] (channel planes) and labels [N] of one batch file."""
    if binary:
        rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + 3072)
        return rows[:, 1:], rows[:, 0]
    batch = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    return batch[b"data"], np.asarray(batch[b"labels"], np.uint8)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain values; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str):
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            if name == "_reconstruct":
                return np._core.multiarray._reconstruct
        raise InputError(f"the batch file asks for {module}.{name}: not one of CIFAR-10's")


def _verified(path: pathlib.Path, expected: str, algorithm: str = "sha256") -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the original file {path}: {error.strerror}") from error
    found = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise InputError(f"{path} has {algorithm} {found}, expected {expected}: not the original")
    return data


def _fetch(mirrors: tuple[str, ...], file: str, sha256: str) -> bytes:
    """One original file, from an earlier download or the first mirror that has it right."""
    path = prepared.cache_dir() / "downloads" / file
    if path.is_file():
        try:
            return _verified(path, sha256)
        except InputError:
            pass  # fetched again below
    reasons = []
    for url in _reachable([mirror + file for mirror in mirrors]):
        part = path.with_name(f"{file}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _download(url, part)
            data = _verified(part, sha256)
            os.replace(part, path)
            return data
        except (OSError, InputError, http.client.HTTPException) as error:
            reasons.append(f"{url}: {error}")
        finally:
            part.unlink(missing_ok=True)
    raise InputError("; ".join(reasons) or f"no network: no answer from {', '.join(mirrors)}")


def _reachable(urls: list[str]) -> list[str]:
    """Those of the addresses that answer within a few seconds."""
    answered = set()

    def probe(url):
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
                answered.add(url)
        except (OSError, ValueError, http.client.HTTPException):
            pass

    # In threads, because looking up a host's name knows no timeout.
    threads = [threading.Thread(target=probe, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PROBE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [url for url in urls if url in answered]


def _download(url: str, path: pathlib.Path) -> None:
    with urllib.request.urlopen(url, timeout=_READ_SECONDS) as response, path.open("wb") as out:
        total = int(response.headers.get("Content-Length") or 0) or None
        with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc=path.stem) as bar:
            while chunk := response.read(1 << 18):
                out.write(chunk)
                bar.update(len(chunk))


_READERS = {"mnist": _mnist, "cifar10": _cifar10}
NAMES = tuple(_READERS)
