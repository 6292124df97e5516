"""Goals and losses: what counts as reached, and that gradients are those of the losses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax.test_util import check_grads

from advdet.attacks import objectives
from advdet.attacks.goals import Goals, margin
from advdet.attacks.objectives import Combined, DropoutNetworks, Generic, Quantile, make, resolve
from advdet.defenses import Defense, undefended
from advdet.detectors import Detector, Dropout, NoDetector
from advdet.types import Classifier, InputError, Outputs

# ---- margins and goals


@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0])
def test_negative_logits_are_compared_with_each_other_and_not_with_zero(shift):
    """As reported for a public C&W whose best other logit was masked with 0."""
    logits = jnp.array([-5.0, -2.0, -9.0]) + shift
    assert margin(logits, jnp.int32(1), True) == -3.0  # class 0 is the best other
    assert margin(logits, jnp.int32(0), True) == 3.0
    assert margin(logits, jnp.int32(0), False) == -3.0
    assert margin(logits, jnp.int32(2), False) == -7.0


def test_margins_equal_those_of_a_sort(rng):
    logits = rng.randn(50, 10).astype(np.float32) * 5 - 20
    targets = rng.randint(10, size=50)
    for row, target in zip(logits, targets):
        others = max(value for k, value in enumerate(row) if k != target)
        assert margin(jnp.asarray(row), jnp.int32(target), True) == others - row[target]
        assert margin(jnp.asarray(row), jnp.int32(target), False) == row[target] - others


@pytest.mark.parametrize(
    "classifier, detector, met",
    [
        ([-1e-6], [], True),
        ([0.0], [], False),  # a tie fails
        ([-1.0], [0.0], True),  # a score at the threshold is not flagged
        ([-1.0], [1e-6], False),
        ([1.0], [-1.0], False),
        ([-1.0, 0.0], [-1.0], False),
        ([-1.0], [-1.0, 0.5], False),
        ([np.nan], [], False),
        ([-1.0], [np.nan], False),
    ],
)
def test_goals_are_met_strictly_by_the_classifier_and_at_the_threshold(classifier, detector, met):
    array = lambda values: jnp.asarray(values, jnp.float32).reshape(-1)
    assert bool(Goals(array(classifier), array(detector), array([])).met()) == met


def test_the_violation_is_the_worst_of_the_detector_s_goals():
    goals = lambda *values: Goals(jnp.zeros(1), jnp.array(values, jnp.float32), jnp.zeros(1))
    assert goals(-1.0, 0.5, 0.25).violation() == 0.5
    assert goals().violation() == -jnp.inf


# ---- the base: a label and a score


@pytest.fixture(scope="module")
def guarded():
    direction = np.random.RandomState(3).randn(toys.PIXELS).astype(np.float32)
    return toys.guarded(
        toys.network(), toys.LinearScore(), jnp.asarray(direction), threshold=0.5, scale=0.25
    )


def test_confidence_detector_margin_and_scale_enter_as_documented(guarded):
    image = toys.digits(count=1)[0]
    target = jnp.int32(4)
    goals = Generic(confidence=1.5, detector_margin=0.2)(
        jax.random.key(0), guarded, jnp.asarray(image), target
    )
    value, _ = toys.margin64(guarded.classifier.variables, image, 4)
    excess = image.ravel().astype(np.float64) @ np.asarray(guarded.fitted) - 0.5 + 0.2
    np.testing.assert_allclose(goals.classifier, [value + 1.5], rtol=1e-4)
    np.testing.assert_allclose(goals.detector, [excess], rtol=1e-4)
    np.testing.assert_allclose(goals.losses, [value + 1.5, excess / 0.25], rtol=1e-4)


def test_without_a_detector_there_is_one_goal():
    image = jnp.asarray(toys.digits(count=1)[0])
    goals = Generic()(jax.random.key(0), undefended(toys.network()), image, jnp.int32(4))
    assert goals.detector.shape == (0,)
    np.testing.assert_array_equal(goals.losses, goals.classifier)


def test_a_random_score_must_be_met_twice_by_independent_draws():
    """Half of the draws of a coin are met; a quarter of the pairs."""
    net = toys.classifier(bias=np.arange(toys.CLASSES))
    defense = toys.guarded(net, toys.Coin(), threshold=0.5)
    image, objective = jnp.full(toys.SHAPE, 0.5), Generic()

    @jax.jit
    @jax.vmap
    def draw(key):
        first, second = jax.random.split(key)
        goals = objective(first, defense, image, jnp.int32(9))
        decisive, accepted = objective.accept(second, defense, image, jnp.int32(9), goals)
        return goals.met(), decisive.met(), accepted

    first, second, accepted = draw(jax.random.split(jax.random.key(0), 1000))
    np.testing.assert_array_equal(accepted, first & second)
    assert abs(first.mean() - 0.5) < 0.07 and abs(second.mean() - 0.5) < 0.07
    assert abs(accepted.mean() - 0.25) < 0.06


def test_a_deterministic_score_is_accepted_as_it_is(guarded):
    image = jnp.asarray(toys.digits(count=1)[0])
    goals = Generic()(jax.random.key(0), guarded, image, jnp.int32(4))
    decisive, accepted = Generic().accept(jax.random.key(1), guarded, image, jnp.int32(4), goals)
    assert decisive is goals and accepted == goals.met()


# ---- gradients

THIN = Dropout(num_samples=4)
OBJECTIVES = {
    "generic": (Generic(confidence=0.5), None),
    "generic untargeted": (Generic(targeted=False, confidence=40.0), None),
    "generic on dropout": (Generic(confidence=0.5), THIN),
    "quantile": (Quantile(z=2.0, num_groups=3, gradient_groups=3), THIN),
    "networks": (DropoutNetworks(confidence=0.5, num_networks=5), THIN),
    "eot": (DropoutNetworks(confidence=0.5, num_networks=5, fresh=True), THIN),
    "combined": (Combined(confidence=0.5), None),
    "combined untargeted": (Combined(targeted=False, confidence=40.0), None),
}


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_gradients_of_all_losses_equal_finite_differences(name, guarded):
    objective, detector = OBJECTIVES[name]
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)
        classifier = Classifier(wide(guarded.classifier.variables), toys.ToyApply())
        threshold, scale = wide((guarded.threshold, guarded.scale))
        fitted = () if detector else wide(guarded.fitted)
        kind = detector or guarded.detector
        defense = Defense(classifier, fitted, threshold, scale, kind)
        image = wide(toys.digits(6, 1)[0])
        label = int(toys.logits64(classifier.variables, image).argmax())
        target = jnp.int64(label if not objective.targeted else (label + 3) % toys.CLASSES)
        losses = jax.jit(lambda x: objective(jax.random.key(2), defense, x, target).losses)
        assert (np.abs(losses(image)) > 0).all()
        check_grads(losses, (image,), order=1, modes=["rev"], eps=1e-5, rtol=1e-6, atol=1e-6)


def test_groups_that_all_agree_give_a_finite_gradient(guarded):
    objective = Quantile(num_groups=3, gradient_groups=3)
    loss = lambda x: objective(jax.random.key(0), guarded, x, jnp.int32(4)).losses[1]
    gradient = jax.jit(jax.grad(loss))(jnp.asarray(toys.digits(count=1)[0]))
    np.testing.assert_allclose(gradient.ravel(), guarded.fitted / 0.25, rtol=1e-4)


# ---- quantile


def test_quantile_is_the_mean_over_groups_plus_z_standard_deviations():
    defense = toys.guarded(toys.network(), THIN, threshold=0.1, scale=0.05)
    image = jnp.asarray(toys.digits(count=1)[0])
    objective = Quantile(z=1.7, num_groups=6, gradient_groups=4, detector_margin=0.02)
    score, excess, accept = map(jax.jit, (defense.score, objective.excess, objective.accept))

    def twin(seed, groups):
        keys = jax.random.split(jax.random.key(seed), groups)
        scores = np.array([score(k, image[None])[0] for k in keys], np.float64)
        return scores.mean() + 1.7 * scores.std(ddof=1) - float(defense.threshold)

    found = excess(jax.random.key(3), defense, image, jnp.int32(0))
    np.testing.assert_allclose(found, twin(3, 4), rtol=1e-4)

    goals = Goals(jnp.array([-1.0]), jnp.array([-9.0]), jnp.array([0.0]))
    decisive, accepted = accept(jax.random.key(5), defense, image, jnp.int32(0), goals)
    np.testing.assert_allclose(decisive.detector, [twin(5, 6) + 0.02], rtol=1e-4)
    assert accepted == (twin(5, 6) + 0.02 <= 0)
    np.testing.assert_array_equal(decisive.classifier, goals.classifier)


@pytest.mark.parametrize("groups", ["num_groups", "gradient_groups"])
def test_one_group_has_no_spread_and_is_refused_or_finite(groups):
    """A standard deviation over one value is 0/0; it must not reach the image as NaN."""
    defense = toys.guarded(toys.network(), THIN, threshold=0.1, scale=0.05)
    image = jnp.asarray(toys.digits(count=1)[0])
    try:
        objective = Quantile(**{groups: 1})
    except ValueError:
        return
    loss = lambda x: objective._upper(jax.random.key(0), defense, x, 1)
    assert np.isfinite(jax.jit(jax.grad(loss))(image)).all()


# ---- networks thinned by dropout


@dataclasses.dataclass(frozen=True)
class LevelApply:
    """Network k says class 1 where the first pixel exceeds a uniform number of its own."""

    def __call__(self, variables, images, key=None):
        level = images[:, 0, 0, 0] - (0.5 if key is None else jax.random.uniform(key))
        return Outputs(jnp.stack([jnp.zeros_like(level), level], axis=1), {})


LEVELS = Classifier({}, LevelApply())


def fooled_by(count, seed=0, networks=20):
    """An image that just so many of the networks with fixed masks call class 1."""
    keys = jax.random.split(jax.random.key(seed), networks)
    draws = np.sort([float(jax.random.uniform(k)) for k in keys])
    edges = np.concatenate([[0.0], draws, [1.0]])
    return jnp.full(toys.SHAPE, 0.5 * (edges[count] + edges[count + 1]), jnp.float32), draws


@pytest.mark.parametrize(
    "share, needed", [(0.7, 14), (0.5, 10), (1.0, 20), (0.05, 1), (0.71, 15), (0.9, 18)]
)
def test_the_share_of_networks_that_must_be_fooled(share, needed):
    objective = DropoutNetworks(share=share)
    met = jax.jit(lambda o, x: o(jax.random.key(1), undefended(LEVELS), x, jnp.int32(1)).met())
    for count in (needed - 1, needed):
        image, _ = fooled_by(count)
        assert bool(met(objective, image)) == (count >= needed)


def test_the_loss_of_networks_is_the_mean_of_their_hinges():
    image, draws = fooled_by(9)
    level = float(image[0, 0, 0])
    objective = DropoutNetworks(confidence=0.1)
    goals = objective(jax.random.key(1), undefended(LEVELS), image, jnp.int32(1))
    margins = draws - level + 0.1
    np.testing.assert_allclose(goals.losses, [np.maximum(margins, 0).mean()], rtol=1e-5)
    np.testing.assert_allclose(goals.classifier, [np.sort(margins)[13]], rtol=1e-4)
    assert goals.detector.shape == (0,)


def test_fixed_masks_are_the_same_under_every_key_and_fresh_ones_are_not():
    image, _ = fooled_by(9)
    loss = lambda objective, seed: float(
        objective(jax.random.key(seed), undefended(LEVELS), image, jnp.int32(1)).losses[0]
    )
    fixed, fresh = DropoutNetworks(), DropoutNetworks(fresh=True)
    assert loss(fixed, 1) == loss(fixed, 2)
    assert loss(DropoutNetworks(mask_seed=1), 1) != loss(fixed, 1)
    assert loss(fresh, 1) != loss(fresh, 2)
    dropout = toys.guarded(LEVELS, Dropout())
    assert not fixed.is_random(dropout) and fresh.is_random(dropout)


# ---- classifier and detector as one network


def readout(logits, score):
    """A defence whose first pixels are the logits (halved, moved by 0.5) and last one the score."""
    skip = np.zeros((toys.PIXELS, toys.CLASSES), np.float32)
    skip[: toys.CLASSES] = np.eye(toys.CLASSES)
    direction = np.zeros(toys.PIXELS, np.float32)
    direction[-1] = 1.0
    image = np.zeros(toys.PIXELS, np.float32)
    image[: toys.CLASSES] = np.asarray(logits) + 0.5
    image[-1] = score
    defense = toys.guarded(
        toys.classifier(skip=skip), toys.LinearScore(), jnp.asarray(direction), threshold=0.3
    )
    return defense, jnp.asarray(image.reshape(toys.SHAPE))


def test_the_joined_network_s_extra_class_wins_just_where_the_score_exceeds_the_threshold(rng):
    flagged = []
    call = jax.jit(lambda d, x, t: Combined()(jax.random.key(0), d, x, t))
    away = jax.jit(lambda d, x, t: Combined(targeted=False)(jax.random.key(0), d, x, t))
    for _ in range(60):
        logits = rng.randn(toys.CLASSES) * 2
        logits[rng.randint(toys.CLASSES)] = 3.0 + rng.rand()
        score = 0.3 + rng.choice([-1, 1]) * rng.uniform(0.01, 0.5)
        defense, image = readout(logits, score)
        best, second = np.argsort(logits)[::-1][:2]
        extra = (score - 0.3 + 1) * logits[best]
        found = call(defense, image, jnp.int32(best))
        np.testing.assert_allclose(
            found.losses, [max(logits[second], extra) - logits[best]], atol=1e-4
        )
        assert bool(found.losses[0] > 0) == (score > 0.3) == (extra > logits[best])
        assert bool(found.met()) == (score <= 0.3)

        # Away from class `second`, which is not the best: the goal is reached unless flagged.
        untargeted = away(defense, image, jnp.int32(second))
        wanted = max(logits[second], extra) - logits[best]
        np.testing.assert_allclose(untargeted.losses, [wanted], atol=1e-4)
        assert bool(untargeted.met()) == (score <= 0.3)
        # Away from the best class itself: never reached, whatever the score.
        stays = away(defense, image, jnp.int32(best))
        assert stays.losses[0] > 0 and not stays.met()
        flagged.append(score > 0.3)
    assert set(flagged) == {True, False}


# ---- names


def test_auto_takes_the_strongest_that_is_known():
    assert resolve("auto", "dropout", Dropout()) == "quantile"
    assert resolve("auto", "none", NoDetector()) == "generic"
    assert resolve("auto", "stranger", toys.Coin()) == "quantile"
    assert resolve("auto", "stranger", toys.LinearScore()) == "generic"


@pytest.mark.parametrize(
    "name, defense, detector",
    [
        ("quantile", "stranger", toys.LinearScore()),
        ("eot", "stranger", toys.Coin()),
        ("networks", "dropout", Dropout()),  # by its name `paper`
        ("paper", "stranger", toys.LinearScore()),
        ("combined", "none", NoDetector()),
        ("nonsense", "dropout", Dropout()),
    ],
)
def test_an_objective_made_for_another_kind_of_defence_is_refused(name, defense, detector):
    with pytest.raises(InputError, match=f"objective '{name}' is none for defence {defense}"):
        resolve(name, defense, detector)


@pytest.mark.parametrize("name", ["generic", "quantile", "combined", "eot", "paper"])
def test_what_fits_a_defence_is_made_with_its_settings(name):
    assert resolve(name, "dropout", Dropout()) == name
    made = make(name, "dropout", seed=7, targeted=False, confidence=0.25)
    assert made.confidence == 0.25 and not made.targeted
    wanted = {"eot": "networks", "paper": "networks"}.get(name, name)
    assert type(made) is objectives.OBJECTIVES[wanted]
    if wanted == "networks":
        assert made.mask_seed == 7
        assert made.fresh == (name == "eot")


def test_a_setting_that_an_objective_does_not_have_is_refused():
    with pytest.raises(InputError, match="objective generic has no setting 'z'"):
        make("generic", "none", seed=0, targeted=True, z=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_setting_that_is_not_finite_is_refused(value):
    with pytest.raises(InputError, match="confidence must be a finite number"):
        make("generic", "none", seed=0, targeted=True, confidence=value)


@pytest.mark.parametrize("kind", sorted(set(objectives.OBJECTIVES.values()), key=str))
def test_objectives_are_equal_by_value_and_their_numbers_are_traced(kind):
    one = kind(confidence=0.5)
    assert one == kind(confidence=0.5) and hash(one) == hash(kind(confidence=0.5))
    same = jax.tree.structure(kind(confidence=2.0, detector_margin=1.0))
    assert jax.tree.structure(one) == same
    assert jax.tree.structure(kind(targeted=False)) != same


def test_a_detector_of_another_kind_than_score_is_not_looked_at():
    @dataclasses.dataclass(frozen=True)
    class Corrector(Detector):
        kind = "corrector"

        def logits(self, key, fitted, classifier, images):
            return -classifier(images).logits

    defense = toys.guarded(toys.network(), Corrector())
    image = toys.digits(count=1)[0]
    goals = Generic()(jax.random.key(0), defense, jnp.asarray(image), jnp.int32(2))
    wanted = -toys.logits64(defense.classifier.variables, image)
    np.testing.assert_allclose(
        goals.classifier, [np.delete(wanted, 2).max() - wanted[2]], rtol=1e-4
    )
    assert goals.detector.shape == (0,)
