"""Preparing data from original files, against the files themselves; no network is used."""

import gzip
import hashlib
import io
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

from advdet import datasets, originals, prepared
from advdet.types import InputError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ADVDET_CACHE", str(tmp_path / "cache"))


def _idx_gz(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A folder with four small idx files, whose checksums are the expected ones."""
    folder = tmp_path / "original"
    folder.mkdir()
    random = np.random.RandomState(0)
    arrays, sums = {}, {}
    for split, stem, count in (("train", "train", 120), ("test", "t10k", 30)):
        images = random.randint(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        arrays[split] = images, labels
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            file = f"{stem}-{kind}-ubyte.gz"
            (folder / file).write_bytes(_idx_gz(array))
            sums[file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    monkeypatch.setattr(originals, "_MNIST_SHA256", sums)
    return folder, arrays


def _rows(images, labels):
    """A set's images and labels as a set of bytes, whatever the order."""
    return sorted(bytes([label]) + image.tobytes() for image, label in zip(images, labels))


def test_small_set_is_prepared_unaltered_and_loads(small_mnist, tmp_path):
    folder, arrays = small_mnist
    out = tmp_path / "out"
    version = originals.prepare("mnist", out, folder)
    assert version == out / "mnist" / "3.0.1"
    raw = prepared.read("mnist", version)
    for split, (images, labels) in arrays.items():
        got = raw.arrays[f"{split}_images"], raw.arrays[f"{split}_labels"]
        assert _rows(*got) == _rows(images[..., None], labels)
    splits = datasets.load("mnist", "tfds", out)
    sizes = [len(b.ids) for b in (splits.train, splits.select, splits.threshold, splits.test)]
    assert sizes == [108, 4, 8, 30]
    assert originals.prepare("mnist", out) == version  # there already: nothing is fetched


def test_full_mnist_comes_out_as_the_prepared_copy(tmp_path):
    folder = pathlib.Path(os.environ.get("TFDS_DATA_DIR", "-")).parent / "original" / "mnist"
    if not folder.is_dir():
        pytest.skip("needs the original files in $TFDS_DATA_DIR/../original/mnist")
    version = originals.prepare("mnist", tmp_path / "out", folder)
    raw = prepared.read("mnist", version)
    # The order of TFDS's own preparation, by a fact written down before this code.
    for split, stem, order in (
        ("train", "train", [16399, 1680, 47917, 17307, 27051]),
        ("test", "t10k", [9933, 5669, 163, 6686, 4747]),
    ):
        pixels = gzip.decompress((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes())[16:]
        images = np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1)
        np.testing.assert_array_equal(raw.arrays[f"{split}_images"][:5], images[order])
        assert len(raw.arrays[f"{split}_images"]) == len(images)


def test_wrong_or_missing_file_is_named(small_mnist, tmp_path):
    folder, _ = small_mnist
    file = folder / "t10k-labels-idx1-ubyte.gz"
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(b"something else")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(InputError, match=f"t10k-labels.*{found}.*{expected}"):
        originals.prepare("mnist", tmp_path / "out", folder)
    file.unlink()
    with pytest.raises(InputError, match="cannot read.*t10k-labels"):
        originals.prepare("mnist", tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="'svhn' cannot be prepared"):
        originals.prepare("svhn", tmp_path / "out")


def _tar(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """Folders with the three forms of a small CIFAR-10, and its pixels [N, 3, 32, 32]."""
    random = np.random.RandomState(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    pixels = random.randint(0, 256, (6, 4, 3072)).astype(np.uint8)
    labels = random.randint(0, 10, (6, 4)).astype(np.uint8)
    python, binary, md5 = {}, {}, {}
    for name, x, y in zip(names, pixels, labels):
        data = pickle.dumps({b"data": x, b"labels": y.tolist()})
        python[name], md5[name] = data, hashlib.md5(data).hexdigest()
        binary[name] = np.concatenate([y[:, None], x], 1).tobytes()
    folders = [tmp_path / form for form in ("python", "binary", "batches")]
    for folder in folders:
        folder.mkdir()
    py, bi = "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"
    sums = {
        py: _tar(folders[0] / py, {f"cifar-10-batches-py/{n}": d for n, d in python.items()}),
        bi: _tar(folders[1] / bi, {f"cifar-10-batches-bin/{n}.bin": d for n, d in binary.items()}),
    }
    (folders[2] / "cifar-10-batches-py").mkdir()
    for name, data in python.items():
        (folders[2] / "cifar-10-batches-py" / name).write_bytes(data)
    monkeypatch.setattr(originals, "_CIFAR10_SHA256", sums)
    monkeypatch.setattr(originals, "_CIFAR10_BATCH_MD5", md5)
    return folders, pixels.reshape(6, 4, 3, 32, 32), labels


def test_every_form_of_cifar10_gives_the_same_prepared_set(small_cifar10, tmp_path):
    folders, pixels, labels = small_cifar10
    expected = _rows(pixels[:5].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels[:5].ravel())
    for folder in folders:
        version = originals.prepare("cifar10", tmp_path / f"out-{folder.name}", folder)
        raw = prepared.read("cifar10", version)
        assert _rows(raw.arrays["train_images"], raw.arrays["train_labels"]) == expected
        assert raw.class_names[:2] == ("airplane", "automobile")
    with pytest.raises(InputError, match="holds none of"):
        originals.prepare("cifar10", tmp_path / "out", tmp_path)


def test_a_pickle_that_asks_for_anything_but_arrays_is_refused(small_cifar10, tmp_path):
    (_, _, folder), _, _ = small_cifar10
    data = pickle.dumps(os.system)
    (folder / "cifar-10-batches-py" / "test_batch").write_bytes(data)
    originals._CIFAR10_BATCH_MD5["test_batch"] = hashlib.md5(data).hexdigest()
    with pytest.raises(InputError, match="asks for .*system"):
        originals.prepare("cifar10", tmp_path / "out", folder)


def test_entry_point_says_errors_in_one_line(tmp_path):
    command = [sys.executable, "-m", "experiments.prepare_data", "--dataset=mnist"]
    done = subprocess.run(
        [*command, f"--from_dir={tmp_path}", f"--data_dir={tmp_path / 'out'}"],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read the original file")
    assert done.stderr.count("\n") == 1


class _Response(io.BytesIO):
    headers = {}


def test_download_takes_the_first_mirror_that_has_it_right(small_mnist, tmp_path, monkeypatch):
    folder, _ = small_mnist
    asked = []

    def urlopen(request, timeout):
        assert timeout <= 20
        if isinstance(request, urllib.request.Request):
            return _Response()  # the question whether it answers
        asked.append(request)
        wrong = request.startswith(originals._MNIST_MIRRORS[0])
        file = folder / request.rsplit("/", 1)[1]
        return _Response(b"a login page" if wrong else file.read_bytes())

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    originals.prepare("mnist", tmp_path / "out")
    assert len(asked) == 8
    assert datasets.load("mnist", "tfds", tmp_path / "out").source == "tfds"
    assert not list((tmp_path / "cache" / "downloads").glob("*.part"))
    # Kept, so that a second preparation needs no network.
    originals.prepare("mnist", tmp_path / "out2")
    assert len(asked) == 8


def test_auto_without_a_network_falls_back_loudly(tmp_path, monkeypatch, capsys):
    timeouts = []

    def urlopen(request, timeout):
        timeouts.append(timeout)
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    splits = datasets.load("mnist", "auto", tmp_path / "none")
    assert (splits.name, splits.source) == ("mnist_5k", "embedded")
    said = capsys.readouterr().err
    assert "mnist_5k" in said and "experiments.prepare_data --dataset=mnist" in said
    assert timeouts and max(timeouts) < 15
    with pytest.raises(InputError, match="no prepared cifar10.*no network.*prepare_data"):
        datasets.load("cifar10", "auto", tmp_path / "none")


def test_a_hanging_name_lookup_counts_as_no_network(tmp_path, monkeypatch):
    never = threading.Event()

    def urlopen(request, timeout):
        never.wait(60)
        raise urllib.error.URLError("no such name")

    assert originals._PROBE_SECONDS < 15
    monkeypatch.setattr(originals, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    try:
        assert datasets.load("mnist", "auto", tmp_path / "none").name == "mnist_5k"
    finally:
        never.set()
