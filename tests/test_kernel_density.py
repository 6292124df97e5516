"""Kernel density as a detector: the right class, features and thresholds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import densities, statistics
from advdet.detectors.kernel_density import KernelDensity, features
from advdet.types import Batch, Classifier, FitData, InputError, Outputs

NET = toys.network()


def batch(seed, count, first_id=0):
    images = toys.digits(seed, count)
    ids = np.arange(first_id, first_id + count, dtype=np.int32)
    return Batch(images, ids % np.int32(10), ids)


DATA = FitData(batch(1, 120), batch(2, 60, 1000))
SCORE, CLASS_SCORE = jax.jit(KernelDensity().score), jax.jit(KernelDensity().class_score)
FITTED = {"sigma": np.float32(2.0)}
FITTED |= {"centres": features(NET, DATA.train.images, "penultimate"), "labels": DATA.train.labels}


def hidden64(images):
    """The toy's hidden layer in float64."""
    flat = np.asarray(images, np.float64).reshape(len(images), -1) - 0.5
    return np.tanh(flat @ np.asarray(NET.variables["w1"], np.float64))


def density64(image, label, sigma):
    own = hidden64(DATA.train.images)[DATA.train.labels == label]
    squares = np.square(hidden64(image[None]) - own).sum(1)
    return np.log(np.mean(np.exp(-squares / sigma)))


def test_features_do_not_depend_on_batches():
    images = batch(3, 11).images
    found = features(NET, images, "penultimate", batch_size=4)
    np.testing.assert_allclose(found, hidden64(images), atol=1e-6)
    np.testing.assert_allclose(found, features(NET, images, "penultimate"), atol=1e-6)


def test_the_score_is_the_log_density_of_the_predicted_class():
    images = batch(3, 12).images
    found = SCORE(jax.random.key(0), FITTED, NET, images)
    labels = toys.predicted(NET, images)
    wanted = [-density64(image, label, 2.0) for image, label in zip(images, labels)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert len(np.unique(labels)) > 2


def test_the_score_of_a_class_is_that_of_the_class_asked_for():
    images, labels = batch(3, 12).images, np.int32(np.arange(12) * 7 % 10)
    score = lambda label: CLASS_SCORE(FITTED, NET, images, label)
    wanted = [-density64(image, label, 2.0) for image, label in zip(images, labels)]
    np.testing.assert_allclose(score(labels), wanted, rtol=1e-5)
    wanted = [-density64(image, 4, 2.0) for image in images]
    np.testing.assert_allclose(score(jnp.int32(4)), wanted, rtol=1e-5)


def test_the_gradient_of_the_score_is_numerically_right(rng):
    image = batch(3, 1).images[0]
    one = lambda x: KernelDensity().class_score(FITTED, NET, x[None], 4)[0]
    gradient = np.asarray(jax.jit(jax.grad(one))(image), np.float64)
    direction = rng.randn(*image.shape)
    near = [-density64(image + 1e-5 * sign * direction, 4, 2.0) for sign in (1, -1)]
    np.testing.assert_allclose((gradient * direction).sum(), (near[0] - near[1]) / 2e-5, rtol=1e-4)


def test_fit_keeps_features_and_the_median_of_the_densities_left_out():
    fitted = KernelDensity(sigma=3.0).fit(jax.random.key(0), NET, DATA)
    np.testing.assert_allclose(fitted["centres"], hidden64(DATA.train.images), atol=1e-6)
    np.testing.assert_array_equal(fitted["labels"], DATA.train.labels)
    assert fitted["sigma"] == 3.0
    left_out = statistics.left_out_log_densities(fitted["centres"], fitted["labels"], 3.0)
    native = KernelDensity().native_threshold(fitted)
    np.testing.assert_allclose(native, np.median(-left_out), rtol=1e-6)
    dtypes = {name: np.asarray(value).dtype.name for name, value in fitted.items()}
    wanted = {"centres": "float32", "labels": "int32", "sigma": "float32", "native": "float32"}
    assert dtypes == wanted


def test_the_bandwidth_is_searched_on_the_selection_images():
    fitted = KernelDensity().fit(jax.random.key(0), NET, DATA)
    points = features(NET, DATA.select.images, "penultimate")
    wanted = statistics.bandwidth(points, DATA.select.labels, fitted["centres"], DATA.train.labels)
    assert fitted["sigma"] == np.float32(wanted)
    assert np.isclose(densities.BANDWIDTHS, wanted).any()


def test_a_share_of_the_centres_is_drawn_by_the_key():
    fit = lambda seed: KernelDensity(sigma=3.0, share=0.25).fit(jax.random.key(seed), NET, DATA)
    one, again, other = fit(0), fit(0), fit(1)
    assert one["centres"].shape == (30, toys.HIDDEN) and one["labels"].shape == (30,)
    np.testing.assert_array_equal(one["centres"], again["centres"])
    assert (one["centres"] != other["centres"]).any()
    everything = features(NET, DATA.train.images, "penultimate")
    rows = [np.flatnonzero((everything == row).all(1)) for row in one["centres"]]
    assert {len(found) for found in rows} == {1} and len({found[0] for found in rows}) == 30
    np.testing.assert_array_equal(DATA.train.labels[np.concatenate(rows)], one["labels"])


def test_images_far_away_and_classes_without_centres_keep_finite_scores():
    far = dataclasses.replace(NET, apply=Far())
    score = CLASS_SCORE(FITTED, far, jnp.zeros((2, *toys.SHAPE)), 0)
    assert np.isfinite(score).all() and score.min() > 1e9
    empty = CLASS_SCORE(FITTED, NET, jnp.zeros((2, *toys.SHAPE)), 11)
    np.testing.assert_allclose(empty, -densities.NO_CENTRES)


@dataclasses.dataclass(frozen=True)
class Far(toys.ToyApply):
    """The toy with its hidden layer moved far away."""

    def __call__(self, variables, images, key=None):
        outputs = super().__call__(variables, images, key)
        return outputs._replace(features={"penultimate": outputs.features["penultimate"] + 1e5})


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A stranger's classifier with one feature of another name, with height and width."""

    def __call__(self, variables, images, key=None):
        del key
        logits = images.reshape(images.shape[0], -1)[:, :10] + variables
        return Outputs(logits, {"mine": images})


def test_a_foreign_classifier_needs_the_feature_and_no_more():
    foreign = Classifier(jnp.zeros(()), Foreign())
    with pytest.raises(InputError, match="'penultimate', and the classifier has: mine"):
        KernelDensity().fit(jax.random.key(0), foreign, DATA)
    detector = KernelDensity(feature="mine")
    fitted = detector.fit(jax.random.key(0), foreign, DATA)
    np.testing.assert_array_equal(fitted["centres"], DATA.train.images.reshape(120, -1))
    score = jax.jit(detector.score)(jax.random.key(0), fitted, foreign, DATA.select.images)
    assert score.shape == (60,) and np.isfinite(score).all()


def test_settings_without_meaning_are_refused():
    for sigma in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="sigma must be"):
            KernelDensity(sigma=sigma)
    for share in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="share must be"):
            KernelDensity(share=share)
    with pytest.raises(InputError, match="no class has two of the 1 centres"):
        KernelDensity(sigma=1.0, share=0.01).fit(jax.random.key(0), NET, DATA)
