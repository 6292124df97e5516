"""Tests of sets: a shifted set is told from the reference, one of the same kind is not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import metrics, sets
from advdet.detectors import Detector, from_spec
from experiments import mmd_power, report


def scene(size=20):
    rng = np.random.RandomState(0)
    detector = from_spec(f"mmd:sigma2=5.0,num_reference=60,set_size={size},num_permutations=199")
    draw = lambda count: rng.rand(count, *toys.SHAPE).astype(np.float32)
    defense = toys.guarded(
        toys.network(), detector, {"reference": jax.numpy.asarray(draw(60).reshape(60, -1))}
    )
    originals = draw(50)
    return defense, 0.5 * originals, draw(80), originals


@dataclasses.dataclass(frozen=True)
class Recorder(Detector):
    """Says as the p-value what images it was given, a bit for each."""

    kind = "set"
    set_size: int = 4

    def p_value(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return jnp.sum(images[:, 0, 0, 0])


def test_a_shifted_set_is_rejected_and_the_clean_controls_are_not():
    defense, shifted, clean, originals = scene()
    found = sets.assess_sets(0, defense, shifted, clean, originals)
    assert (found["size"], found["draws"]) == (20, 2)
    assert found["adversarial"]["rejected"] == 1.0
    assert found["adversarial"]["median_p"] == np.float32(1 / 200)
    counts = {name: (found[name]["told"], found[name]["sets"]) for name in
              ("adversarial", "clean", "originals")}  # fmt: skip
    assert counts["adversarial"] == (2, 2) and counts["clean"][1] == 4
    assert counts["clean"][0] <= 1 and counts["originals"] == (0, 2)
    assert found == sets.assess_sets(0, defense, shifted, clean, originals)


@pytest.mark.parametrize("count", [4, 7, 12, 21])
def test_no_image_is_in_two_sets_and_as_many_sets_are_made_as_there_can_be(count):
    defense = toys.guarded(toys.network(), Recorder())
    images = np.zeros((count, *toys.SHAPE), np.float32)
    images[:, 0, 0, 0] = 2.0 ** np.arange(count)
    seen = [int(value) for value in sets.p_values_of(0, 0, defense, images, 4)]
    assert len(seen) == count // 4
    assert all(value.bit_count() == 4 for value in seen)
    assert np.bitwise_or.reduce(seen).bit_count() == 4 * len(seen)


def test_originals_form_the_sets_of_the_images_made_from_them():
    defense = toys.guarded(toys.network(), Recorder())
    images = np.zeros((12, *toys.SHAPE), np.float32)
    images[:, 0, 0, 0] = 2.0 ** np.arange(12)
    found = sets.assess_sets(0, defense, images, images, images)
    assert found["adversarial"] == found["originals"]


def test_an_interval_needs_two_sets_and_its_absence_has_a_reason():
    two, one = sets.told_of(np.array([0.01, 0.3])), sets.told_of(np.array([0.01]))
    assert two["interval"] == metrics.wilson(1, 2) and two["reason"] is None
    assert one["interval"] is None and one["reason"].startswith("1 set is too few")
    assert (one["told"], one["sets"], one["rejected"]) == (1, 1, 1.0)


def test_the_set_shrinks_to_the_images_there_are():
    defense, shifted, clean, originals = scene()
    found = sets.assess_sets(0, defense, shifted[:7], clean, originals[:7])
    assert found["size"] == 7 and found["adversarial"]["interval"] is None


def test_one_image_is_no_set():
    defense, shifted, clean, originals = scene()
    assert sets.assess_sets(0, defense, shifted[:1], clean, originals[:1]) is None


def test_too_few_images_for_sets_are_told_before_the_attack():
    detector = from_spec("mmd")
    assert sets.few_sets_warning(detector, 445) is None
    said = sets.few_sets_warning(detector, 200)
    assert said.startswith("200 images make about 1 set of 100") and "attack 445 images" in said
    assert "set_size=45" in said
    assert sets.few_sets_warning(from_spec("mmd:set_size=45"), 200) is None
    assert sets.few_sets_warning(from_spec("dropout"), 10) is None


def test_tests_of_power_share_no_image():
    images, reference = np.arange(10).reshape(10, 1), np.arange(100, 107).reshape(7, 1)
    pairs = list(mmd_power.disjoint(0, images, reference, 3, 20))
    assert [len(pair[0]) for pair in pairs] == [3, 3]  # the reference has no third
    for side in zip(*pairs):
        assert len(np.unique(np.concatenate(side))) == 6
    assert len(list(mmd_power.disjoint(0, images, reference, 2, 1))) == 1


def test_a_report_counts_sets():
    part = sets.told_of(np.array([0.01, 0.3, 0.9]))
    assert report.sets_told(part) == "1 of 3"
    assert report.sets_told({"rejected": 0.25}) == report.percent(0.25)  # an older record
    lines = list(report._sets({"size": 5, "level": 0.05, "adversarial": part, "clean": part,
                               "originals": sets.told_of(np.array([0.5]))}))  # fmt: skip
    assert len(lines) == 3 and "0 of 1;" in lines[1] and "1 of 3 [" in lines[0]
