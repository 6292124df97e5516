"""Which attacks a word means: on detectors without gradients, at a radius, several at once."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import advdet
from advdet import detectors, settings
from advdet.types import InputError

pytest_plugins = ["cli_tools"]


@dataclasses.dataclass(frozen=True)
class InkLevels(advdet.Detector):
    """Suspects much ink, told in forty levels: the gradient is zero."""

    differentiable: ClassVar[bool] = False

    def score(self, key, fitted, classifier, images):
        return jnp.floor(40.0 * jnp.mean(images, axis=(1, 2, 3)))


@dataclasses.dataclass(frozen=True)
class WithSurrogate(InkLevels):
    """The same, with a stand-in for the gradient."""

    surrogate_gradient: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Ink(advdet.Detector):
    """Suspects much ink."""

    def score(self, key, fitted, classifier, images):
        return jnp.mean(images, axis=(1, 2, 3))


STRONG = ("carlini_wagner", "ddn")
RADIUS = ("pgd", "selective_pgd", "orthogonal_pgd", "square")


def plan(detector, attack=None, threat_model="perfect_knowledge", copied=None, **attack_settings):
    given = dict(
        data="mnist", preset="fast", objective=None, num_images=None, targets=None,
        operating_point=None, confidence=None, detector_margin=None, margin_rate=None, lanes=None,
        train_attack=None, seed=0,
    )  # fmt: skip
    return settings.fill(
        detectors.name_of(detector), detector, attack=attack, threat_model=threat_model,
        copied=copied, attack_settings=attack_settings, **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("detector", "attack", "wanted"),
    [
        (Ink(), None, STRONG),
        (Ink(), "all", STRONG),
        (Ink(), "fixed_radius", RADIUS),
        (Ink(), "square,pgd", ("square", "pgd")),
        (InkLevels(), None, ("square",)),
        (InkLevels(), "all", ("square",)),
        (InkLevels(), "fixed_radius", ("square",)),
        (InkLevels(), "square", ("square",)),
        (WithSurrogate(), "all", (*STRONG, "square")),
        (WithSurrogate(), "fixed_radius", RADIUS),
        (WithSurrogate(), "ddn", ("ddn",)),
    ],
)
def test_groups_mean_what_makes_sense_on_the_detector(detector, attack, wanted):
    assert plan(detector, attack).attacks == wanted


@pytest.mark.parametrize("attack", ["ddn", "pgd", "jsma", "square,carlini_wagner"])
def test_gradients_are_refused_where_there_are_none(attack):
    with pytest.raises(InputError, match=r"follows gradients, and defence ink_levels .* square"):
        plan(InkLevels(), attack)


def test_it_is_what_the_attacker_is_shown_that_counts():
    assert plan(InkLevels(), threat_model="zero_knowledge").attacks == STRONG
    assert plan(InkLevels(), "ddn", "zero_knowledge").attacks == ("ddn",)
    limited = dict(threat_model="limited_knowledge")
    assert plan(InkLevels(), copied=Ink(), **limited).attacks == STRONG
    assert plan(Ink(), copied=InkLevels(), **limited).attacks == ("square",)
    assert plan(InkLevels(), **limited).attacks == ("square",)


@pytest.mark.parametrize(
    ("attack", "given", "said"),
    [
        (
            "ddn",
            {"epsilon": 0.1},
            r"attack ddn has no epsilon .* fast_gradient, pgd, selective_pgd",
        ),
        (None, {"norm": "l2"}, r"attack carlini_wagner has no norm .*: pgd, selective_pgd"),
        ("jsma", {"epsilon": 0.1}, "attack jsma has no epsilon"),
        ("fast_gradient", {"norm": "l2"}, "attack fast_gradient has no norm"),
        ("pgd,ddn", {"epsilon": 0.1}, "attack ddn has no epsilon"),
        ("pgd", {"epsilon": 0.0}, "epsilon must be above 0"),
        ("pgd", {"epsilon": float("nan")}, "epsilon must be a finite number"),
        ("pgd", {"norm": "l0"}, "unknown norm 'l0'; known: linf, l2"),
        ("pgd,pgd", {}, "attack 'pgd,pgd' names one twice"),
        ("pgd,", {}, "unknown attack ''"),
    ],
)
def test_a_radius_goes_with_attacks_that_have_one(attack, given, said):
    with pytest.raises(InputError, match=said):
        plan(Ink(), attack, **given)


def test_radius_and_norm_reach_the_attacks(splits):
    make = lambda attack, **given: settings.make_attack(
        plan(Ink(), attack, **given), attack, splits, "ink"
    )
    assert (make("pgd").norm, make("pgd").epsilon) == ("linf", 0.3)
    assert (make("square", norm="l2").norm, make("square", norm="l2").epsilon) == ("l2", 2.0)
    assert make("orthogonal_pgd", norm="l2", epsilon=1.5).epsilon == 1.5
    assert make("fast_gradient", epsilon=0.1).epsilon == 0.1


@pytest.fixture(scope="module")
def evaluate(classifier, splits):
    def call(detector, **changes):
        given = dict(
            classifier=classifier, data=splits, preset="smoke", num_images=12, progress=False,
            targets="untargeted",
        )  # fmt: skip
        return advdet.evaluate(detector, **(given | changes))

    return call


def test_a_detector_without_gradients_is_evaluated_by_values(evaluate):
    done = evaluate(InkLevels(), steps=300)
    assert list(done.records) == ["square"] == list(done.baseline.records)
    record, arrays = done.records["square"], done.arrays["square"]
    assert record["attack"]["gradients_per_image"] == 0
    assert record["run"]["settings"]["attack"]["epsilon"] == 0.3
    assert arrays["success"].mean() > 0.5
    threshold = record["clean"]["thresholds"]["0.05"]
    assert (arrays["adversarial_score"][0][arrays["success"]] <= threshold).all()
    moved = arrays["image"] - done.clean.images
    assert np.abs(moved).max() <= 0.3 + 1e-6


def test_several_attacks_share_a_headline(evaluate):
    done = evaluate("none", attack="pgd,square", norm="l2", epsilon=1.5)
    assert list(done.records) == ["pgd", "square", "best"]
    best, parts = done.arrays["best"], [done.arrays[name] for name in ("pgd", "square")]
    np.testing.assert_array_equal(best["success"], parts[0]["success"] | parts[1]["success"])
    assert set(best["attack"]) <= {"pgd", "square"}
    used = done.records["best"]["run"]["settings"]["attack"]
    assert {name: (u["norm"], u["epsilon"]) for name, u in used.items()} == {
        "pgd": ("l2", 1.5), "square": ("l2", 1.5)
    }  # fmt: skip
