"""Dimensionality reduction: the projection against linear algebra, the networks against NumPy."""

import functools

import jax
import jax.numpy as jnp
import learned_toys
import numpy as np
import pytest

from advdet import nets
from advdet.detectors.pca_reduction import PcaReduction, project, reconstruct
from advdet.types import InputError

SMALL = {
    "fc": PcaReduction(variant="fc", components=12, epochs=40),
    "cnn": PcaReduction(variant="cnn", components=12, epochs=60),
}
every = pytest.mark.parametrize("variant", SMALL)


@functools.cache
def classifier():
    return nets.init(jax.random.key(0), nets.MnistNet(learned_toys.CLASSES), learned_toys.SHAPE)


@functools.cache
def data():
    return learned_toys.data(train=64)


@functools.cache
def fitted_toy(variant):
    return SMALL[variant].fit(jax.random.key(1), classifier(), data())


@functools.partial(jax.jit, static_argnums=0)
def logits(detector, fitted, images):
    return detector.logits(None, fitted, None, images)


def basis64(count):
    """Mean and first components of the training images, by a singular value decomposition."""
    flat = data().train.images.reshape(64, -1).astype(np.float64)
    mean = flat.mean(0)
    return mean, np.linalg.svd(flat - mean, full_matrices=False)[2][:count].T


def test_the_projection_is_that_on_the_first_principal_components():
    fitted = fitted_toy("fc")
    mean, components = basis64(12)
    np.testing.assert_allclose(fitted["mean"], mean, rtol=1e-5, atol=1e-6)
    found = np.asarray(fitted["components"], np.float64)
    assert found.shape == (256, 12)
    np.testing.assert_allclose(found.T @ found, np.eye(12), atol=1e-5)
    # The three largest are the bright quarters'; each is the same axis but for its sign.
    np.testing.assert_allclose(np.abs(np.sum(found * components, 0))[:3], 1.0, atol=1e-4)
    images = learned_toys.clean(4, 5, 0).images
    flat = images.reshape(5, -1) - mean
    by_hand = (flat @ found @ found.T + mean).reshape(images.shape)
    kept = project(fitted, jnp.asarray(images))
    assert kept.shape == (5, 12)
    np.testing.assert_allclose(kept, flat @ found, rtol=1e-4, atol=1e-5)
    again = reconstruct(fitted, kept, learned_toys.SHAPE)
    np.testing.assert_allclose(again, by_hand, rtol=1e-4, atol=1e-5)


def test_with_all_components_projection_and_inverse_are_the_identity(monkeypatch):
    monkeypatch.setattr("advdet.detectors.learning.train_network", lambda *a, **b: {})
    detector = PcaReduction(components=256)
    fitted = detector.fit(jax.random.key(0), classifier(), data())
    images = np.random.RandomState(0).rand(4, *learned_toys.SHAPE).astype(np.float32)
    again = reconstruct(fitted, project(fitted, jnp.asarray(images)), learned_toys.SHAPE)
    np.testing.assert_allclose(again, images, atol=1e-5)


def test_the_cnn_learns_from_projected_images_and_the_fc_from_coefficients(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "advdet.detectors.learning.train_network",
        lambda key, name, detector, net, loss, rows, data, epochs: seen.append(rows) or {},
    )
    for detector in SMALL.values():
        fitted = detector.fit(jax.random.key(0), classifier(), data())
    coefficients = project(fitted, jnp.asarray(data().train.images))
    images = reconstruct(fitted, coefficients, learned_toys.SHAPE)
    for rows, expected in zip(seen, (coefficients, images)):
        np.testing.assert_allclose(rows.images, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(rows.labels, data().train.labels)


def test_logits_of_the_fc_equal_a_numpy_twin():
    fitted, images = fitted_toy("fc"), learned_toys.clean(4, 6, 0).images
    wide = jax.tree.map(lambda array: np.asarray(array, np.float64), fitted)
    layer = lambda x, name: x @ wide["params"][name]["kernel"] + wide["params"][name]["bias"]
    x = (images.reshape(6, -1) - wide["mean"]) @ wide["components"]
    for name in ("dense1", "dense2"):
        x = np.maximum(layer(x, name), 0.0)
        assert x.shape == (6, 100)
    by_hand = layer(x, "logits")
    found = logits(SMALL["fc"], fitted, images)
    assert found.shape == (6, learned_toys.CLASSES)
    np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-4)


def test_logits_of_the_cnn_are_its_network_s_for_the_projected_image():
    fitted, images = fitted_toy("cnn"), learned_toys.clean(4, 6, 0).images
    wide = np.asarray(fitted["components"], np.float64)
    flat = images.reshape(6, -1) - fitted["mean"].astype(np.float64)
    projected = (flat @ wide @ wide.T + fitted["mean"]).reshape(images.shape).astype(np.float32)
    net = nets.NetApply(nets.MnistNet(learned_toys.CLASSES))
    by_hand = net({"params": fitted["params"]}, jnp.asarray(projected)).logits
    np.testing.assert_allclose(logits(SMALL["cnn"], fitted, images), by_hand, rtol=1e-3, atol=1e-4)


@every
def test_what_lies_outside_the_components_changes_nothing(variant):
    fitted, rng = fitted_toy(variant), np.random.RandomState(0)
    images = learned_toys.clean(4, 4, 0).images
    change = rng.randn(4, 256)
    wide = np.asarray(fitted["components"], np.float64)
    change -= change @ wide @ wide.T
    changed = images + 0.1 * change.reshape(images.shape).astype(np.float32)
    plain, other = (logits(SMALL[variant], fitted, x) for x in (images, changed))
    np.testing.assert_allclose(plain, other, rtol=1e-3, atol=1e-3)
    far = logits(SMALL[variant], fitted, images[::-1])
    assert np.abs(plain - far).max() > 0.1


@every
def test_the_networks_learn_and_answer_fresh_images(variant):
    fresh = learned_toys.clean(5, 100, 0)
    found = np.asarray(logits(SMALL[variant], fitted_toy(variant), fresh.images))
    assert (found.argmax(1) == fresh.labels).mean() > 0.9


@every
def test_gradients_run_through_projection_and_network(variant):
    fitted = fitted_toy(variant)
    image = jnp.asarray(learned_toys.clean(6, 1, 0).images)
    margin = jax.jit(lambda x: logits(SMALL[variant], fitted, x)[0, 0])
    gradient = jax.jit(jax.grad(margin))(image)
    length, step = jnp.linalg.norm(gradient), 1e-3
    rise = margin(image + step * gradient / length) - margin(image - step * gradient / length)
    np.testing.assert_allclose(rise / (2 * step), length, rtol=0.05)


def test_equal_keys_give_equal_bits_and_plain_arrays():
    again = SMALL["fc"].fit(jax.random.key(1), classifier(), data())
    jax.tree.map(np.testing.assert_array_equal, again, fitted_toy("fc"))
    other = SMALL["fc"].fit(jax.random.key(2), classifier(), data())
    assert (other["params"]["dense1"]["kernel"] != again["params"]["dense1"]["kernel"]).any()
    assert set(again) == {"mean", "components", "params"}
    for leaf in jax.tree.leaves(again):
        assert isinstance(leaf, np.ndarray) and leaf.dtype == np.float32


def test_it_corrects_and_flags_nothing():
    assert PcaReduction.kind == "corrector" and not PcaReduction.needs_adversarial
    assert PcaReduction().native_threshold(fitted_toy("fc")) is None


def test_wrong_hyperparameters_are_refused():
    with pytest.raises(ValueError, match="variant must be fc or cnn, not 'rnn'"):
        PcaReduction(variant="rnn")
    for name in ("components", "epochs"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            PcaReduction(**{name: 0})
    with pytest.raises(InputError, match="keep 257 components.*only 256 values"):
        PcaReduction(components=257).fit(jax.random.key(0), classifier(), data())
