"""NumPy scores: values, stand-in gradients (BPDA), seeds, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import advdet
from advdet import bridges
from advdet.defenses import score_images
from advdet.types import InputError

IMAGES = toys.digits()


def rough(images):
    return np.round(8 * images).sum((1, 2, 3)) / 8


def smooth(images):
    return jnp.sum(images, axis=(1, 2, 3))


def _score(function, gradient=None, fitted=(), key=0):
    detector = advdet.Detector.from_function(bridges.numpy_score(function, gradient))
    return lambda x: detector.score(jax.random.key(key), fitted, None, x)


def test_values_are_those_of_the_function_and_slopes_those_of_the_stand_in():
    score = _score(rough, smooth)
    np.testing.assert_allclose(jax.jit(score)(jnp.asarray(IMAGES)), rough(IMAGES), rtol=1e-6)
    one = jax.jit(jax.vmap(jax.value_and_grad(lambda x: jnp.square(score(x[None])[0]))))
    values, slopes = one(jnp.asarray(IMAGES))
    np.testing.assert_allclose(values, rough(IMAGES) ** 2, rtol=1e-5)
    # The chain rule meets the true value: 2 s(x) times the stand-in's slope, which is 1.
    wanted = np.broadcast_to(2 * rough(IMAGES)[:, None, None, None], IMAGES.shape)
    np.testing.assert_allclose(slopes, wanted, rtol=1e-5)


def test_straight_through_a_step_inside_a_score():
    step = bridges.numpy_score(lambda x: np.round(8 * x) / 8, "straight_through")
    score = lambda x: jnp.sum(jnp.square(step(x)), axis=(1, 2, 3))
    slope = jax.jit(jax.vmap(jax.grad(lambda x: score(x[None])[0])))(jnp.asarray(IMAGES))
    np.testing.assert_allclose(slope, 2 * np.round(8 * IMAGES) / 8, atol=1e-6)


def test_a_jax_function_may_take_another_s_slope():
    score = bridges.surrogate_gradient(lambda x: jnp.sum(jnp.round(x)), lambda x: jnp.sum(2 * x))
    value, slope = jax.value_and_grad(score)(jnp.asarray([0.2, 0.7]))
    assert value == 1.0
    np.testing.assert_array_equal(slope, [2.0, 2.0])


def test_without_a_stand_in_nothing_can_be_followed():
    score = _score(rough)
    np.testing.assert_allclose(score(jnp.asarray(IMAGES)), rough(IMAGES), rtol=1e-6)
    with pytest.raises(InputError, match="no gradient: use an attack that needs none"):
        jax.grad(lambda x: score(x).sum())(jnp.asarray(IMAGES))


def test_a_fitted_object_reaches_score_and_stand_in():
    class Scaler:
        factor = 3.0

    detector = advdet.Detector.from_function(
        bridges.numpy_score(
            lambda x, fitted: fitted.factor * rough(x), lambda x, fitted: fitted.factor * smooth(x)
        ),
        fit=lambda images, labels: Scaler(),
    )
    batch = advdet.Batch(IMAGES, np.arange(16), np.arange(16))
    fitted = detector.fit(jax.random.key(0), None, advdet.FitData(batch, batch))
    score = lambda x: detector.score(jax.random.key(0), fitted, None, x)
    np.testing.assert_allclose(score(jnp.asarray(IMAGES)), 3 * rough(IMAGES), rtol=1e-6)
    assert (jax.grad(lambda x: score(x).sum())(jnp.asarray(IMAGES)) == 3).all()


def test_a_score_of_the_classifier_s_answers():
    network = toys.network()
    sharpest = bridges.numpy_score(lambda logits: -logits.max(1), lambda logits: -logits.max(1))
    detector = advdet.Detector.from_function(lambda x, classifier: sharpest(classifier(x).logits))
    ask = lambda x: detector.score(jax.random.key(0), (), network, x)
    wanted = lambda x: -network(x).logits.max(1)
    np.testing.assert_allclose(ask(jnp.asarray(IMAGES)), wanted(IMAGES), rtol=1e-6)
    slope = lambda f: jax.grad(lambda x: f(x).sum())(jnp.asarray(IMAGES))
    np.testing.assert_allclose(slope(ask), slope(wanted), rtol=1e-5)


def test_random_scores_get_a_seed_for_each_image():
    noisy = lambda x, seed: x.mean((1, 2, 3)) + np.random.RandomState(seed).rand(len(x))
    detector = advdet.Detector.from_function(bridges.numpy_score(noisy))
    assert detector.random
    defense, ids = toys.guarded(toys.network(), detector), np.arange(16)
    same = np.repeat(IMAGES[:1], 16, axis=0)
    first, again, other = (
        score_images(jax.random.key(k), defense, same, ids) for k in (0, 0, 1)
    )  # fmt: skip
    np.testing.assert_array_equal(first, again)
    assert len(set(first)) == 16 and (first != other).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: _score(lambda x, classifier: x), "cannot call the classifier, which is JAX"),
        (lambda: _score(rough, "identity"), "unknown gradient 'identity'"),
        (lambda: _score(lambda x: x.sum()), r"shape \(\) for 1 image; wanted \(1,\)"),
        (lambda: _score(lambda x: x.sum(1)[:, :3, 0]), r"shape \(1, 3\) for 1 image; wanted"),
        (lambda: _score(lambda x: x.sum(1)[:, :2, 0]), r"z\[:, 1\] - z\[:, 0\] is a score"),
        (lambda: _score(lambda x: x @ np.ones(3)), r"called on an array of shape \(1, 8, 8, 1\)"),
        (lambda: _score(lambda x, beta: x), "parameter 'beta'"),
        (lambda: _score(rough, "straight_through"), r"wanted \(1, 8, 8, 1\)"),
    ],
)
def test_bad_functions_are_refused_in_words(make, message):
    with pytest.raises(InputError, match=message):
        make()(jnp.asarray(IMAGES))
