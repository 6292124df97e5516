"""Probabilities where logits belong: one rule, before anything is run, and its override."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toys

import advdet
from advdet import bridges, cases, contract, contract_scores, indicators, inputs, logit_range
from advdet.types import Classifier, InputError

NET = toys.network()
DATA = toys.splits(NET)
IMAGES = DATA.threshold.images[:100]
LOGITS = np.asarray(NET(IMAGES).logits)


def cosines(images):
    """Honest logits in [0, 1]: how nearly an image points where a class does."""
    flat = images.reshape(len(images), -1)
    classes = jnp.abs(jnp.asarray(np.random.RandomState(5).randn(10, 64), jnp.float32))
    flat, classes = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (flat, classes))
    return flat @ classes.T


SOFTMAX = np.asarray(jax.nn.softmax(LOGITS))
SIGMOIDS = np.asarray(jax.nn.sigmoid(LOGITS))
ROUNDED = SOFTMAX.astype(ml_dtypes.bfloat16).astype(np.float32)
WRONG = {
    "softmax": (SOFTMAX, "rows that sum to 1"),
    "softmax in bfloat16": (ROUNDED, "rows that sum to 1"),
    "percent": (100 * SOFTMAX, "rows that sum to 100"),
    "percent in bfloat16": ((100 * SOFTMAX).astype(ml_dtypes.bfloat16).astype(np.float32), "a mul"),
    "sigmoids": (SIGMOIDS, "as sigmoids do"),
    "cosines, undeclared": (np.asarray(cosines(IMAGES)), "bounded_logits=True"),
}
RIGHT = {
    "logits": LOGITS,
    "logits above 0": LOGITS - LOGITS.min(),
    "logarithms": np.log(SOFTMAX),
    "nothing": np.zeros((100, 10), np.float32),
    "some in [0, 1]": np.where(np.arange(100)[:, None] < 99, SIGMOIDS, LOGITS),
}


@pytest.mark.parametrize("kind", WRONG)
def test_probabilities_are_refused_and_flagged_by_one_rule(kind):
    logits, said = WRONG[kind]
    assert said in logit_range.refusal(logits)
    assert logit_range.share_of_probabilities(logits) == 1.0
    assert indicators.probabilities(logits)["raised"]


def test_half_precision_does_not_hide_a_softmax():
    """What makes the case: its rows do not sum to 1 by a thousandth."""
    assert np.abs(ROUNDED.sum(axis=1) - 1).max() > 1e-3


@pytest.mark.parametrize("kind", RIGHT)
def test_logits_are_none(kind):
    assert logit_range.refusal(RIGHT[kind]) is None
    assert not indicators.probabilities(RIGHT[kind])["raised"]


def test_who_declares_bounded_logits_may_have_them_and_a_softmax_is_refused_all_the_same():
    bounded = np.asarray(cosines(IMAGES))
    assert logit_range.refusal(bounded, bounded=True) is None
    assert not indicators.probabilities(bounded, bounded=True)["raised"]
    for kind in ("softmax in bfloat16", "percent"):
        assert logit_range.refusal(WRONG[kind][0], bounded=True) is not None
        assert indicators.probabilities(WRONG[kind][0], bounded=True)["raised"]


def keras_net(bounded):
    os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, "sigmoid")])
    model.build((None, *toys.SHAPE))
    return bridges.keras_classifier(model, bounded_logits=bounded)


def torch_net(bounded):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Sigmoid())
    return bridges.torch_classifier(module, bounded_logits=bounded)


@pytest.mark.parametrize(
    "make", [keras_net, torch_net, lambda b: Classifier.from_function(cosines, bounded_logits=b)]
)
def test_every_way_to_make_a_classifier_takes_the_declaration(make):
    inputs.check_classifier(make(True), DATA)
    with pytest.raises(InputError, match="bounded_logits=True"):
        inputs.check_classifier(make(False), DATA)
    assert contract.classifier_logits(make(True), DATA).level == "ok"
    assert contract.classifier_logits(make(False), DATA).level == "fault"


def test_a_function_and_an_apply_can_say_it_of_themselves():
    own = lambda images: cosines(images)
    own.bounded_logits = True
    assert Classifier.from_function(own).bounded_logits
    assert not Classifier.from_function(own, bounded_logits=False).bounded_logits
    assert not NET.bounded_logits


def evaluate(tmp_path, detector="none", classifier=NET, data=DATA):
    return advdet.evaluate(
        detector, classifier=classifier, data=data, attack="ddn", preset="smoke", num_images=16,
        lanes=4, progress=False, results_dir=tmp_path,
    )  # fmt: skip


_BEFORE = {
    "sigmoids": (dict(classifier=toys.changed(NET, "sigmoid")), "the classifier returns numbers"),
    "percent": (dict(classifier=toys.changed(NET, "percent")), "the classifier returns a multiple"),
    "a corrector's": (dict(detector=toys.SoftmaxCorrector()), "own answer .* returns probabilit"),
}


@pytest.mark.parametrize("fault", _BEFORE)
def test_nothing_is_run_on_probabilities(fault, tmp_path):
    given, said = _BEFORE[fault]
    with pytest.raises(InputError, match=said):
        evaluate(tmp_path, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["sigmoids", "a corrector's"])
def test_what_only_the_attacked_images_show_is_flagged_after_the_run(fault, tmp_path, monkeypatch):
    for check in ("check_classifier", "check_answers"):
        monkeypatch.setattr(cases.inputs, check, lambda *_: None)
    record = evaluate(tmp_path, **_BEFORE[fault][0]).records["ddn"]
    assert record["indicators"]["probabilities"]["raised"]
    assert record["verdict"] == "evaluation invalid" and "bounded_logits" not in record["run"]


def test_the_record_keeps_the_declaration_and_heeds_it(tmp_path):
    honest = Classifier.from_function(cosines, bounded_logits=True)
    record = evaluate(tmp_path, classifier=honest, data=toys.splits(honest)).records["ddn"]
    assert record["run"]["bounded_logits"] is True
    sign = record["indicators"]["probabilities"]
    assert not sign["raised"] and sign["value"] < 1


def test_the_contract_of_a_defence_has_the_same_rule():
    """A detector's own logits are looked at as the classifier's are."""

    @dataclasses.dataclass(frozen=True)
    class Sigmoids(advdet.Detector):
        """Sigmoids in place of logits."""

        kind = "corrector"

        def logits(self, key, fitted, classifier, images):
            return jax.nn.sigmoid(classifier(images).logits)

    found = contract_scores.logits_shape(toys.guarded(NET, Sigmoids()), IMAGES, 10)
    assert found.level == "fault" and "sigmoid" in found.change + found.said
    assert contract_scores.logits_shape(toys.guarded(NET, toys.Ink()), IMAGES, 10).level == "ok"
