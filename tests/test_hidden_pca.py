"""Li's layer statistics: percentiles, projection, SVM margins, and what they find."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learned_toys
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from advdet import nets
from advdet.detectors.hidden_pca import HiddenPca, coefficients, describe
from advdet.types import InputError, Outputs

DETECTOR = HiddenPca(num_images=100)
LAYERS = ("conv1", "conv2", "conv3")


@functools.cache
def data():
    return learned_toys.data(train=128)


@functools.cache
def classifier():
    return nets.init(jax.random.key(0), nets.MnistNet(learned_toys.CLASSES), learned_toys.SHAPE)


@functools.cache
def fitted():
    return DETECTOR.fit(jax.random.key(1), classifier(), data())


compiled_margins = jax.jit(DETECTOR.margins)
compiled_score = jax.jit(functools.partial(DETECTOR.score, None))
compiled_classifier = jax.jit(lambda net, images: net(images).features)
margins = lambda images: compiled_margins(fitted(), classifier(), images)
score = lambda images: compiled_score(fitted(), classifier(), images)
features = lambda images: compiled_classifier(classifier(), images)


@pytest.mark.parametrize("positions", [1, 2, 5, 36, 49])
def test_descriptions_equal_numpy_s(positions, rng):
    values = rng.randn(3, positions, 4).astype(np.float32)
    wide = values.astype(np.float64)
    by_hand = np.concatenate(
        [
            np.abs(wide).mean(1),
            wide.min(1),
            *np.percentile(wide, [25, 50, 75], axis=1),
            wide.max(1),
        ],
        axis=-1,
    )
    np.testing.assert_allclose(describe(jnp.asarray(values)), by_hand, rtol=1e-5, atol=1e-6)


def test_coefficients_have_unit_variance_over_clean_positions_and_no_more_axes():
    train = data().train.images[: DETECTOR.num_images]
    for layer, maps in features(train).items():
        if layer not in LAYERS:
            continue
        stage = fitted()[layer]
        found = np.asarray(coefficients(stage, maps), np.float64).reshape(-1, maps.shape[-1])
        alive = stage["scale"] > 0
        assert alive.any()
        np.testing.assert_allclose(found.mean(0), 0.0, atol=1e-2)
        np.testing.assert_allclose(found.var(0)[alive], 1.0, rtol=2e-2)
        np.testing.assert_array_equal(found[:, ~alive], 0.0)
        together = (found.T @ found / len(found))[np.ix_(alive, alive)]
        np.testing.assert_allclose(together, np.eye(alive.sum()), atol=3e-2)


def margins64(images):
    """The stages' margins from the fitted arrays alone, in float64."""
    found, maps_of = [], features(images)
    for layer in LAYERS:
        stage = {name: np.asarray(array, np.float64) for name, array in fitted()[layer].items()}
        maps = np.asarray(maps_of[layer], np.float64).reshape(len(images), -1, 64)
        values = (maps - stage["mean"]) @ stage["components"] * stage["scale"]
        quartiles = np.percentile(values, [25, 50, 75], axis=1)
        described = np.concatenate(
            [np.abs(values).mean(1), values.min(1), *quartiles, values.max(1)], axis=-1
        )
        standard = (described - stage["centre"]) * stage["spread"]
        found.append(standard @ stage["weights"] + stage["bias"])
    return np.stack(found, -1)


def test_margins_equal_a_float64_twin_and_the_score_is_the_largest():
    images = learned_toys.clean(4, DETECTOR.num_images, 0).images
    found = np.asarray(margins(images))
    assert found.shape == (DETECTOR.num_images, 3)
    np.testing.assert_allclose(found, margins64(images), rtol=1e-3, atol=5e-3)
    np.testing.assert_allclose(score(images), found.max(1), rtol=1e-5, atol=1e-5)
    assert len(set(found.argmax(1))) > 1
    assert DETECTOR.native_threshold(fitted()) == 0.0


def test_the_unit_of_a_margin_is_the_spread_of_clean_training_margins():
    train = data().train.images[: DETECTOR.num_images]
    np.testing.assert_allclose(np.std(margins(train), axis=0), 1.0, rtol=1e-2)


def test_marked_images_that_were_never_seen_are_told_from_clean_ones():
    fresh = learned_toys.clean(3, DETECTOR.num_images // 2, 5000)
    found = np.asarray(score(np.concatenate([fresh.images, learned_toys.marked(fresh).images])))
    is_marked = np.arange(DETECTOR.num_images) >= DETECTOR.num_images // 2
    assert roc_auc_score(is_marked, found) > 0.9
    assert (found[is_marked] > 0).mean() > 0.9


def test_the_score_s_gradient_is_its_slope():
    image = jnp.asarray(learned_toys.clean(5, 1, 0).images)
    slope = jax.jit(jax.grad(lambda x, *fit: DETECTOR.score(None, *fit, x)[0]))
    gradient = slope(image, fitted(), classifier())
    direction = gradient / jnp.linalg.norm(gradient)
    step = 1e-3
    rise = (score(image + step * direction) - score(image - step * direction))[0] / (2 * step)
    np.testing.assert_allclose(rise, jnp.linalg.norm(gradient), rtol=0.05)


def test_fitting_draws_nothing_and_leaves_the_classifier_alone():
    before = jax.tree.map(np.array, classifier().variables)
    again = DETECTOR.fit(jax.random.key(9), classifier(), data())
    jax.tree.map(np.testing.assert_array_equal, again, fitted())
    jax.tree.map(np.testing.assert_array_equal, classifier().variables, before)
    for leaf in jax.tree.leaves(again):
        assert isinstance(leaf, np.ndarray) and leaf.dtype == np.float32


@dataclasses.dataclass(frozen=True)
class Named:
    """Feature maps of the given names, all alike; the last pixel row never changes."""

    names: tuple[str, ...]

    def __call__(self, variables, images, key=None):
        maps = jnp.concatenate([images, images[:, ::-1], jnp.ones_like(images)], axis=-1)
        return Outputs(images.mean((1, 2)), dict.fromkeys(self.names, maps))


def test_layers_are_chosen_by_name():
    small = learned_toys.data(train=16)

    def stages(detector, *names):
        named = dataclasses.replace(classifier(), variables={}, apply=Named(names))
        fitted = detector.fit(jax.random.key(0), named, small)
        return list(fitted), fitted

    assert stages(HiddenPca(), "ad0", "ad1", "ad2", "ad3", "ad4")[0] == ["ad1", "ad2", "ad3", "ad4"]
    assert stages(HiddenPca(), "ad1", *LAYERS)[0] == list(LAYERS)
    names, fitted = stages(HiddenPca(layers="b+a"), "a", "b", "c")
    assert names == ["b", "a"]
    # The constant third channel carries nothing: its component and all that describes it are 0.
    dead = fitted["a"]["scale"] == 0
    assert dead.sum() == 1
    np.testing.assert_array_equal(fitted["a"]["weights"].reshape(6, 3)[:, dead], 0.0)
    with pytest.raises(InputError, match=r"conv1 \+ conv2 \+ conv3 or ad1 .*has: a, b"):
        stages(HiddenPca(), "a", "b")


def test_wrong_hyperparameters_and_missing_images_are_refused():
    with pytest.raises(ValueError, match="different names joined by"):
        HiddenPca(layers="conv1+conv1")
    with pytest.raises(ValueError, match="different names joined by"):
        HiddenPca(layers="conv1+")
    with pytest.raises(ValueError, match="num_images must be at least 2"):
        HiddenPca(num_images=1)
    with pytest.raises(ValueError, match="cost must be above 0"):
        HiddenPca(cost=0.0)
    data = learned_toys.data(train=8)._replace(adversarial_train=None)
    with pytest.raises(InputError, match="hidden_pca learns from adversarial images"):
        HiddenPca().fit(jax.random.key(0), classifier(), data)
