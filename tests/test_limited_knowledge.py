"""The sweep of limited knowledge: which pairs, what transfers, which pair is cheapest."""

import numpy as np
import pytest
import toys

from advdet.detectors import Detector
from experiments import limited_knowledge


def arrays(share, distance, correct=None):
    count = len(share)
    return {
        "id": np.arange(count),
        "judged_success": np.asarray(share, np.float32),
        "distance": np.asarray(distance, np.float32),
        "clean_correct": np.ones(count, bool) if correct is None else np.asarray(correct),
    }


class Logit(toys.LinearScore):
    """A score that is a logit."""

    logit_score = True


class Corrector(Detector):
    """Changes the answer."""

    kind = "corrector"


def test_pairs_are_those_of_the_defence_s_kind():
    confidences, rates = [0.0, 5.0], [0.05, 0.5]
    pairs = lambda detector: limited_knowledge.pairs(detector, confidences, rates)
    assert pairs(Corrector()) == [{"confidence": 0.0}, {"confidence": 5.0}]
    assert pairs(Logit()) == [
        {"confidence": 0.0, "detector_margin": 0.0, "margin_rate": 0.5},
        {"confidence": 5.0, "detector_margin": 5.0, "margin_rate": 0.5},
    ]
    both = pairs(toys.LinearScore())
    assert len(both) == 4 and {"confidence": 5.0, "margin_rate": 0.5} in both


def test_transfer_counts_shares_of_draws_and_distances_of_majorities():
    found = arrays([1, 0.6, 0.4, 0, 1], [1, 2, 4, 8, 100], [True, True, True, True, False])
    rate, distance = limited_knowledge.transferred(found, np.ones(5, bool))
    assert rate == pytest.approx((1 + 0.6 + 0.4) / 4)
    assert distance == pytest.approx(1.5)


def test_nothing_transferred_has_no_distance():
    assert limited_knowledge.transferred(arrays([0, 0], [1, 1]), np.ones(2, bool)) == (0.0, None)


def test_the_cheapest_pair_is_chosen_on_the_even_rows_alone():
    near = arrays([1, 0, 1, 0, 1, 0], [1, 9, 1, 9, 1, 9])  # all of the even rows, none of the odd
    far = arrays([1] * 6, [5] * 6)
    weak = arrays([1, 1, 1, 1, 0, 1], [0.1] * 6)
    tried = [far, near, weak]
    assert limited_knowledge.cheapest(tried, 0.9) == 1
    assert limited_knowledge.cheapest(tried, 0.6) == 2
    assert limited_knowledge.cheapest([weak], 0.9) is None
