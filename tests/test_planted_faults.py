"""Faults planted in models and attacks, each of which must raise its flag; and an honest toy."""

import dataclasses

import pytest
import toys

import advdet
from advdet import indicators
from advdet.attacks import DDN, presets
from advdet.types import pytree
from experiments import report

_NET, _BLIND = toys.network(), toys.blind_network()
_MARKED = dict(classifier=_BLIND, data=toys.splits(_BLIND, marked=True))
_KEYS = {"value", "raised", "invalidates", "advice", "reason"}


def evaluate(detector="none", classifier=_NET, **changes):
    """`advdet.evaluate` on toys with a short DDN, unless told otherwise.

    Images and lanes are the same for all tests, so that they share compiled programs.
    """
    given = dict(
        classifier=classifier, data=toys.splits(classifier), attack="ddn", preset="smoke",
        num_images=60, lanes=3, progress=False,
    )  # fmt: skip
    return advdet.evaluate(detector, **(given | changes))


def raised(record) -> set[str]:
    return {name for name, sign in record["indicators"].items() if sign["raised"]}


_FAULTS = {
    "classifier kills its gradient": (
        dict(classifier=toys.changed(_NET, "rounded")), {"zero_gradient"}, "evaluation invalid"
    ),
    "detector kills its gradient": (
        dict(detector=toys.Mark(hard=True), **_MARKED), {"zero_gradient"}, "evaluation invalid"
    ),
    "detector's gradient is infinite": (
        dict(detector=toys.SquareRoots()), {"zero_gradient"}, "evaluation invalid"
    ),
    "coin": (
        dict(detector=toys.Coin()), {"zero_gradient", "silent_success"}, "evaluation invalid"
    ),
    "constant score": (dict(detector=toys.Constant()), {"constant_score"}, "broken"),
    "detector's gradient is negated": (
        dict(detector=toys.WrongInk()), {"wrong_gradient"}, "evaluation invalid"
    ),
    "detector's gradient is shattered": (
        dict(detector=toys.WrongInk(how="shattered")), {"wrong_gradient"}, "evaluation invalid"
    ),
    "classifier in waves": (
        dict(classifier=toys.changed(_NET, "waves")), {"wrong_gradient"}, "evaluation invalid"
    ),
    "score with its sign turned": (dict(detector=toys.Certainty()), {"score_reversed"}, None),
    "decisions in place of a score": (
        dict(detector=toys.Dark(), attack="square"), {"coarse_score"}, None
    ),
    "score that is no number": (
        dict(detector=toys.SometimesNaN()), {"score_not_a_number"}, None
    ),
    "starved of steps": (
        dict(detector=toys.Ink(), steps=1), {"classifier_goal_missed", "natural_image_missed"},
        "evaluation invalid",
    ),
    "noise does as well": (
        dict(classifier=toys.changed(_NET, "waves"), attack="fast_gradient", targets="untargeted"),
        {"noise_success_rate"}, "evaluation invalid",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_planted_fault_raises_its_flag(fault):
    given, flags, verdict = _FAULTS[fault]
    record = evaluate(**given).records[given.get("attack", "ddn")]
    assert flags <= raised(record), record["indicators"]
    assert verdict in (None, record["verdict"])
    for name, sign in record["indicators"].items():
        assert set(sign) >= _KEYS
        assert (sign["advice"] is not None) == sign["raised"], name
        assert sign["value"] is not None or sign["reason"], name


def test_a_hard_decision_with_its_gradient_given_back_is_broken():
    record = evaluate(toys.Mark(), steps=100, **_MARKED).records["ddn"]
    assert raised(record) == {"coarse_score"} and record["verdict"] == "broken"


@pytree
@dataclasses.dataclass(frozen=True)
class Clipped(DDN):
    """Never gets farther than a thousandth."""

    initial_radius: float = 1e-3
    gamma: float = 1e-9


@pytree
@dataclasses.dataclass(frozen=True)
class Uphill(DDN):
    """Walks the wrong way."""

    first_step: float = -1.0
    last_step: float = -0.01


@pytree
@dataclasses.dataclass(frozen=True)
class Elsewhere(DDN):
    """Aims at another class than the one it was given."""

    def init(self, key, image_id, image, target, start, free):
        return super().init(key, image_id, image, (target + 1) % 10, start, free)


def test_a_score_that_drifts_over_its_calls_is_told():
    calls = []

    def drifting(images):  # too slowly for two calls to show
        calls.append(len(images))
        return images.mean((1, 2, 3)) * (1.0 + 1e-5 * len(calls))

    score = advdet.bridges.numpy_score(drifting, gradient=lambda x: x.mean((1, 2, 3)))
    detector = advdet.Detector.from_function(score, name="drifting")
    record = evaluate(detector, steps=200).records["ddn"]
    assert "score_drifts" in raised(record) and record["verdict"] == "evaluation invalid"
    assert "keeps state" in record["indicators"]["score_drifts"]["advice"]


def test_thresholds_of_ten_clean_images_are_told_in_the_record():
    data = toys.splits(_NET)
    few = dataclasses.replace(data, threshold=data.threshold.take(slice(10)))
    record = evaluate(toys.Ink(), data=few).records["ddn"]
    sign = record["indicators"]["few_clean_images"]
    assert sign["raised"] and sign["value"] == 10


def test_attacks_by_values_alone_have_a_verdict_of_their_own():
    given = dict(attack="square", targets="untargeted", epsilon=0.01)
    record = evaluate(toys.Ink(), **given).records["square"]
    assert record["verdict"] == "not broken by gradient-free attacks alone"


@pytest.mark.parametrize(
    ("attack", "flag"), [(Uphill, "classifier_goal_missed"), (Elsewhere, "natural_image_missed")]
)
def test_an_attack_that_aims_wrongly_raises_a_flag(monkeypatch, attack, flag):
    monkeypatch.setitem(presets.ATTACKS, "ddn", attack)
    record = evaluate(toys.Ink()).records["ddn"]
    assert flag in raised(record), record["indicators"]
    assert record["verdict"] == "evaluation invalid"


def test_clipped_steps_are_told_by_one_step_and_by_the_label_missed(monkeypatch):
    monkeypatch.setitem(presets.ATTACKS, "ddn", Clipped)
    evaluation = evaluate(toys.Ink())
    for record in (evaluation.records["ddn"], evaluation.baseline.records["ddn"]):
        assert {"one_step", "classifier_goal_missed"} <= raised(record)
        assert record["indicators"]["classifier_goal_missed"]["value"] == 1.0
        assert record["verdict"] == "evaluation invalid"


def test_an_honest_toy_raises_no_flag():
    honest = evaluate(toys.Ink(), attack="all", preset="fast")
    for evaluation in (honest, honest.baseline):
        for name, record in evaluation.records.items():
            # DDN gives the detector's goal as much weight as the label's, and is behind C&W here.
            true = {"nearer_attack"} if name == "ddn" and evaluation is honest else set()
            # An image at its least distance need not survive a file: that is said, and is true.
            assert raised(record) - {"lost_to_8bit"} == true, (name, record["indicators"])
            assert record["verdict"] == "broken"
    again = honest.records["best"]["indicators"]["nearer_again"]
    assert again["n"] == again["images"] >= 5 and abs(again["value"]) < indicators.TOLERATED
    for one, other in (("carlini_wagner", "ddn"), ("ddn", "carlini_wagner")):
        sign = honest.records[one]["indicators"]["nearer_attack"]
        assert sign["attack"] == other and sign["n"] == honest.records[one]["counts"]["succeeded"]
    text = report.table(honest)
    assert "verdict: broken" in text and "signs" not in text
    warned = [line for line in text.splitlines() if line.startswith("warnings:")]
    assert warned in ([], ["warnings: lost_to_8bit"])
