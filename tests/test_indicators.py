"""The rules of the indicators, on hand-made figures; what is looked at around an attack."""

import numpy as np
import pytest
import toys

from advdet import indicators, metrics, naturals, probes, records, reruns, sets, slopes
from advdet.assess import with_noise
from advdet.attacks.base import AttackResult
from advdet.attacks.objectives import Generic
from advdet.defenses import threshold_at
from advdet.judge import judge
from advdet.types import Batch

_N = 100
_ALL = np.ones(_N, bool)
_ENDLESS = probes.Reach(True)


def first(count: int, n: int = _N) -> np.ndarray:
    return np.arange(n) < count


def probe_of(*, clean=0, end=0, one_step=None, differentiable=True) -> probes.Probe:
    dead = {"classifier": {"clean": first(clean), "end": first(end)}}
    return probes.Probe(dead, one_step, differentiable)


def goal_missed(met, attacked=_ALL, **changes):
    given = dict(alone=None, minimal=True, confidence=0.0, defended=True) | changes
    return indicators.classifier_goal_missed(met, attacked, **given)


def natural_missed(failed, *, near=None, shown=True, minimal=True):
    there = failed if near is None else near
    return indicators.natural_image_missed(
        failed, np.where(there, 8.0, np.inf), np.ones(len(failed), bool), shown=shown,
        minimal=minimal,
    )  # fmt: skip


def slope_sign(kind: str, count: int):
    kinds = np.where(first(count, 8), kind, "right")
    found = {"detector": slopes.Compared(kinds, np.ones(8))}
    return indicators.wrong_gradient(probe_of()._replace(slopes=found), _ALL, np.ones(_N))


# ---- rules


@pytest.mark.parametrize(
    ("sign", "value", "raised"),
    [
        (indicators.zero_gradient(probe_of(clean=10), _ALL, np.ones(_N)), 0.10, False),
        (indicators.zero_gradient(probe_of(clean=1, end=18), _ALL, np.ones(_N)), 0.18, True),
        (indicators.zero_gradient(probe_of(end=50), _ALL, np.zeros(_N)), None, False),
        (indicators.noise(None, np.ones(0)), None, False),
        (indicators.noise(first(49), _ALL), 0.49, False),
        (indicators.noise(first(62), _ALL), 0.62, True),
        (indicators.noise(first(1), first(1)), 0.01, False),  # one image is chance
        (indicators.one_step(probe_of(one_step=first(52)), _ALL, first(50), True), 0.02, False),
        (indicators.one_step(probe_of(one_step=first(56)), _ALL, first(50), True), 0.06, True),
        (indicators.one_step(probe_of(one_step=first(30)), _ALL, first(50), False), 0.3, False),
        (indicators.one_step(probe_of(one_step=first(60)), _ALL, first(50), False), 0.6, True),
        (indicators.one_step(probe_of(), _ALL, first(50), False), None, False),
        (goal_missed(first(97)), 0.03, False),
        (goal_missed(first(94)), 0.06, True),
        (goal_missed(first(1, 2), _ALL[:2]), 0.5, False),  # one of two is chance
        (goal_missed(first(0), confidence=1.0), None, False),
        (goal_missed(first(0), minimal=False), None, False),
        (goal_missed(first(0), defended=False), None, False),
        (natural_missed(first(2, 200)), 0.01, False),  # lower bound 0.27 %
        (natural_missed(first(6, 200)), 0.03, True),  # lower bound 1.4 %
        (natural_missed(first(5, 8)), 0.625, True),
        (natural_missed(first(2, 8)), 0.25, False),
        (natural_missed(first(5, 8), near=first(0, 8)), 0.0, False),
        (natural_missed(first(5, 8), shown=False), None, False),
        (natural_missed(first(5, 8), minimal=False), None, False),
        (indicators.score_not_a_number(np.array([[0.5, np.nan]])), 0.5, True),
        (indicators.score_not_a_number(np.array([[0.5, np.inf]])), 0.0, False),
        (indicators.score_not_a_number(np.zeros((1, 0))), None, False),
        (slope_sign("negated", 8), 1.0, True),
        (slope_sign("unrelated", 5), 0.625, True),
        (slope_sign("partial", 2), 0.25, False),
        (slope_sign("flat", 8), 0.0, False),
        (indicators.probabilities(np.eye(4)), 1.0, True),
        (indicators.probabilities(7.0 * np.eye(4)), 1.0, True),
        (indicators.probabilities(np.float32([[0.2, 0.9], [0.4, 0.1], [0.3, 0.8]])), 1.0, True),
        (indicators.probabilities(np.float32([[0.2, 1.9], [0.4, 0.1]])), 0.5, False),
        (indicators.probabilities(np.log(np.float32([[0.2, 0.8], [0.4, 0.6]]))), 0.0, False),
        (indicators.lost_to_8bit(0.8, 0.4), 0.5, False),
        (indicators.lost_to_8bit(0.8, 0.3), 0.625, True),
        (indicators.lost_to_8bit(0.0, 0.0), None, False),
        (indicators.constant_score(np.full((5, 8), 0.25)), 0.0, True),
        (indicators.constant_score(np.array([[0.25, 0.5]])), 0.25, False),
        (indicators.constant_score(np.zeros((1, 0))), None, False),
    ],
)  # fmt: skip
def test_rules_at_their_edges(sign, value, raised):
    assert sign["value"] == (None if value is None else pytest.approx(value))
    assert sign["raised"] is raised
    assert (sign["advice"] is not None) == raised
    assert sign["value"] is not None or sign["reason"]


@pytest.mark.parametrize(
    ("passes", "random", "count", "raised"),
    [
        (0.6 * first(2), False, 2, False),
        (0.6 * first(6), False, 6, True),
        (0.8 * first(90), True, 0, False),  # not in every draw: may be luck
        (1.0 * first(10), True, 10, False),
        (1.0 * first(18), True, 18, True),
    ],
)
def test_silent_success_grants_random_scores_some_luck(passes, random, count, raised):
    sign = indicators.silent_success(passes, _ALL, shown=True, judges_alike=True, random=random)
    assert (sign["value"], sign["raised"]) == (count, raised)
    for shown, alike in ((False, True), (True, False)):
        exempt = indicators.silent_success(
            passes, _ALL, shown=shown, judges_alike=alike, random=random
        )
        assert exempt["value"] is None and exempt["reason"] and not exempt["raised"]


def test_another_attack_is_compared_over_images_that_both_break():
    def arrays(distance, won):
        return {
            "clean_correct": first(9, 10), "distance": np.full(10, distance), "success": won,
            "judged_success": won.astype(np.float32),
        }  # fmt: skip

    own, every = arrays(2.0, first(10, 10)), first(10, 10)
    sign = indicators.nearer_attack(own, {"ddn": arrays(1.95, every)})
    assert sign["value"] == pytest.approx(0.025) and sign["raised"] and sign["n"] == 9
    assert not indicators.nearer_attack(own, {"ddn": arrays(1.97, every)})["raised"]
    two = {"a": arrays(1.99, every), "b": arrays(1.0, first(3, 10))}
    assert indicators.nearer_attack(own, two)["attack"] == "b"
    assert indicators.nearer_attack(own, two)["n"] == 3
    for others in ({}, {"ddn": arrays(1.0, ~every)}):
        sign = indicators.nearer_attack(own, others)
        assert sign["value"] is None and sign["reason"] and not sign["raised"]


def test_a_second_run_must_not_be_nearer_nor_break_more():
    rows, won, near = first(25), first(20), np.full(_N, 2.0)
    again = lambda distance, success: indicators.nearer_again(
        near, won, distance, success, rows, reliable=~first(2), attack="ddn", steps=600
    )
    same = again(near, won)
    assert (same["value"], same["raised"]) == (0.0, False)
    assert (same["images"], same["n"], same["gained"], same["steps"]) == (25, 18, 0, 600)
    assert again(0.97 * near, won)["raised"] and not again(0.99 * near, won)["raised"]
    assert not again(near, first(21))["raised"] and again(near, first(23))["raised"]
    assert again(np.where(first(2), 0.5, 1.0) * near, won)["value"] == 0.0
    assert again(near, ~won)["value"] is None


def test_a_second_run_costs_a_tenth_at_most():
    for spent, each, count in ((_N * 1800, 600, 25), (_N * 1800, 3000, 6), (_N * 1400, 3000, 0)):
        rows = reruns.affordable(~first(3), spent, each)
        assert rows.sum() == count and not rows[:3].any() and count * each <= 0.1 * spent + each
    assert reruns.affordable(first(4), 1e6, 1.0).sum() == 4


@pytest.mark.parametrize(
    ("interval", "flags", "said"),
    [
        ([0.5, 0.9], (), "broken"),
        ([0.49, 0.9], (), "not broken by these attacks at this budget"),
        (None, (), "not broken by these attacks at this budget"),
        ([0.9, 1.0], ("lost_to_8bit", "nearer_attack", "nearer_again", "constant_score"), "broken"),
        *[([0.9, 1.0], (name,), "evaluation invalid") for name in indicators.INVALIDATING],
    ],
)  # fmt: skip
def test_the_verdict_heeds_flags_that_invalidate_and_no_others(interval, flags, said):
    names = (*indicators.INVALIDATING, "lost_to_8bit")
    signs = {name: indicators.entry(name, 0.0) for name in names}
    signs |= {name: indicators.entry(name, 1.0, True) for name in flags}
    assert indicators.verdict(interval, signs) == said
    record = {"indicators": signs, "intervals": {"success_rate": interval}, "verdict": "?",
              "sets": None, "run": {"attack": "ddn"}}  # fmt: skip
    changed = indicators.amended(record, "one_step", indicators.entry("one_step", 1.0, True))
    assert changed["verdict"] == "evaluation invalid" and record["verdict"] == "?"


@pytest.mark.parametrize(
    ("told", "count", "said"),
    [
        (0, 20, "broken"), (0, 4, "broken"), (20, 20, "not broken"), (4, 4, "not broken"),
        (0, 1, "too few sets"), (1, 1, "too few sets"), (0, 3, "too few sets"),
        (10, 20, "too few sets"),
    ],
)  # fmt: skip
def test_the_verdict_on_sets_needs_sets_that_say_something(told, count, said):
    p_values = np.where(np.arange(count) < told, 0.01, 0.5)
    drawn = {"adversarial": sets.told_of(p_values)}
    assert indicators.verdict([0.9, 1.0], {}, drawn).startswith(said)
    assert indicators.verdict([0.3, 0.6], {}, drawn).startswith("not broken")


def test_two_images_are_too_few_to_tell_probabilities_by_their_sum():
    assert not indicators.probabilities(np.float32([[3, 1, 7]]))["raised"]
    assert not indicators.probabilities(np.float32([[3, 1, 7], [3, 4, 4]]))["raised"]
    assert indicators.probabilities(np.float32([[3, 1, 7], [3, 4, 4], [9, 1, 1]]))["raised"]
    assert not indicators.probabilities(np.float32([[0.3, 0.7]]))["raised"]
    assert indicators.probabilities(np.float32([[0.3, 0.7]] * 3))["raised"]


def test_a_classifier_at_chance_is_known_by_its_accuracy():
    at_chance = [(0.12, 10), (0.17, 10), (0.5, 2)]
    for accuracy, classes in (*at_chance, (0.21, 10), (0.55, 2), (0.1, 100)):
        raised = (accuracy, classes) in at_chance
        sign = indicators.classifier_at_chance(accuracy, classes, 2000)
        assert sign["raised"] == raised and sign["invalidates"], (accuracy, classes)


def test_an_attack_that_does_not_fool_the_victim_s_classifier_warns():
    sign = indicators.not_transferred(True, 0.1, 1.0)
    assert sign["raised"] and not sign["invalidates"] and "confidence" in sign["advice"]
    assert not indicators.not_transferred(True, 0.6, 1.0)["raised"]
    for limited, fooled, own in ((False, 0.1, 1.0), (True, None, 1.0), (True, 0.0, 0.0)):
        assert indicators.not_transferred(limited, fooled, own)["value"] is None


def test_a_score_that_falls_under_unaware_attacks_warns():
    clean = np.arange(100.0)
    sign = indicators.score_reversed(clean, clean[:40] - 60)
    assert sign["raised"] and sign["value"] < 0.1 and "higher" in sign["advice"]
    for found in (clean[25:65], clean[60:]):  # the first may be chance
        assert not indicators.score_reversed(clean, found)["raised"]
    for found in (None, clean[:3]):
        assert indicators.score_reversed(clean, found)["value"] is None


def test_what_no_gradient_was_asked_of_has_a_verdict_of_its_own():
    best = lambda *names: {"attack": "best", "settings": {"attack": dict.fromkeys(names)}}
    for run, said in (
        ({"attack": "square"}, True), ({"attack": "pgd"}, False), ({"attack": "ddn"}, False),
        (best("square"), True), (best("square", "pgd"), False),
    ):  # fmt: skip
        assert indicators.by_values(run) == said, run
        withstood = indicators.verdict([0.1, 0.3], {}, by_values=indicators.by_values(run))
        assert withstood == (indicators.NOT_BY_VALUES if said else indicators.NOT_BROKEN)
        assert indicators.verdict([0.9, 1.0], {}, by_values=said) == indicators.BROKEN
    invalid = {"one_step": indicators.entry("one_step", 1.0, True)}
    assert indicators.verdict([0.1, 0.3], invalid, by_values=True) == indicators.INVALID


@pytest.mark.parametrize(
    ("values", "point", "raised", "flagged"),
    [
        (np.arange(1000), "0.05", False, 0.05),
        (np.arange(1000) // 3, "0.05", False, 0.049),  # a few ties do no harm
        (np.arange(10), "0.01", False, 0.0),  # few images are another sign's business
        (np.arange(1000) >= 890, "0.05", True, 0.11),  # yes or no: 11 % say yes
        (np.arange(1000) >= 995, "0.05", True, 0.005),
        (np.digitize(np.arange(1000), (700, 980)), "0.05", True, 0.02),  # three values
        (np.arange(1000) >= 995, "native", False, None),
    ],
)
def test_a_score_of_few_values_is_told_with_the_rate_that_it_reaches(
    values, point, raised, flagged
):
    scores = np.random.RandomState(0).permutation(values).astype(np.float32)
    threshold = 0.5 if point == "native" else threshold_at(scores, float(point))
    sign = indicators.coarse_score(scores, threshold, point)
    assert sign["raised"] == raised and not sign["invalidates"]
    assert sign["value"] == (None if flagged is None else pytest.approx(flagged, abs=1e-6))
    if raised:
        assert f"flags {100 * flagged:g} %" in sign["advice"]


def test_something_can_be_flagged_at_every_threshold_unless_all_scores_are_one():
    for share in (0.004, 0.011, 0.06, 0.3, 0.8):
        scores = np.float32(np.arange(1000) < 1000 * share)
        for rate in (0.01, 0.05, 0.5):
            assert threshold_at(scores, rate) == 0.0
    assert threshold_at(np.ones(50), 0.05) == 1.0
    assert threshold_at(np.arange(10), 0.01) == 9.0


def test_few_clean_images_and_a_score_that_drifts_are_told():
    assert indicators.few_clean_images(np.zeros(99))["raised"]
    assert not indicators.few_clean_images(np.zeros(100))["raised"]
    assert indicators.few_clean_images(np.zeros(0))["value"] is None
    scores = np.linspace(3.0, 4.0, 50)
    sign = indicators.score_drifts(scores, np.where(np.arange(50) < 5, 1.01, 1.0) * scores)
    assert (sign["value"], sign["raised"], sign["invalidates"]) == (0.1, True, True)
    assert not indicators.score_drifts(scores, scores * (1 + 1e-6))["raised"]
    assert indicators.score_drifts(None, None)["reason"]


# ---- what is looked at


def _result(images, success) -> AttackResult:
    count = len(images)
    return AttackResult(
        image=images, success=success, distance=np.where(success, 1.0, np.inf),
        const=np.full(count, np.nan), nearest_miss=images, missed=success,
        num_gradients=np.ones(count, np.int32),
    )  # fmt: skip


def look(view, images, targets, attacked=None, *, success=None, reach=_ENDLESS):
    count = len(images)
    success = np.zeros(count, bool) if success is None else success
    return probes.probe(
        Generic(), view, Batch(images, targets, np.arange(count, dtype=np.int32)), targets,
        _result(images, success), np.ones(count, bool) if attacked is None else attacked, seed=0,
        reach=reach,
    )  # fmt: skip


def test_gradients_are_looked_at_where_a_goal_is_not_reached():
    net = toys.blind_network()
    images = toys.digits(3, 6)
    targets = toys.wrong_targets(net, images)
    hard = toys.guarded(net, toys.Mark(hard=True))
    marks = images.reshape(6, -1)[:, : toys.CLASSES]
    marks[:] = np.eye(toys.CLASSES)[toys.predicted(net, images)]
    marks[3:] = np.eye(toys.CLASSES)[targets[3:]]  # flagged: the goal is open, and has no slope
    found = look(hard, images, targets, np.arange(6) != 5)
    np.testing.assert_array_equal(found.dead["detector"]["clean"], [0, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(found.dead["detector"]["end"], [0, 0, 0, 1, 1, 0])
    assert not found.dead["classifier"]["clean"].any()
    declared = look(toys.guarded(net, toys.DeclaredMark(hard=True)), images, targets)
    assert set(declared.dead) == {"classifier"} and not declared.differentiable
    sign = indicators.zero_gradient(declared, np.ones(6, bool), np.ones(6))
    assert sign["reason"] == "the detector declares that it has no gradients"


def test_of_an_attack_without_gradients_none_are_asked():
    net = toys.network()
    images = toys.digits(3, 6)
    free = _result(images, np.zeros(6, bool))._replace(num_gradients=np.zeros(6, np.int32))
    batch = Batch(images, toys.predicted(net, images), np.arange(6, dtype=np.int32))
    found = probes.probe(
        None, toys.guarded(net, toys.Ink()), batch, batch.labels, free, np.ones(6, bool), seed=0,
        reach=_ENDLESS,
    )  # fmt: skip
    for sign in (
        indicators.zero_gradient(found, np.ones(6, bool), free.num_gradients),
        indicators.one_step(found, np.ones(6, bool), free.success, True),
    ):
        assert sign["value"] is None and sign["reason"] == "the attack uses no gradients"


def test_one_step_is_tried_on_failures_or_at_the_radius_on_all():
    random = np.random.RandomState(0)
    linear = toys.classifier(skip=random.randn(toys.PIXELS, toys.CLASSES))
    bare = toys.guarded(linear, toys.Constant(), threshold=1.0)
    images = np.full((6, *toys.SHAPE), 0.5, np.float32) + 0.01 * random.rand(6, *toys.SHAPE)
    images = images.astype(np.float32)
    targets = toys.wrong_targets(linear, images)
    np.testing.assert_array_equal(
        look(bare, images, targets, success=np.arange(6) < 2).one_step, np.arange(6) >= 2
    )
    # Of a linear margin one step tells the truth: the l2 step of that length, and no shorter.
    margin = toys.margins(linear, images, targets)
    weights = np.asarray(linear.variables["skip"])
    other = np.array(linear(images).logits)
    other[np.arange(6), targets] = -np.inf
    slopes = (weights[:, other.argmax(1)] - weights[:, targets]).T
    needed = margin / np.linalg.norm(slopes, axis=1)
    for share in (0.9, 1.1):
        reach = probes.Reach(False, float(share * needed[0]), "l2")
        assert look(bare, images, targets, reach=reach).one_step[0] == (share > 1)
    assert look(bare, images, targets, reach=probes.Reach(False)).one_step is None


def test_noise_has_the_length_asked_for_after_clipping():
    images = toys.digits(5, 8)
    clean = Batch(images, np.zeros(8, np.int32), np.arange(8, dtype=np.int32))
    wanted = np.float32([0.1, 0.5, 1.0, 2.0, 3.0, np.inf, 0.0, 100.0])
    noisy = with_noise(0, clean, wanted)
    assert noisy.min() >= 0 and noisy.max() <= 1 and noisy.dtype == np.float32
    reached = metrics.l2(noisy, images)
    np.testing.assert_allclose(reached[:5], wanted[:5], rtol=1e-3)
    np.testing.assert_array_equal(reached[5:7], 0.0)
    assert np.isfinite(reached[7]) and reached[7] > 3.0  # all that the box has room for


def test_an_attack_that_asks_for_more_than_the_judge_is_not_silent():
    settings = lambda margin, **objective: {"detector_margin": margin, "objective": objective}
    assert records._asks_for_more(settings(0.5), minimal=True)
    assert records._asks_for_more(settings(0.0, z=3.0), minimal=False)
    assert not records._asks_for_more(settings(0.0, z=3.0), minimal=True)
    assert not records._asks_for_more(settings(0.0, z=0.0), minimal=False)


def test_advice_names_what_is_wrong_with_a_gradient_and_who_misses_the_label():
    advice = slope_sign("negated", 8)["advice"]
    assert "negated on 8" in advice and 'attack="square"' in advice
    alone = goal_missed(first(0), alone=_ALL)
    assert alone["reached_alone"] == 1.0 and "that it reaches without" in alone["advice"]
    neither = goal_missed(first(0), alone=first(0))
    assert neither["reached_alone"] == 0.0 and "even with no detector" in neither["advice"]
    sign = natural_missed(first(5, 8))
    assert (sign["count"], sign["failed"], sign["mean_l2"]) == (5, 5, 8.0)
    assert sign["interval"] == metrics.wilson(5, 8)


def test_every_indicator_is_found_under_its_name():
    assert set(indicators.RULES) == set(indicators.ADVICE)
    assert set(indicators.INVALIDATING) <= set(indicators.RULES)


def test_natural_images_are_those_that_the_judge_lets_pass_nearest_first():
    net = toys.network()
    images = toys.digits(7, 40)
    batch = Batch(images, toys.predicted(net, images), np.arange(40, dtype=np.int32))
    ink = images.mean(axis=(1, 2, 3))
    limit = float(np.median(ink))
    view = toys.guarded(net, toys.Ink())
    judged = judge(view, images, batch.ids, batch.labels, targeted=True, seed=0)
    clean, goal, rows = toys.digits(8, 3), np.int32([batch.labels[0]] * 3), np.arange(3) != 1
    found = naturals.nearest(
        naturals.Naturals(batch, judged), limit, clean, goal, rows, targeted=True
    )
    there = images[(batch.labels == goal[0]) & (ink <= limit)]
    for row in (0, 2):
        assert found[row] == pytest.approx(metrics.l2(there, clean[[row]]).min())
    assert np.isinf(found[1])
    for asked in ({"confidence": 1e6}, {"detector_margin": 1e6}):  # nothing natural is that far
        more = naturals.nearest(
            naturals.Naturals(batch, judged), limit, clean, goal, rows, targeted=True, **asked
        )
        assert np.isinf(more).all()
    look = lambda known, some: naturals.nearest(known, limit, clean, goal, some, targeted=True)
    assert look(None, rows) is None and np.isinf(look(None, ~_ALL[:3])).all()
