"""Decoupled direction and norm against a plain loop, for one goal and for two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet.attacks import DDN
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended

ATTACK = DDN(60)


def unit(direction):
    length = np.linalg.norm(direction)
    return direction / length if length > 0 else direction


def plain_ddn(goals, image, attack: DDN):
    """The attack for one image, in float64: Rony et al. 2019, algorithm 1, for several goals.

    Args:
      goals: of an image, [(value, gradient)]; reached below 0 for the first, at 0 for the others.
      image: [H, W, C] clean.
      attack: the settings.

    Returns:
      The least L2 of an image that reached all goals, or inf.
    """
    clean = image.astype(np.float64)
    now, radius, best = clean.copy(), attack.initial_radius, np.inf
    for iteration in range(attack.steps):
        found = goals(now)
        met = found[0][0] < 0 and all(value <= 0 for value, _ in found[1:])
        if met:
            best = min(best, np.linalg.norm(now - clean))
        unmet = [gradient for value, gradient in found if value > 0]
        followed = unmet or [gradient for _, gradient in found]
        direction = -unit(sum(unit(gradient) for gradient in followed))
        cosine = 0.5 * (1 + np.cos(np.pi * iteration / attack.steps))
        length = attack.last_step + (attack.first_step - attack.last_step) * cosine
        if len(found) > 1:
            reached = np.linalg.norm(now - clean)
            radius = min(radius, reached) if met and reached > 0 else radius
            radius = min(radius, np.linalg.norm(np.maximum(clean, 1 - clean)))
        radius *= 1 - attack.gamma if met else 1 + attack.gamma
        now = np.clip(clean + radius * unit(now - clean + length * direction), *attack.bounds)
    return best


@pytest.fixture(scope="module")
def guarded():
    """A network with a linear detector that the shortest way past the network runs into."""
    net = toys.network()
    images = toys.digits(11)
    targets = toys.wrong_targets(net, images)
    plain = toys.attack(ATTACK, Generic(), undefended(net), images, targets)
    direction = np.random.RandomState(5).randn(toys.PIXELS).astype(np.float32)
    scores = plain.image.reshape(toys.ROWS, -1) @ direction
    defense = toys.guarded(
        net, toys.LinearScore(), jnp.asarray(direction), float(np.median(scores)) - 0.5, 0.25
    )
    return defense, images, targets


def test_a_plain_loop_finds_the_same_for_one_goal():
    net = toys.network()
    images = toys.digits(11)
    targets = toys.wrong_targets(net, images)
    plain = [
        plain_ddn(lambda x: [toys.margin64(net.variables, x, target)], image, ATTACK)  # noqa: B023
        for image, target in zip(images, targets)
    ]
    result = toys.attack(ATTACK, Generic(), undefended(net), images, targets)
    assert result.success.all()
    np.testing.assert_allclose(result.distance, plain, rtol=1e-3)


def test_a_plain_loop_finds_the_same_for_two_goals(guarded):
    defense, images, targets = guarded
    direction = np.asarray(defense.fitted, np.float64)
    threshold = float(defense.threshold)

    def goals(image, target):
        excess = image.ravel() @ direction - threshold
        slope = direction.reshape(toys.SHAPE)
        return [toys.margin64(defense.classifier.variables, image, target), (excess, slope)]

    plain = [
        plain_ddn(lambda x: goals(x, target), image, ATTACK)  # noqa: B023
        for image, target in zip(images, targets)
    ]
    result = toys.attack(ATTACK, Generic(), defense, images, targets)
    assert result.success.all()
    np.testing.assert_allclose(result.distance, plain, rtol=5e-3)


def test_a_success_reaches_both_goals_and_costs_more_than_one(guarded):
    defense, images, targets = guarded
    result = toys.attack(ATTACK, Generic(), defense, images, targets)
    alone = toys.attack(ATTACK, Generic(), undefended(defense.classifier), images, targets)
    scores = defense.score(jax.random.key(0), jnp.asarray(result.image))
    assert (scores <= defense.threshold + 1e-5).all()
    assert (toys.margins(defense.classifier, result.image, targets) < 0).all()
    flagged = alone.image.reshape(toys.ROWS, -1) @ np.asarray(defense.fitted) > defense.threshold
    assert flagged.any()
    assert (result.distance[flagged] > alone.distance[flagged]).all()


def test_a_step_costs_one_gradient_for_each_goal(guarded):
    defense, images, targets = guarded
    two = toys.attack(ATTACK, Generic(), defense, images, targets)
    one = toys.attack(ATTACK, Generic(), undefended(defense.classifier), images, targets)
    assert (two.num_gradients == 2 * ATTACK.steps).all()
    assert (one.num_gradients == ATTACK.steps).all()


def test_an_unreachable_detector_leaves_the_nearest_miss(guarded):
    """Of the images that fool the classifier it is the one with the least violation."""
    defense, images, targets = guarded
    free = np.zeros(images.shape, bool)
    free[:, :, 1:] = True  # the pixels that carry the score are frozen
    direction = np.zeros(toys.SHAPE, np.float32)
    direction[:, 0] = 1.0
    blocked = toys.guarded(
        defense.classifier, toys.LinearScore(), jnp.asarray(direction.ravel()), -1.0, 0.25
    )
    result = toys.attack(ATTACK, Generic(), blocked, images, targets, free=free)
    assert not result.success.any()
    np.testing.assert_array_equal(result.image, images)
    assert result.missed.any()
    rows = result.missed
    nearest = result.nearest_miss[rows]
    assert (toys.margins(defense.classifier, nearest, targets[rows]) < 0).all()
    np.testing.assert_array_equal(result.nearest_miss[~rows], images[~rows])


def test_a_goal_without_gradient_is_a_zero_vector_and_not_a_nan():
    constant = toys.classifier()
    images = toys.digits(count=3)
    defense = toys.guarded(constant, toys.LinearScore(), jnp.ones(toys.PIXELS), 30.0, 1.0)
    state = ATTACK.init(
        None,
        jnp.int32(0),
        jnp.asarray(images[0]),
        jnp.int32(1),
        jnp.asarray(images[0]),
        jnp.ones(toys.SHAPE, bool),
    )
    step = jax.jit(lambda s: ATTACK.step(jax.random.key(0), Generic(), defense, s))
    for _ in range(5):
        state = step(state)
        assert np.isfinite(state.walk.current).all()
    # The other goal is still followed: the score is the sum of the pixels.
    assert state.walk.current.sum() < images[0].sum()


def test_tiny_gradients_keep_their_direction():
    """Squares of entries near 1e-30 vanish in float32; the direction must not."""
    net = toys.network()
    scale = 1e-30
    tiny = toys.classifier(
        w1=net.variables["w1"],
        w2=scale * np.asarray(net.variables["w2"]),
        bias=scale * np.asarray(net.variables["bias"]),
    )
    images = toys.digits(11)
    targets = toys.wrong_targets(net, images)
    plain = toys.attack(ATTACK, Generic(), undefended(net), images, targets)
    result = toys.attack(ATTACK, Generic(), undefended(tiny), images, targets)
    np.testing.assert_array_equal(result.success, plain.success)
    np.testing.assert_allclose(result.distance, plain.distance, rtol=1e-2)


def test_the_norm_shrinks_while_all_goals_are_met_and_grows_otherwise():
    net = toys.network()
    images = toys.digits(11, 8)
    targets = toys.wrong_targets(net, images)
    begin = lambda image, target: ATTACK.init(
        None, jnp.int32(0), image, target, image, jnp.ones(image.shape, bool)
    )
    states = jax.vmap(begin)(jnp.asarray(images), jnp.asarray(targets))
    one = lambda s: ATTACK.step(jax.random.key(0), Generic(), undefended(net), s)
    step = jax.jit(jax.vmap(one))
    seen = []
    for _ in range(20):
        met = toys.margins(net, states.walk.current, targets) < 0
        after = step(states)
        factor = np.where(met, 1 - ATTACK.gamma, 1 + ATTACK.gamma)
        np.testing.assert_allclose(after.radius / states.radius, factor, rtol=1e-5)
        norms = np.linalg.norm(
            np.asarray(after.walk.current - states.walk.image).reshape(8, -1), axis=1
        )
        assert (norms <= after.radius * (1 + 1e-5)).all()
        seen += list(met)
        states = after
    assert set(seen) == {True, False}


def test_from_a_start_that_is_farther_away_the_radius_is_that_start_s():
    net = toys.network()
    images = toys.digits(3)
    targets = toys.wrong_targets(net, images)
    far = toys.attack(DDN(100), Generic(confidence=5.0), undefended(net), images, targets).image
    away = np.sqrt(np.square(far - images).sum((1, 2, 3)))
    begin = lambda start: jax.vmap(
        lambda image, start: DDN().init(
            None, None, image, jnp.int32(0), start, jnp.ones(image.shape, bool)
        ).radius
    )(jnp.asarray(images), jnp.asarray(start))  # fmt: skip
    np.testing.assert_allclose(begin(far), np.maximum(away, 1.0), rtol=1e-5)
    np.testing.assert_array_equal(begin(images), 1.0)


# ---- several goals


def states_of(attack, defense, images, targets):
    """The states [N] of an attack on images, one step after the other."""
    begin = lambda image, target: attack.init(
        None, jnp.int32(0), image, target, image, jnp.ones(image.shape, bool)
    )
    states = jax.vmap(begin)(jnp.asarray(images), jnp.asarray(targets))
    step = jax.jit(jax.vmap(lambda s: attack.step(jax.random.key(0), Generic(), defense, s)))
    for _ in range(attack.steps):
        states = step(states)
        yield states


def guarded_by_a_line(threshold, count=6):
    """A network guarded by a linear score, images of which many pixels are at an edge, targets."""
    net = toys.network()
    images = np.concatenate([toys.digits(11, count), np.zeros((1, *toys.SHAPE), np.float32)])
    direction = jnp.asarray(np.random.RandomState(5).randn(toys.PIXELS), jnp.float32)
    defense = toys.guarded(net, toys.LinearScore(), direction, threshold, 1.0)
    return defense, images, toys.wrong_targets(net, images)


def test_a_goal_out_of_reach_does_not_let_the_norm_grow_beyond_the_box():
    defense, images, targets = guarded_by_a_line(-1e3)
    farthest = np.sqrt(np.square(np.maximum(images, 1 - images)).sum((1, 2, 3)))
    for states in states_of(ATTACK, defense, images, targets):
        assert (np.asarray(states.radius) <= farthest * (1 + ATTACK.gamma) * (1 + 1e-5)).all()
    assert (np.asarray(states.radius) > 0.9 * farthest).all()  # it was wanted


def test_after_a_success_the_norm_shrinks_from_what_was_reached():
    defense, images, targets = guarded_by_a_line(0.0)
    attack, before, seen = DDN(60, initial_radius=6.0), None, 0
    for states in states_of(attack, defense, images, targets):
        if before is not None:
            norms = np.sqrt(np.square(np.asarray(before.walk.current) - images).sum((1, 2, 3)))
            shrunk = np.asarray(states.radius) < np.asarray(before.radius) * (1 - 1e-4)
            seen += int(shrunk.sum())
            assert (np.asarray(states.radius)[shrunk] <= 0.95 * norms[shrunk] * (1 + 1e-4)).all()
        before = states
    assert seen > 20
