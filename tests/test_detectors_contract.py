"""What holds for every detector, by kind; and the dropout detector itself."""

import dataclasses
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import contract, contract_gradients, contract_scores, defenses, fits, nets
from advdet.detectors import DETECTORS, Dropout, from_spec, learning, name_of
from advdet.detectors.dropout import uncertainty
from advdet.splits import Splits
from advdet.types import Batch, FitData, InputError

SCORING = [name for name, kind in DETECTORS.items() if kind.kind == "score"]
every = pytest.mark.parametrize("name", SCORING)
all_kinds = pytest.mark.parametrize("name", [name for name in DETECTORS if name != "none"])
SHAPE = (16, 16, 1)  # the least that the MNIST network, with all its features, takes
# Trainings of seconds; where a name is missing the defaults are quick enough.
QUICK = {
    "outlier_class": "outlier_class:epochs=1",
    "binary": "binary:epochs=1",
    "inner_layer": "inner_layer:trials=1,trial_images=64,epochs=1",
    "pca_reduction": "pca_reduction:epochs=1",
    "kernel_density": "kernel_density:sigma=0.05",  # an untrained network has tiny features
    "mmd": "mmd:num_reference=40,set_size=20,num_permutations=99",
}
# Bonferroni over detectors and rates, so that the whole table errs once in a hundred runs.
RATES = (0.05, 0.5)
Z = NormalDist().inv_cdf(1 - 0.01 / (2 * len(SCORING) * len(RATES)))


def batch(seed, count, first_id, base=None):
    random = np.random.RandomState(seed)
    images = random.rand(count, *SHAPE).astype(np.float32) ** 3
    if base is not None:  # made from the images of another batch
        images = np.clip(base.images + 0.3 * (images - 0.5), 0, 1).astype(np.float32)
    labels = np.arange(count, dtype=np.int32) % 10 if base is None else base.labels
    ids = np.arange(first_id, first_id + count, dtype=np.int32) if base is None else base.ids
    return Batch(images, labels, ids)


SPLITS = Splits(
    "noise", "arrays", tuple("0123456789"), batch(1, 150, 0), batch(2, 50, 1000),
    batch(3, 200, 2000), batch(7, 400, 5000),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def nothing_to_learn():
    """On noise a training need not get anywhere: the contract is about what comes out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "_LEARNED", -1.0)
        yield


@pytest.fixture(scope="module")
def scene():
    """Each scoring detector, fitted once; with a classifier, data and threshold images."""
    classifier = nets.init(jax.random.key(0), nets.MnistNet(10), SHAPE)
    train, select, threshold = SPLITS.train, SPLITS.select, SPLITS.threshold
    found = {}

    def get(name):
        if name not in found:
            detector = from_spec(QUICK.get(name, name))
            crafted = detector.needs_adversarial
            before = contract.snapshot(detector, classifier)
            data = FitData(
                train,
                select,
                batch(4, 150, 0, train) if crafted else None,
                batch(5, 50, 0, select) if crafted else None,
            )
            found[name] = defenses.fit_defense(
                jax.random.key(1), detector, classifier, data, threshold
            )
            assert_ok(contract.unchanged_by_fit(before, detector, classifier))
        return found[name], threshold

    return get


def assert_ok(finding):
    """The check found nothing to say."""
    assert finding.level == contract.OK, finding


SCORE_CHECKS = {
    "shape": contract_scores.score_shape,
    "compiled": contract_scores.score_compiled,
    "randomness": contract_scores.score_randomness,
}


@every
@pytest.mark.parametrize("check", SCORE_CHECKS)
def test_scores_keep_the_contract(name, check, scene):
    assert_ok(SCORE_CHECKS[check](scene(name)[0].defense, batch(6, 5, 0).images))


@all_kinds
def test_logits_have_one_row_an_image_and_repeat(name, scene):
    assert_ok(contract_scores.logits_shape(scene(name)[0].defense, batch(6, 3, 0).images, 10))


@all_kinds
def test_what_is_learned_is_nested_dicts_of_arrays_that_can_be_kept(name, scene, tmp_path):
    fitted = jax.device_get(scene(name)[0].defense.fitted)
    assert_ok(contract.learned_arrays(fitted))
    if not jax.tree.leaves(fitted):
        assert fitted == ()
        return
    back = fits.load(fits.save(tmp_path / "fit.npz", fitted, {}))
    assert jax.tree.structure(back) == jax.tree.structure(fitted)
    jax.tree.map(np.testing.assert_array_equal, back, fitted)


def test_a_set_gets_a_p_value(scene):
    """Of the same distribution, of another one; the same for equal keys."""
    defense = scene("mmd")[0].defense
    images = batch(9, 40, 0).images[:20]
    found = contract_scores.set_p_value(defense, images)
    assert_ok(found)
    assert found.value > 0.01
    far = defense.detector.p_value(jax.random.key(1), defense.fitted, None, 1.0 - images)
    assert far == np.float32(1 / 100)


@pytest.mark.parametrize("name", [n for n, kind in DETECTORS.items() if kind.kind != "set"])
def test_gradients_are_finite_and_right_by_finite_differences(name, scene):
    images = batch(6, 6, 0)
    defense = scene(name)[0].defense
    found = contract_gradients.gradient(defense, images.images, images.ids)
    assert_ok(found)
    assert not defense.detector.differentiable or found.value == 0


@every
def test_a_score_depends_on_its_image_and_id_alone(name, scene, rng):
    fitted, threshold = scene(name)
    few = threshold.take(slice(12))
    assert_ok(contract_scores.score_batch_mates(fitted.defense, few.images, few.ids))
    run = lambda rows: defenses.score_images(
        jax.random.key(2), fitted.defense, threshold.images[rows], threshold.ids[rows]
    )
    whole = run(np.arange(200))
    for rows in (rng.permutation(200), np.array([199]), np.arange(90, 110)):
        np.testing.assert_array_equal(run(rows), whole[rows])


@pytest.mark.parametrize("name", [n for n in SCORING if "epochs=1" not in QUICK.get(n, "")])
def test_strange_images_are_scored_higher_than_clean_ones(name, scene):
    """Marked as those that were learned from; of black and white pixels, where nothing was.

    The networks, of one epoch here, are looked at where they learn: tests/test_learned_detectors.
    """
    defense = scene(name)[0].defense
    clean = batch(10, 100, 7000)
    strange = batch(11, 100, 0, clean)
    if not defense.detector.needs_adversarial:
        strange = clean._replace(images=np.float32(strange.images > np.median(strange.images)))
    found = contract_scores.score_direction(defense, clean, strange)
    assert_ok(found)
    assert found.value > 0.5


@every
def test_thresholds_keep_their_false_positive_rates(name, scene):
    fitted, threshold = scene(name)
    for rate in RATES:
        found = contract_scores.false_positives(fitted, threshold, SPLITS.test, rate=rate, z=Z)
        assert_ok(found)
    ordered = [fitted.thresholds[str(rate)] for rate in (0.5, 0.05, 0.01)]
    assert ordered == sorted(ordered)
    assert fitted.defense.threshold == np.float32(fitted.thresholds["0.05"])


@every
def test_the_native_threshold_is_a_number_or_none(name, scene):
    fitted, _ = scene(name)
    assert_ok(contract_scores.native_threshold(fitted))
    native = fitted.defense.detector.native_threshold(fitted.defense.fitted)
    assert fitted.thresholds["native"] == native


@pytest.mark.parametrize("name", list(DETECTORS))
def test_detectors_are_equal_by_value_and_frozen(name):
    one, other = DETECTORS[name](), DETECTORS[name]()
    assert one == other and hash(one) == hash(other)
    assert name_of(one) == name and from_spec(name) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.anything = 1
    assert_ok(contract.equality_by_value(one))


@pytest.mark.parametrize("name", list(DETECTORS))
def test_detectors_say_what_they_are(name):
    assert_ok(contract.kind_and_flags(DETECTORS[name]()))


def test_the_scene_s_splits_are_disjoint():
    assert_ok(contract.splits_disjoint(SPLITS))


# ---- dropout


def test_uncertainty_is_the_variance_of_the_softmax_as_a_mean_over_classes(rng):
    draws = rng.dirichlet(np.ones(10), (30, 4)).astype(np.float32)
    wide = draws.astype(np.float64)
    by_squares = np.mean(np.mean(wide**2, 0) - np.mean(wide, 0) ** 2, axis=-1)
    np.testing.assert_allclose(uncertainty(jnp.asarray(draws)), by_squares, rtol=1e-5)
    np.testing.assert_allclose(uncertainty(jnp.asarray(draws)), wide.var(0).mean(-1), rtol=1e-5)


def test_uncertainty_of_networks_that_agree_is_zero_and_never_below():
    one = np.repeat(np.float32([[[0.1, 0.7, 0.2]]]), 30, axis=0)
    assert 0 <= uncertainty(jnp.asarray(one))[0] < 1e-12


def test_two_networks_that_disagree_are_as_uncertain_as_by_hand():
    draws = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    assert uncertainty(draws) == 0.25


def test_the_paper_s_threshold_belongs_to_the_mean_over_ten_classes():
    """Networks of which few disagree pass at 0.02, half of them do not; by the sum both fail."""
    eye = np.eye(10, dtype=np.float32)
    mixed = lambda count: np.stack([eye[3]] * (30 - count) + [eye[7]] * count)
    few, half = (uncertainty(jnp.asarray(mixed(count))) for count in (2, 15))
    tau = Dropout().native_threshold(())
    assert few < tau < half and 10 * few > tau


def test_dropout_finds_images_between_two_classes_more_suspicious():
    """Half of the hidden units speak for class 0 and see the left pixels, half for class 1."""
    left = np.arange(toys.PIXELS) % 2 == 0
    w1 = np.zeros((toys.PIXELS, toys.HIDDEN))
    w1[left, :8] = w1[~left, 8:] = 0.2
    w2 = np.zeros((toys.HIDDEN, 2))
    w2[:8, 0] = w2[8:, 1] = 2.0
    net = toys.classifier(w1=w1, w2=w2, classes=2)
    image = lambda a, b: np.where(left, a, b).reshape(toys.SHAPE).astype(np.float32)
    clean = np.stack([image(0.9, 0.4), image(0.4, 0.9)])
    between = clean[:1] * 0.5 + clean[1:] * 0.5
    images = jnp.asarray(np.concatenate([clean, between]))
    defense = toys.guarded(net, Dropout())
    score = jax.jit(jax.vmap(lambda k: defense.score(k, images)))
    scores = score(jax.random.split(jax.random.key(0), 20))
    assert scores[:, 2].min() > 3 * scores[:, :2].max()


def test_the_native_threshold_of_dropout_is_the_paper_s():
    assert Dropout().native_threshold(()) == 0.02
    assert Dropout(tau=0.1).native_threshold(()) == 0.1


def test_a_spread_over_less_than_two_networks_is_refused():
    with pytest.raises(ValueError, match="num_samples must be at least 2"):
        Dropout(num_samples=1)
    with pytest.raises(InputError, match="num_samples must be at least 2"):
        from_spec("dropout:num_samples=1")
