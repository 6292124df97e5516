"""What a person sees: the table and the sheet of images."""

import copy
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from advdet.types import Batch
from experiments import pictures, report


class _Evaluation(NamedTuple):
    records: dict
    baseline: object = None


_POINTS = ("native", "0.01", "0.05", "0.5")


def _record(defense="dropout", **attack):
    point = "none" if defense == "none" else "0.05"
    known = (lambda value: value) if defense != "none" else (lambda value: None)
    return {
        "run": {
            "defense": defense, "dataset": "mnist", "threat_model": "perfect_knowledge",
            "targets": "random", "objective": "generic", "operating_point": point,
            "settings": {"confidence": 0.0},
        },
        "counts": {"requested": 20, "attacked": 19, "clean_judged": 2000},
        "clean": {
            "accuracy": 0.991,
            "false_positive_rate": {p: known(0.0513) for p in _POINTS},
            "thresholds": {p: known(0.125) for p in _POINTS},
        },
        "attack": {
            "success_rate": {"misclassified": 0.75, "0.05": known(0.625)},
            "success_rate_8bit": 0.5, "mean_l2": 2.25, "median_l2": 2.5,
            "baseline_ratio": known(1.125), "gradients_per_image": 1234.0,
        } | attack,
        "detection": {"true_positive_rate": {p: known(0.25) for p in _POINTS}, "n": 17,
                      "auc": known(0.75)},
        "verdict": "broken",
        "intervals": {
            "success_rate": [0.4, 0.8], "mean_l2": [2.0, 2.5],
            "false_positive_rate": {p: [0.0417, 0.0624] for p in _POINTS} if known(1) else {},
        },
        "indicators": {"silent_success": {"value": 0, "raised": False}},
        "paper": {"figure": None, "regime": "no paper figure", "in_band": None},
    }  # fmt: skip


def test_the_table_shows_rates_costs_baseline_and_false_positives():
    bare = _Evaluation({"best": _record("none", mean_l2=2.0)})
    text = report.table(_Evaluation({"ddn": _record(), "best": _record()}, bare))
    for part in (
        "dropout on mnist, an attacker who knows everything but the random draws",
        "flagged above 0.125 (5 % of clean images)", "clean accuracy 99.10%", "62.5 %",
        "[40.0, 80.0]", "50.0 %", "[2.00, 2.50]", "1.12", "1,234", "undefended, best", "75.0 %",
        "success: the wanted label, not flagged; over the 19 of 20 images", "5.1 %", "[4.2, 6.2]",
        "25.0 %", "2,000 clean test images, and 17 adversarial ones", "AUC 0.75",
        "verdict: broken, at a median L2 of 2.50 (mean 1.12 x the undefended)",
        "paper's regime: no paper figure",
    ):  # fmt: skip
        assert part in text, part
    header, *rows = [line for line in text.splitlines() if "mean L2" in line or "1,234" in line]
    ends = {len(line) for line in (header, *rows)}
    assert len(rows) == 3 and len(ends) == 1  # aligned to the right
    assert "\npaper " not in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_undefined_figures_are_dashes():
    nothing = _record(
        success_rate={"misclassified": 0.0, "0.05": 0.0}, success_rate_8bit=0.0, mean_l2=None,
        median_l2=None, baseline_ratio=None,
    )  # fmt: skip
    nothing["intervals"]["mean_l2"] = None
    nothing["clean"]["false_positive_rate"]["native"] = None
    nothing["intervals"]["false_positive_rate"].pop("native")
    nothing["verdict"] = "not broken by these attacks at this budget"
    text = report.table(_Evaluation({"ddn": nothing}))
    assert "None" not in text and "nan" not in text
    assert "verdict: not broken by these attacks at this budget\n" in text


@pytest.mark.parametrize(
    ("in_band", "said"),
    [(True, ": in band"), (False, ": OUTSIDE the band"), (None, "orientation only")],
)
def test_the_papers_figure_stands_with_its_regime(in_band, said):
    record = _record()
    record["paper"] = {
        "figure": {"success_rate": 0.98, "mean_l2": 3.68, "ratio": 1.8, "detection": 0.75},
        "regime": "C&W on 20 networks (section 6.1)",
        "in_band": in_band,
    }
    text = report.table(_Evaluation({"carlini_wagner": record}))
    (row,) = [line for line in text.splitlines() if line.startswith("paper ")]
    assert row.split() == ["paper", "98.0", "%", "3.68", "1.80"]
    assert "paper's regime: C&W on 20 networks (section 6.1)" in text and said in text
    assert "the paper reports 75%" in text


def test_signs_of_a_broken_attack_are_named_beside_the_verdict():
    record = _record()
    record["verdict"] = "evaluation invalid"
    record["indicators"] = {"silent_success": {"value": 3, "raised": True}}
    text = report.table(_Evaluation({"ddn": record}))
    assert "verdict: evaluation invalid" in text
    assert "signs that the attack or the model is broken: silent_success" in text


def test_raised_indicators_say_what_to_change_and_the_others_that_they_were_looked_at():
    sign = lambda value, raised, invalidates: {
        "value": value, "raised": raised, "invalidates": invalidates,
        "advice": 6 * "do this or that, " if raised else None, "reason": None,
    }  # fmt: skip
    weak, best = _record(), _record()
    weak["verdict"] = "evaluation invalid"
    weak["indicators"] = {"one_step": sign(0.1, True, True), "other": sign(0.5, True, False)}
    best["indicators"] = {"one_step": sign(0.0, False, True), "other": sign(None, False, False)}
    text = report.table(_Evaluation({"ddn": weak, "best": best}))
    assert "checks of attack and model: 1 looked at, none raised" in text
    assert "\nddn alone: evaluation invalid (one_step)\n" in text
    text = report.table(_Evaluation({"best": best, "ddn": weak}))
    assert "signs that the attack or the model is broken: one_step\n" in text
    assert "warnings: other\n  one_step (0.1): do this" in text and "  other (0.5): do" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_cost_is_that_of_the_median_where_it_is_known():
    text = report.table(_Evaluation({"ddn": _record(median_ratio=1.25)}))
    assert "verdict: broken, at a median L2 of 2.50 (1.25 x the undefended)\n" in text


def test_the_undefended_classifier_has_no_threshold_and_no_detection():
    text = report.table(_Evaluation({"ddn": _record("none")}))
    assert "none (the undefended classifier) on mnist\n" in text
    assert "flagged" not in text and "AUC" not in text


@pytest.mark.parametrize("channels", [1, 3])
def test_the_sheet_is_a_picture_of_the_first_images(tmp_path, rng, channels):
    images = rng.uniform(size=(12, 8, 8, channels)).astype(np.float32)
    arrays = {
        "image": images.copy(),
        "judged_success": np.tile(np.float32([0, 0.4, 1]), 4),
        "label": np.arange(12) % 10,
        "target_class": (np.arange(12) + np.arange(12) % 2) % 10,
        "distance": np.where(np.arange(12) % 3, 1.5, np.inf),
    }
    arrays["image"][1::3] = 1 - arrays["image"][1::3]
    given = copy.deepcopy(arrays)
    clean = Batch(images, arrays["label"], np.arange(12))
    for name in ("one.png", "two.png"):
        pictures.sheet(tmp_path / name, clean, arrays)
    for name, value in given.items():
        np.testing.assert_array_equal(arrays[name], value)
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.width > 3 * picture.height / 2
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    pictures.sheet(tmp_path / "few.png", clean, {k: v[:2] for k, v in arrays.items()})
