"""The Square Attack: values alone, its squares and bumps against plain loops, what it can do."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet.attacks import PGD, Square, balls
from advdet.attacks.objectives import Generic
from advdet.attacks.square import _bump, _grid_of_bumps
from advdet.defenses import undefended
from advdet.detectors import Detector

by_norm = pytest.mark.parametrize("norm", balls.NORMS)
OUT_OF_REACH = Generic(confidence=1e4)


@jax.custom_jvp
def no_gradient(x):
    """The value; whoever asks for a gradient gets an exception."""
    return x


@no_gradient.defjvp
def _refuse(primals, tangents):
    raise AssertionError("a gradient was taken")


@jax.custom_vjp
def nan_gradient(x):
    """The value, with a gradient of NaN."""
    return x


nan_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.full_like(g, jnp.nan),))


@dataclasses.dataclass(frozen=True)
class Stepped(toys.LinearScore):
    """A linear score in steps of one half, which has the gradient 0 almost everywhere."""

    differentiable: ClassVar[bool] = False
    how: str = "round"

    def score(self, key, fitted, classifier, images):
        plain = super().score(key, fitted, classifier, images)
        return {
            "round": lambda x: jnp.round(2.0 * x) / 2.0,
            "raises": no_gradient,
            "nan": nan_gradient,
        }[self.how](plain)


@dataclasses.dataclass(frozen=True)
class Noisy(Detector):
    """The mean of an image plus noise."""

    random: ClassVar[bool] = True

    def score(self, key, fitted, classifier, images):
        return jnp.mean(images, axis=(1, 2, 3)) + 0.3 * jax.random.normal(key, images.shape[:1])


def scene(how="round"):
    net = toys.network()
    images = toys.digits(11)
    direction = np.random.RandomState(5).randn(toys.PIXELS).astype(np.float32)
    threshold = float(np.median(images.reshape(toys.ROWS, -1) @ direction))
    defense = toys.guarded(net, Stepped(how=how), jnp.asarray(direction), threshold, 1.0)
    return defense, images, toys.wrong_targets(net, images)


@pytest.mark.parametrize("how", ["raises", "nan", "round"])
def test_a_score_is_met_that_cannot_be_differentiated(how):
    defense, images, targets = scene(how)
    found = toys.attack(Square(0.5, 600), Generic(), defense, images, targets)
    assert found.success.mean() > 0.5
    rows = found.success
    scores = np.asarray(defense.score(jax.random.key(0), jnp.asarray(found.image)))
    assert (scores <= defense.threshold + 1e-5)[rows].all()
    assert (toys.margins(defense.classifier, found.image, targets) < 0)[rows].all()
    assert (found.num_gradients == 0).all()
    assert np.abs(found.image - images).max() <= 0.5 + 1e-6


def test_where_gradients_are_zero_they_stop_pgd_and_not_this():
    defense, images, targets = scene()
    attack = lambda attack: toys.attack(attack, Generic(), defense, images, targets)
    by_gradients, by_values = attack(PGD(0.5, 300)), attack(Square(0.5, 600))
    flagged = np.asarray(defense.score(jax.random.key(0), jnp.asarray(images))) > defense.threshold
    assert by_values.success[flagged].mean() > by_gradients.success[flagged].mean() + 0.3


def states_of(attack, images, targets):
    keys = jax.random.split(jax.random.key(4), len(images))
    rows = jnp.arange(len(images), dtype=jnp.int32)
    given = map(jnp.asarray, (images, targets, images, np.ones(images.shape, bool)))
    return keys, jax.vmap(attack.init)(keys, rows, *given)


@jax.jit
def look(attack, objective, defense, keys, states):
    return jax.vmap(lambda k, s: attack.step(k, objective, defense, s))(keys, states)


@by_norm
def test_the_loss_never_rises_and_is_that_of_the_image_kept(norm):
    defense, images, targets = scene()
    attack = Square(0.3 if norm == "linf" else 1.2, 200, norm=norm)
    objective = Generic(confidence=30.0)
    keys, states = states_of(attack, images, targets)
    losses = []
    for _ in range(60):
        states = look(attack, objective, defense, keys, states)
        goals = jax.vmap(lambda x, t: objective(jax.random.key(0), defense, x, t))(
            states.kept, jnp.asarray(targets)
        )
        hinges = np.maximum(np.asarray(goals.losses), 0).sum(1)
        np.testing.assert_allclose(states.loss, hinges, rtol=1e-4)
        losses.append(np.asarray(states.loss))
    assert (np.diff(losses, axis=0) <= 0).all()
    assert (losses[-1] < losses[0]).all()


def test_in_linf_it_begins_with_stripes_and_repaints_one_square_at_a_time():
    net = toys.network()
    images = np.random.RandomState(2).uniform(0.3, 0.7, (toys.ROWS, *toys.SHAPE))
    images = images.astype(np.float32)
    attack = Square(0.2, 200)
    keys, states = states_of(attack, images, toys.wrong_targets(net, images))
    step = lambda states: look(attack, OUT_OF_REACH, undefended(net), keys, states)
    states = step(states)
    stripes = np.asarray(states.walk.current) - images
    np.testing.assert_allclose(np.abs(stripes), 0.2, atol=1e-6)
    np.testing.assert_allclose(stripes, stripes[:, :1] + np.zeros_like(stripes), atol=1e-6)
    assert (np.sign(stripes[:, 0, :, 0]).std(1) > 0).sum() > toys.ROWS // 2
    sides = set()
    for _ in range(60):
        states = step(states)
        changed = np.abs(np.asarray(states.walk.current - states.kept)) > 1e-6
        moved = np.abs(np.asarray(states.walk.current) - images)
        np.testing.assert_allclose(moved[changed], 0.2, atol=1e-6)
        assert changed.any((1, 2, 3)).all()  # no try is spent on what is there already
        for mask in changed[..., 0]:
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            sides.add(max(np.ptp(rows), np.ptp(columns)) + 1)
    # 0.8 of 64 pixels have a side of 7, then, halved again and again, 5, 4, 3 and 2.
    assert max(sides) == 7 and {1, 2} & sides and len(sides) >= 4


def test_squares_shrink_by_the_published_schedule():
    attack = Square(0.3, 10_000, share=0.8)
    walk = attack.init(
        None, None, jnp.zeros((20, 20, 1)), jnp.int32(0), jnp.zeros((20, 20, 1)),
        jnp.ones((20, 20, 1), bool),
    ).walk  # fmt: skip
    for tries, halvings in ((0, 0), (10, 0), (11, 1), (50, 1), (51, 2), (500, 3), (501, 4),
                            (2001, 6), (6001, 8), (8001, 9)):  # fmt: skip
        side = attack._side(walk._replace(iteration=jnp.int32(tries + 1)))
        assert int(side) == np.round(np.sqrt(0.8 * 400 / 2**halvings)), tries


def plain_hill(height, width):
    """Rings of 1 / k^2 laid over each other, by slices; length 1."""
    hill, middle = np.zeros((height, width)), (height // 2, width // 2)
    for ring in range(max(middle) + 1):
        rows, columns = (slice(max(0, m - ring), m + ring + 1) for m in middle)
        hill[rows, columns] += 1.0 / (ring + 1) ** 2
    return hill / np.linalg.norm(hill)


@pytest.mark.parametrize("side", [3, 5, 7])
def test_a_bump_is_a_hill_beside_a_hollow(side):
    inside = np.zeros((9, 11, 1), bool)
    inside[1 : 1 + side, 3 : 3 + side] = True
    half = side // 2
    wanted = np.concatenate([plain_hill(half, side), -plain_hill(side - half, side)]) / np.sqrt(2)
    turned = 0
    for seed in range(8):
        bump = np.asarray(_bump(jax.random.key(seed), jnp.asarray(inside), jnp.int32(side)))
        assert (bump[~inside] == 0).all()
        part = bump[1 : 1 + side, 3 : 3 + side, 0]
        is_turned = np.abs(part - wanted.T).max() < np.abs(part - wanted).max()
        np.testing.assert_allclose(part, wanted.T if is_turned else wanted, atol=1e-6)
        turned += is_turned
    assert 0 < turned < 8


@pytest.mark.parametrize("shape", [(28, 28, 1), (8, 9, 3), (1, 1, 1)])
def test_the_grid_of_bumps_covers_an_image_of_any_size(shape):
    grid = np.asarray(_grid_of_bumps(jax.random.key(1), shape))
    assert grid.shape == shape and np.isfinite(grid).all()
    assert np.mean(grid != 0) > 0.7
    side = max(1, min(shape[:2]) // 5)
    tiles = (shape[0] // side) * (shape[1] // side)
    np.testing.assert_allclose(np.square(grid).sum(), tiles * shape[2], rtol=1e-5)


def test_in_l2_all_of_the_radius_is_used_and_two_squares_change():
    net = toys.network()
    images = np.random.RandomState(2).uniform(0.35, 0.65, (toys.ROWS, *toys.SHAPE))
    images = images.astype(np.float32)
    attack = Square(0.25, 400, norm="l2")
    keys, states = states_of(attack, images, toys.wrong_targets(net, images))
    step = lambda states: look(attack, OUT_OF_REACH, undefended(net), keys, states)
    states = step(states)
    for _ in range(40):
        moves = np.asarray(states.walk.current, np.float64) - images
        lengths = np.linalg.norm(moves.reshape(toys.ROWS, -1), axis=1)
        np.testing.assert_allclose(lengths, 0.25, rtol=1e-5)
        states = step(states)


@pytest.mark.parametrize(("norm", "share"), [("linf", 0.97), ("l2", 0.6)])
def test_on_a_linear_classifier_it_comes_near_the_optimum(rng, norm, share):
    skip = 0.1 * rng.randn(toys.PIXELS, 2)
    net = toys.classifier(skip=skip, classes=2)
    images = rng.uniform(0.35, 0.65, (toys.ROWS, *toys.SHAPE)).astype(np.float32)
    wanted = 1 - toys.predicted(net, images)
    slope = skip[:, 0] - skip[:, 1]
    epsilon = 0.2 if norm == "linf" else 0.3
    best = epsilon * (np.abs(slope).sum() if norm == "linf" else np.linalg.norm(slope))
    attack = Square(epsilon, 1500, norm=norm)
    keys, states = states_of(attack, images, wanted)
    step = lambda _, s: jax.vmap(
        lambda k, one: attack.step(k, OUT_OF_REACH, undefended(net), one)
    )(keys, s)  # fmt: skip
    states = jax.jit(lambda s: jax.lax.fori_loop(0, attack.max_steps(), step, s))(states)
    assert np.asarray(states.over).all()
    fall = toys.margins(net, images, wanted) - toys.margins(net, np.asarray(states.kept), wanted)
    assert (fall <= best * (1 + 1e-4)).all()
    assert fall.min() > share * best


def test_where_scores_are_random_the_image_kept_is_looked_at_again_by_the_same_draws():
    net = toys.network()
    images = toys.digits(11)
    targets = toys.wrong_targets(net, images)
    defense = toys.guarded(net, Noisy(), threshold=-5.0, scale=0.1)
    attack = Square(0.2, 100)
    keys, states = states_of(attack, images, targets)
    for _ in range(8):
        before = states
        states = look(attack, OUT_OF_REACH, defense, keys, states)
        for row in range(4):
            folded = jax.random.fold_in(jax.random.clone(keys)[row], before.walk.iteration[row])
            key = jax.random.split(folded, 3)[0]
            hinge = lambda image, key=key, row=row: np.maximum(
                np.asarray(OUT_OF_REACH(
                    jax.random.clone(key), defense, image, jnp.asarray(targets[row])
                ).losses), 0
            ).sum()  # fmt: skip
            new, old = hinge(before.walk.current[row]), hinge(before.kept[row])
            np.testing.assert_allclose(states.loss[row], min(new, old), rtol=1e-5)
            kept = before.walk.current[row] if new <= old else before.kept[row]
            if abs(new - old) > 1e-3:
                np.testing.assert_array_equal(states.kept[row], kept)


def test_the_first_look_is_at_the_start_and_looks_are_one_more_than_steps():
    defense, images, targets = scene()
    attack = Square(0.2, 5)
    keys, states = states_of(attack, images, targets)
    np.testing.assert_array_equal(states.walk.current, images)
    for count in range(1, attack.max_steps() + 1):
        assert not np.asarray(attack.done(states)).any()
        states = look(attack, OUT_OF_REACH, defense, keys, states)
        assert (np.asarray(states.walk.iteration) == count).all()
    assert attack.max_steps() == 6 and np.asarray(attack.done(states)).all()


@by_norm
def test_frozen_pixels_keep_their_bits(norm):
    defense, images, targets = scene()
    free = np.random.RandomState(0).rand(*images.shape) < 0.6
    attack = Square(0.4 if norm == "linf" else 2.0, 300, norm=norm)
    found = toys.attack(
        attack, Generic(), undefended(defense.classifier), images, targets, free=free
    )
    assert found.success.any()
    np.testing.assert_array_equal(found.image[~free].view(np.int32), images[~free].view(np.int32))
