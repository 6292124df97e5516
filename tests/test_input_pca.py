"""The whitened tail variance: its formula, its gradient, and what it is so sensitive to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import defenses
from advdet.detectors.input_pca import InputPca
from advdet.types import Batch, FitData, InputError

CONSTANT = np.zeros(toys.PIXELS, bool)
CONSTANT[:20] = True
TAIL = 36  # of 64: 44 pixels vary, so 8 components with spread and the 20 without


def batch(seed, count):
    """Images of which the first 20 pixels are 0, 0.1 or 1/3, and never vary."""
    random = np.random.RandomState(seed)
    mixing = np.random.RandomState(99).rand(toys.PIXELS, toys.PIXELS)
    rows = 0.5 + 0.02 * (random.rand(count, toys.PIXELS) - 0.5) @ mixing
    rows = np.clip(rows + 0.1 * random.randn(count, toys.PIXELS), 0, 1)
    rows[:, CONSTANT] = np.resize([0.0, 0.1, 1 / 3], 20)
    ids = np.arange(count, dtype=np.int32)
    return Batch(rows.reshape(count, *toys.SHAPE).astype(np.float32), ids % np.int32(10), ids)


@pytest.fixture(scope="module")
def scene():
    data = FitData(batch(1, 400), batch(2, 10))
    return defenses.fit_defense(
        jax.random.key(0), InputPca(tail=TAIL), toys.classifier(), data, batch(3, 400)
    )


def scores64(train, images, tail, epsilon=1e-11):
    """The score in float64, straight from its formula."""
    flat = lambda x: np.asarray(x, np.float64).reshape(len(x), -1)
    centred = flat(train) - flat(train).mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    whitened = (flat(images) - flat(train).mean(0)) @ vectors[:, ::-1]
    whitened = whitened / np.sqrt(np.maximum(values[::-1], 0) + epsilon)
    return whitened[:, tail:].var(axis=1)


def test_scores_equal_the_formula_in_float64(scene):
    images = batch(4, 20).images
    found = scene.defense.score(jax.random.key(0), jnp.asarray(images))
    np.testing.assert_allclose(found, scores64(batch(1, 400).images, images, TAIL), rtol=1e-3)
    touched = np.clip(images + np.float32(0.01), 0, 1)
    found = scene.defense.score(jax.random.key(0), jnp.asarray(touched))
    np.testing.assert_allclose(found, scores64(batch(1, 400).images, touched, TAIL), rtol=1e-3)
    assert found.min() > 1e5


def test_the_gradient_is_that_of_the_formula(scene):
    image = batch(4, 1).images
    total = lambda x: scene.defense.score(jax.random.key(0), x).sum()
    gradient = np.asarray(jax.grad(total)(jnp.asarray(image))).ravel()
    train = batch(1, 400).images
    for pixel in (3, 30, 60):
        step = np.zeros(toys.PIXELS)
        step[pixel] = 1e-6
        around = np.concatenate([image + step.reshape(image.shape) * sign for sign in (1, -1)])
        up, down = scores64(train, around, TAIL)
        np.testing.assert_allclose(gradient[pixel], (up - down) / 2e-6, rtol=1e-2)


def test_constant_pixels_left_alone_add_exactly_nothing(scene):
    fitted = scene.defense.fitted
    images = batch(4, 5).images.reshape(5, -1)
    assert (images[:, CONSTANT] - fitted["mean"][None, CONSTANT] == 0).all()
    assert (fitted["std"].ravel()[CONSTANT] == 0).all()
    wanted = batch(1, 400).images.reshape(400, -1).std(0, dtype=np.float64)
    np.testing.assert_allclose(fitted["std"].ravel(), wanted, rtol=1e-6, atol=1e-9)
    assert fitted["std"].shape == toys.SHAPE and fitted["whitening"].shape == (64, 64 - TAIL)


def test_tiny_noise_is_flagged_where_constant_pixels_are_touched_and_only_there(scene, rng):
    images = batch(5, 300).images
    noise = 1e-4 * rng.randn(*images.shape)
    allowed = noise * ~CONSTANT.reshape(toys.SHAPE)
    flagged = {}
    for name, change in (("none", 0 * noise), ("everywhere", noise), ("allowed", allowed)):
        changed = np.float32(images + change)
        scores = scene.defense.score(jax.random.key(0), jnp.asarray(changed))
        flagged[name] = float((scores > scene.defense.threshold).mean())
    assert flagged["everywhere"] == 1.0
    assert abs(flagged["allowed"] - flagged["none"]) <= 0.01
    assert flagged["none"] < 0.15  # 5 % on the threshold's own images


def test_scores_stay_finite_at_the_corners_of_the_box(scene):
    corners = np.stack([np.zeros(toys.SHAPE), np.ones(toys.SHAPE)]).astype(np.float32)
    scores = scene.defense.score(jax.random.key(0), jnp.asarray(corners))
    assert np.isfinite(scores).all() and scores.max() > 1e9


@pytest.mark.parametrize("shape, late", [((28, 28, 1), 84), ((8, 8, 1), 6), ((4, 4, 3), 5)])
def test_the_automatic_tail_is_the_authors_or_a_tenth(rng, shape, late):
    images = rng.rand(20, *shape).astype(np.float32)
    rows = Batch(images, np.zeros(20, np.int32), np.arange(20, dtype=np.int32))
    fitted = InputPca().fit(jax.random.key(0), toys.classifier(), FitData(rows, rows))
    assert fitted["whitening"].shape == (images[0].size, late)


def test_settings_without_meaning_are_refused():
    with pytest.raises(ValueError, match="tail must be"):
        InputPca(tail=-1)
    for epsilon in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="epsilon must be"):
            InputPca(epsilon=epsilon)
    data = FitData(batch(1, 5), batch(2, 5))
    for tail, left in ((63, 1), (80, 0)):
        with pytest.raises(InputError, match=f"tail={tail} leaves {left} of 64 components"):
            InputPca(tail=tail).fit(jax.random.key(0), toys.classifier(), data)


def test_it_has_no_threshold_of_the_paper(scene):
    assert scene.thresholds["native"] is None
