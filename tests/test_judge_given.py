"""Verdicts on given images: what files may hold, what is refused, and figures against truth."""

import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_detectors
import toys

import advdet
from advdet import given_images, metrics, sets
from advdet.defenses import FittedDefense
from advdet.detectors import from_spec
from advdet.judge_given import judge_given
from advdet.types import Batch, InputError
from experiments import judge as command

N = 6


@pytest.fixture(scope="module")
def scene():
    """A linear classifier of 2 classes by the left and right half; images of known margins."""
    left = np.repeat(np.arange(8)[None, :, None] < 4, 8, axis=0)
    skip = np.zeros((toys.PIXELS, 2))
    skip[left.ravel(), 0] = skip[~left.ravel(), 1] = 1.0
    network = toys.classifier(
        w1=np.zeros((toys.PIXELS, toys.HIDDEN)), w2=np.zeros((toys.HIDDEN, 2)), skip=skip,
        bias=np.zeros(2), classes=2,
    )  # fmt: skip
    image = lambda a, b: np.where(left, a, b).astype(np.float32)
    clean = np.stack([image(0.8, 0.2)] * 4 + [image(0.2, 0.8)] * 2)
    labels = np.array([0, 0, 0, 1, 1, 1], np.int32)  # the fourth is taken for 0: not attacked
    adversarial = clean.copy()
    adversarial[0] = image(0.4, 0.5)  # fools
    adversarial[1] = image(0.4, 0.9)  # fools, and is brighter
    adversarial[2] = image(0.5, 0.499)  # does not
    adversarial[4] = image(0.3, 0.2999)  # fools, and not in 8 bit: a tie there
    data = advdet.Splits.from_arrays(
        test=(clean, labels), clean=(clean, labels), name="toy", class_names=("0", "1")
    )
    # Put in by hand: of equal pictures `from_arrays` keeps one.
    test = Batch(clean, labels, np.arange(N, 2 * N, dtype=np.int32))
    data = dataclasses.replace(data, test=test)
    return network, data, clean, labels, adversarial


class Brightness(advdet.Detector):
    """The mean pixel."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return jnp.mean(images, axis=(1, 2, 3))


def judged(scene, detector, thresholds, kept=()):
    network, data, clean, labels, adversarial = scene
    defense = toys.guarded(network, detector, kept)
    pair = given_images.Pair(
        data.test._replace(images=clean, labels=labels), adversarial, labels, False
    )
    return judge_given(FittedDefense(defense, thresholds), data, pair, progress=False)


def test_figures_are_those_by_hand(scene):
    limits = {"native": None, "0.01": 0.7, "0.05": 0.6, "0.5": 0.3}
    figures, arrays = judged(scene, Brightness(), limits)
    assert figures["counts"] == {"images": N, "attacked": 5, "unchanged": 2}
    np.testing.assert_array_equal(arrays["fooled"], [1, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(arrays["clean_correct"], [1, 1, 1, 0, 1, 1])
    assert figures["fooled"]["rate"] == 3 / 5
    assert figures["fooled"]["interval"] == metrics.wilson(3, 5)
    assert figures["fooled_8bit"]["rate"] == 2 / 5
    assert set(figures["points"]) == {"0.01", "0.05", "0.5"}
    at = figures["points"]["0.05"]  # flags the second alone, of brightness 0.65
    assert at["flagged"] == {"rate": 1 / 3, "n": 3, "interval": metrics.wilson(1, 3)}
    assert at["success"]["rate"] == 2 / 5 and at["success_8bit"]["rate"] == 1 / 5
    assert at["clean_flagged"]["rate"] == 0
    first = 8 * 4 * (0.4**2 + 0.3**2)
    fifth = 8 * 4 * (0.1**2 + 0.5001**2)
    assert at["mean_l2"] == pytest.approx((first**0.5 + fifth**0.5) / 2, rel=1e-6)
    assert at["median_l2"] is None  # over half fail
    assert figures["points"]["0.01"]["success"]["rate"] == 3 / 5
    assert figures["points"]["0.5"]["success"]["rate"] == 1 / 5  # the fifth, of brightness 0.3
    np.testing.assert_array_equal(arrays["success_0.05"], [1, 0, 0, 1, 1, 0])
    assert figures["correction"] is None and figures["sets"] is None


def test_a_random_score_counts_by_its_share_of_draws(scene):
    limits = {"native": None, "0.01": 2.0, "0.05": 0.5, "0.5": -1.0}
    figures, arrays = judged(scene, toys.Coin(), limits)
    share = arrays["flagged_0.05"]
    np.testing.assert_allclose(share, (arrays["score"] > 0.5).mean(0))
    assert arrays["score"].shape == (5, N) and 0 < share.mean() < 1
    rows = arrays["clean_correct"] & arrays["fooled"]
    success = figures["points"]["0.05"]["success"]["rate"]
    assert success == pytest.approx((1 - share[rows]).sum() / 5)


def test_correctors_and_sets_say_what_they_are(scene):
    figures, _ = judged(scene, toy_detectors.Fade(), {})
    assert figures["points"] == {} and figures["kind"] == "corrector"
    assert figures["correction"]["target_broken"]["n"] == 3
    text = command.table("fade", "toy", figures)
    assert "it flags nothing and changes the answer" in text and "threshold" not in text
    _, data, *_ = scene
    detector = from_spec("mmd:num_reference=4,set_size=3,num_permutations=19")
    reference = {"reference": np.asarray(data.test.images[:4]).reshape(4, -1)}
    figures, _ = judged(scene, detector, {}, reference)
    assert figures["points"] == {} and figures["sets"] is None  # no other test images for control
    assert "judges sets of images" in command.table("mmd", "toy", figures)
    one, three = (sets.told_of(np.full(count, 0.01)) for count in (1, 3))
    figures["sets"] = {"size": 3, "draws": 1, "level": 0.05, "adversarial": one, "clean": three,
                       "originals": one}  # fmt: skip
    text = command.table("mmd", "toy", figures)
    assert "1 of 1 rejected" in text and "3 of 3" in text and "too few for an interval" in text
    figures, _ = judged(scene, from_spec("none"), {})
    assert figures["mean_l2"] > 0
    assert "nothing is flagged" in command.table("none", "toy", figures)


def save(folder, name="x.npz", **arrays):
    np.savez(folder / name, **arrays)
    return folder / name


def read(path):
    return given_images.read(path, toys.SHAPE, 2)


def test_files_are_read_by_their_names_and_types(scene, tmp_path):
    _, data, clean, labels, adversarial = scene
    given = read(save(tmp_path, images=clean, labels=labels, targets=1 - labels))
    np.testing.assert_array_equal(given.images, clean)
    assert not given.was_uint8 and given.ids is None
    whole = np.round(clean * 255).astype(np.uint8)
    given = read(save(tmp_path, images=whole, labels=labels))
    assert given.was_uint8
    np.testing.assert_array_equal(given.images, whole / np.float32(255))
    mine = read(save(tmp_path, image=adversarial, label=labels, target_class=labels,
                     id=data.test.ids, flagged=labels))  # fmt: skip
    pair = given_images.pair(None, mine, data)
    assert not pair.targeted
    np.testing.assert_array_equal(pair.clean.images, clean)
    np.testing.assert_array_equal(pair.adversarial, adversarial)
    turned = given_images.pair(None, mine._replace(targets=1 - labels), data)
    assert turned.targeted
    np.testing.assert_array_equal(turned.goal, 1 - labels)


IMAGES, LABELS = np.full((3, *toys.SHAPE), 0.5, np.float32), np.zeros(3, np.int64)
NAN = np.where(np.arange(3).reshape(3, 1, 1, 1) == 1, np.nan, IMAGES)
REFUSED = {
    "no images": (dict(labels=LABELS), "has no array `images`; it holds labels"),
    "flat": (dict(images=IMAGES.reshape(3, -1)), r"shape \(3, 64\), wanted \[N, H, W, C\]"),
    "no rows": (dict(images=IMAGES[:0]), "wanted .N, H, W, C"),
    "channels first": (dict(images=IMAGES.transpose(0, 3, 1, 2)), "channels come last"),
    "another size": (dict(images=IMAGES[:, :7]), r"\(7, 8, 1\), those of the data set \(8, 8, 1\)"),
    "0 to 255": (dict(images=IMAGES * 400), "range from 200 to 200.*divide by 255"),
    "normalised": (dict(images=IMAGES * 4 - 3), "range from -1 to -1.*undo the normalisation"),
    "NaN": (dict(images=NAN), "1 of 3 images hold NaN"),
    "whole numbers": (dict(images=IMAGES.astype(int)), "images are int64; give floats"),
    "objects": (dict(images=IMAGES, labels=np.array([0, None, 1])), "Python objects"),
    "one-hot": (dict(images=IMAGES, labels=np.eye(3)), "one-hot"),
    "few labels": (dict(images=IMAGES, labels=LABELS[:2]), r"labels have the shape \(2,\) for 3"),
    "float labels": (dict(images=IMAGES, labels=LABELS / 2), "labels are float64"),
    "label too large": (dict(images=IMAGES, labels=LABELS + 2), "from 2 to 2, wanted 0 to 1"),
    "target below 0": (dict(images=IMAGES, targets=LABELS - 1), "targets go from -1 to -1"),
    "ids twice": (dict(images=IMAGES, ids=LABELS), "ids occur twice"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_file_is_refused_in_words(what, tmp_path):
    arrays, said = REFUSED[what]
    with pytest.raises(InputError, match=said) as caught:
        read(save(tmp_path, **arrays))
    assert "\n" not in str(caught.value) and "x.npz" in str(caught.value)


def test_what_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(InputError, match="is a pickle, which could run code"):
        read(path)
    np.save(tmp_path / "x.npy", IMAGES)
    with pytest.raises(InputError, match="no npz file; write it by np.savez"):
        read(tmp_path / "x.npy")
    save(tmp_path, images=IMAGES)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match="damaged"):
        read(path)
    with pytest.raises(InputError, match="cannot be read .No such file"):
        read(tmp_path / "none.npz")


def test_files_that_do_not_belong_together_are_refused(scene, tmp_path):
    _, data, *_ = scene
    make = lambda name, **arrays: read(save(tmp_path, name, images=IMAGES, **arrays))
    plain = make("plain.npz")
    labelled = make("labelled.npz", labels=LABELS, ids=np.arange(3))
    refused = (
        (labelled._replace(images=IMAGES[:2]), plain, "holds 2 images, .* 3; they must be as many"),
        (plain, plain, "has an array `labels`"),
        (labelled, labelled._replace(labels=LABELS + 1), "labels differ .* in 3 rows"),
        (labelled, labelled._replace(ids=np.array([0, 2, 1])), "ids differ .* in 2 rows"),
        (labelled, plain._replace(targets=np.array([0, 1, 1])), "1 targets are the true labels"),
        (labelled._replace(of_a_record=True), plain, "leave --clean out"),
        (None, plain, "has no array `ids`"),
        (None, labelled._replace(ids=np.array([*data.test.ids[:2], 99])), "1 ids, such as 99, "),
    )  # fmt: skip
    for clean, adversarial, said in refused:
        with pytest.raises(InputError, match=said):
            given_images.pair(clean, adversarial, data)


def test_verdicts_on_a_record_s_images_are_the_record_s(tmp_path):
    """The npz of a run of ours goes in, its own figures come out."""
    network, data = toy_detectors.splits()
    done = advdet.evaluate(
        toy_detectors.ShakyFar(noise=2.0), classifier=network, data=data, attack="ddn",
        preset="smoke", num_images=8, steps=20, lanes=toys.LANES, results_dir=tmp_path,
        threat_model="zero_knowledge", progress=False,
    )  # fmt: skip
    record, path = done.records["ddn"], done.paths["ddn"]
    from advdet.victims import defend

    victim = defend(toy_detectors.ShakyFar(noise=2.0), network, data, progress=False)
    given = given_images.read(path.with_suffix(".npz"), data.image_shape, data.num_classes)
    pair = given_images.pair(None, given, data)
    figures, arrays = judge_given(victim, data, pair, seed=0, progress=False)
    np.testing.assert_array_equal(arrays["score"], done.arrays["ddn"]["adversarial_score"])
    rates = record["attack"]["success_rate"]
    assert figures["fooled"]["rate"] == rates["misclassified"]
    for point in ("0.01", "0.05", "0.5"):
        assert figures["points"][point]["success"]["rate"] == rates[point]
    at = figures["points"][record["run"]["operating_point"]]
    assert at["success_8bit"]["rate"] == record["attack"]["success_rate_8bit"]
    assert at["mean_l2"] == record["attack"]["mean_l2"]
    assert jax.tree.structure(json.loads(json.dumps(figures))) is not None
