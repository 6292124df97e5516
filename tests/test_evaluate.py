"""`advdet.evaluate`: threat models, targets, presets, adversarial data for fits, refusals."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import files_in

import advdet
from advdet import cases, cells, crafting, detectors, paper, settings, training
from advdet.attacks import driver
from advdet.types import Classifier, InputError, Outputs

pytest_plugins = ["cli_tools"]

_N = 12


@dataclasses.dataclass(frozen=True)
class Ink(advdet.Detector):
    """Suspects much ink."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return jnp.mean(images, axis=(1, 2, 3))


@dataclasses.dataclass(frozen=True)
class MeanDifference(advdet.Detector):
    """Projects on the mean adversarial image minus the mean clean one; keeps what it was given."""

    needs_adversarial: ClassVar[bool] = True
    seen: ClassVar[list] = []

    def fit(self, key, classifier, data):
        del key
        self.seen.append((classifier, data))
        difference = np.mean(data.adversarial_train.images, 0) - np.mean(data.train.images, 0)
        return jnp.asarray(difference)

    def score(self, key, fitted, classifier, images):
        del key, classifier
        return jnp.sum(images * fitted[None], axis=(1, 2, 3))


@pytest.fixture(scope="module")
def evaluate(classifier, splits):
    """`advdet.evaluate` on a dozen images with a short DDN, unless told otherwise."""

    def call(detector="none", **changes):
        given = dict(
            classifier=classifier, data=splits, attack="ddn", preset="smoke", num_images=_N,
            steps=20, progress=False,
        )  # fmt: skip
        return advdet.evaluate(detector, **(given | changes))

    return call


def _predicted(classifier, images):
    return training.logits(classifier, images).argmax(axis=1)


def test_zero_knowledge_judges_the_images_made_for_the_bare_classifier(evaluate, tmp_path):
    bare = evaluate("none", results_dir=tmp_path)
    before = files_in(tmp_path)
    seen = evaluate(Ink(), threat_model="zero_knowledge", results_dir=tmp_path)
    for field in ("image", "success", "distance", "nearest_miss", "num_gradients", "target_class"):
        np.testing.assert_array_equal(seen.arrays["ddn"][field], bare.arrays["ddn"][field])
        np.testing.assert_array_equal(seen.baseline.arrays["ddn"][field], bare.arrays["ddn"][field])
    assert before.items() <= files_in(tmp_path).items()  # read, not run again
    record = seen.records["ddn"]
    # Nothing was aimed at a threshold, so success is known at all of them.
    rates = record["attack"]["success_rate"]
    known = [rates[point] for point in ("0.5", "0.05", "0.01")]
    assert known == sorted(known) and known[-1] <= rates["misclassified"]
    assert rates["native"] is None
    flagged = record["detection"]["true_positive_rate"]
    assert flagged["0.01"] <= flagged["0.05"] <= flagged["0.5"]
    assert record["detection"]["n"] == int(
        (seen.arrays["ddn"]["success"] & seen.arrays["ddn"]["clean_correct"]).sum()
    )


def test_zero_knowledge_with_confidence_takes_images_of_that_confidence(evaluate, classifier):
    seen = evaluate(Ink(), threat_model="zero_knowledge", confidence=2.0)
    arrays = seen.arrays["ddn"]
    logits = training.logits(classifier, arrays["image"])
    rows = np.arange(_N)
    wanted = logits[rows, arrays["target_class"]].copy()
    logits[rows, arrays["target_class"]] = -np.inf
    margin = wanted - logits.max(axis=1)
    assert arrays["success"].any()
    assert (margin[arrays["success"]] > 2.0 - 1e-3).all()
    # The ratio stays one to the baseline that asks for no margin.
    attack = seen.records["ddn"]["attack"]
    assert attack["baseline_mean_l2"] == seen.baseline.records["ddn"]["attack"]["mean_l2"]
    assert seen.baseline.records["ddn"]["run"]["settings"]["confidence"] == 0


def test_perfect_knowledge_aims_below_the_point_and_success_is_known_there_only(evaluate):
    seen = evaluate(Ink(), operating_point=0.5)
    record, arrays = seen.records["ddn"], seen.arrays["ddn"]
    assert record["run"]["operating_point"] == "0.5"
    threshold = np.float32(record["clean"]["thresholds"]["0.5"])
    assert (arrays["adversarial_score"][0][arrays["success"]] <= threshold).all()
    rates = record["attack"]["success_rate"]
    assert [name for name in ("native", "0.01", "0.05", "0.5") if rates[name] is not None] == [
        "0.5"
    ]


def test_a_confidence_sweep_compiles_once(evaluate):
    count = getattr(driver._advance, "_cache_size", None)
    if count is None:
        pytest.skip("this JAX does not tell how many programs it keeps")
    evaluate(Ink(), confidence=0.0)
    before = count()
    for value in (0.5, 1.0, 3.0):
        found = evaluate(Ink(), confidence=value)
        assert found.records["ddn"]["run"]["settings"]["confidence"] == value
    assert count() == before


def test_limited_knowledge_attacks_a_surrogate_of_the_other_half(evaluate, splits, monkeypatch):
    quick = dict(epochs=2, progress=False, say=lambda line: None)
    halves = []

    def briefly(data, *, half="full", **_):
        halves.append((half, data.part))
        found, _ = training.train_classifier(data, half=half, **quick)
        return jax.tree.map(jnp.asarray, found)

    monkeypatch.setattr(cases.training, "classifier_for", briefly)
    own = evaluate(Ink(), classifier=None, threat_model="limited_knowledge")
    assert halves == [("defender", "full"), ("attacker", "attacker")]
    attacker, _ = training.train_classifier(splits, half="attacker", **quick)
    given = evaluate(
        Ink(), classifier=None, threat_model="limited_knowledge", surrogate=(attacker, Ink())
    )
    np.testing.assert_array_equal(own.arrays["ddn"]["image"], given.arrays["ddn"]["image"])

    # Made for the surrogate: every success fools it, and the judge's is another classifier.
    arrays = own.arrays["ddn"]
    fooled = _predicted(attacker, arrays["image"]) == arrays["target_class"]
    assert arrays["success"].any() and fooled[arrays["success"]].all()
    reached = arrays["success"] & arrays["clean_correct"]
    assert own.records["ddn"]["detection"]["n"] == reached.sum()
    assert arrays["classified_as_wanted"].sum() <= fooled.sum()
    attack = own.records["ddn"]["attack"]
    assert attack["own_success_rate"] == arrays["success"][arrays["clean_correct"]].mean()

    # Without a detector it is the transfer between two classifiers.
    bare = evaluate(
        "none",
        classifier=None,
        threat_model="limited_knowledge",
        surrogate=(attacker, detectors.NoDetector()),
    )
    found = bare.arrays["ddn"]
    fooled = _predicted(attacker, found["image"]) == found["target_class"]
    assert found["success"].any() and fooled[found["success"]].all()
    assert bare.records["ddn"]["run"]["threat_model"] == "limited_knowledge"
    assert bare.baseline is None


def test_targets_are_what_their_names_say(evaluate, classifier, splits):
    labels, rows = splits.test.labels[:_N], np.arange(_N)
    logits = training.logits(classifier, splits.test.images[:_N])

    random = evaluate(targets="random").arrays["ddn"]["target_class"]
    assert (random != labels).all() and len(set(random)) > 3
    np.testing.assert_array_equal(random, evaluate().arrays["ddn"]["target_class"])
    assert (evaluate(seed=1).arrays["ddn"]["target_class"] != random).any()

    least = evaluate(targets="least_likely").arrays["ddn"]["target_class"]
    others = logits.copy()
    others[rows, labels] = np.inf
    np.testing.assert_array_equal(least, others.argmin(axis=1))

    untargeted = evaluate(targets="untargeted")
    arrays, record = untargeted.arrays["ddn"], untargeted.records["ddn"]
    np.testing.assert_array_equal(arrays["target_class"], labels)
    assert record["run"]["targets"] == "untargeted"
    found = _predicted(classifier, arrays["image"])
    np.testing.assert_array_equal(arrays["judged_success"] == 1, found != labels)
    assert record["attack"]["mean_l2"] < evaluate().records["ddn"]["attack"]["mean_l2"]

    nearest = evaluate(targets="nearest", steps=30).arrays["ddn"]["target_class"]
    assert (nearest != labels).all()

    mine = (labels + 3) % 10
    given = evaluate(targets=mine)
    np.testing.assert_array_equal(given.arrays["ddn"]["target_class"], mine)
    assert given.records["ddn"]["run"]["targets"] == "given"
    reached = given.arrays["ddn"]["judged_success"] == 1
    assert reached.any()
    np.testing.assert_array_equal(
        _predicted(classifier, given.arrays["ddn"]["image"])[reached], mine[reached]
    )


def test_a_detector_that_learns_from_adversarial_images_gets_them(
    evaluate, classifier, splits, monkeypatch
):
    monkeypatch.setattr(crafting, "NUM_IMAGES", 64)
    MeanDifference.seen.clear()
    right = {
        part: batch.take(_predicted(classifier, batch.images) == batch.labels)
        for part, batch in (("train", splits.train), ("select", splits.select))
    }
    splits = dataclasses.replace(splits, **right)
    seen = evaluate(
        MeanDifference(), data=splits, train_attack="ddn", threat_model="zero_knowledge"
    )
    assert seen.records["ddn"]["run"]["train_attack"] == "ddn"
    ((_, data),) = MeanDifference.seen
    for made, source in (
        (data.adversarial_train, splits.train), (data.adversarial_select, splits.select)
    ):  # fmt: skip
        assert 60 <= len(made.ids) <= 64 and np.isin(made.ids, source.ids[:64]).all()
        rows = np.array([np.flatnonzero(source.ids == i)[0] for i in made.ids])
        np.testing.assert_array_equal(made.labels, source.labels[rows])
        assert (_predicted(classifier, made.images) != made.labels).all()
        moved = np.abs(made.images - source.images[rows]).max(axis=(1, 2, 3))
        assert (moved > 0).all()
    assert not np.intersect1d(data.adversarial_train.ids, splits.threshold.ids).size


def test_adversarial_images_that_change_no_label_are_refused(evaluate, monkeypatch):
    monkeypatch.setattr(crafting, "NUM_IMAGES", 8)
    monkeypatch.setattr(
        cells, "attack_images",
        _with_failures(cells.attack_images, of="training images"),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"ddn changed the label of only .*--train_attack"):
        evaluate(MeanDifference(), train_attack="ddn", threat_model="zero_knowledge")


def _with_failures(attack_images, of):
    def attack(name, *arguments, **options):
        found, seconds = attack_images(name, *arguments, **options)
        if name.startswith(of):
            found = found._replace(success=np.zeros_like(found.success))
        return found, seconds

    return attack


def test_a_failure_enters_no_mean_even_where_the_clean_image_is_wrong(evaluate, classifier, splits):
    wrong = np.flatnonzero(_predicted(classifier, splits.test.images) != splits.test.labels)
    rows = np.r_[wrong[:2], np.setdiff1d(np.arange(_N), wrong)][:_N]
    chosen = dataclasses.replace(splits, test=splits.test.take(rows))
    count = len(rows)
    failed = evaluate(targets="untargeted", confidence=1e4, data=chosen, num_images=count)
    arrays, attack = failed.arrays["ddn"], failed.records["ddn"]["attack"]
    assert not arrays["success"].any() and np.isposinf(arrays["distance"]).all()
    np.testing.assert_array_equal(arrays["image"], chosen.test.images)
    for name in ("mean_l2", "median_l2", "mean_l2_unfiltered", "baseline_ratio"):
        assert attack[name] is None
    assert attack["success_rate"]["misclassified"] == 0
    assert failed.records["ddn"]["verdict"].startswith("not broken by these attacks")


def _plan(spec="dropout", **changes):
    given = dict(
        data="mnist", preset="fast", attack=None, objective=None, threat_model="perfect_knowledge",
        num_images=None, targets=None, operating_point=None, confidence=None,
        detector_margin=None, margin_rate=None, lanes=None, train_attack=None, seed=0,
        attack_settings={},
    )  # fmt: skip
    detector = detectors.from_spec(spec)
    return settings.fill(detectors.name_of(detector), detector, **(given | changes))


def test_presets_fill_what_is_open_and_flags_by_hand_win():
    plan = _plan()
    assert plan.attacks == ("carlini_wagner", "ddn") and plan.num_images == 100
    assert (plan.objective, plan.targets, plan.operating_point) == ("quantile", "random", "0.05")
    filled = _plan(preset="paper")
    assert filled.attacks == ("carlini_wagner",) and filled.objective == "paper"
    assert filled.operating_point == "native" and filled.confidence == 1.0
    assert filled.targets == paper.target_regime("mnist", "dropout")
    assert filled.num_images == 100
    by_hand = _plan(
        preset="paper", attack="ddn", objective="generic", operating_point="0.01", confidence=0.5,
        targets="least_likely", num_images=7,
    )  # fmt: skip
    assert by_hand.attacks == ("ddn",) and by_hand.objective == "generic"
    assert by_hand.operating_point == "0.01" and by_hand.confidence == 0.5
    assert by_hand.targets == "least_likely" and by_hand.num_images == 7
    assert _plan("none", preset="paper").operating_point == "none"


class _Softmax:
    def __init__(self, apply):
        self.apply = apply

    def __call__(self, variables, images, key):
        return Outputs(jax.nn.softmax(self.apply(variables, images, key).logits), {})


def test_python_calls_with_bad_input_say_so_and_write_nothing(
    evaluate, classifier, splits, tmp_path
):
    labels = splits.test.labels[:_N]
    equal = (labels + 1) % 10
    equal[4] = labels[4]
    probabilities = Classifier(classifier.variables, _Softmax(classifier.apply))
    wider = dataclasses.replace(splits, class_names=splits.class_names + ("another",))
    broken = jax.tree.map(lambda x: x * np.float32(np.nan), classifier)
    refused = {
        r"targets equal the true labels at 1 images \(the first is 4\)": dict(targets=equal),
        r"targets must be 12 integers, found int\d+ of shape \(5,\)": dict(targets=equal[:5]),
        "targets must be 12 integers, found float": dict(targets=equal / 2),
        r"targets must lie in 0 \.\.\. 9": dict(targets=equal + 40),
        "1001 images wanted, mnist_5k has 1000": dict(num_images=1001),
        "num_images must be at least 1, not 0": dict(num_images=0),
        "num_images must be at least 1, not -3": dict(num_images=-3),
        "lanes must be at least 1, not 0": dict(lanes=0),
        "confidence must be at least 0, not -1": dict(confidence=-1),
        "steps must be at least 1, not 0": dict(steps=0),
        "unknown threat model 'white_box'": dict(threat_model="white_box"),
        "the classifier returns probabilities": dict(classifier=probabilities),
        r"shape \(100, 10\) for 100 images of mnist_5k; wanted \[100, 11\] logits": dict(
            data=wider
        ),
        "logits are not finite on clean images": dict(classifier=broken),
        "has no native threshold; known: 0.01": dict(detector=Ink(), operating_point="native"),
    }
    for said, given in refused.items():
        given = {"detector": "none", "results_dir": tmp_path} | given
        with pytest.raises(InputError, match=said) as caught:
            evaluate(**given)
        assert "\n" not in str(caught.value)
    assert files_in(tmp_path) == {}
