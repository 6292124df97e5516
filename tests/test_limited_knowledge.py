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
        {"confidence": 0.0, "detector_margin": 0.0}, {"confidence": 5.0, "detector_margin": 5.0},
        {"confidence": 0.0, "margin_rate": 0.5}, {"confidence": 5.0, "margin_rate": 0.5},
    ]  # fmt: skip
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


def test_the_pair_of_which_most_transfer_is_found_on_the_even_rows():
    tried = [
        None,
        arrays([1, 0] * 3, [1] * 6),
        arrays([1] * 6, [1] * 6),
        arrays([0, 1] * 3, [1] * 6),
    ]
    assert limited_knowledge.most(tried) == 1


def test_a_pair_that_cannot_be_the_cheapest_is_needless():
    def found(transfer, on_copy):
        made = arrays([transfer] * 100, [1.0] * 100)
        return made | {"success": np.arange(100) // 2 < 50 * on_copy}

    pair = lambda confidence, rate: {"confidence": confidence, "margin_rate": rate}
    ask = limited_knowledge.needless
    assert ask(pair(0, 0.05), []) is None
    good, poor = (pair(10, 0.1), found(1.0, 1.0)), (pair(10, 0.1), found(0.5, 0.8))
    other = (pair(40, 0.05), found(0.82, 0.83))
    for given, why in (
        ([good], limited_knowledge.DEARER),
        ([other, poor], limited_knowledge.BEYOND),
    ):
        assert ask(pair(15, 0.1), given) == ask(pair(10, 0.2), given) == why
        assert ask(pair(5, 0.2), given) is None  # asks for less of the one
        assert ask(pair(15, 0.05), given) is None
    equal = {"confidence": 10, "detector_margin": 10}, found(1.0, 1.0)
    assert ask(pair(15, 0.1), [equal]) is None  # margins told in two ways are not compared
    assert ask(pair(15, 0.1), [poor]) is None  # more may transfer than the half that do so far
    assert ask(pair(15, 0.2), [(pair(10, 0.1), found(0.97, 0.97)), (pair(0, 0.1), None)]) is None
    wrong = found(1.0, 0.8) | {"clean_correct": np.arange(100) < 50}  # of those right, all yield
    wrong["judged_success"] = np.full(100, 0.5, np.float32)
    assert ask(pair(15, 0.1), [(pair(10, 0.1), wrong)]) is None


def test_what_was_left_out_is_named_in_the_table():
    row = {"confidence": 5.0, "detector_margin": 1.0, "margin_rate": 0.1, "on_surrogate": 1.0,
           "transfer": 0.99, "interval": [0.9, 1.0], "mean_l2": 2.0, "n": 9}  # fmt: skip
    why = limited_knowledge.DEARER
    without = [{"confidence": k, "margin_rate": 0.1, "left_out": why} for k in (10.0, 15.0)]
    own = {"detector_margin": 1.0, "transfer": 0.5, "mean_l2": 3.0}
    best = {"confidence": 5.0, "transfer": 0.7, "mean_l2": 2.0, "carlini_wagner": own}
    result = {"rows": [row, *without], "levels": {"0.84": None}, "most": best}
    text = limited_knowledge.show(result)
    assert "84%: not reached by any pair" in text
    assert "most: confidence 5, margin 1: 70.0 % of the other half" in text
    assert f"left out, {why}: 10 at 10 %, 15 at 10 %" in text
    assert len([line for line in text.splitlines() if "99.0 %" in line]) == 1


def test_whether_sets_are_told_apart_stands_beside_what_transfers():
    row = {"confidence": 5.0, "detector_margin": 0.0, "on_surrogate": 1.0, "transfer": 0.99,
           "interval": [0.9, 1.0], "mean_l2": 2.0, "n": 9, "sets_rejected": 0.35}  # fmt: skip
    own = {"detector_margin": 0.0, "transfer": 0.5, "mean_l2": 3.0, "sets_rejected": 1.0}
    best = {"confidence": 5.0, "transfer": 0.7, "mean_l2": 2.0, "carlini_wagner": own,
            "sets_rejected": 0.45}  # fmt: skip
    text = limited_knowledge.show({"rows": [row], "levels": {"0.84": None}, "most": best})
    lines = text.splitlines()
    assert lines[1].split()[-2:] == ["sets", "told"] and lines[2].endswith("35.0 %")
    assert lines[-1].endswith("; sets told apart: 45.0 %")
    del row["sets_rejected"], best["sets_rejected"]
    assert "told" not in limited_knowledge.show({"rows": [row], "levels": {}, "most": best})
