"""The fast gradient sign method against closed forms and a plain loop, in one step and in many."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet.attacks import FastGradient, presets
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended
from advdet.types import InputError


def plain_fast_gradient(goals, image, attack: FastGradient):
    """The attack for one image, in float64: Kurakin et al. 2017, section 2.2.

    Args:
      goals: of an image, [(loss, gradient)]; reached below 0 for the first, at 0 for the others.
      image: [H, W, C] clean.
      attack: the settings.

    Returns:
      The least L2 of an image that reached all goals, or inf; and the last image.
    """
    clean = image.astype(np.float64)
    now, best = clean.copy(), np.inf
    for step in range(attack.steps + 1):
        found = goals(now)
        if found[0][0] < 0 and all(value <= 0 for value, _ in found[1:]):
            best = min(best, np.linalg.norm(now - clean))
        if step < attack.steps:
            slope = np.sign(sum(gradient for _, gradient in found))
            now = now - attack.epsilon / attack.steps * slope
            now = np.clip(now, clean - attack.epsilon, clean + attack.epsilon)
            now = np.clip(now, *attack.bounds)
    return best, now


@jax.jit
def look(attack, objective, defense, state):
    return attack.step(jax.random.key(0), objective, defense, state)


def run_alone(attack, objective, defense, image, target, start=None):
    """The last state of one image."""
    image = jnp.asarray(image)
    free = jnp.ones(image.shape, bool)
    start = image if start is None else jnp.asarray(start)
    state = attack.init(None, jnp.int32(0), image, jnp.int32(target), start, free)
    for _ in range(attack.max_steps()):
        assert not attack.done(state)
        state = look(attack, objective, defense, state)
    assert attack.done(state)
    return state


@pytest.fixture(scope="module")
def scene():
    net = toys.network()
    images = toys.digits(11)
    return net, images, toys.wrong_targets(net, images)


@pytest.mark.parametrize("targeted", [True, False])
def test_on_two_linear_classes_a_step_gains_epsilon_times_the_sum_of_the_slopes(rng, targeted):
    skip = 0.1 * rng.randn(toys.PIXELS, 2)
    net = toys.classifier(skip=skip, classes=2)
    images = rng.uniform(0.3, 0.7, (toys.ROWS, *toys.SHAPE)).astype(np.float32)
    labels = toys.predicted(net, images)
    wanted = 1 - labels if targeted else labels
    gaps = -toys.margins(net, images, labels)
    gain = np.abs(skip[:, 0] - skip[:, 1]).sum()
    epsilon = float(np.median(gaps)) / gain
    assert epsilon < 0.25  # the box is not felt

    objective = Generic(targeted=targeted)
    result = toys.attack(FastGradient(epsilon), objective, undefended(net), images, wanted)
    clear = np.abs(gaps - epsilon * gain) > 1e-5
    np.testing.assert_array_equal(result.success[clear], (gaps < epsilon * gain)[clear])
    assert 0 < result.success.sum() < toys.ROWS
    moved = (result.image - images)[result.success]
    np.testing.assert_allclose(np.abs(moved), epsilon, rtol=1e-4)
    np.testing.assert_allclose(
        result.distance[result.success], epsilon * np.sqrt(toys.PIXELS), rtol=1e-4
    )
    np.testing.assert_allclose(
        -toys.margins(net, result.image, labels)[result.success],
        (gaps - epsilon * gain)[result.success],
        atol=1e-5,
    )


@pytest.mark.parametrize("steps", [1, 7])
def test_a_plain_loop_finds_the_same(scene, steps):
    net, images, targets = scene
    attack = FastGradient(0.12, steps)
    result = toys.attack(attack, Generic(), undefended(net), images, targets)
    for row, (image, target) in enumerate(zip(images, targets)):
        goals = lambda x, target=target: [toys.margin64(net.variables, x, target)]
        wanted, last = plain_fast_gradient(goals, image, attack)
        assert result.success[row] == np.isfinite(wanted)
        np.testing.assert_allclose(result.distance[row], wanted, rtol=1e-4)
        state = run_alone(attack, Generic(), undefended(net), image, target)
        np.testing.assert_allclose(state.current, last, atol=1e-5)
    assert result.success.any() and not result.success.all()


def test_a_detector_s_loss_is_followed_too(scene):
    net, images, targets = scene
    direction = np.random.RandomState(5).randn(toys.PIXELS).astype(np.float32)
    threshold, scale = float(np.median(images.reshape(len(images), -1) @ direction)) - 1.0, 0.25
    defense = toys.guarded(net, toys.LinearScore(), jnp.asarray(direction), threshold, scale)
    attack = FastGradient(0.3, 4)
    for image, target in zip(images[:4], targets):

        def goals(x, target=target):
            excess = x.ravel() @ direction.astype(np.float64) - threshold
            detector = excess / scale, direction.reshape(toys.SHAPE) / scale
            return [toys.margin64(net.variables, x, target), detector]

        wanted, last = plain_fast_gradient(goals, image, attack)
        state = run_alone(attack, Generic(), defense, image, target)
        np.testing.assert_allclose(state.current, last, atol=1e-5)
        np.testing.assert_allclose(attack.result(state).distance, wanted, rtol=1e-4)


def test_the_nearest_success_on_the_way_is_kept(scene):
    """Later images go on to epsilon, so a success that comes early is nearer than the last."""
    net, images, targets = scene
    attack = FastGradient(0.3, 10)
    result = toys.attack(attack, Generic(), undefended(net), images, targets)
    longest = np.abs(result.image - images).max(axis=(1, 2, 3))[result.success]
    shares = longest / (attack.epsilon / attack.steps)
    np.testing.assert_allclose(shares, np.round(shares), atol=1e-4)
    assert shares.min() < 5


def test_an_image_that_is_as_wanted_already_is_a_success_at_distance_0(scene):
    net, images, _ = scene
    wanted = toys.predicted(net, images)
    result = toys.attack(FastGradient(), Generic(), undefended(net), images, wanted)
    assert result.success.all() and (result.distance == 0).all()
    np.testing.assert_array_equal(result.image, images)


def test_gradients_are_counted_without_the_last_look(scene):
    net, images, targets = scene
    for steps in (1, 5):
        attack = FastGradient(0.1, steps)
        result = toys.attack(attack, Generic(), undefended(net), images, targets)
        assert (result.num_gradients == steps).all()
        assert attack.max_steps() == steps + 1


def test_images_stay_within_epsilon_of_the_clean_one_wherever_the_attack_starts(scene):
    net, images, targets = scene
    start = np.clip(images[0] + 0.5, 0, 1)
    attack = FastGradient(0.1, 3)
    state = run_alone(attack, Generic(), undefended(net), images[0], targets[0], start)
    assert np.abs(state.current - images[0]).max() <= 0.1 + 1e-6
    assert 0 <= state.current.min() and state.current.max() <= 1


def test_presets_take_the_defenders_epsilon():
    for preset in presets.PRESETS:
        make = lambda channels, preset=preset: presets.make(
            "fast_gradient", presets.settings("fast_gradient", preset, channels, "none")
        )
        assert make(1) == FastGradient(0.3, 1)
        assert make(3) == FastGradient(0.03, 1)


@pytest.mark.parametrize("field", ["epsilon", "steps"])
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(InputError, match=f"{field} must be"):
        presets.make("fast_gradient", dataclasses.asdict(FastGradient()) | {field: 0})
