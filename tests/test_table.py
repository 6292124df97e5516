"""The paper's table beside ours, from hand-made records."""

import copy
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from advdet import results
from advdet.detectors import DETECTORS
from advdet.types import InputError
from experiments import table_blocks
from experiments.table_lines import HEADER, line_of

ROOT = pathlib.Path(__file__).parents[1]
PATH = pathlib.Path("record.json")
POINTS = ("native", "0.01", "0.05", "0.5")
DROPOUT = {"num_samples": 30, "tau": 0.02}


def record_of(
    attack="carlini_wagner", objective="paper", defense="dropout", detector=None, dataset="mnist",
    threat_model="perfect_knowledge", targets="random", point="native", confidence=1.0, seed=0,
    rate=0.97, mean_l2=3.7, ratio=1.9, attacked=98, flagged=0.03, false_alarms=0.3,
    correction=None, sets=None,
):  # fmt: skip
    """A record with all that the table reads."""
    scored = point != "none"
    if detector is None:
        detector = DROPOUT if defense == "dropout" else {}
    return {
        "schema": 1,
        "run": {
            "dataset": dataset, "defense": defense, "detector": detector, "attack": attack,
            "objective": objective, "threat_model": threat_model, "targets": targets,
            "operating_point": point, "seed": seed, "settings": {"confidence": confidence},
        },
        "counts": {"attacked": attacked},
        "clean": {"false_positive_rate": {p: false_alarms if scored else None for p in POINTS}},
        "attack": {
            "success_rate": {
                "misclassified": 0.99 if scored else rate,
                **{p: rate if p == point else None for p in POINTS},
            },
            "mean_l2": mean_l2,
            "baseline_ratio": ratio,
        },
        "detection": {"true_positive_rate": {p: flagged if scored else None for p in POINTS}},
        "correction": correction,
        "sets": sets,
        "intervals": {"success_rate": [0.5, 0.99]},
    }  # fmt: skip


def cells(**changes):
    line = line_of(PATH, record_of(**changes))
    return dict(zip((*HEADER[:-1], "verdict"), line.cells))


def put(folder, **records):
    for name, record in records.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record if isinstance(record, str) else json.dumps(record))


# ---- one line


def test_a_line_tells_ours_and_the_paper_s():
    assert cells() == {
        "data set": "mnist", "defence": "dropout", "knowledge": "perfect", "targets": "random",
        "success [95 %]": "97.0 % [50.0, 99.0]", "mean L2": "3.70", "x baseline": "1.90",
        "flagged / of clean": "3.0 % / 30.0 %", "n": "98",
        "attack, objective, aim": "carlini_wagner, paper, native, k 1",
        "paper": "98.0 %, L2 3.68, 1.80 x", "verdict": "in band",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict", "figure"),
    [
        ({}, "in band", "98.0 %, L2 3.68, 1.80 x"),
        ({"ratio": 1.2}, "OUTSIDE", "98.0 %, L2 3.68, 1.80 x"),
        ({"mean_l2": None, "ratio": None, "rate": 0.0}, "OUTSIDE", "98.0 %, L2 3.68, 1.80 x"),
        ({"attack": "best", "objective": "quantile", "point": "0.05"}, "not compared",
         "98.0 %, L2 3.68, 1.80 x"),
        ({"targets": "least_likely"}, "no paper figure", "-"),
        ({"defense": "stranger"}, "no paper figure", "-"),
        ({"dataset": "mnist_5k"}, "not comparable (mnist_5k)", "-"),
    ],
)  # fmt: skip
def test_the_verdict_is_the_paper_s_band(changes, verdict, figure):
    found = cells(**changes)
    assert (found["verdict"], found["paper"]) == (verdict, figure)


def test_the_comparison_is_made_anew_from_the_paper_s_rows():
    record = record_of()
    record["paper"] = {"figure": None, "regime": "as known then", "in_band": False}
    assert line_of(PATH, record).in_band is True


def test_undefined_figures_are_dashes():
    record = record_of(mean_l2=None, ratio=None)
    record["intervals"]["success_rate"] = None
    record["attack"]["success_rate"]["native"] = None
    line = line_of(PATH, record)
    assert line.cells[4:7] == ("-", "-", "-")
    assert "None" not in " ".join(line.cells)


def test_detection_is_shown_at_the_threshold_that_the_paper_reports_it_at():
    record = record_of(
        objective="generic", threat_model="zero_knowledge", point="0.05", confidence=0.0,
        flagged=0.9, false_alarms=0.05,
    )  # fmt: skip
    record["detection"]["true_positive_rate"]["native"] = 0.7
    record["clean"]["false_positive_rate"]["native"] = 0.3
    line = line_of(PATH, record)
    assert line.cells[7] == "70.0 % / 30.0 % (native)"
    assert line.cells[-2:] == ("flags 75.0 %", "in band")
    record["run"]["targets"] = "least_likely"  # of which the paper has nothing
    assert line_of(PATH, record).cells[7] == "90.0 % / 5.0 %"


def test_correctors_sets_and_the_undefended_classifier_are_told_in_their_terms():
    plain = dict(point="none", targets="untargeted", objective="generic", confidence=0.0)
    blur = cells(
        defense="mean_blur", threat_model="zero_knowledge",
        correction={"target_broken": 0.85, "label_restored": 0.8, "n": 90}, **plain,
    )  # fmt: skip
    assert blur["flagged / of clean"] == "corrects 85.0 %"
    assert (blur["paper"], blur["verdict"]) == ("corrects 80.0 %", "in band")
    sets = {"adversarial": {"rejected": 0.25}, "clean": {"rejected": 0.05}}
    mmd = cells(defense="mmd", threat_model="zero_knowledge", sets=sets, **plain)
    assert mmd["flagged / of clean"] == "sets 25.0 % / 5.0 %"
    assert (mmd["paper"], mmd["verdict"]) == ("rejects 0.0 %", "OUTSIDE")
    none = cells(defense="none", mean_l2=1.4, ratio=None, **plain)
    assert none["flagged / of clean"] == "-" and none["verdict"] == "in band"
    assert none["attack, objective, aim"] == "carlini_wagner, generic"


def test_hyperparameters_that_are_not_usual_and_seeds_are_named():
    assert cells(detector=DROPOUT | {"num_samples": 50})["defence"] == "dropout:num_samples=50"
    assert cells(detector=DROPOUT | {"tau": 0.1, "num_samples": 5})["defence"] == (
        "dropout:num_samples=5,tau=0.1"
    )
    assert cells(defense="stranger", detector={"size": 3})["defence"] == "stranger"
    assert cells(seed=2)["attack, objective, aim"].endswith("native, k 1, seed 2")


# ---- blocks


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ({}, "paper"),
        ({"objective": "generic"}, None),
        ({"objective": "quantile"}, None),
        ({"attack": "ddn"}, None),
        ({"attack": "best", "objective": "quantile"}, "headline"),
        ({"threat_model": "zero_knowledge", "objective": "generic"}, "paper"),
        ({"threat_model": "zero_knowledge", "objective": "generic", "attack": "ddn"}, None),
        ({"defense": "none", "objective": "generic", "point": "none"}, "paper"),
        ({"defense": "none", "objective": "generic", "point": "none", "attack": "best"},
         "headline"),
        ({"defense": "pca_reduction", "objective": "generic", "point": "none",
          "targets": "untargeted"}, "paper"),
    ],
)  # fmt: skip
def test_runs_in_the_paper_s_manner_and_headlines_are_shown(changes, block):
    assert line_of(PATH, record_of(**changes)).block == block


def test_lines_come_in_the_order_of_data_sets_detectors_and_knowledge(tmp_path):
    names = list(DETECTORS)[:3]
    wanted = []
    for dataset in ("mnist", "cifar10", "mnist_5k", "another"):
        for defense in (*names, "stranger"):
            for threat_model in ("zero_knowledge", "perfect_knowledge", "limited_knowledge"):
                wanted.append((dataset, defense, threat_model.removesuffix("_knowledge")))
                record = record_of(
                    dataset=dataset, defense=defense, threat_model=threat_model,
                    objective="generic", attack="best",
                )  # fmt: skip
                put(tmp_path, **{f"{len(wanted) * 7919 % 1000}": record})
    lines, warnings = table_blocks.read(tmp_path)
    assert warnings == []
    assert [line.cells[:3] for line in lines] == wanted


@pytest.fixture
def folder(tmp_path):
    """Results with two lines in one block, one in the other, one that is not shown."""
    put(
        tmp_path / "results" / "mnist",
        **{
            "a/one": record_of(),
            "a/two": record_of(confidence=5.0),
            "b/three": record_of("best", "quantile", point="0.05"),
            "b/four": record_of("ddn", "quantile", point="0.05"),
        },
    )
    (tmp_path / "results" / "mnist" / "a" / "one.npz").write_bytes(b"arrays")
    return tmp_path / "results"


def test_the_table_of_a_terminal_is_aligned_and_numbers_the_regimes(folder):
    lines, _ = table_blocks.read(folder)
    text = table_blocks.terminal(table_blocks.blocks_of(lines))
    ours, headlines = text.split("Headlines")
    assert ours.count("carlini_wagner, paper") == 2 and "best" not in ours
    assert "1 in band, 0 OUTSIDE, 1 not compared" in ours
    assert headlines.count("best, quantile, 0.05") == 1 and "ddn" not in text
    for part in (ours, headlines):
        assert part.count("1.80 x [1]") == part.count("mnist ")
        assert "\n[1] C&W on 20 networks, random targets" in part
    rows = [line for line in ours.splitlines() if "[1]" in line and "mnist" in line]
    header = next(line for line in ours.splitlines() if line.startswith("data set"))
    for row in rows:
        assert row.index("98.0 %, L2") == header.index("paper")
        assert row[: header.index("mean L2") + len("mean L2")].endswith("3.70")


def test_markdown_has_one_row_of_equal_columns_a_line(folder):
    lines, _ = table_blocks.read(folder)
    text = table_blocks.markdown(table_blocks.blocks_of(lines))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 + 2 + 1
    assert {row.count("|") for row in rows} == {len(HEADER) + 1}
    assert text.startswith("# ") and text.count("\n## ") == 2
    assert "- 1 in band, 0 OUTSIDE, 1 not compared" in text


def sweep_of(defense="binary", levels=(0.86, None, 0.97), **more):
    """A sweep of limited knowledge as `experiments.limited_knowledge` keeps it."""
    run = record_of(defense=defense, threat_model="limited_knowledge", point="0.05")["run"]
    own = {"transfer": 0.95, "mean_l2": 4.4, "detector_margin": 5.0}
    chosen = [
        rate and {"confidence": 5.0, "transfer": rate, "mean_l2": 3.21, "carlini_wagner": own}
        for rate in levels
    ]
    return {
        "schema": 1, "kind": "transfer", "run": run | {"surrogate_spec": None},
        "rows": [{"n": 99}], "levels": dict(zip(("0.84", "0.9", "0.98"), chosen)),
        "most": chosen[-1],
    } | more  # fmt: skip


def test_a_sweep_of_limited_knowledge_is_a_block_of_its_own(tmp_path):
    best = {"confidence": 20.0, "detector_margin": 8.0, "attack": "carlini_wagner",
            "transfer": 0.94, "mean_l2": 5.5}  # fmt: skip
    by = {"carlini_wagner": {"most": best}, "ddn": {"most": best | {"attack": "ddn"}}}
    new = sweep_of(by_attack=by, within={"3": None, "5.3": best}, most=best)
    (tmp_path / "sweep.json").write_text(json.dumps(new))
    (tmp_path / "figure.json").write_text(json.dumps({"schema": 1, "kind": "pca_curve"}))
    lines, warnings = table_blocks.read(tmp_path)
    assert not warnings and [line.block for line in lines] == ["transfer"]
    (block,) = table_blocks.blocks_of(lines)
    row = dict(zip(block.rows[0], block.rows[1]))
    assert row["84 % wanted"] == "86.0 % at L2 3.21, k 5"
    assert row["90 % wanted"] == "not reached"
    assert row["most"] == row["C&W alone"] == "94.0 % at L2 5.50, C&W k 20/8"
    assert row["DDN alone"] == "94.0 % at L2 5.50, DDN k 20/8"
    assert row["within mean L2"] == "3: -, 5.3: 94.0 %"
    assert (row["copy"], row["n"], row["paper"]) == ("same", "99", "98.0 %")
    lines = table_blocks.markdown([block]).splitlines()
    table = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and "mnist" in table[-1]


def test_a_sweep_by_ddn_alone_is_still_read(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps(sweep_of()))
    lines, warnings = table_blocks.read(tmp_path)
    (block,) = table_blocks.blocks_of(lines)
    row = dict(zip(block.rows[0], block.rows[1]))
    assert not warnings and row["most"] == row["DDN alone"] == "97.0 % at L2 3.21, k 5"
    assert row["C&W alone"] == "95.0 % at L2 4.40" and row["within mean L2"] == "-"


def test_what_transfers_at_the_paper_s_distance_is_named(tmp_path):
    within = {"3": None, "5.3": {"transfer": 0.9, "mean_l2": 5.2}}
    sweep = sweep_of("outlier_class", within=within)
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    (line,), _ = table_blocks.read(tmp_path)
    assert "3: -, 5.3 (the paper): 90.0 %" in line.cells


def test_damaged_and_foreign_files_are_named_and_left_out(folder):
    whole = record_of()
    lacking = copy.deepcopy(whole)
    del lacking["attack"]["mean_l2"]
    put(
        folder,
        cut=json.dumps(whole)[:200],
        empty="",
        list="[1, 2]",
        foreign='{"name": "something else"}',
        newer=json.dumps(whole | {"schema": 2}),
        lacking=lacking,
        odd=whole | {"run": 3},
    )
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    lines, warnings = table_blocks.read(folder)
    assert len(lines) == 4
    names = ("binary", "cut", "empty", "foreign", "lacking", "list", "newer", "odd")
    assert len(warnings) == len(names)
    for name, warning in zip(names, warnings):
        assert warning.startswith(f"warning: {folder / name}.json is left out (")
        assert "\n" not in warning
    said = dict(zip(names, warnings))
    assert "lacks 'mean_l2'" in said["lacking"] and "not a record" in said["foreign"]
    assert "schema is 2, this version reads 1" in said["newer"]


def test_records_shown_are_copied_in_their_layout_without_arrays(folder, tmp_path):
    lines, _ = table_blocks.read(folder)
    target = tmp_path / "deep" / "reference"
    assert table_blocks.copy_records(lines, folder, target) == 3
    copied = {p.relative_to(target) for p in target.rglob("*") if p.is_file()}
    assert copied == {
        pathlib.Path("mnist", "a", "one.json"),
        pathlib.Path("mnist", "a", "two.json"),
        pathlib.Path("mnist", "b", "three.json"),
    }
    for name in copied:
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    again, warnings = table_blocks.read(target)
    assert warnings == [] and [line.cells for line in again] == [
        line.cells for line in lines if line.block is not None
    ]


def test_the_images_of_a_headline_are_copied_and_still_sealed(folder, tmp_path):
    lines, _ = table_blocks.read(folder)
    headline = next(line for line in lines if line.block == "headline")
    record, arrays = json.loads(headline.path.read_text()), {"image": np.zeros((50, 8, 8, 1))}
    results.save(headline.path, record, arrays)
    table_blocks.copy_records(lines, folder, tmp_path / "reference")
    (kept,) = (tmp_path / "reference").rglob("*.npz")
    assert kept.stat().st_size < headline.path.with_suffix(".npz").stat().st_size / 4
    np.testing.assert_array_equal(results.load(kept.with_suffix(".json"))[1]["image"], 0)
    headline.path.with_suffix(".npz").write_bytes(b"PK")
    with pytest.raises(InputError, match="cannot be copied"):
        table_blocks.copy_records(lines, folder, tmp_path / "other")


def test_the_folder_that_is_read_is_not_copied_onto_itself(folder):
    lines, _ = table_blocks.read(folder)
    with pytest.raises(InputError, match="is the folder that is read"):
        table_blocks.copy_records(lines, folder, folder / "mnist" / "..")


# ---- the command


def run_table(*words):
    return subprocess.run(
        [sys.executable, "-m", "experiments.table", *words], cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_the_command_prints_writes_copies_and_warns(folder, tmp_path):
    put(folder, cut="{")
    page, target = tmp_path / "table.md", tmp_path / "reference"
    ran = run_table(f"--results_dir={folder}", f"--markdown={page}", f"--copy_reference={target}")
    assert ran.returncode == 0, ran.stderr
    assert f"warning: {folder / 'cut.json'} is left out" in ran.stderr
    assert "1 in band, 0 OUTSIDE, 1 not compared" in ran.stdout
    assert "records of single attacks, not shown: 1" in ran.stdout
    assert f"copied  3 records to {target}" in ran.stdout
    assert page.read_text().startswith("# ") and len(list(target.rglob("*.json"))) == 3


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    ran = run_table(f"--results_dir={tmp_path / 'nowhere'}")
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("error: there is no folder") and ran.stderr.count("\n") == 1
