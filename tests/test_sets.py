"""Tests of sets: a shifted set is told from the reference, one of the same kind is not."""

import jax
import numpy as np
import toys

from advdet import sets
from advdet.detectors import from_spec


def scene(size=20):
    rng = np.random.RandomState(0)
    detector = from_spec(f"mmd:sigma2=5.0,num_reference=60,set_size={size},num_permutations=199")
    draw = lambda count: rng.rand(count, *toys.SHAPE).astype(np.float32)
    defense = toys.guarded(
        toys.network(), detector, {"reference": jax.numpy.asarray(draw(60).reshape(60, -1))}
    )
    return defense, 0.5 * draw(50), draw(80)


def test_a_shifted_set_is_rejected_and_the_clean_control_is_not():
    defense, shifted, clean = scene()
    found = sets.assess_sets(0, defense, shifted, clean)
    assert (found["size"], found["draws"]) == (20, sets.NUM_SETS)
    assert found["adversarial"]["rejected"] == 1.0
    assert found["adversarial"]["median_p"] == np.float32(1 / 200)
    assert found["clean"]["rejected"] <= 0.25 and found["clean"]["median_p"] > 0.1
    assert found == sets.assess_sets(0, defense, shifted, clean)


def test_the_set_shrinks_to_the_images_there_are():
    defense, shifted, clean = scene()
    assert sets.assess_sets(0, defense, shifted[:7], clean)["size"] == 7


def test_one_image_is_no_set():
    defense, shifted, clean = scene()
    assert sets.assess_sets(0, defense, shifted[:1], clean) is None
