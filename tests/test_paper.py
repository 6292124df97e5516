"""The paper's figures against what it says, and what counts as reproduced."""

import pytest

from advdet import paper
from advdet.attacks import presets
from advdet.paper_rows import ROWS
from advdet.threat_models import THREAT_MODELS

ALL = [(key, row) for key, rows in ROWS.items() for row in rows]


def run_of(defense="dropout", threat_model="perfect_knowledge", targets="random", **changes):
    run = {
        "dataset": "mnist", "defense": defense, "threat_model": threat_model, "targets": targets,
        "attack": "carlini_wagner", "objective": "paper", "operating_point": "native",
        "settings": {"confidence": presets.PAPER_CONFIDENCE.get(defense, 0.0)},
    }  # fmt: skip
    if "confidence" in changes:
        run["settings"] = {"confidence": changes.pop("confidence")}
    return run | changes


DROPOUT = {"success_rate": 0.97, "mean_l2": 3.7, "ratio": 1.9, "detection": 0.1}


# ---- the rows


@pytest.mark.parametrize(
    ("key", "figures"),
    [
        (("mnist", "none", "perfect_knowledge", "random"), {"mean_l2": 2.05}),
        (("mnist", "none", "perfect_knowledge", "untargeted"), {"mean_l2": 1.32}),
        (("mnist", "none", "limited_knowledge", "random"), {"success_rate": 0.98, "mean_l2": 5.1}),
        (("cifar10", "none", "perfect_knowledge", "untargeted"), {"mean_l2": 0.169}),
        (("mnist", "outlier_class", "zero_knowledge", "random"), {"detection": 0.985}),
        (("mnist", "outlier_class", "perfect_knowledge", "random"),
         {"success_rate": 1.0, "mean_l2": 2.26}),
        (("mnist", "outlier_class", "limited_knowledge", "random"),
         {"success_rate": 0.98, "mean_l2": 5.3}),
        (("mnist", "binary", "zero_knowledge", "random"), {"detection": 0.98}),
        (("mnist", "binary", "perfect_knowledge", "random"),
         {"success_rate": 1.0, "mean_l2": 2.31}),
        (("mnist", "binary", "limited_knowledge", "random"), {"success_rate": 0.98}),
        (("cifar10", "outlier_class", "zero_knowledge", "random"),
         {"detection": 0.7, "false_positive_rate": 0.4}),
        (("cifar10", "inner_layer", "zero_knowledge", "nearest"),
         {"detection": 0.81, "false_positive_rate": 0.28}),
        (("cifar10", "inner_layer", "perfect_knowledge", "nearest"), {"mean_l2": 0.227}),
        (("cifar10", "inner_layer", "limited_knowledge", "nearest"), {"success_rate": 0.84}),
        (("mnist", "pca_reduction", "perfect_knowledge", "untargeted"), {"success_rate": 0.995}),
        (("mnist", "hidden_pca", "zero_knowledge", "random"), {"false_positive_rate": 0.92}),
        (("cifar10", "hidden_pca", "zero_knowledge", "random"), {"false_positive_rate": 0.98}),
        (("mnist", "mmd", "zero_knowledge", "untargeted"), {"rejection": 0.0}),
        (("mnist", "kernel_density", "perfect_knowledge", "random"), {"mean_l2": 3.81}),
        (("cifar10", "kernel_density", "zero_knowledge", "random"), {"reversed": 0.8}),
        (("mnist", "dropout", "zero_knowledge", "random"), {"detection": 0.75}),
        (("mnist", "dropout", "perfect_knowledge", "random"),
         {"success_rate": 0.98, "mean_l2": 3.68}),
        (("mnist", "dropout", "limited_knowledge", "random"), {"success_rate": 0.9}),
        (("cifar10", "dropout", "zero_knowledge", "random"), {"detection": 0.95}),
        (("mnist", "mean_blur", "zero_knowledge", "untargeted"), {"correction": 0.8}),
        (("cifar10", "mean_blur", "zero_knowledge", "untargeted"), {"correction": 0.8}),
    ],
)  # fmt: skip
def test_published_values(key, figures):
    row = paper.row_for(*key)
    assert {name: getattr(row, name) for name in figures} == figures


def test_ratios_are_those_of_the_distances_to_the_baseline_of_the_same_targets():
    baseline = {
        (dataset, targets): paper.row_for(dataset, "none", "perfect_knowledge", targets).mean_l2
        for dataset, targets in (
            ("mnist", "random"), ("mnist", "untargeted"), ("cifar10", "untargeted"),
        )
    }  # fmt: skip
    baseline["cifar10", "nearest"] = baseline["cifar10", "untargeted"]
    checked = 0
    for (dataset, _, _), row in ALL:
        if row.ratio is not None and row.mean_l2 is not None:
            assert row.ratio == pytest.approx(
                row.mean_l2 / baseline[dataset, row.targets], abs=0.006
            )
            checked += 1
    assert checked >= 5


def test_raised_confidence_costs_what_the_paper_says():
    low, high = ROWS["mnist", "dropout", "limited_knowledge"]
    assert high.mean_l2 / low.mean_l2 == pytest.approx(1.15, abs=0.005)
    metzen = ROWS["cifar10", "inner_layer", "limited_knowledge"][1]
    perfect = ROWS["cifar10", "inner_layer", "perfect_knowledge"][0]
    assert metzen.mean_l2 / perfect.mean_l2 == pytest.approx(1.28, abs=0.005)


@pytest.mark.parametrize(("key", "row"), ALL)
def test_rows_are_whole(key, row):
    dataset, _, threat_model = key
    assert dataset in ("mnist", "cifar10") and threat_model in THREAT_MODELS
    assert row.targets in ("random", "untargeted", "nearest")
    assert row.objective in ("generic", "paper") and row.operating_point in ("native", None)
    assert "section" in row.regime or "figure" in row.regime
    told = [name for name in paper.FIGURES if getattr(row, name) is not None]
    assert told
    for name, (low, high) in row.band.items():
        assert name in paper.FIGURES and low < high
        figure = getattr(row, name)
        assert figure is None or low <= figure <= high
    assert row.raised <= (threat_model == "limited_knowledge")
    if threat_model == "zero_knowledge":
        assert row.objective == "generic" and row.confidence == 0


@pytest.mark.parametrize(
    ("dataset", "defense", "targets"),
    [
        ("mnist", "none", "random"), ("cifar10", "none", "untargeted"),
        ("mnist", "outlier_class", "random"), ("mnist", "binary", "random"),
        ("cifar10", "inner_layer", "nearest"), ("mnist", "inner_layer", "random"),
        ("mnist", "input_pca", "random"), ("mnist", "pca_reduction", "untargeted"),
        ("mnist", "hidden_pca", "random"), ("mnist", "mmd", "untargeted"),
        ("cifar10", "mmd", "untargeted"), ("mnist", "kernel_density", "random"),
        ("mnist", "dropout", "random"), ("mnist", "mean_blur", "untargeted"),
        ("cifar10", "mean_blur", "untargeted"), ("fashion_mnist", "stranger", "random"),
    ],
)  # fmt: skip
def test_targets_are_those_that_the_paper_attacks_the_defence_with(dataset, defense, targets):
    assert paper.target_regime(dataset, defense) == targets


# ---- what is compared


def test_a_run_in_the_paper_s_regime_is_in_band_or_outside():
    for figures, inside in (
        (DROPOUT, True),
        (DROPOUT | {"ratio": 1.4}, False),
        (DROPOUT | {"ratio": 2.2}, False),
        (DROPOUT | {"success_rate": 0.87}, False),
        (DROPOUT | {"success_rate": 0.88, "ratio": 2.1}, True),
        (DROPOUT | {"ratio": None}, False),
        (DROPOUT | {"mean_l2": 9.0}, True),  # no band of its own
    ):
        found = paper.compare("mnist", run_of(), figures)
        assert found["in_band"] is inside, figures
        assert found["figure"] == {"success_rate": 0.98, "mean_l2": 3.68, "ratio": 1.8}
        assert "20 networks" in found["regime"]


@pytest.mark.parametrize(
    "changes",
    [
        {"attack": "ddn"}, {"attack": "best"}, {"objective": "quantile"}, {"objective": "generic"},
        {"operating_point": "0.05"}, {"confidence": 0.0}, {"confidence": 5.0},
    ],
)  # fmt: skip
def test_a_run_in_another_regime_is_shown_the_figure_and_not_judged(changes):
    found = paper.compare("mnist", run_of(**changes), DROPOUT)
    assert found["in_band"] is None and found["figure"]["mean_l2"] == 3.68


@pytest.mark.parametrize(
    ("dataset", "changes"),
    [
        ("mnist", {"targets": "least_likely"}), ("mnist", {"defense": "stranger"}),
        ("mnist", {"defense": "input_pca"}), ("cifar10", {"targets": "nearest"}),
        ("fashion_mnist", {}),
    ],
)  # fmt: skip
def test_a_run_of_which_the_paper_says_nothing_has_no_figure(dataset, changes):
    found = paper.compare(dataset, run_of(**changes), DROPOUT)
    assert found == {"figure": None, "regime": "no paper figure", "in_band": None}


def test_the_embedded_digits_are_not_compared():
    found = paper.compare("mnist_5k", run_of(), DROPOUT)
    assert found["figure"] is None and found["in_band"] is None
    assert "not comparable" in found["regime"]


def test_detection_at_the_paper_s_threshold_is_compared_whatever_the_run_aims_at():
    run = run_of(threat_model="zero_knowledge", objective="generic", confidence=0.0)
    for point in ("native", "0.05"):
        at = run | {"operating_point": point}
        assert paper.compare("mnist", at, {"detection": 0.7})["in_band"] is True
        assert paper.compare("mnist", at, {"detection": 0.9})["in_band"] is False
    louder = run | {"settings": {"confidence": 20.0}}
    assert paper.compare("mnist", louder, {"detection": 0.7})["in_band"] is None


def test_where_the_generic_objective_is_the_paper_s_both_names_are_compared():
    for objective in ("generic", "paper"):
        run = run_of("pca_reduction", targets="untargeted", objective=objective)
        run["operating_point"] = "none"
        assert paper.compare("mnist", run, {"success_rate": 1.0})["in_band"] is True
        assert paper.compare("mnist", run, {"success_rate": 0.8})["in_band"] is False


def test_limited_knowledge_takes_the_row_of_the_run_s_confidence():
    compare = lambda confidence, rate, distance: paper.compare(
        "mnist",
        run_of(threat_model="limited_knowledge", confidence=confidence),
        {"success_rate": rate, "mean_l2": distance},
    )
    low, high = compare(1.0, 0.9, 3.7), compare(12.0, 0.97, 4.4)
    assert low["in_band"] is True and low["figure"]["mean_l2"] == 3.68
    assert high["in_band"] is True and high["figure"]["mean_l2"] == 4.23
    assert compare(1.0, 0.7, 3.7)["in_band"] is False
    assert compare(12.0, 0.97, 5.4)["in_band"] is False
    assert compare(0.5, 0.9, 3.7)["in_band"] is None


def test_a_row_whose_confidence_is_raised_is_no_measure_for_a_run_that_raises_none():
    run = run_of("outlier_class", threat_model="limited_knowledge")
    figures = {"success_rate": 0.2, "mean_l2": 2.3}
    assert paper.compare("mnist", run, figures)["in_band"] is None
    run["settings"] = {"confidence": 10.0}
    assert paper.compare("mnist", run, figures)["in_band"] is False


def test_transfer_between_undefended_networks_is_compared_too():
    run = run_of("none", threat_model="limited_knowledge", objective="generic", confidence=15.0)
    run["operating_point"] = "none"
    assert paper.compare("mnist", run, {"success_rate": 1.0, "mean_l2": 4.4})["in_band"] is True
    assert paper.compare("mnist", run, {"success_rate": 1.0, "mean_l2": 2.0})["in_band"] is False


def test_rows_without_a_band_and_figures_not_measured_are_not_judged():
    run = run_of("hidden_pca", threat_model="zero_knowledge", objective="generic")
    found = paper.compare("mnist", run, {"false_positive_rate": 0.9})
    assert found["figure"] == {"false_positive_rate": 0.92} and found["in_band"] is None
    run = run_of("kernel_density", threat_model="zero_knowledge", objective="generic")
    assert paper.compare("cifar10", run, {"detection": 0.5})["in_band"] is None
    assert paper.compare("cifar10", run, {"reversed": 0.7})["in_band"] is True


def test_the_figures_of_a_record():
    record = {
        "run": {"operating_point": "native"},
        "clean": {"false_positive_rate": {"native": 0.3}},
        "attack": {
            "success_rate": {"misclassified": 0.9, "native": 0.4}, "mean_l2": 2.0,
            "baseline_ratio": 1.1,
        },
        "detection": {"true_positive_rate": {"native": 0.6}},
        "correction": None,
        "sets": None,
    }  # fmt: skip
    wanted = {
        "success_rate": 0.4, "mean_l2": 2.0, "ratio": 1.1, "detection": 0.6,
        "false_positive_rate": 0.3, "correction": None, "rejection": None,
    }  # fmt: skip
    assert paper.figures(record) == wanted
    record["run"]["operating_point"] = "none"
    record["correction"] = {"target_broken": 0.8, "label_restored": 0.7}
    record["sets"] = {"adversarial": {"rejected": 0.05}}
    record["detection"]["reversed"] = 0.2
    changed = {"success_rate": 0.9, "correction": 0.8, "rejection": 0.05, "reversed": 0.2}
    assert paper.figures(record) == wanted | changed
    record["sets"] = {"adversarial": {"rejected": 0.0, "interval": None}}  # of one set
    assert "rejection" not in paper.figures(record)
    del record["sets"]  # a record from before there were set tests
    assert paper.figures(record)["rejection"] is None


# ---- the paper's own attack settings


@pytest.mark.parametrize(
    ("defense", "row"),
    [
        ("outlier_class", (3, 2000, 0.01, 10)), ("binary", (3, 2000, 0.01, 10)),
        ("pca_reduction", (6, 3000, 0.01, 1)), ("mean_blur", (4, 3000, 0.01, 10)),
        ("kernel_density", (5, 10_000, 0.01, 1)), ("hidden_pca", (2, 1000, 0.01, 10)),
        ("input_pca", (2, 1000, 0.01, 10)), ("mmd", (2, 500, 0.01, 1)),
        ("dropout", (4, 1000, 0.1, 1)), ("none", (3, 3000, 0.1, 1)),
    ],
)  # fmt: skip
def test_the_preset_takes_the_settings_of_the_paper_s_experiment(defense, row):
    for channels in (1, 3):
        made = presets.make(
            "carlini_wagner", presets.settings("carlini_wagner", "paper", channels, defense)
        )
        assert (
            made.binary_search_steps, made.steps, made.learning_rate, made.initial_const
        ) == row  # fmt: skip
        assert made.abort_early == (defense != "dropout")
        assert made.restart_noise == (0.1 if channels == 1 else 0.01)


def test_the_row_made_for_photographs_is_given_what_digits_need():
    on = lambda channels: presets.settings("carlini_wagner", "paper", channels, "inner_layer")
    assert on(3)["steps"] == 300
    for defense in (*presets._PAPER, "none"):
        row = presets.settings("carlini_wagner", "paper", 1, defense)
        assert row["steps"] * row["learning_rate"] >= presets.MINIMUM_TRAVEL, defense
    largest = lambda row: row["initial_const"] * 10.0 ** (row["binary_search_steps"] - 1)
    assert largest(on(1)) >= 1e3 > largest(on(3))  # as far as the search can raise c
    assert on(1)["initial_const"] == on(3)["initial_const"]


def test_the_confidence_of_the_preset_is_that_of_the_row():
    for (_, defense, threat_model), row in ALL:
        if threat_model == "perfect_knowledge" and row.objective == "paper":
            assert row.confidence == presets.PAPER_CONFIDENCE.get(defense, 0.0)
