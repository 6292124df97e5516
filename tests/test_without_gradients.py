"""Detectors and classifiers that say that they have no gradient: every part takes them at that."""

import numpy as np
import own_data
import own_sklearn
import pytest

import advdet
from advdet import contract, provenance, verify
from advdet.detectors.function import Held
from advdet.judge import Judgement

DATA = own_data.splits()
SMOKE = dict(preset="smoke", num_images=4, progress=False)


def hard_classifier():
    """The linear classifier, told to have no gradient."""
    smooth = own_data.jax_classifier()
    return advdet.Classifier.from_function(smooth.apply.function, differentiable=False)


def test_check_finds_no_fault_in_a_score_without_a_gradient():
    network = own_data.jax_classifier()
    found = advdet.check(own_sklearn.no_gradient, classifier=network, data=DATA, progress=False)
    said = {finding.name: finding for finding in found}
    assert not [finding for finding in found if finding.level == contract.FAULT], found
    assert (
        "gradients a second" not in said["speed"].said and "scores a second" in said["speed"].said
    )
    assert "differentiable" not in said["detector: kind, flags"].said
    assert "an object of type OneClassSVM" in said["fit: what was learned"].said


def test_check_attacks_a_classifier_without_a_gradient_by_its_values():
    found = advdet.check("mean_blur_detector", classifier=hard_classifier(), data=DATA,
                         progress=False)  # fmt: skip
    said = {finding.name: finding for finding in found}
    assert "a cheap attack" not in said
    assert "adversarial images" in said["score: direction"].said


def test_a_victim_without_gradients_has_no_baseline_beside_an_attack_on_a_smooth_copy():
    copy = own_data.jax_classifier("attacker"), own_sklearn.detector
    give = dict(classifier=hard_classifier(), data=DATA, surrogate=copy,
                threat_model="limited_knowledge", **SMOKE)  # fmt: skip
    done = advdet.evaluate(own_sklearn.detector, attack="ddn", **give)
    record = done.records["ddn"]
    assert done.baseline is None and record["attack"]["baseline_mean_l2"] is None
    assert record["attack"]["own_success_rate"] is not None
    assert advdet.evaluate(own_sklearn.detector, attack="square", **give).baseline is not None


def test_what_jax_does_not_look_into_has_no_digest(tmp_path):
    assert provenance.digest_of(Held(object())) is None and provenance.digest_of(()) is not None
    done = advdet.evaluate(
        own_sklearn.detector, classifier=own_data.jax_classifier(), data=DATA, attack="ddn",
        results_dir=tmp_path, **SMOKE,
    )  # fmt: skip
    (path,) = done.paths.values()
    given = dict(classifier=own_data.jax_classifier(), data=DATA, progress=False)
    same = verify.verify(path, detector=own_sklearn.detector, **given)
    assert {claim.verdict for claim in same} <= {"confirmed", "not decidable", "claimed"}
    assert "confirmed" == next(c.verdict for c in same if c.name == "adversarial_score")
    other = advdet.Detector.from_function(
        own_sklearn.detector.functions[0], name="one_class",
        fit=lambda images, labels: own_sklearn.fit(images[:100], labels),
    )  # fmt: skip
    found = verify.verify(path, detector=other, **given)
    assert "refuted" not in {claim.verdict for claim in found}
    why = next(claim.note for claim in found if claim.name == "detection")
    assert "may not be the record's" in why


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_score_that_is_no_number_is_flagged(value):
    scores = np.array([[value, 0.2, 0.9]])
    judged = Judgement(np.zeros((3, 2)), np.ones(3, bool), scores)
    np.testing.assert_array_equal(judged.success(0.5), [0, 1, 0])
    from advdet import indicators, metrics

    assert metrics.auc(np.array([0.1, 0.3]), np.array([value, 0.2])) == pytest.approx(0.75)
    assert np.isfinite(indicators.constant_score(scores)["value"])
