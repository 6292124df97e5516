"""Gradients against finite differences: each way of being wrong by its name, and kinks forgiven."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import advdet
from advdet import contract_gradients, goal_slopes, nets, slopes
from advdet.attacks.objectives import Generic
from advdet.defenses import Defense, undefended

SIDE, COUNT = 16, 8
SHAPE = (SIDE, SIDE, 1)


def strokes(seed=0, count=COUNT):
    """Random bright strokes on black, as digits are."""
    random = np.random.RandomState(seed)
    images = np.zeros((count, *SHAPE), np.float32)
    for image in images:
        for _ in range(3):
            row, column = random.randint(2, SIDE - 6, 2)
            across = random.rand() < 0.5
            piece = image[row : row + 2, column : column + 5] if across else (
                image[row : row + 5, column : column + 2]
            )  # fmt: skip
            piece[:] = random.uniform(0.5, 1.0, piece.shape)
    return images


IMAGES = strokes()
ROWS = np.arange(COUNT, dtype=np.int32)


@pytest.fixture(scope="module")
def network():
    """advdet's own net: convolutions, ReLUs, max-pooling; untrained."""
    return nets.init(jax.random.key(0), nets.MnistNet(10), SHAPE)


def mahalanobis(x, network):
    """A distance in the net's last but one layer, from a mean and with a covariance of its own."""
    features = network(x).features["penultimate"].reshape(x.shape[0], -1)
    weights = np.random.RandomState(3).uniform(0.5, 2.0, features.shape[1]).astype(np.float32)
    return jnp.sum(weights[None] * jnp.square(features - 0.1), axis=1)


def gradient_changed(function, change):
    """The same values, another gradient: `change` takes the true one and the image."""

    @jax.custom_vjp
    def changed(x):
        return function(x)

    changed.defvjp(
        lambda x: (function(x), x),
        lambda x, g: (change(jax.vjp(function, x)[1](g)[0], x),),
    )
    return changed


def through_rounding(function, levels):
    """Images in so many levels, and the gradient as if there were none."""
    rounding = lambda x: jnp.round(levels * x) / levels
    straight = lambda x: function(x + jax.lax.stop_gradient(rounding(x) - x))
    return straight, lambda x: function(rounding(x))


def scoring(function, **flags):
    score = lambda self, key, fitted, classifier, images: function(images, classifier)
    return type("Planted", (advdet.Detector,), {"score": score, **flags})()


def kinds_of(detector, network, threshold=0.1) -> list[str]:
    """What the attacker's two goals look like, by the comparison that `evaluate` makes."""
    defense = Defense(network, (), jnp.float32(threshold), jnp.float32(1.0), detector)
    found = goal_slopes.compared(
        jax.random.key(0), Generic(), defense, IMAGES, ROWS % 10, ROWS, detector=True
    )
    assert set(found) == {"classifier", "detector"}
    assert not found["classifier"].wrong.any() and set(found["classifier"].kinds) <= {
        "right", "kinked",
    }  # fmt: skip
    return found["detector"].kinds.tolist()


CHANGES = {
    "negated": (lambda g, x: -g, {"negated"}),
    "halved": (lambda g, x: 0.5 * g, {"scaled"}),
    "shattered": (lambda g, x: g * jnp.sin(1e5 * x), {"unrelated", "partial"}),
    "of every fourth row": (
        lambda g, x: jnp.where((jnp.arange(SIDE) % 4 == 0)[None, :, None, None], g, 0.0),
        {"partial"},
    ),
    "of another image": (lambda g, x: jnp.roll(g, 3, axis=1), {"unrelated"}),
    "stopped": (lambda g, x: 0.0 * g, {"flat"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_wrong_gradient_of_an_honest_score_is_named(what, network):
    change, names = CHANGES[what]
    detector = scoring(lambda x, net: gradient_changed(lambda y: mahalanobis(y, net), change)(x))
    kinds = kinds_of(detector, network)
    assert np.isin(kinds, list(names)).mean() > 0.7, kinds  # a few random directions can miss some
    found = contract_gradients.gradient(
        Defense(network, (), jnp.float32(0.1), jnp.float32(1.0), detector), IMAGES, ROWS
    )
    assert found.level == "fault", found
    if names & set(slopes.WRONG):
        assert 'attack="square"' in found.change, found


def test_max_pooling_and_relus_on_black_are_right(network):
    detector = scoring(mahalanobis)
    assert set(kinds_of(detector, network)) <= {"right", "kinked"}
    defense = Defense(network, (), jnp.float32(0.1), jnp.float32(1.0), detector)
    found = contract_gradients.gradient(defense, IMAGES, ROWS)
    assert (found.level, found.value) == ("ok", 0), found


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_size_of_a_score_makes_no_difference(scale, network):
    honest = scoring(lambda x, net: scale * mahalanobis(x, net))
    assert set(kinds_of(honest, network, 0.1 * scale)) <= {"right", "kinked"}
    drowned = scoring(lambda x, net: 1e9 + mahalanobis(x, net))
    assert set(kinds_of(drowned, network)) <= {"right", "kinked", "undefined"}


def compare(function):
    images = slopes.off_kinks(IMAGES)
    gradients = np.asarray(jax.vmap(jax.grad(lambda x: function(x[None])[0]))(images))
    return slopes.compare(lambda x, rows: np.asarray(function(jnp.asarray(x))), images, gradients)


def test_kinks_are_told_from_wrong_gradients():
    flat = slopes.off_kinks(IMAGES).reshape(COUNT, -1)
    bends = jnp.asarray(flat.T)  # each image lies on a kink of its own

    def bent(x):
        own = jnp.abs(x.reshape(len(x), -1) - 0.5).sum(axis=1)
        return own + jnp.abs(x.reshape(len(x), -1) @ bends - (bends * bends).sum(0)[None]).min(
            axis=1
        )

    found = compare(bent)
    assert not found.wrong.any() and set(found.kinds) <= {"right", "kinked"}


def test_steps_are_told_from_stand_ins():
    mean = lambda x: jnp.mean(x, axis=(1, 2, 3))
    for levels in (9, 255):
        stand_in, rounded = through_rounding(mean, levels)
        assert set(compare(rounded).kinds) <= {"flat", "rounded"}
        assert compare(stand_in).wrong.mean() <= 0.25  # whose steps are noise beside the slope
    hard = lambda x: (mean(x) > 0.2).astype(jnp.float32)
    assert set(compare(hard).kinds) == {"still"}
    tail = lambda x: jax.nn.sigmoid(mean(x))
    soft = lambda x: hard(x) + tail(x) - jax.lax.stop_gradient(tail(x))
    assert set(compare(soft).kinds) == {"stand-in"}


def test_a_declared_stand_in_is_not_compared(network):
    mean = lambda x, net: through_rounding(lambda y: jnp.mean(y, axis=(1, 2, 3)), 9)[0](x)
    look = lambda detector: contract_gradients.gradient(
        Defense(network, (), jnp.float32(0.1), jnp.float32(1.0), detector), IMAGES, ROWS
    )
    found = look(scoring(mean))
    assert found.level == "fault" and "surrogate_gradient" in found.change, found
    declared = look(scoring(mean, differentiable=False, surrogate_gradient=True))
    assert declared.level == "ok" and "as declared" in declared.said, declared


def test_no_gradient_and_no_number_are_no_error():
    images = slopes.off_kinks(IMAGES)
    nothing = slopes.compare(lambda x, rows: np.full(len(x), np.nan), images, 0.0 * images)
    assert set(nothing.kinds) == {"still"}
    infinite = slopes.compare(lambda x, rows: np.zeros(len(x)), images, images * np.inf)
    assert set(infinite.kinds) == {slopes.UNDEFINED}
    assert nothing.counts() == {"still": COUNT} and not nothing.wrong.any()


def test_images_are_moved_off_ties_and_stay_in_the_box():
    moved = slopes.off_kinks(IMAGES)
    assert 0.09 < moved.min() and moved.max() < 0.91
    assert len(np.unique(moved[0])) > 0.9 * moved[0].size
    np.testing.assert_array_equal(moved, slopes.off_kinks(IMAGES))


def test_a_random_score_is_compared_under_one_draw(network):
    drawn = type("Drawn", (advdet.Detector,), {
        "random": True,
        "score": lambda self, key, fitted, classifier, images: jnp.mean(
            images * jax.random.normal(key, images.shape), axis=(1, 2, 3)),
    })()  # fmt: skip
    assert kinds_of(drawn, network) == ["right"] * COUNT


def test_a_function_in_waves_is_shattered_although_its_gradient_is_its_own():
    waves = toys.changed(toys.network(), "waves")
    images, rows = toys.digits(4, 8), np.arange(8, dtype=np.int32)
    found = goal_slopes.compared(
        jax.random.key(0), Generic(), undefended(waves), images, rows, rows, detector=False
    )
    assert found["classifier"].wrong.all()
