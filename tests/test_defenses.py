"""Thresholds, scores by image, and the judge."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import defenses, judge
from advdet.attacks import DDN
from advdet.attacks.objectives import Generic
from advdet.detectors import Detector, Dropout, NoDetector
from advdet.types import Batch, FitData, InputError

# ---- thresholds


@pytest.mark.parametrize(
    "scores, rate, wanted",
    [
        (range(100), 0.05, 94.0),  # 95 ... 99 exceed it
        (range(100), 0.01, 98.0),
        (range(100), 0.5, 49.0),
        (range(99), 0.05, 94.0),  # 4 of 99; 5 would be more than 5 %
        ([3, 1, 2], 0.01, 3.0),  # none may exceed
        ([0, 0, 0, 0, 1, 1, 1, 1, 1, 2], 0.5, 1.0),  # a tie is on the safe side
        ([0, 0, 0, 0, 0, 0, 1, 1, 1, 1], 0.5, 0.0),
        ([7, 7, 7, 7], 0.5, 7.0),
        ([-2.5], 0.5, -2.5),
    ],
)
def test_a_threshold_is_the_smallest_score_that_few_enough_exceed(scores, rate, wanted):
    scores = np.array(list(scores), np.float32)
    found = defenses.threshold_at(scores, rate)
    assert found == wanted
    assert (scores > found).mean() <= rate
    lower = scores[scores < found]
    assert len(lower) == 0 or (scores > lower.max()).mean() > rate


def test_a_threshold_holds_on_fresh_draws_within_sampling_error(rng):
    seen, fresh = rng.randn(2, 100_000).astype(np.float32)
    for rate in defenses.FALSE_POSITIVE_RATES:
        threshold = defenses.threshold_at(seen[:3000], rate)
        assert (seen[:3000] > threshold).mean() <= rate
        error = np.sqrt(rate * (1 - rate) / 3000)
        np.testing.assert_allclose((fresh > threshold).mean(), rate, atol=4 * error)


def test_a_float32_score_does_not_exceed_the_threshold_it_set(rng):
    scores = rng.rand(50).astype(np.float32)
    threshold = defenses.threshold_at(scores, 0.01)
    assert not (scores > np.float32(threshold)).any()
    assert np.float32(threshold) == scores.max()


# ---- fitting


@dataclasses.dataclass(frozen=True)
class FirstPixel(Detector):
    """The score is the first pixel, to which 1/0 may happen."""

    def score(self, key, fitted, classifier, images):
        pixel = images[:, 0, 0, 0]
        return jnp.where(pixel > 0.9, jnp.float32(jnp.nan), pixel)

    def native_threshold(self, fitted):
        return 0.25


@dataclasses.dataclass(frozen=True)
class Corrector(Detector):
    kind: ClassVar[str] = "corrector"


def batch(values) -> Batch:
    images = np.zeros((len(values), *toys.SHAPE), np.float32)
    images[:, 0, 0, 0] = values
    count = len(values)
    return Batch(images, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))


def fit(detector, values) -> defenses.FittedDefense:
    data = FitData(batch([0.0]), batch([0.0]))
    return defenses.fit_defense(jax.random.key(0), detector, toys.network(), data, batch(values))


def test_a_fitted_defence_has_all_its_operating_points_and_their_spread():
    fitted = fit(FirstPixel(), np.arange(100) / 200)
    assert fitted.thresholds == pytest.approx(
        {"native": 0.25, "0.01": 98 / 200, "0.05": 94 / 200, "0.5": 49 / 200}
    )
    assert fitted.defense.threshold == np.float32(94 / 200)
    np.testing.assert_allclose(fitted.defense.scale, 45 / 200, rtol=1e-6)
    for point, threshold in fitted.thresholds.items():
        assert fitted.at(point).threshold == np.float32(threshold)


def test_scores_that_are_all_alike_give_a_scale_above_zero():
    assert fit(FirstPixel(), np.full(20, 0.3)).defense.scale > 0


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match="not finite on 2 of 5"):
        fit(FirstPixel(), [0.1, 0.95, 0.2, 1.0, 0.3])


@dataclasses.dataclass(frozen=True)
class NoNative(FirstPixel):
    def native_threshold(self, fitted):
        return None


@pytest.mark.parametrize("detector, point", [(FirstPixel(), "0.1"), (NoNative(), "native")])
def test_an_operating_point_that_does_not_exist_is_refused(detector, point):
    with pytest.raises(InputError, match=f"operating point '{point}'.*0.01, 0.05, 0.5"):
        fit(detector, np.arange(10) / 20).at(point)


@pytest.mark.parametrize("detector", [NoDetector(), Corrector()])
def test_what_flags_nothing_has_no_thresholds_and_any_point(detector):
    fitted = fit(detector, [0.1, 0.2])
    assert fitted.thresholds == {}
    assert fitted.at("0.05") is fitted.defense
    assert np.isinf(fitted.defense.threshold)


# ---- scores and logits by image


@pytest.fixture(scope="module")
def random_defense():
    return toys.guarded(toys.network(), Dropout(num_samples=4))


def test_a_score_depends_on_its_image_and_id_alone(random_defense, rng):
    images, ids = toys.digits(1, 130), np.arange(500, 630, dtype=np.int32)
    for function in (defenses.score_images, defenses.classify_images):
        run = lambda r: function(jax.random.key(3), random_defense, images[r], ids[r])  # noqa: B023
        whole = run(np.arange(130))
        for rows in (rng.permutation(130), np.array([129]), np.arange(95, 105)):
            np.testing.assert_array_equal(run(rows), whole[rows])


def test_a_random_score_changes_with_id_and_key(random_defense):
    image = np.repeat(toys.digits(1, 1), 2, axis=0)
    score = lambda seed, *ids: defenses.score_images(
        jax.random.key(seed), random_defense, image, np.array(ids)
    )
    first, second = score(0, 1, 2)
    assert first != second
    assert score(1, 1, 2)[0] != first
    assert score(0, 1, 3)[0] == first


def test_batched_scores_and_logits_are_those_of_single_calls(random_defense):
    images = toys.digits(1, 3)
    ids = np.array([4, 9, 2])
    scores = defenses.score_images(jax.random.key(3), random_defense, images, ids)
    logits = defenses.classify_images(jax.random.key(3), random_defense, images, ids)
    assert scores.shape == (3,) and logits.shape == (3, toys.CLASSES)
    for row, image_id in enumerate(ids):
        key = lambda: jax.random.fold_in(jax.random.key(3), image_id)  # noqa: B023
        image = jnp.asarray(images[row : row + 1])
        np.testing.assert_allclose(scores[row], random_defense.score(key(), image)[0], rtol=1e-4)
        expected = toys.logits64(random_defense.classifier.variables, images[row])
        np.testing.assert_allclose(logits[row], expected, atol=1e-5)


# ---- the judge


@pytest.mark.parametrize(
    "logits, target, targeted, wanted",
    [
        ([1, 3, 2], 1, True, True),
        ([1, 3, 2], 2, True, False),
        ([3, 3, 2], 1, True, False),  # a tie fails
        ([-5, -2, -9], 1, True, True),
        ([-5, -2, -9], 1, False, False),
        ([-5, -2, -9], 0, False, True),
        ([3, 3, 2], 0, False, False),  # a tie fails here too
        ([0, 0, 0], 0, False, False),
        ([np.nan, 1, 0], 0, True, False),
    ],
)
def test_an_image_is_taken_as_wanted_only_without_a_tie(logits, target, targeted, wanted):
    found = judge.is_wanted(np.array([logits], np.float32), np.array([target]), targeted)
    assert found.tolist() == [wanted]


def judged_by_hand(defense, images, ids, threshold, seed):
    """[N] the share of five draws that each image survives, one image and draw at a time."""
    shares = []
    for image, image_id in zip(images, ids):
        survived = []
        for draw in range(5):
            key = jax.random.fold_in(jax.random.key(seed), 0x4A55)
            key = jax.random.fold_in(jax.random.fold_in(key, draw), int(image_id))
            score = defense.score(key, jnp.asarray(image[None]))[0]
            survived.append(not score > np.float32(threshold))
        shares.append(np.mean(survived))
    return np.array(shares)


def test_anyone_can_draw_the_judge_s_numbers_again(random_defense):
    net = random_defense.classifier
    images, ids = toys.digits(1, 6), np.array([3, 1, 4, 15, 9, 2])
    targets = np.array(toys.predicted(net, images))
    targets[0] = (targets[0] + 1) % toys.CLASSES
    found = judge.judge(random_defense, images, ids, targets, targeted=True, seed=5)
    threshold = float(np.median(found.scores))
    by_hand = judged_by_hand(random_defense, images, ids, threshold, 5)
    by_hand[0] = 0.0  # its target is not what the classifier says
    np.testing.assert_allclose(found.success(threshold), by_hand)
    assert found.scores.shape == (5, 6)
    assert len(set(by_hand)) > 2  # shares between 0 and 1 occur
    again = judge.judge(random_defense, images, ids, targets, targeted=True, seed=5)
    np.testing.assert_array_equal(again.scores, found.scores)


def test_the_judge_s_draws_differ_by_seed_and_stream(random_defense):
    images, ids = toys.digits(1, 4), np.arange(4)
    run = lambda **options: (
        judge.judge(
            random_defense, images, ids, np.zeros(4, np.int32), targeted=True, **options
        ).scores
    )
    assert (run(seed=0) != run(seed=1)).all()
    assert (run(seed=0) != run(seed=0, stream=judge.ATTACKERS_OWN)).all()
    assert len(np.unique(run(seed=0)[:, 0])) == 5


def test_a_deterministic_defence_is_judged_by_one_draw():
    net = toys.network()
    defense = toys.guarded(net, toys.LinearScore(), jnp.ones(toys.PIXELS))
    images = toys.digits(1, 5)
    labels = toys.predicted(net, images)
    found = judge.judge(defense, images, np.arange(5), labels, targeted=True, seed=0)
    sums = images.reshape(5, -1).sum(1)
    np.testing.assert_allclose(found.scores, sums[None], rtol=1e-5)
    threshold = float(np.sort(found.scores[0])[2])  # a score at the threshold is not flagged
    np.testing.assert_array_equal(found.success(threshold), found.scores[0] <= threshold)
    assert found.success(threshold).sum() == 3
    assert found.success(None).all()
    untargeted = judge.judge(defense, images, np.arange(5), labels, targeted=False, seed=0)
    assert not untargeted.wanted.any()


def test_a_defence_that_flags_nothing_is_judged_by_its_logits():
    net = toys.network()
    images = toys.digits(1, 3)
    labels = toys.predicted(net, images)
    found = judge.judge(
        defenses.undefended(net), images, np.arange(3), labels, targeted=True, seed=0
    )
    assert found.scores.shape == (1, 0)
    assert found.flagged(0.5).shape == (1, 3) and not found.flagged(0.5).any()
    assert found.success(0.5).tolist() == [1.0, 1.0, 1.0]
    assert found.take(np.array([True, False, True])).success(None).shape == (2,)


def test_what_an_attack_calls_a_success_the_judge_calls_one():
    net = toys.network()
    images, ids = toys.digits(), np.arange(toys.ROWS)
    targets = toys.wrong_targets(net, images)
    defense = toys.guarded(net, toys.LinearScore(), jnp.ones(toys.PIXELS), 31.0, 1.0)
    result = toys.attack(DDN(60), Generic(confidence=0.01, detector_margin=1e-3), defense, images,
                         targets)  # fmt: skip
    found = judge.judge(defense, result.image, ids, targets, targeted=True, seed=0)
    np.testing.assert_array_equal(found.success(31.0) > 0.5, result.success)
    assert 0 < result.success.sum()


def test_rounding_to_8_bit_gives_the_nearest_of_256_levels():
    values = np.array([0.0, 1.0, 0.5, 1 / 255, 0.4 / 255, 0.6 / 255], np.float32)
    wanted = np.array([0, 255, 128, 1, 0, 1], np.float32) / np.float32(255)
    np.testing.assert_array_equal(judge.round_to_8_bit(values), wanted)
