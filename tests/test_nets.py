"""The classifiers: convolutions, dropout, shapes, and what does not depend on batch mates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from advdet import nets
from advdet.types import Classifier, InputError

CASES = list(itertools.product((1, 3, 5), (1, 2), ("SAME", "VALID")))
NETS = {
    "mnist": (nets.MnistNet(10), (28, 28, 1)),
    "cifar": (nets.ResNet32(10, blocks=1), (32, 32, 3)),
}


def noise(seed, *shape):
    return np.random.default_rng(seed).random(shape, np.float32)


@pytest.fixture(scope="module", params=NETS)
def classifier(request):
    net, shape = NETS[request.param]
    return nets.init(jax.random.key(0), net, shape)


def compiled(classifier):
    return jax.jit(lambda images, key=None: classifier(images, key))


def images_for(classifier, count, seed=0):
    shape = (32, 32, 3) if isinstance(classifier.apply.net, nets.ResNet32) else (28, 28, 1)
    return noise(seed, count, *shape)


def lax_conv(x, kernel, stride, padding, precision):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=layout, precision=precision
    )


@pytest.mark.parametrize("size, stride, padding", CASES)
def test_convolutions_and_both_gradients_equal_lax_conv(size, stride, padding):
    x, kernel = noise(1, 2, 9, 10, 3) - 0.5, noise(2, size, size, 3, 4) - 0.5

    @jax.jit
    def all_forms(x, kernel):
        results = []
        for conv in (lax_conv, nets.conv, nets.patches_conv):
            out, pull = jax.vjp(lambda x, k: conv(x, k, stride, padding, "highest"), x, kernel)  # noqa: B023
            results.append(
                (out, *pull(jnp.sin(jnp.arange(out.size, dtype=x.dtype)).reshape(out.shape)))
            )
        return results

    wanted, *others = all_forms(x, kernel)
    for found in others:
        for one, other in zip(found, wanted):
            np.testing.assert_allclose(one, other, atol=2e-5)


def test_features_have_the_names_and_shapes_that_detectors_rely_on(classifier):
    outputs = compiled(classifier)(images_for(classifier, 2))
    assert outputs.logits.shape == (2, 10)
    shapes = {name: feature.shape[1:] for name, feature in outputs.features.items()}
    if isinstance(classifier.apply.net, nets.ResNet32):
        ad = [(32, 32, 3), (32, 32, 16), (32, 32, 16), (16, 16, 32), (8, 8, 64)]
        assert shapes == {f"ad{i}": shape for i, shape in enumerate(ad)} | {"penultimate": (64,)}
        np.testing.assert_array_equal(outputs.features["ad0"], images_for(classifier, 2))
    else:
        convs = {"conv1": (14, 14, 64), "conv2": (6, 6, 64), "conv3": (4, 4, 64)}
        assert shapes == convs | {"penultimate": (32,)}
    assert (outputs.features["penultimate"] >= 0).all()


def test_networks_have_the_papers_number_of_weights():
    def count(net, shape):
        params = jax.eval_shape(lambda: nets.init(jax.random.key(0), net, shape)).variables
        return sum(leaf.size for leaf in jax.tree.leaves(params["params"]))

    # Counted by hand from the layer lists: convolutions, biases, dense layers, BatchNorm pairs.
    assert count(*NETS["mnist"]) == 1664 + 2 * 36928 + 32800 + 330
    assert count(nets.ResNet32(10), (32, 32, 3)) == 467946


def test_mnist_net_takes_other_sizes_and_refuses_tiny_images():
    def outputs():
        other = nets.init(jax.random.key(0), nets.MnistNet(7), (16, 20, 3))
        return other(jnp.zeros((2, 16, 20, 3)))

    assert jax.eval_shape(outputs).logits.shape == (2, 7)
    with pytest.raises(InputError, match="12 x 12.*at least 16 x 16"):
        nets.init(jax.random.key(0), nets.MnistNet(10), (12, 12, 1))


def test_apply_is_equal_and_hashable_by_value():
    one, other = nets.NetApply(nets.MnistNet(10)), nets.NetApply(nets.MnistNet(10))
    assert one == other and hash(one) == hash(other)
    assert one != nets.NetApply(nets.MnistNet(11))


@pytest.mark.parametrize("rate", [0.5, 0.3, 0.0])
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate):
    x = jnp.ones((64, 5, 7, 29))
    out = np.asarray(nets.dropout(jax.random.key(1), x, rate))
    assert out.shape == x.shape and out.dtype == np.float32
    np.testing.assert_allclose(np.unique(out), [0.0, 1 / (1 - rate)] if rate else [1.0], rtol=1e-6)
    deviation = np.sqrt(rate / (1 - rate) / out.size)  # of the mean of inverted dropout
    assert abs(out.mean() - 1) <= 4 * deviation
    if rate:  # neither images nor units share a mask
        assert len({image.tobytes() for image in out}) == len(out)
        by_unit = out.reshape(len(out), -1).mean(0)
        assert 0.3 < by_unit.min() and by_unit.max() < 1.9


def test_dropout_follows_its_key():
    x = jnp.ones((3, 100))
    draw = lambda seed: np.asarray(nets.dropout(jax.random.key(seed), x))
    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).mean() > 0.3


def test_key_switches_dropout_on(classifier):
    images = images_for(classifier, 2)
    forward = compiled(classifier)
    off, one = forward(images), forward(images, jax.random.key(1))
    again, other = forward(images, jax.random.key(1)), forward(images, jax.random.key(2))
    np.testing.assert_array_equal(one.logits, again.logits)
    assert (one.logits != other.logits).any() and (one.logits != off.logits).any()
    for name, feature in off.features.items():  # features are those without dropout
        np.testing.assert_allclose(feature, one.features[name], atol=1e-5)


def test_many_keys_on_one_image_leave_the_convolutions_unbatched(classifier):
    images = images_for(classifier, 1)
    keys = jax.random.split(jax.random.key(3), 50)
    many = lambda keys: jax.vmap(lambda key: classifier(images, key).logits)(keys)
    jaxpr = str(jax.make_jaxpr(many)(keys))
    assert "f32[50," in jaxpr  # the dropped-out activations
    side = 14 if images.shape[1] == 28 else 16
    assert f"f32[50,1,{side}," not in jaxpr and f"f32[50,{side}," not in jaxpr
    key = jax.random.split(jax.random.key(3), 50)[7]
    single = compiled(classifier)(images, key).logits
    np.testing.assert_allclose(jax.jit(many)(keys)[7], single, rtol=1e-5, atol=1e-4)


def test_logits_do_not_depend_on_batch_mates(classifier):
    images = images_for(classifier, 256)
    forward = jax.jit(lambda images: classifier(images).logits)
    together = forward(images)
    for row in (0, 100, 255):
        np.testing.assert_allclose(
            forward(images[row : row + 1])[0], together[row], rtol=1e-5, atol=1e-4
        )


def test_inference_leaves_batch_statistics_alone():
    classifier = nets.init(jax.random.key(0), *NETS["cifar"])
    before = jax.tree.map(np.array, classifier.variables["batch_stats"])
    images = images_for(classifier, 4)
    forward = compiled(classifier)
    forward(images), forward(images, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, before, classifier.variables["batch_stats"])
    train = jax.jit(lambda v, x: nets.train_apply(classifier.apply.net, v, x, None).batch_stats)
    trained = train(classifier.variables, images)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, trained)
    assert all(jax.tree.leaves(changed))


def test_net_for_chooses_by_name_and_channels():
    assert nets.net_for("cifar10", 10) == nets.ResNet32(10)
    assert nets.net_for("photos", 4, (32, 32, 3)) == nets.ResNet32(4)
    assert nets.net_for("mnist_5k", 10, (28, 28, 1)) == nets.MnistNet(10)


def test_without_rescaling_kept_units_are_taken_as_they_are(classifier):
    """W m h / (1 - rate) + b against W m h + b, at rate 0.5 and with b = 3."""
    params = classifier.variables["params"]
    logits = params["logits"] | {"bias": jnp.full_like(params["logits"]["bias"], 3.0)}
    variables = classifier.variables | {"params": params | {"logits": logits}}
    classifier = Classifier(variables, classifier.apply)
    images = images_for(classifier, 2)
    rescaled = compiled(classifier)(images, jax.random.key(3)).logits - 3.0
    halved = nets.without_rescaling(classifier)
    plain = compiled(halved)(images, jax.random.key(3)).logits - 3.0
    np.testing.assert_allclose(2.0 * plain, rescaled, rtol=1e-4, atol=1e-5)


def test_another_classifier_than_ours_has_no_such_form():
    with pytest.raises(InputError, match="this classifier is another"):
        nets.without_rescaling(Classifier((), lambda variables, images, key: None))
