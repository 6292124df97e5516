"""The C&W attack against a plain loop, and its constant, bracket and early abort."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import checkpoints, datasets, nets
from advdet.attacks import CarliniWagner, driver, presets, variables
from advdet.attacks.goals import margin
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended
from advdet.types import Classifier, Outputs

FAST = presets.make("carlini_wagner", presets.settings("carlini_wagner", "fast", 1, "none"))
PUBLISHED = dataclasses.replace(FAST, restart_noise=0.0)


# ---- the change of variables

GRID = np.linspace(-12, 12, 2001).astype(np.float32)


def test_the_box_s_derivative_keeps_its_digits_at_both_ends():
    found = jax.vmap(jax.grad(variables.to_box))(jnp.asarray(GRID))
    exact = 0.5 / np.cosh(GRID.astype(np.float64)) ** 2
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_the_box_s_derivative_scales_with_its_bounds():
    found = jax.vmap(jax.grad(lambda w: variables.to_box(w, (-1.0, 3.0))))(jnp.asarray(GRID))
    exact = 2.0 / np.cosh(GRID.astype(np.float64)) ** 2
    np.testing.assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.5, 0.5), (-1.0, 1.0), (0.1, 0.3)])
def test_images_survive_the_way_into_variables_and_back(bounds, rng):
    low, high = bounds
    images = rng.uniform(low, high, 500).astype(np.float32)
    images[:2] = bounds
    there = variables.from_box(jnp.asarray(images), bounds)
    assert np.isfinite(there).all()
    back = variables.to_box(there, bounds)
    np.testing.assert_allclose(back, images, atol=1e-6 * (high - low))


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.5, 0.5), (0.1, 0.3)])
def test_any_variables_lie_in_the_box_exactly(bounds):
    wild = jnp.array([-jnp.inf, -1e30, -200.0, -20.0, 0.0, 20.0, 200.0, 1e30, jnp.inf])
    images = np.asarray(variables.to_box(wild, bounds))
    assert images.min() == np.float32(bounds[0]) and images.max() == np.float32(bounds[1])
    exact = bounds[0] + (bounds[1] - bounds[0]) * 0.5 * (np.tanh(GRID.astype(np.float64)) + 1)
    np.testing.assert_allclose(variables.to_box(jnp.asarray(GRID), bounds), exact, atol=1e-7)


# ---- the whole attack, as a plain loop


def plain_carlini_wagner(image, attack: CarliniWagner):
    """The attack as the paper and its released code give it, for one image, in float64.

    Args:
      image: [H, W, C] clean.
      attack: the settings.

    Yields:
      Images; wants (margin, its gradient) sent back, the margin negative where all is well.

    Returns:
      (least L2 of a success or inf, Adam steps taken).

    Source: Carlini & Wagner 2017 (S&P); reference code's search over c and 0.9999 rule.
    """
    clean = image.astype(np.float64)
    w_clean = np.arctanh(0.999999 * (2.0 * clean - 1.0))
    lower, upper, const = 0.0, 1e10, attack.initial_const
    best, taken = np.inf, 0
    for _ in range(attack.binary_search_steps):
        w, mean, square = w_clean.copy(), np.zeros_like(clean), np.zeros_like(clean)
        won, previous = False, np.inf
        for iteration in range(attack.steps):
            now = 0.5 * (np.tanh(w) + 1.0)
            margin, slope = yield now
            squared = np.sum((now - clean) ** 2)
            loss = squared + const * max(margin, 0.0)
            if margin < 0:
                won, best = True, min(best, squared)
            gradient = 2.0 * (now - clean) + (const * slope if margin > 0 else 0.0)
            gradient = gradient * 0.5 * (1.0 - np.tanh(w) ** 2)
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            unbiased = mean / (1 - 0.9 ** (iteration + 1))
            spread = np.sqrt(square / (1 - 0.999 ** (iteration + 1)))
            w = w - attack.learning_rate * unbiased / (spread + 1e-8)
            taken += 1
            if attack.abort_early and iteration % (attack.steps // 10) == 0:
                if loss > 0.9999 * previous:
                    break
                previous = loss
        if won:
            upper = min(upper, const)
        else:
            lower = max(lower, const)
        const = 0.5 * (lower + upper) if upper < 1e9 else 10.0 * const
    return np.sqrt(best), taken


def run_plain(margins_and_gradients, images, attack: CarliniWagner):
    """One plain loop for each image, none knowing of the others; [N] distances, [N] steps.

    Args:
      margins_and_gradients: of images [N, H, W, C] -> ([N], [N, H, W, C]).
      images: [N, H, W, C] clean.
      attack: the settings.
    """
    loops = [plain_carlini_wagner(image, attack) for image in images]
    looked_at = np.stack([next(loop) for loop in loops])
    outcome = [None] * len(images)
    while None in outcome:
        margins, slopes = margins_and_gradients(looked_at)
        for i in range(len(images)):
            if outcome[i] is None:
                try:
                    looked_at[i] = loops[i].send((margins[i], slopes[i]))
                except StopIteration as ended:
                    outcome[i] = ended.value
    return np.array(outcome).T


def assert_like_the_loop(result, distances, taken):
    # At rate 0.1 an odd image is lost or found by rounding alone.
    won = result.success & np.isfinite(distances)
    assert won.sum() >= 19 and len(won) == 20
    np.testing.assert_allclose(result.distance[won].mean(), distances[won].mean(), rtol=0.01)
    np.testing.assert_allclose(result.distance[won], distances[won], rtol=0.05)
    np.testing.assert_allclose(result.num_gradients.mean(), taken.mean(), rtol=0.1)


def test_a_plain_loop_finds_the_same_on_a_toy():
    net = toys.network()
    images = toys.digits(7, 20)
    targets = toys.wrong_targets(net, images)
    look = lambda now: list(
        zip(*(toys.margin64(net.variables, x, t) for x, t in zip(now, targets)))
    )
    plain = run_plain(look, images, PUBLISHED)
    ids = np.arange(20, dtype=np.int32)
    parts = [
        toys.attack(PUBLISHED, Generic(), undefended(net), images[r], targets[r], ids=ids[r])
        for r in (slice(0, 16), slice(16, 20))
    ]
    result = jax.tree.map(lambda *a: np.concatenate(a), *parts)
    assert_like_the_loop(result, *plain)


@pytest.mark.slow
def test_a_plain_loop_finds_the_same_on_mnist():
    path = checkpoints.shipped("mnist")
    if path is None or not os.environ.get("TFDS_DATA_DIR"):
        pytest.skip("needs the shipped MNIST weights and prepared MNIST in $TFDS_DATA_DIR")
    network = nets.MnistNet(10)
    like = jax.eval_shape(lambda: nets.init(jax.random.key(0), network, (28, 28, 1)).variables)
    net = Classifier(checkpoints.load(path, like)[0], nets.NetApply(network))
    test = datasets.load("mnist", "tfds").test.take(slice(0, 40))
    rows = np.flatnonzero(toys.predicted(net, test.images) == test.labels)[:20]
    images, ids = test.images[rows], test.ids[rows]
    targets = toys.wrong_targets(net, images)

    @jax.jit
    def look(now):
        value = lambda x, t: margin(net(x[None]).logits[0], t, True)
        return jax.vmap(jax.value_and_grad(value))(now, jnp.asarray(targets))

    def look64(now):
        return [np.asarray(a, np.float64) for a in look(now.astype(np.float32))]

    plain = run_plain(look64, images, PUBLISHED)
    result = driver.run(
        jax.random.key(0), PUBLISHED, Generic(), undefended(net), images, targets, ids, lanes=10
    ).results
    assert_like_the_loop(result, *plain)


# ---- constant and bracket


@dataclasses.dataclass(frozen=True)
class ScaledApply:
    """The toy with its logits divided by 10, 100 or 1,000, as the first pixel says."""

    def __call__(self, variables, images, key=None):
        logits = toys.ToyApply()(variables, images, key).logits
        power = jnp.round(3.0 * jax.lax.stop_gradient(images[:, 0, 0, 0]))
        return Outputs(logits * 10.0 ** -power[:, None], {})


def test_each_image_has_a_constant_of_its_own():
    """One image four times, its logits scaled so that c must be 1 to 1,000 times as large.

    A constant shared by the batch, or multiplied out over it, cannot serve all four.
    """
    w1 = np.array(toys.network().variables["w1"])
    w1[0] = 0.0  # the first pixel sets the scale and does nothing else
    plain = toys.network(w1=w1)
    net = Classifier(plain.variables, ScaledApply())
    images = np.repeat(toys.digits(3, 1), 4, axis=0)
    images[:, 0, 0, 0] = np.arange(4) / 3
    free = np.ones(images.shape, bool)
    free[:, 0, 0, 0] = False
    targets = np.repeat(toys.wrong_targets(plain, images[:1]), 4)
    attack = CarliniWagner(12, 200, 0.05, 0.01, restart_noise=0.0)
    run = lambda **options: toys.attack(
        attack, Generic(), undefended(net), images, targets, free=free, **options
    )
    result = run()
    assert result.success.all()
    np.testing.assert_allclose(result.const[1:] / result.const[:-1], 10.0, rtol=0.35)
    np.testing.assert_allclose(result.distance, result.distance[0], rtol=0.03)
    for row in range(4):
        toys.assert_same_bits(run(todo=np.array([row])), result, rows=[row])


@pytest.fixture(scope="module")
def histories():
    """lower, upper, const, search_step [steps, images] of the attack stepped by hand.

    The last image cannot be broken: its weights are zero but for a bias.
    """
    attack = CarliniWagner(8, 30, 0.1, 0.01)
    net = toys.network()
    images = jnp.asarray(toys.digits(4, 6))
    targets = jnp.asarray(toys.wrong_targets(net, images))
    hopeless = toys.classifier(bias=np.arange(toys.CLASSES)[::-1])
    choose = lambda *leaves: jnp.stack([leaves[0]] * 5 + [leaves[1]])
    many = jax.tree.map(choose, undefended(net), undefended(hopeless))
    targets = targets.at[5].set(9)
    begin = lambda image, target: attack.init(
        jax.random.key(1), jnp.int32(0), image, target, image, jnp.ones(image.shape, bool)
    )
    states = jax.vmap(begin)(images, targets)

    @jax.jit
    def step(states):
        one = lambda d, s: attack.step(jax.random.key(0), Generic(), d, s)
        return jax.vmap(one)(many, states)

    rows = []
    while not attack.done(states).all():
        rows.append([states.lower, states.upper, states.const, states.search_step])
        states = step(states)
    return attack, [np.array(column) for column in zip(*rows)]


def test_the_bracket_never_inverts_and_holds_the_constant(histories):
    attack, (lower, upper, const, search) = histories
    at_work = search < attack.binary_search_steps
    assert (lower <= upper)[at_work].all()
    assert ((lower <= const) & (const <= upper))[at_work].all()


def test_the_constant_rises_tenfold_until_a_success_then_halves_the_bracket(histories):
    attack, (lower, upper, const, search) = histories
    seen = []
    for image in range(search.shape[1]):
        for new in np.flatnonzero(np.diff(search[:, image]) == 1) + 1:
            if search[new, image] >= attack.binary_search_steps:
                break
            tried = const[new - 1, image]
            won = upper[new, image] < upper[new - 1, image]
            moved, kept = (upper, lower) if won else (lower, upper)
            assert moved[new, image] == tried
            assert kept[new, image] == kept[new - 1, image]
            middle = 0.5 * (lower[new, image] + upper[new, image])
            wanted = middle if upper[new, image] < 1e9 else 10 * tried
            np.testing.assert_allclose(const[new, image], wanted, rtol=1e-6)
            seen.append((won, upper[new, image] < 1e9))
    assert set(seen) == {(True, True), (False, True), (False, False)}


def test_the_constant_of_a_hopeless_image_keeps_rising(histories):
    attack, (lower, upper, const, search) = histories
    last = np.flatnonzero(search[:, 5] == attack.binary_search_steps - 1)[0]
    np.testing.assert_allclose(const[last, 5], 0.01 * 10.0**7, rtol=1e-5)
    np.testing.assert_allclose(lower[last, 5], 0.01 * 10.0**6, rtol=1e-5)
    assert np.isinf(upper[last, 5])


def test_a_success_beyond_1e9_closes_the_bracket_too():
    """Logits in units of 1e-9 need such constants; a bracket left open would run away from them."""
    net = toys.network()
    tiny = toys.classifier(
        w1=net.variables["w1"],
        w2=1e-9 * np.asarray(net.variables["w2"]),
        bias=1e-9 * np.asarray(net.variables["bias"]),
    )
    images = toys.digits(3, 4)
    targets = toys.wrong_targets(net, images)
    run = lambda classifier, const: toys.attack(
        CarliniWagner(6, 200, 0.1, const), Generic(), undefended(classifier), images, targets
    )
    plain, scaled = run(net, 0.1), run(tiny, 1e8)
    np.testing.assert_array_equal(plain.success, scaled.success)
    np.testing.assert_allclose(scaled.distance, plain.distance, rtol=0.02)


# ---- early abort


def test_an_image_on_which_nothing_moves_is_given_up_at_the_second_check():
    constant = toys.classifier()
    images = toys.digits(count=2)
    result = toys.attack(
        PUBLISHED, Generic(confidence=1.0), undefended(constant), images, np.zeros(2, np.int32)
    )
    each = FAST.steps // 10 + 1
    assert (result.num_gradients == FAST.binary_search_steps * each).all()


def test_without_early_abort_all_steps_are_taken():
    constant = toys.classifier()
    images = toys.digits(count=2)
    attack = dataclasses.replace(FAST, steps=20, abort_early=False)
    result = toys.attack(
        attack, Generic(confidence=1.0), undefended(constant), images, np.zeros(2, np.int32)
    )
    assert (result.num_gradients == attack.binary_search_steps * 20).all()


def test_goals_that_are_random_are_never_given_up():
    defense = toys.guarded(toys.classifier(), toys.Coin(), threshold=0.5)
    images = toys.digits(count=2)
    attack = dataclasses.replace(FAST, steps=20)
    result = toys.attack(attack, Generic(confidence=1.0), defense, images, np.zeros(2, np.int32))
    assert (result.num_gradients == attack.binary_search_steps * 20).all()


def test_early_abort_is_each_image_s_own():
    """One hard image among easy ones: it takes the steps, and finds what it finds alone."""
    net = toys.network()
    images = toys.digits(8)
    targets = np.array(
        toys.predicted(net, images)
    )  # aimed at the label it has: done at once, and given up
    targets[5] = toys.wrong_targets(net, images)[5]
    together = toys.attack(FAST, Generic(), undefended(net), images, targets)
    alone = toys.attack(FAST, Generic(), undefended(net), images, targets, todo=np.array([5]))
    toys.assert_same_bits(together, alone, rows=[5])
    easy = np.delete(together.num_gradients, 5)
    assert easy.max() < together.num_gradients[5]


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_fewer_steps_than_checks_do_not_divide_by_zero(steps):
    net = toys.network()
    images = toys.digits(count=2)
    targets = toys.wrong_targets(net, images)
    attack = dataclasses.replace(FAST, steps=steps)
    result = toys.attack(attack, Generic(), undefended(net), images, targets)
    assert (result.num_gradients <= attack.binary_search_steps * steps).all()
    assert (result.num_gradients >= attack.binary_search_steps).all()


@pytest.mark.parametrize("travel, warned", [(0.01 * 300, True), (0.1 * 300, False)])
def test_a_rate_that_cannot_free_edge_pixels_is_warned_about(travel, warned):
    attack = CarliniWagner(5, 300, travel / 300, 1.0)
    assert (presets.frozen_edge_warning(attack, toys.digits()) is not None) == warned
    grey = np.full((2, *toys.SHAPE), 0.5, np.float32)
    assert presets.frozen_edge_warning(attack, grey) is None


def test_a_step_without_success_is_followed_by_a_noisy_start_and_others_by_the_image():
    net = toys.network()
    images = toys.digits(2, 1)
    targets = toys.wrong_targets(net, images)
    attack = CarliniWagner(6, 5, 0.1, 1e-6, abort_early=False)  # c rises until it is large enough
    hopeful = dataclasses.replace(attack, initial_const=1e3, steps=100)
    for settings, noisy in ((attack, True), (hopeful, False)):
        free = np.ones(images[0].shape, bool)
        state = settings.init(
            jax.random.key(1), jnp.int32(0), images[0], targets[0], images[0], free
        )
        step = jax.jit(
            lambda s, a=settings: a.step(jax.random.key(0), Generic(), undefended(net), s)
        )
        while state.search_step < 1:
            state = step(state)
        away = np.abs(np.asarray(variables.to_box(state.w)) - images[0])
        assert (np.median(away) > 1e-3) == noisy
        assert np.isfinite(state.upper) != noisy
        assert (away < 0.5).all()
