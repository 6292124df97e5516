"""SR@1, SR@5, SR@50: one run for each operating point, and what reports say of a radius."""

import pathlib
from typing import NamedTuple

import numpy as np
import pytest
from cli_tools import read_record

from experiments import fixed_radius, report
from experiments.table_lines import line_of

pytest_plugins = ["cli_tools"]


class Evaluation(NamedTuple):
    records: dict
    arrays: dict
    baseline: object = None


def record_of(point, rate, **settings):
    points = ("native", "0.01", "0.05", "0.5")
    return {
        "run": {
            "defense": "binary", "dataset": "mnist", "operating_point": point, "detector": {},
            "targets": "random", "objective": "generic", "attack": "best", "seed": 0,
            "threat_model": "perfect_knowledge",
            "settings": {"confidence": 0.0, "attack": settings},
        },
        "counts": {"requested": 4, "attacked": 3, "clean_judged": 2000},
        "clean": {"thresholds": dict.fromkeys(points, 0.5), "accuracy": 0.99,
                  "false_positive_rate": dict.fromkeys(points, 0.05)},
        "attack": {
            "success_rate": {"misclassified": 1.0, **dict.fromkeys(points), point: rate},
            "success_rate_8bit": 0.5, "mean_l2": 5.4, "median_l2": 5.5, "baseline_ratio": 1.25,
            "gradients_per_image": 40.0,
        },
        "detection": {"true_positive_rate": dict.fromkeys(points, 0.2), "n": 3, "auc": 0.7},
        "correction": None,
        "intervals": {"success_rate": [0.2, 0.9], "mean_l2": [5.0, 6.0], "false_positive_rate": {}},
        "indicators": {},
        "verdict": "broken",
        "paper": {"figure": None, "regime": "no paper figure", "in_band": None},
    }  # fmt: skip


BALL = {"norm": "linf", "epsilon": 0.3, "steps": 20}
ARRAYS = {
    "clean_correct": np.array([True, True, True, False]),
    "clean_score": np.float32([[0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]]),
    "judged_success": np.float32([1, 0.5, 0, 1]),
}


def test_accuracy_counts_images_that_are_right_pass_and_withstand():
    before, under = fixed_radius.accuracy_under_attack(ARRAYS, 0.5)
    assert before == pytest.approx((1 + 0.5 + 1) / 4)
    assert under == pytest.approx((0 + 0.5 * 0.5 + 1) / 4)
    assert fixed_radius.accuracy_under_attack(ARRAYS, None)[0] == pytest.approx(3 / 4)


def test_the_table_has_a_column_for_each_point():
    rates = {"0.01": 0.25, "0.05": 0.5, "0.5": 0.75}
    done = [Evaluation({"pgd": record_of(p, r / 5, **BALL), "best": record_of(p, r, pgd=BALL)},
                       {"best": ARRAYS}) for p, r in rates.items()]  # fmt: skip
    text = fixed_radius.show(done)
    (head,) = [line for line in text.splitlines() if "SR@1" in line]
    assert head.split() == ["SR@1", "95", "%", "SR@5", "95", "%", "SR@50", "95", "%"]
    (best,) = [line for line in text.splitlines() if line.startswith("best ")]
    assert [word for word in best.split() if word.endswith("0") and "[" not in word] == [
        "25.0", "50.0", "75.0"
    ]  # fmt: skip
    for part in ("binary on mnist, within linf 0.3: random targets", "3 of 4 images",
                 "accurate and not flagged", "62.5 %", "the same, under best", "31.2 %",
                 "verdict at 0.01: broken"):  # fmt: skip
        assert part in text, part


def test_the_report_says_the_radius_and_no_cost():
    text = report.table(Evaluation({"pgd": record_of("0.05", 0.5, **BALL)}, {}))
    assert "confidence 0, within linf 0.3" in text
    assert "verdict: broken, within linf 0.3\n" in text
    assert "median" not in text and "1.25" not in text
    assert "not what the defence costs" in text


def test_one_radius_is_told_of_a_headline_only_where_all_share_it():
    run = lambda **settings: {"settings": {"confidence": 0.0, "attack": settings}}
    assert report.ball(run(pgd=BALL, square=BALL)) == "linf 0.3"
    assert report.ball(run(pgd=BALL, square=BALL | {"epsilon": 0.1})) is None
    assert report.ball(run(pgd=BALL, ddn={"steps": 3})) is None
    assert report.ball(run(steps=3, gamma=0.05)) is None
    assert report.ball({"settings": {"confidence": 0.0}}) is None
    assert report.ball(run(norm="l2", epsilon=0.5)) == "l2 0.5"


def test_in_the_table_of_all_records_radii_have_a_block_of_their_own():
    path = pathlib.Path("record.json")
    line = line_of(path, record_of("0.05", 0.5, pgd=BALL, square=BALL))
    assert line.block == "radius"
    assert "within linf 0.3" in line.cells[9] and line.cells[6] == "-"
    record = record_of("0.05", 0.5, **BALL)
    record["run"]["attack"] = "pgd"
    assert line_of(path, record).block is None
    record["run"]["attack"] = "square"
    assert line_of(path, record).block == "radius"


def test_from_the_command_line(cli, tmp_path):
    words = ("--dataset=mnist_5k", "--preset=smoke", "--num_images=8", f"--results_dir={tmp_path}",
             "--defense=tests.own_detector:Reconstruction:components=30")  # fmt: skip
    ran = cli(*words, "--attack=pgd,selective_pgd", module="fixed_radius")
    assert ran.status == 0, ran.err
    assert "SR@1 " in ran.out and "SR@50" in ran.out and "undefended, best:" in ran.out
    cell = tmp_path / "mnist_5k" / "perfect_knowledge" / "reconstruction"
    paths = list(cell.glob("pgd.generic/*.json"))
    assert len(paths) == 3 and len(list(cell.glob("best.generic/*.json"))) == 3
    for path in paths:
        record, arrays = read_record(path)
        point = record["run"]["operating_point"]
        known = [p for p in fixed_radius.POINTS if record["attack"]["success_rate"][p] is not None]
        assert known == [point]
        threshold = np.float32(record["clean"]["thresholds"][point])
        assert (arrays["adversarial_score"][0][arrays["success"]] <= threshold).all()
    bare = tmp_path / "mnist_5k" / "perfect_knowledge" / "none"
    assert len(list(bare.glob("pgd.generic/*.json"))) == 1  # one baseline for all points

    ran = cli(*words, "--attack=pgd,jsma", module="fixed_radius")
    assert ran.status == 2 and "does not stay within a radius" in ran.err
