"""The blur against a loop over pixels, and both detectors that rest on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet.detectors.mean_blur import MeanBlur, MeanBlurDetector, blur


def blur64(images, size):
    """Averages by loops in float64, the border's pixels repeated."""
    reach, wide = size // 2, np.asarray(images, np.float64)
    padded = np.pad(wide, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="edge")
    found = np.zeros_like(wide)
    for row in range(wide.shape[1]):
        for column in range(wide.shape[2]):
            window = padded[:, row : row + size, column : column + size]
            found[:, row, column] = window.mean((1, 2))
    return found


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("shape", [(7, 5, 1), (6, 6, 3), (2, 2, 2)])
def test_blur_averages_each_channel_by_itself(rng, shape, size):
    images = rng.rand(2, *shape).astype(np.float32)
    found = blur(jnp.asarray(images), size)
    np.testing.assert_allclose(found, blur64(images, size), rtol=1e-6)
    assert (found.shape, found.dtype) == (images.shape, jnp.float32)


def test_blur_leaves_constant_colours_as_they_are_up_to_the_border():
    colours = np.float32([[0.0, 0.3, 1.0], [0.7, 0.1, 0.5]])
    images = np.broadcast_to(colours[:, None, None], (2, 9, 9, 3))
    found = np.asarray(blur(jnp.asarray(images)))
    np.testing.assert_allclose(found, images, rtol=1e-6)
    assert found.min() >= 0 and found.max() <= 1


def test_blur_of_one_bright_pixel_is_a_square_of_ninths():
    image = np.zeros((1, 5, 5, 1), np.float32)
    image[0, 2, 2, 0] = 1.0
    wanted = np.zeros((5, 5))
    wanted[1:4, 1:4] = 1 / 9
    np.testing.assert_allclose(blur(jnp.asarray(image))[0, :, :, 0], wanted, rtol=1e-6)


def test_the_gradient_of_the_blur_is_its_transpose(rng):
    x, weight = (rng.rand(1, 5, 4, 2).astype(np.float32) for _ in range(2))
    gradient = jax.grad(lambda x: jnp.sum(blur(x) * weight))(jnp.asarray(x))
    units = np.eye(x.size).reshape(x.size, *x.shape[1:])
    wanted = [(blur64(unit[None], 3) * weight).sum() for unit in units]
    np.testing.assert_allclose(np.ravel(gradient), wanted, rtol=1e-5)


@pytest.mark.parametrize("size", [3, 5])
def test_the_corrector_answers_for_the_blurred_image(size):
    net, images = toys.network(), toys.digits(1, 6)
    found = MeanBlur(size).logits(jax.random.key(0), (), net, jnp.asarray(images))
    wanted = [toys.logits64(net.variables, image) for image in blur64(images, size)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert MeanBlur.kind == "corrector" and not hasattr(MeanBlur(), "score")


def test_the_detector_measures_how_far_the_answers_lie_apart():
    net, images = toys.network(), toys.digits(1, 6)

    def softmax64(images):
        raw = np.exp([toys.logits64(net.variables, image) for image in images])
        return raw / raw.sum(1, keepdims=True)

    found = MeanBlurDetector().score(jax.random.key(0), (), net, jnp.asarray(images))
    wanted = np.abs(softmax64(images) - softmax64(blur64(images, 3))).sum(1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert (found.min() >= 0) and (found.max() <= 2) and found.max() > 0.1
    own = MeanBlurDetector().logits(jax.random.key(0), (), net, jnp.asarray(images))
    np.testing.assert_array_equal(own, net(jnp.asarray(images)).logits)
    assert MeanBlurDetector().native_threshold(()) is None


def test_an_image_that_blur_leaves_alone_is_not_suspicious():
    flat = jnp.full((1, *toys.SHAPE), 0.5)
    assert MeanBlurDetector().score(jax.random.key(0), (), toys.network(), flat)[0] < 1e-5


@pytest.mark.parametrize("kind", [MeanBlur, MeanBlurDetector])
def test_sizes_that_have_no_middle_are_refused(kind):
    for size in (1, 2, 4, -3):
        with pytest.raises(ValueError, match="size must be an odd number"):
            kind(size=size)
