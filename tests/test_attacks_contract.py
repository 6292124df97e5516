"""What holds for every attack: its form, the truth on linear classifiers, and its manners."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from scipy.optimize import nnls

from advdet import metrics
from advdet.attacks import (
    ATTACKS,
    DDN,
    FIXED_RADIUS,
    PGD,
    STRONG,
    AttackResult,
    CarliniWagner,
    FastGradient,
    Jsma,
    OrthogonalPGD,
    SelectivePGD,
    Square,
    presets,
)
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended

WEAK = ("fast_gradient", "jsma")  # need not succeed
FAST = {
    "carlini_wagner": CarliniWagner(5, 300, 0.1, 1.0),
    "ddn": DDN(300),
    "fast_gradient": FastGradient(0.3, 10),
    "jsma": Jsma(1.0, 0.5),
    "pgd": PGD(0.4, 60),
    "selective_pgd": SelectivePGD(0.4, 60),
    "orthogonal_pgd": OrthogonalPGD(0.4, 60),
    "square": Square(0.4, 300),
}
THOROUGH = {
    "carlini_wagner": CarliniWagner(9, 1000, 0.01, 1e-2),
    "ddn": DDN(1000),
}
BOUNDED = {
    "carlini_wagner": CarliniWagner(3, 100, 0.1, 1.0, bounds=(-0.5, 0.5)),
    "ddn": DDN(100, bounds=(-0.5, 0.5)),
    "fast_gradient": FastGradient(0.3, 10, bounds=(-0.5, 0.5)),
    "jsma": Jsma(1.0, 0.5, bounds=(-0.5, 0.5)),
    "pgd": PGD(0.4, 60, bounds=(-0.5, 0.5)),
    "selective_pgd": SelectivePGD(0.4, 60, bounds=(-0.5, 0.5)),
    "orthogonal_pgd": OrthogonalPGD(0.4, 60, bounds=(-0.5, 0.5)),
    "square": Square(0.4, 300, bounds=(-0.5, 0.5)),
}
strong = pytest.mark.parametrize("name", STRONG)  # these seek the nearest image
every = pytest.mark.parametrize("name", list(ATTACKS))


def test_an_attack_is_strong_or_weak_or_keeps_to_a_radius():
    assert sorted((*STRONG, *WEAK, *FIXED_RADIUS)) == sorted(ATTACKS)
    assert set(presets.GRADIENT_FREE) <= set(FIXED_RADIUS)


# ---- form


def smoke(name):
    return presets.make(name, presets.settings(name, "smoke", 1, "none"))


def first_state(attack, image, target):
    free = jnp.ones(image.shape, bool)
    return attack.init(jax.random.key(1), jnp.int32(3), image, target, image, free)


@pytest.fixture(scope="module")
def one_image():
    net = toys.network()
    images = toys.digits(count=1)
    return undefended(net), jnp.asarray(images[0]), jnp.asarray(toys.wrong_targets(net, images)[0])


@every
def test_a_state_is_a_named_tuple_that_holds_no_key_and_keeps_its_form(name, one_image):
    defense, image, target = one_image
    attack = smoke(name)
    state = first_state(attack, image, target)
    assert isinstance(state, tuple) and hasattr(state, "_fields")
    for leaf in jax.tree.leaves(state):
        assert not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    form = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)
    step = lambda s: attack.step(jax.random.key(0), Generic(), defense, s)
    before = jax.eval_shape(lambda: first_state(attack, image, target))
    assert form(jax.eval_shape(step, state)) == form(before)


@every
def test_done_and_result_have_their_shapes_and_dtypes(name, one_image):
    _, image, target = one_image
    attack = smoke(name)
    state = first_state(attack, image, target)
    done, result = attack.done(state), attack.result(state)
    assert (done.shape, done.dtype) == ((), jnp.bool_)
    assert not done
    assert isinstance(result, AttackResult)
    wanted = AttackResult(
        image=(image.shape, jnp.float32),
        success=((), jnp.bool_),
        distance=((), jnp.float32),
        const=((), jnp.float32),
        nearest_miss=(image.shape, jnp.float32),
        missed=((), jnp.bool_),
        num_gradients=((), jnp.int32),
    )
    assert jax.tree.map(lambda a: (a.shape, a.dtype), result) == wanted


@every
def test_an_attack_that_found_nothing_returns_the_clean_image_at_infinity(name, one_image):
    _, image, target = one_image
    result = smoke(name).result(first_state(smoke(name), image, target))
    np.testing.assert_array_equal(result.image, image)
    np.testing.assert_array_equal(result.nearest_miss, image)
    assert not result.success and not result.missed
    assert np.isinf(result.distance) and np.isnan(result.const)
    assert result.num_gradients == 0


@every
def test_a_step_gives_the_same_compiled_and_not(name, one_image):
    defense, image, target = one_image
    attack = smoke(name)
    step = lambda s: attack.step(jax.random.key(0), Generic(), defense, s)
    state = first_state(attack, image, target)
    plain, quick = step(state), jax.jit(step)(state)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(quick)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@every
def test_attacks_are_equal_by_value_and_their_numbers_are_traced(name):
    attack = smoke(name)
    again = dataclasses.replace(attack)
    other = dataclasses.replace(attack, steps=attack.steps + 1)
    assert attack == again and hash(attack) == hash(again)
    assert attack != other
    assert jax.tree.structure(attack) == jax.tree.structure(other)
    moved = dataclasses.replace(attack, bounds=(-1.0, 1.0))
    assert jax.tree.structure(attack) != jax.tree.structure(moved)


@every
def test_no_image_takes_more_than_max_steps(name):
    net, attack = toys.network(), smoke(name)
    images = toys.digits()
    targets = toys.wrong_targets(net, images)
    result = toys.attack(attack, Generic(), undefended(net), images, targets)
    in_a_step = {"jsma": 2, "square": 0}.get(name, 1)
    assert (result.num_gradients <= in_a_step * attack.max_steps()).all()
    # At a fixed radius the start itself, or the random one after it, may be a success.
    assert name in FIXED_RADIUS or (result.num_gradients > 0).all()


# ---- linear classifiers, where the nearest image is known


def weights(rng, classes):
    """[PIXELS, K] whose entries have like sizes, so that no pixel has to move far."""
    signs = rng.choice([-1.0, 1.0], (toys.PIXELS, classes))
    return 0.4 * signs * rng.uniform(0.7, 1.3, (toys.PIXELS, classes))


def inside_images(rng, skip, count=toys.ROWS):
    """Images a given way out along one class's own direction, far from the edges of the box."""
    pull = skip[:, rng.randint(skip.shape[1], size=count)].T
    pull *= np.linspace(0.7, 1.7, count)[:, None] / np.linalg.norm(pull, axis=1, keepdims=True)
    flat = 0.5 + pull + rng.uniform(-0.03, 0.03, pull.shape)
    return flat.reshape(-1, *toys.SHAPE).astype(np.float32)


def nearest_distance(skip, bias, image, target, box):
    """The least |d| for which no other class beats the target at image + d, by active sets.

    min |d| subject to G d >= h (Lawson and Hanson 1974, chapter 23: least-distance programming),
    in float64; the conditions of Karush, Kuhn and Tucker are asserted.
    """
    flat = image.astype(np.float64).ravel()
    logits = (flat - 0.5) @ skip + bias
    others = np.delete(np.arange(len(logits)), target)
    rows = (skip[:, [target]] - skip[:, others]).T
    sides = logits[others] - logits[target]
    if box:
        eye = np.eye(len(flat))
        rows = np.concatenate([rows, eye, -eye])
        sides = np.concatenate([sides, -flat, flat - 1.0])
    matrix = np.concatenate([rows.T, sides[None]])
    unit = np.zeros(len(flat) + 1)
    unit[-1] = 1.0
    multipliers, _ = nnls(matrix, unit, maxiter=10_000)
    residual = matrix @ multipliers - unit
    move = -residual[:-1] / residual[-1]
    multipliers = multipliers / -residual[-1]
    slack = rows @ move - sides
    assert slack.min() > -1e-9
    np.testing.assert_allclose(move, rows.T @ multipliers, atol=1e-9)
    np.testing.assert_allclose(multipliers * slack, 0.0, atol=1e-8)
    return np.linalg.norm(move), int((multipliers[len(others) :] > 1e-9).sum())


def linear(skip, bias=None):
    return toys.classifier(skip=skip, bias=bias, classes=skip.shape[1])


def assert_nearest(result, wanted):
    """All succeeded, within 2 % of the least distance and not below it."""
    assert result.success.all()
    ratio = result.distance / np.asarray(wanted)
    assert 1 - 1e-4 < ratio.min() and ratio.max() < 1.02


@strong
def test_two_linear_classes_are_crossed_at_the_hyperplane(name, rng):
    skip, bias = weights(rng, 2), np.array([0.3, -0.2])
    normal, offset = skip[:, 1] - skip[:, 0], bias[1] - bias[0]
    length = np.linalg.norm(normal)
    wanted = np.linspace(0.3, 2.0, toys.ROWS)
    flat = 0.5 + rng.uniform(-0.03, 0.03, (toys.ROWS, toys.PIXELS))
    signed = ((flat - 0.5) @ normal + offset) / length
    flat -= (signed + wanted)[:, None] * normal / length
    images = flat.reshape(-1, *toys.SHAPE).astype(np.float32)
    assert 0 < images.min() and images.max() < 1

    targets = np.ones(toys.ROWS, np.int32)
    defense = undefended(linear(skip, bias))
    result = toys.attack(THOROUGH[name], Generic(), defense, images, targets)
    assert_nearest(result, wanted)


@strong
def test_untargeted_on_ten_linear_classes_the_nearest_hyperplane_is_crossed(name, rng):
    skip = weights(rng, 10)
    images = inside_images(rng, skip)
    logits = (images.reshape(toys.ROWS, -1).astype(np.float64) - 0.5) @ skip
    labels = logits.argmax(1)
    gaps = logits[np.arange(toys.ROWS), labels][:, None] - logits
    lengths = np.linalg.norm(skip[:, labels].T[:, None] - skip.T[None], axis=2)
    wanted = np.min(np.where(lengths > 0, gaps / np.where(lengths > 0, lengths, 1), np.inf), 1)

    defense = undefended(linear(skip))
    result = toys.attack(THOROUGH[name], Generic(targeted=False), defense, images, labels)
    assert_nearest(result, wanted)


@strong
def test_targeted_on_ten_linear_classes_the_quadratic_program_is_solved(name, rng):
    skip, bias = weights(rng, 10), 0.3 * rng.randn(10)
    images = inside_images(rng, skip)
    net = linear(skip, bias)
    targets = toys.wrong_targets(net, images)
    solve = lambda i, box: nearest_distance(skip, bias, images[i], targets[i], box)[0]
    wanted = np.array([solve(i, False) for i in range(toys.ROWS)])
    np.testing.assert_allclose([solve(0, True), solve(1, True)], wanted[:2], rtol=1e-6)
    assert 0.3 < wanted.min() and wanted.max() < 2.5

    result = toys.attack(THOROUGH[name], Generic(), undefended(net), images, targets)
    assert_nearest(result, wanted)


@strong
def test_targeted_where_the_box_binds_the_quadratic_program_is_solved(name, rng):
    skip, bias = weights(rng, 10), 0.3 * rng.randn(10)
    images = toys.digits(5)
    net = linear(skip, bias)
    targets = toys.wrong_targets(net, images)
    wanted, binding = zip(
        *(nearest_distance(skip, bias, x, t, True) for x, t in zip(images, targets))
    )
    assert min(binding) >= 8  # bounds that carry force

    result = toys.attack(THOROUGH[name], Generic(), undefended(net), images, targets)
    assert_nearest(result, wanted)


# ---- manners


@pytest.fixture(scope="module")
def scene():
    """A network, digit-like images, their labels and wrong targets."""
    net = toys.network()
    images = toys.digits()
    return net, images, toys.predicted(net, images), toys.wrong_targets(net, images)


def enough(name, result, share=1.0):
    """Whether at least this share succeeded; of a weak attack, whether any did.

    A random search is given a little: it has no slope that leads to the last images.
    """
    if name in WEAK:
        return result.success.any()
    return result.success.mean() >= (0.8 * share if name in presets.GRADIENT_FREE else share)


@every
def test_images_of_one_value_and_checkerboards_can_be_moved(name):
    net = toys.network()
    board = np.indices(toys.SHAPE).sum(0) % 2
    images = np.stack([np.zeros(toys.SHAPE), np.ones(toys.SHAPE), board, 1 - board])
    images = images.astype(np.float32)
    targets = toys.wrong_targets(net, images)

    state = first_state(FAST[name], jnp.asarray(images[0]), jnp.asarray(targets[0]))
    moved = FAST[name].step(jax.random.key(0), Generic(), undefended(net), state)
    position = lambda s: s.w if name == "carlini_wagner" else getattr(s, "walk", s).current
    assert np.isfinite(position(moved)).all()
    assert np.abs(position(moved) - position(state)).max() > 1e-3

    result = toys.attack(FAST[name], Generic(), undefended(net), images, targets)
    assert enough(name, result)
    rows = result.success
    changed = np.abs(result.image - images).max(axis=(1, 2, 3))
    assert (changed[rows] > 0.05).all() and (changed[~rows] == 0).all()
    assert (toys.margins(net, result.image, targets)[rows] < 0).all()


@every
@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_a_constant_added_to_all_logits_changes_nothing(name, shift, scene):
    net, images, _, targets = scene
    shifted = toys.network(bias=np.asarray(net.variables["bias"]) + shift)
    if shift < 0:
        assert shifted(jnp.asarray(images)).logits.max() < 0
    plain = toys.attack(FAST[name], Generic(), undefended(net), images, targets)
    other = toys.attack(FAST[name], Generic(), undefended(shifted), images, targets)
    np.testing.assert_array_equal(plain.success, other.success)
    assert enough(name, plain)
    # Logits near 100 are rounded to 8e-6, which each trajectory feels on its own.
    means = [found.distance[found.success].mean() for found in (other, plain)]
    np.testing.assert_allclose(*means, rtol=1e-3)


@every
@pytest.mark.parametrize("targeted", [True, False])
def test_a_constant_classifier_is_never_broken(name, targeted):
    constant = toys.classifier(bias=np.full(toys.CLASSES, 0.7))
    images = np.concatenate([toys.digits(count=3), np.zeros((1, *toys.SHAPE), np.float32)])
    targets = np.array([1, 2, 3, 0], np.int32)
    objective = Generic(targeted=targeted)
    result = toys.attack(FAST[name], objective, undefended(constant), images, targets)
    assert not result.success.any() and not result.missed.any()
    np.testing.assert_array_equal(result.image, images)
    assert np.isinf(result.distance).all() and np.isnan(result.const).all()
    assert metrics.mean_or_none(result.distance[result.success]) is None
    assert metrics.median_l2(result.distance, result.success) is None


@every
@pytest.mark.parametrize("targeted", [True, False])
def test_successes_meet_their_confidence_which_costs_distance(name, targeted, scene):
    net, images, labels, targets = scene
    wanted = targets if targeted else labels
    means = []
    for confidence in (0.0, 0.5, 1.0, 2.0):
        objective = Generic(confidence=confidence, targeted=targeted)
        result = toys.attack(FAST[name], objective, undefended(net), images, wanted)
        assert enough(name, result)
        margins = toys.margins(net, result.image, wanted, targeted)
        assert (margins[result.success] <= -confidence).all()
        means.append(result.distance.mean())
    assert name not in STRONG or (np.diff(means) > 0).all()


@every
def test_the_distance_is_that_of_the_returned_image_from_the_clean_one(name, scene):
    net, images, _, targets = scene
    result = toys.attack(FAST[name], Generic(), undefended(net), images, targets)
    assert enough(name, result)
    rows = result.success
    distances = metrics.l2(result.image, images)
    np.testing.assert_allclose(result.distance[rows], distances[rows], rtol=1e-5)
    assert np.isinf(result.distance[~rows]).all() and (distances[~rows] == 0).all()
    assert result.image.min() >= 0 and result.image.max() <= 1


@every
def test_the_returned_image_lies_in_another_box_exactly(name, scene):
    net, images, _, _ = scene
    images = images - np.float32(0.5)
    targets = toys.wrong_targets(net, images)
    result = toys.attack(BOUNDED[name], Generic(), undefended(net), images, targets)
    assert enough(name, result, 0.5)
    for found in (result.image, result.nearest_miss):
        assert found.min() >= -0.5 and found.max() <= 0.5
    moved = np.abs(result.image - images).max(axis=(1, 2, 3))
    assert (moved[result.success] > 0.01).all()


@every
def test_frozen_pixels_keep_their_exact_bits(name, scene, rng):
    net, images, _, targets = scene
    free = rng.rand(*images.shape) < 0.7
    result = toys.attack(FAST[name], Generic(), undefended(net), images, targets, free=free)
    assert enough(name, result, 0.5)
    for found in (result.image, result.nearest_miss):
        np.testing.assert_array_equal(found[~free].view(np.int32), images[~free].view(np.int32))
    open_everywhere = toys.attack(FAST[name], Generic(), undefended(net), images, targets)
    assert name not in STRONG or result.distance.mean() > open_everywhere.distance.mean()


@every
def test_frozen_pixels_are_the_clean_image_s_wherever_the_attack_starts(name, scene, rng):
    net, images, _, targets = scene
    free = rng.rand(*images.shape) < 0.7
    start = np.clip(images + rng.uniform(-0.2, 0.2, images.shape), 0, 1).astype(np.float32)
    result = toys.attack(
        FAST[name], Generic(), undefended(net), images, targets, free=free, start=start
    )
    assert enough(name, result, 0.5)
    np.testing.assert_array_equal(result.image[~free], images[~free])


@every
def test_an_attack_begins_at_its_start(name, scene):
    net, images, _, targets = scene
    broken = toys.attack(FAST["ddn"], Generic(confidence=0.1), undefended(net), images, targets)
    shortest = {"binary_search_steps": 1} if name == "carlini_wagner" else {}
    if hasattr(FAST[name], "random_start"):
        shortest = {"random_start": False}
    if name in FIXED_RADIUS:  # the start lies within it
        shortest |= {"epsilon": 1.0}
    # All but the strong ones look once more after their last step.
    one_look = dataclasses.replace(FAST[name], steps=1 if name in STRONG else 0, **shortest)
    from_image = toys.attack(one_look, Generic(), undefended(net), images, targets)
    assert not from_image.success.any()
    result = toys.attack(one_look, Generic(), undefended(net), images, targets, start=broken.image)
    assert result.success.all()
    np.testing.assert_allclose(result.image, broken.image, atol=1e-6)
    np.testing.assert_allclose(result.distance, broken.distance, rtol=1e-4)


@every
def test_a_result_depends_on_the_image_s_id_and_not_on_its_mates(name, scene):
    net, images, _, targets = scene
    ids = np.arange(50, 50 + toys.ROWS, dtype=np.int32)
    whole = toys.attack(FAST[name], Generic(), undefended(net), images, targets, ids=ids)
    turn = np.random.RandomState(3).permutation(toys.ROWS)
    other = toys.attack(
        FAST[name], Generic(), undefended(net), images[turn], targets[turn], ids=ids[turn]
    )
    toys.assert_same_bits(jax.tree.map(lambda a: a[turn], whole), other)


@every
def test_other_numbers_of_steps_and_other_radii_compile_nothing(name, scene):
    net, images, _, targets = scene
    toys.attack(FAST[name], Generic(), undefended(net), images, targets)
    before = toys.calls["classifier"]
    changes = {"epsilon": 0.1} if name in FIXED_RADIUS else {}
    other = dataclasses.replace(FAST[name], steps=FAST[name].steps - 1, **changes)
    toys.attack(other, Generic(), undefended(net), images, targets)
    assert toys.calls["classifier"] == before
