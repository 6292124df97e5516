"""Limited knowledge: which pairs are tried, what transfers, which attack and pair are chosen."""

import json
import types

import numpy as np
import pytest

import advdet
from advdet.attacks import presets
from experiments import limited_knowledge, table_lines, transfer, transfer_report


def arrays(share, distance, correct=None, on_copy=None):
    count = len(share)
    return {
        "id": np.arange(count),
        "judged_success": np.asarray(share, np.float32),
        "distance": np.asarray(distance, np.float32),
        "clean_correct": np.ones(count, bool) if correct is None else np.asarray(correct),
        "success": np.ones(count, bool) if on_copy is None else np.asarray(on_copy),
    }


def run(share, distance, attack="carlini_wagner", confidence=10.0, margin=1.0, **more):
    """A run on eight images, or as many as shares are given."""
    share = np.broadcast_to(share, np.shape(share) or (8,))
    pair = {"confidence": confidence, "detector_margin": margin}
    found = arrays(share, np.broadcast_to(distance, share.shape), **more)
    return transfer.Run(attack, pair, found)


def halves(even, odd, distance, count=100, **more):
    """A run of which these shares transfer in the even and in the odd half."""
    place = np.arange(count) // 2
    share = np.where(np.arange(count) % 2 == 0, place < even * count / 2, place < odd * count / 2)
    return run(share.astype(float), distance, **more)


def test_transfer_counts_shares_of_draws_and_distances_of_majorities():
    found = arrays([1, 0.6, 0.4, 0, 1], [1, 2, 4, 8, 100], [True, True, True, True, False])
    rate, distance = transfer.transferred(found, np.ones(5, bool))
    assert rate == pytest.approx((1 + 0.6 + 0.4) / 4)
    assert distance == pytest.approx(1.5)


def test_nothing_transferred_has_no_distance():
    assert transfer.transferred(arrays([0, 0], [1, 1]), np.ones(2, bool)) == (0.0, None)


def test_the_halves_are_disjoint_and_whole():
    found = arrays([1] * 7, [1] * 7)
    even, odd = transfer.even(found), transfer.odd(found)
    assert not (even & odd).any() and (even | odd).all() and even.sum() == 4


def test_the_cheapest_is_chosen_on_the_even_half_alone():
    near = halves(1.0, 0.0, 1.0)
    far = halves(1.0, 1.0, 5.0)
    weak = halves(0.7, 1.0, 0.1)
    assert transfer.cheapest([far, near, weak], 0.9) == 1
    assert transfer.cheapest([far, near, weak], 0.6) == 2
    assert transfer.cheapest([weak], 0.9) is None


def test_the_run_of_which_most_transfer_is_found_on_the_even_half_and_is_the_nearest_of_equals():
    runs = [halves(0, 1, 1.0), halves(1, 0, 3.0), halves(1, 1, 2.0), halves(0.9, 1, 1.0)]
    assert transfer.most(runs) == 2
    assert transfer.most([run(0.0, 1.0)]) == 0 and transfer.most([]) is None


def test_the_curve_of_equal_distances_takes_the_most_within_each():
    runs = [halves(0.3, 1, 2.0), halves(0.8, 0, 3.5), halves(0.6, 1, 3.0), halves(0.9, 1, 6.0)]
    curve = {d: transfer.within(runs, d) for d in (1, 2, 3, 4, 5, 6)}
    assert curve == {1: None, 2: 0, 3: 2, 4: 1, 5: 1, 6: 3}
    rates = [transfer.transferred(runs[i].arrays, transfer.even(runs[i].arrays))[0]
             for i in curve.values() if i is not None]  # fmt: skip
    assert rates == sorted(rates)


def test_what_is_chosen_is_told_of_the_odd_half_for_all_attacks_and_each():
    runs = [
        halves(0.9, 0.5, 4.0),
        halves(0.96, 0.7, 6.0, attack="ddn"),
        halves(0.2, 0.9, 1.0, confidence=5.0),
    ]
    of_all = {"transfer": 0.1, "mean_l2": 9.0, "interval": None, "n": 100}
    rows = [{**r.pair, "attack": r.attack, **of_all} for r in runs]
    wanted = transfer.choices([3.0, 5.0])
    told = limited_knowledge.told_of(runs, rows, wanted, ("carlini_wagner", "ddn"))
    assert told["most"]["attack"] == "ddn" and told["most"]["transfer"] == pytest.approx(0.7)
    assert told["most"]["mean_l2"] == pytest.approx(6.0) and told["most"]["n"] == 50
    assert told["most"]["chosen_by"]["transfer"] == pytest.approx(0.96)
    assert told["most"]["carlini_wagner"] is rows[0] and told["most"]["ddn"] is rows[1]
    low, high = told["most"]["interval"]
    assert low < 0.7 < high
    assert told["levels"]["0.84"]["attack"] == "carlini_wagner"
    assert told["levels"]["0.84"]["transfer"] == pytest.approx(0.5)
    assert told["levels"]["0.98"] is None
    assert told["within"]["3"]["transfer"] == pytest.approx(0.9)
    assert told["within"]["5"]["transfer"] == pytest.approx(0.5)
    alone = limited_knowledge.told_of(runs, rows, wanted, ("ddn",))
    assert alone["levels"]["0.84"]["transfer"] == pytest.approx(0.7)
    assert alone["within"]["5"] is None and alone["most"]["attack"] == "ddn"


def test_a_pair_that_cannot_be_chosen_is_needless():
    ask = lambda confidence, margin, *runs: transfer.needless(
        {"confidence": confidence, "detector_margin": margin}, runs
    )
    on_copy = lambda share: {"on_copy": np.arange(100) // 2 < 50 * share}
    assert ask(0, 0) is None
    good = halves(1.0, 1.0, 1.0)
    poor = halves(0.5, 0.5, 1.0, **on_copy(0.8))
    other = halves(0.82, 0.8, 1.0, confidence=40.0, margin=0.0)
    for given, why in (([good], transfer.DEARER), ([other, poor], transfer.BEYOND)):
        assert ask(15, 1, *given) == ask(10, 2, *given) == why
        assert ask(5, 2, *given) is None  # asks for less of the one
        assert ask(15, 0.5, *given) is None
    assert ask(15, 1, poor) is None  # more may transfer than the half that do so far
    assert ask(15, 2, halves(0.96, 1, 1.0, **on_copy(0.96))) is None
    assert ask(15, 1, halves(0.0, 0.0, 1.0, **on_copy(0.0))) == transfer.BEYOND
    right = np.arange(100) < 50
    wrong = run(np.full(100, 0.5), 1.0, correct=right, on_copy=right)
    assert ask(15, 1, wrong) is None  # of those that are right to begin with, all yield


def victim(confidence, margin):
    """(on the copy, transfer) by C&W and by DDN of a victim that wants 20 and 3 of both.

    C&W lands on what it asks for. DDN lands at twice of it, on fewer and fewer images.
    """
    passes = lambda k, m: min(1.0, k / 20) * min(1.0, m / 3)
    by_ddn = max(0.0, 1.0 - 0.02 * confidence)
    return (1.0, passes(confidence, margin)), (by_ddn, by_ddn * passes(2 * confidence, 2 * margin))


def searched(attack, most=60):
    """The runs of one attack's search on that victim."""
    runs, wanted = [], transfer.choices([])
    while len(runs) < most:
        pair, _ = transfer.propose(range(0, 45, 5), range(7), runs, wanted)
        if pair is None:
            return runs
        own, share = victim(*pair.values())[attack]
        place = np.arange(100) // 2
        runs.append(
            transfer.Run(
                "x",
                pair,
                arrays(place < 50 * share, [sum(pair.values())] * 100, on_copy=place < 50 * own),
            )
        )
    raise AssertionError("the search does not end")


def test_an_attack_that_overshoots_does_not_hide_the_pair_that_wins():
    by_cw, by_ddn = searched(0), searched(1)
    rates = lambda runs: [transfer.transferred(r.arrays, transfer.even(r.arrays))[0] for r in runs]
    assert max(rates(by_ddn)) < 0.9  # it yields on too few images to go there
    assert {"confidence": 20, "detector_margin": 3} not in [r.pair for r in by_ddn]
    assert max(rates(by_cw)) == 1.0
    assert by_cw[transfer.cheapest(by_cw, 0.98)].pair == {"confidence": 20, "detector_margin": 3}
    assert len(by_cw) < 30  # of 63


def test_the_search_goes_to_a_neighbour_of_what_would_be_chosen():
    grid, wanted = ([0.0, 10.0, 20.0, 30.0], [0.0, 1.0, 2.0]), {"most": transfer.most}
    first, left_out = transfer.propose(*grid, [], wanted)
    assert first == {"confidence": 20.0, "detector_margin": 0.0} and not left_out
    runs = [halves(0.5, 0.5, 1.0, confidence=20.0, margin=0.0)]
    assert transfer.propose(*grid, runs, wanted)[0] == {"confidence": 20.0, "detector_margin": 2.0}
    runs.append(halves(1.0, 1.0, 2.0, confidence=20.0, margin=2.0))
    assert transfer.propose(*grid, runs, wanted)[0] == {"confidence": 0.0, "detector_margin": 2.0}
    runs.append(halves(0.1, 0.1, 2.0, confidence=0.0, margin=2.0))
    pair, left_out = transfer.propose(*grid, runs, wanted)
    assert pair == {"confidence": 10.0, "detector_margin": 2.0}
    runs.append(halves(0.1, 0.1, 2.0, confidence=10.0, margin=2.0))
    pair, left_out = transfer.propose(*grid, runs, wanted)
    assert pair == {"confidence": 20.0, "detector_margin": 1.0}
    runs.append(halves(0.1, 0.1, 2.0, confidence=20.0, margin=1.0))
    pair, left_out = transfer.propose(*grid, runs, wanted)
    assert pair is None and left_out == {
        transfer.DEARER: [{"confidence": 30.0, "detector_margin": 2.0}]
    }


def test_the_most_of_all_is_refined_before_the_most_within_a_distance():
    grid, wanted = ([0.0, 10.0, 20.0], [0.0, 1.0]), transfer.choices([1.5])
    runs = [halves(0.5, 0.5, 2.0, confidence=20.0, margin=1.0),
            halves(0.2, 0.5, 1.0, confidence=0.0, margin=1.0)]  # fmt: skip
    order = []
    while (pair := transfer.propose(*grid, runs, wanted)[0]) is not None:
        order.append(tuple(pair.values()))
        runs.append(
            halves(0.1, 0.1, 2.0, confidence=pair["confidence"], margin=pair["detector_margin"])
        )
    assert order == [(10.0, 1.0), (20.0, 0.0), (0.0, 0.0)]


def test_where_nothing_is_scored_confidence_alone_is_searched():
    assert transfer.pairs([0.0, 5.0], []) == [{"confidence": 0.0}, {"confidence": 5.0}]
    assert transfer.pairs([0.0, 5.0], [1.0]) == [
        {"confidence": 0.0, "detector_margin": 1.0}, {"confidence": 5.0, "detector_margin": 1.0}
    ]  # fmt: skip
    pair, _ = transfer.propose([0.0, 10.0, 20.0], [], [], {"most": transfer.most})
    assert pair == {"confidence": 20.0}
    runs = [transfer.Run("x", pair, arrays([0.5] * 8, [1] * 8))]
    assert transfer.propose([0.0, 10.0, 20.0], [], runs, {"most": transfer.most})[0] == {
        "confidence": 0.0
    }


def test_a_short_attack_asks_less_of_the_machine_and_keeps_its_steps_for_each_c():
    for channels in (1, 3):
        for preset in ("fast", "thorough", "smoke"):
            full = presets.settings("carlini_wagner", preset, channels, "none")
            short = full | limited_knowledge.short_settings("carlini_wagner", preset, channels)
            assert short["steps"] == full["steps"] and short["binary_search_steps"] == 2
            assert short["initial_const"] == 1.0  # two values that start low would reach nothing
    assert limited_knowledge.short_settings("ddn", "fast", 1) == {"steps": 100}
    assert limited_knowledge.short_settings("ddn", "smoke", 1) == {"steps": 30}


class Series:
    """Evaluations of a victim that C&W passes at 20 and 1.5 spreads of 2, and DDN never on most."""

    def __init__(self, detector, **given):
        del detector, given
        copy = types.SimpleNamespace(defense=types.SimpleNamespace(scale=2.0))
        victim = types.SimpleNamespace(
            defense=types.SimpleNamespace(detector=types.SimpleNamespace(kind="score"))
        )
        self.case = types.SimpleNamespace(
            victim=victim, copy=copy, splits=types.SimpleNamespace(name="mnist"),
            defense_name="outlier_class", threat_model="limited_knowledge",
        )  # fmt: skip
        self.asked = []

    def plan(self, changes):
        del changes
        return types.SimpleNamespace(regime="random")

    def evaluate(self, *, attack, confidence, detector_margin, **settings):
        self.asked.append((attack, confidence, detector_margin, settings))
        own, share = victim(confidence, detector_margin)[attack == "ddn"]
        place = np.arange(100) // 2
        far = 5.0 + confidence / 100 - 0.1 * (settings == {})  # all the steps come nearer
        found = arrays(place < 50 * share, [far] * 100, on_copy=place < 50 * own)
        record = {
            "run": {"operating_point": "0.05", "settings_hash": "0",
                    "settings": {"detector_margin": detector_margin, "attack": {"steps": 300}}},
            "attack": {"success_rate": {"0.05": share}, "own_success_rate": own, "mean_l2": far},
            "intervals": {"success_rate": [0.0, 1.0]}, "sets": None, "counts": {"attacked": 100},
            "seconds": {"run": 1.0},
        }  # fmt: skip
        return types.SimpleNamespace(arrays={attack: found}, records={attack: record})


@pytest.fixture
def sweep(monkeypatch):
    """Sweeps that victim; gives the result and what was asked."""
    made = []
    monkeypatch.setattr(advdet, "series", lambda *a, **b: made.append(Series(*a, **b)) or made[-1])
    monkeypatch.setattr(limited_knowledge.evaluation, "command", lambda module: module)
    monkeypatch.setattr(
        limited_knowledge.common, "splits", lambda: types.SimpleNamespace(image_shape=(28, 28, 1))
    )
    names = ("data_source", "data_dir", "attack", "confidence", "detector_margin", "margin_rate",
             "steps", "binary_search_steps", "initial_const")  # fmt: skip

    def run_(confidences, most_pairs=12, all_pairs=False, **changes):
        settings = dict.fromkeys(names) | {"preset": "fast"} | changes
        margins = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
        result = limited_knowledge.sweep(
            "binary", settings, confidences, margins, [5.15, 6.0], None, most_pairs, all_pairs
        )
        return json.loads(json.dumps(result)), made[-1].asked

    return run_


def test_a_sweep_searches_by_cw_and_tells_the_best_of_both_attacks(sweep):
    result, asked = sweep([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0])
    assert [one[0] for one in asked[:3]] == ["carlini_wagner"] * 3
    assert asked[0][1:3] == (20.0, 2.0)  # a spread below the threshold
    assert len([one for one in asked if one[0] == "carlini_wagner" and one[3]]) <= 12
    best = result["most"]
    assert best["attack"] == "carlini_wagner" and best["transfer"] == 1.0
    assert best["confidence"] == 20.0 and best["detector_margin"] >= 3.0
    assert best["margin_in_spreads"] == best["detector_margin"] / 2
    assert best["mean_l2"] == pytest.approx(5.1)  # by all the steps, which were taken there
    assert result["levels"]["0.98"]["transfer"] == 1.0
    assert result["by_attack"]["ddn"]["levels"]["0.98"] is None
    assert result["by_attack"]["carlini_wagner"]["most"] == best
    assert set(result["within"]) == {"5.15", "5.3", "6"}  # with the paper's
    assert result["within"]["5.15"]["mean_l2"] <= 5.15
    assert {row.get("left_out") for row in result["rows"]} >= {transfer.DEARER}
    assert "most: 100.0 %" in transfer_report.show(result)


def test_a_sweep_stops_where_it_is_told_to_and_takes_settings_by_hand(sweep):
    result, asked = sweep([10.0, 20.0], most_pairs=2)
    assert not result["search_ended"]
    assert sum(bool(one[3]) for one in asked if one[0] == "carlini_wagner") == 2
    _, asked = sweep([10.0, 20.0], all_pairs=True, steps=50, binary_search_steps=3)
    searched = [one for one in asked if one[0] == "carlini_wagner"]
    assert len({one[1:3] for one in searched}) == 14
    assert all(one[3] in ({}, {"initial_const": 1.0}) for one in searched)
    assert all(one[3] == {} for one in asked if one[0] == "ddn")


ROW = {"confidence": 5.0, "detector_margin": 1.0, "attack": "carlini_wagner", "steps": 100,
       "binary_search_steps": 3, "on_surrogate": 1.0, "transfer": 0.99, "interval": [0.9, 1.0],
       "mean_l2": 2.0, "n": 9}  # fmt: skip


def result_of(rows, **most):
    best = rows[0] | {"transfer": 0.7, "carlini_wagner": rows[0], "ddn": None} | most
    found = {"levels": {"0.84": None}, "most": best, "within": {"3": best, "2": None}}
    alone = {"carlini_wagner": found, "ddn": {**found, "most": None}}
    return {"rows": rows, **found, "by_attack": alone, "search_ended": True}


def test_what_was_left_out_is_named_in_the_table():
    why = transfer.DEARER
    without = [{"confidence": k, "detector_margin": 1.5, "left_out": why} for k in (10.0, 15.0)]
    result = result_of([ROW, *without])
    text = transfer_report.show(result)
    assert "cheapest of 84%: not reached" in text
    assert "most: 70.0 % at mean L2 2.00 (carlini_wagner, 5/1)" in text
    assert "most within L2 3: 70.0 %" in text and "most within L2 2: not reached" in text
    assert f"left out, {why} (confidence/margin): 10/1.5, 15/1.5" in text
    assert len([line for line in text.splitlines() if "99.0 %" in line]) == 1
    assert "3 x 100" in text and "stopped" not in text
    assert "stopped" in transfer_report.show(result | {"search_ended": False})


def test_whether_sets_are_told_apart_stands_beside_what_transfers():
    row = ROW | {"sets_rejected": 0.35}
    text = transfer_report.show(result_of([row], sets_rejected=0.45))
    lines = text.splitlines()
    assert lines[1].split()[-2:] == ["sets", "told"] and lines[2].endswith("35.0 %")
    assert "sets told apart 45.0 %" in text
    assert "told apart" not in transfer_report.show(result_of([ROW]))


def test_chosen_rows_read_the_same_in_the_table_of_all():
    assert table_lines._chosen(ROW) == "99.0 % at L2 2.00, C&W k 5/1"
    assert table_lines._chosen(None) == "not reached"
