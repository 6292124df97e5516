"""Saliency maps over pairs of pixels, against loops over all pairs."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet.attacks import Jsma, presets
from advdet.attacks.jsma import best_pair
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended
from advdet.detectors import Detector
from advdet.types import InputError

HALF = Jsma(gamma=0.5)
search = jax.jit(best_pair)


def plain_best_pair(towards, others, domain):
    """Papernot et al. 2016, algorithm 3, in float64: the flat places of the pair, or None."""
    towards, others = (np.asarray(a, np.float64).ravel() for a in (towards, others))
    places = np.flatnonzero(domain)
    best, pair = -np.inf, None
    for i, p in enumerate(places):
        for q in places[i + 1 :]:
            alpha, beta = towards[p] + towards[q], others[p] + others[q]
            if alpha > 0 and beta < 0 and -alpha * beta > best:
                best, pair = -alpha * beta, (p, q)
    return pair


def jacobian64(variables, image):
    """The toy's [K, PIXELS] slopes of the logits, in float64."""
    v = {name: np.asarray(value, np.float64) for name, value in variables.items()}
    hidden = np.tanh((np.asarray(image, np.float64).ravel() - 0.5) @ v["w1"])
    return (v["w1"] @ ((1.0 - hidden**2)[:, None] * v["w2"]) + v["skip"]).T


def plain_jsma(variables, image, aim, reached, attack: Jsma):
    """The attack for one image, in float64: Papernot et al. 2016, algorithm 2.

    Args:
      variables: the toy classifier's.
      image: [H, W, C] clean.
      aim: the class whose logit is raised.
      reached: of logits [K], whether they are as wanted.
      attack: the settings.

    Returns:
      The last image, whether it is a success, and how many pairs were raised.
    """
    now, pairs = image.astype(np.float64).ravel(), 0
    while not reached(toys.logits64(variables, now)):
        slopes = jacobian64(variables, now)
        pair = plain_best_pair(slopes[aim], slopes.sum(0) - slopes[aim], now < attack.bounds[1])
        if pair is None or pairs >= int(0.5 * attack.gamma * now.size + 1e-4):
            return now.reshape(image.shape), False, pairs
        now[list(pair)] = np.clip(now[list(pair)] + attack.theta, *attack.bounds)
        pairs += 1
    return now.reshape(image.shape), True, pairs


@jax.jit
def look(attack, objective, defense, state):
    return attack.step(jax.random.key(0), objective, defense, state)


def run_alone(attack, objective, defense, image, target):
    """The state of one image at the end, and the number of looks."""
    image = jnp.asarray(image)
    free = jnp.ones(image.shape, bool)
    state = attack.init(None, jnp.int32(0), image, jnp.int32(target), image, free)
    looks = 0
    while not attack.done(state):
        state, looks = look(attack, objective, defense, state), looks + 1
        assert looks <= attack.max_steps()
    return state, looks


@pytest.fixture(scope="module")
def scene():
    net = toys.network()
    images = toys.digits(11)
    return net, images, toys.wrong_targets(net, images)


# ---- the search for a pair


@pytest.mark.parametrize("shape", [toys.SHAPE, (9, 5, 3)])  # one block of rows, and three
@pytest.mark.parametrize("share", [1.0, 0.5, 0.03])
def test_the_pair_is_the_one_that_a_loop_over_all_pairs_finds(rng, share, shape):
    for _ in range(10):
        towards, others = rng.randn(2, *shape).astype(np.float32)
        domain = rng.rand(*shape) < share
        chosen, admissible = search(towards, others, domain)
        wanted = plain_best_pair(towards, others, domain)
        assert admissible == (wanted is not None)
        if wanted is not None:
            assert tuple(np.flatnonzero(chosen)) == wanted


def test_a_pair_may_hold_a_pixel_that_alone_is_not_admissible():
    towards, others = np.full((2, 2, 1), -1.0), np.full((2, 2, 1), 1.0)
    towards[0, 0], others[0, 0] = 5.0, 0.5  # alone it raises the other logits as well
    towards[1, 1], others[1, 1] = -2.0, -3.0
    chosen, admissible = search(*map(jnp.float32, (towards, others)), jnp.ones((2, 2, 1), bool))
    assert admissible
    np.testing.assert_array_equal(chosen[..., 0], [[True, False], [False, True]])


def test_there_is_no_pair_without_two_pixels_or_without_a_slope_both_ways(rng):
    towards = jnp.abs(jnp.asarray(rng.randn(*toys.SHAPE), jnp.float32))
    everywhere = jnp.ones(toys.SHAPE, bool)
    one = np.zeros(toys.SHAPE, bool)
    one[3, 4] = True
    assert search(towards, -towards, everywhere)[1]
    for towards_, others, domain in (
        (towards, -towards, jnp.asarray(one)),
        (towards, -towards, jnp.zeros(toys.SHAPE, bool)),
        (towards, towards, everywhere),
        (-towards, -towards, everywhere),
        (0.0 * towards, 0.0 * towards, everywhere),
    ):
        assert not search(towards_, others, domain)[1]


# ---- the attack


def test_a_plain_loop_finds_the_same(scene):
    net, images, targets = scene
    result = toys.attack(HALF, Generic(), undefended(net), images, targets)
    for row, (image, target) in enumerate(zip(images, targets)):
        reached = lambda logits, target=target: np.delete(logits, target).max() < logits[target]
        last, success, pairs = plain_jsma(net.variables, image, target, reached, HALF)
        assert result.success[row] == success
        assert result.num_gradients[row] in (2 * pairs, 2 * pairs + 2)
        if success:
            np.testing.assert_allclose(result.image[row], last, atol=1e-6)
            np.testing.assert_allclose(
                result.distance[row], np.linalg.norm(last - image), rtol=1e-5
            )
        else:
            state, _ = run_alone(HALF, Generic(), undefended(net), image, target)
            np.testing.assert_allclose(state.walk.current, last, atol=1e-6)
    assert result.success.any() and not result.success.all()


def test_untargeted_it_aims_at_the_likeliest_wrong_class(scene):
    net, images, _ = scene
    labels = toys.predicted(net, images)
    result = toys.attack(HALF, Generic(targeted=False), undefended(net), images, labels)
    for row, (image, label) in enumerate(zip(images, labels)):
        aim = np.argsort(toys.logits64(net.variables, image))[-2]
        reached = lambda logits, label=label: logits.argmax() != label
        last, success, _ = plain_jsma(net.variables, image, aim, reached, HALF)
        assert result.success[row] == success
        if success:
            np.testing.assert_allclose(result.image[row], last, atol=1e-6)
    assert result.success.mean() > 0.5


def test_pixels_are_only_raised_to_the_edge_and_no_more_of_them_than_gamma_allows(scene):
    net, images, targets = scene
    for gamma in (0.05, 0.2):
        attack = Jsma(gamma=gamma)
        result = toys.attack(attack, Generic(), undefended(net), images, targets)
        changed = result.image != images
        assert (result.image[changed] == 1).all()
        counts = changed.reshape(len(images), -1).sum(1)
        assert (counts <= gamma * toys.PIXELS).all()
        assert (counts % 2 == 0).all() and counts.max() > 0
        assert (result.num_gradients <= gamma * toys.PIXELS).all()


def test_a_larger_gamma_loses_no_success_and_brings_more(scene):
    net, images, targets = scene
    few, many = (
        toys.attack(Jsma(gamma=gamma), Generic(), undefended(net), images, targets)
        for gamma in (0.05, 0.5)
    )
    assert many.success[few.success].all()
    assert many.success.sum() > few.success.sum()
    np.testing.assert_array_equal(many.image[few.success], few.image[few.success])


def test_the_number_of_pairs_can_be_bounded_too(scene):
    net, images, targets = scene
    state, looks = run_alone(
        Jsma(gamma=1.0, steps=2), Generic(confidence=1e3), undefended(net), images[0], targets[0]
    )
    assert looks == 3 and state.walk.num_gradients == 4
    assert (state.walk.current != images[0]).sum() == 4


def test_it_ends_where_no_pair_is_left(scene):
    net, _, targets = scene
    white = np.ones(toys.SHAPE, np.float32)
    state, looks = run_alone(HALF, Generic(), undefended(net), white, targets[0])
    assert looks == 1 and not HALF.result(state).success
    np.testing.assert_array_equal(HALF.result(state).image, white)


def test_a_pixel_can_be_raised_more_than_once_by_a_small_theta(scene):
    net, images, targets = scene
    attack = Jsma(theta=0.25, gamma=1.0)
    state, _ = run_alone(attack, Generic(confidence=1e3), undefended(net), images[0], targets[0])
    rise = (np.asarray(state.walk.current) - images[0])[np.asarray(state.walk.current) < 1]
    np.testing.assert_allclose(rise / 0.25, np.round(rise / 0.25), atol=1e-5)
    assert (np.asarray(state.walk.current) - images[0]).max() > 0.3


def test_a_flagged_image_is_a_miss_and_the_attack_goes_on(scene):
    net, images, targets = scene
    plain = toys.attack(HALF, Generic(), undefended(net), images, targets)
    row = int(np.flatnonzero(plain.success)[0])
    flags_all = toys.guarded(net, toys.LinearScore(), jnp.zeros(toys.PIXELS), -1.0)
    state, _ = run_alone(HALF, Generic(), flags_all, images[row], targets[row])
    result = HALF.result(state)
    assert not result.success and result.missed
    np.testing.assert_array_equal(result.image, images[row])
    np.testing.assert_array_equal(result.nearest_miss, plain.image[row])
    assert result.num_gradients > plain.num_gradients[row]


@dataclasses.dataclass(frozen=True)
class Backwards(Detector):
    """Gives the classes the logits of their mirror images."""

    kind: ClassVar[str] = "corrector"

    def logits(self, key, fitted, classifier, images):
        return classifier(images).logits[:, ::-1]


def test_logits_are_those_that_the_defence_gives(scene):
    net, images, targets = scene
    plain = toys.attack(HALF, Generic(), undefended(net), images, targets)
    mirrored = toys.attack(
        HALF, Generic(), toys.guarded(net, Backwards()), images, toys.CLASSES - 1 - targets
    )
    np.testing.assert_array_equal(mirrored.success, plain.success)
    np.testing.assert_array_equal(mirrored.image, plain.image)


def test_presets_are_the_paper_s_for_all_budgets():
    for preset in presets.PRESETS:
        for channels, pixels in ((1, 784), (3, 3072)):
            made = presets.make("jsma", presets.settings("jsma", preset, channels, "none"))
            assert (made.theta, made.gamma) == (1.0, 0.1)
            assert made.steps == int(made.gamma * pixels / 2)


@pytest.mark.parametrize("field", ["theta", "gamma", "steps"])
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(InputError, match=f"{field} must be"):
        presets.make("jsma", dataclasses.asdict(Jsma()) | {field: 0})
