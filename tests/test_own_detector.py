"""A detector of thirty lines, from the command line and from Python, under all threat models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import read_record
from own_detector import Reconstruction

import advdet
from advdet.types import FitData, InputError

pytest_plugins = ["cli_tools"]

WORDS = ("--defense=tests.own_detector:Reconstruction:components=30", "--data_source=embedded",
         "--preset=smoke", "--num_images=8")  # fmt: skip


@pytest.fixture(scope="module")
def run(cli, halves, tmp_path_factory):
    """Runs an entry point with the detector; gives its folder of results, too."""
    folder = tmp_path_factory.mktemp("results")

    def call(module, *words):
        ran = cli(*WORDS, f"--results_dir={folder}", *words, module=module)
        assert ran.status == 0, ran.err
        return ran, folder

    return call


@pytest.mark.parametrize("module", ["perfect_knowledge", "zero_knowledge"])
def test_it_runs_by_its_name(module, run):
    ran, folder = run(module)
    (path,) = (folder / "mnist_5k" / module / "reconstruction").glob("best.generic/*.json")
    record, _ = read_record(path)
    assert record["run"]["detector"] == {"components": 30}
    assert record["verdict"] in ran.out and record["paper"]["figure"] is None


def test_it_is_copied_for_limited_knowledge(run):
    ran, folder = run(
        "limited_knowledge", "--confidences=0,2", "--margins=0,0.5", "--distances=1,9",
        "--all_pairs",
    )  # fmt: skip
    assert "chosen on half" in ran.out
    cell = folder / "mnist_5k" / "limited_knowledge" / "reconstruction"
    (path,) = cell.glob("transfer-*.json")
    result = json.loads(path.read_text())
    rows = result["rows"]
    searched = [row for row in rows if row["attack"] == "carlini_wagner"][:4]
    assert [row["confidence"] for row in searched] == [0, 0, 2, 2]
    margins = [row["detector_margin"] for row in searched]
    assert margins[0] == margins[2] == 0.0
    assert margins[1] == margins[3] == pytest.approx(0.5 * result["spread"]) and margins[1] > 0
    assert {row["attack"] for row in rows} == {"carlini_wagner", "ddn"}
    assert all(0 <= row["transfer"] <= row["on_surrogate"] <= 1 for row in rows)
    assert set(result["levels"]) == {"0.84", "0.9", "0.98"} and set(result["within"]) == {"1", "9"}
    assert result["by_attack"]["ddn"]["most"]["attack"] == "ddn" and result["search_ended"]


def test_it_keeps_the_contract(classifier, splits):
    detector = Reconstruction(30)
    data = FitData(splits.train, splits.select)
    fitted = jax.tree.map(jnp.asarray, detector.fit(jax.random.key(0), classifier, data))
    score = jax.jit(lambda x: detector.score(jax.random.key(0), fitted, classifier, x))
    images = jnp.asarray(splits.test.images[:6])
    scores = score(images)
    assert scores.shape == (6,) and np.isfinite(scores).all()
    np.testing.assert_array_equal(scores, score(images))
    noise = np.random.RandomState(0).uniform(0, 1, images.shape).astype(np.float32)
    assert score(jnp.asarray(noise)).min() > scores.max()
    assert detector == Reconstruction(30) and hash(detector) == hash(Reconstruction(30))


def test_a_sweep_leaves_out_what_it_is_told_to(classifier, splits):
    asked, seen = [{"confidence": 0.0}, {"confidence": 1.0}, {"confidence": 2.0}], []

    def skip(change, found):
        seen.append([each for _, each in found])
        return change["confidence"] == 1.0

    done = advdet.sweep(
        asked, "none", skip=skip, classifier=classifier, data=splits, preset="smoke",
        num_images=2, attack="ddn", progress=False,
    )  # fmt: skip
    assert [each and each.records["ddn"]["run"]["settings"]["confidence"] for each in done] == [
        0.0, None, 2.0
    ]  # fmt: skip
    assert seen == [[], [done[0]], [done[0], None]]


def test_a_series_is_evaluated_as_what_was_found_suggests(classifier, splits):
    given = dict(classifier=classifier, data=splits, preset="smoke", num_images=2, attack="ddn",
                 progress=False)  # fmt: skip
    series = advdet.series("none", **given)
    for confidence in (0.0, 2.0):
        done = series.evaluate(confidence=confidence)
        (same,) = advdet.sweep([{"confidence": confidence}], "none", **given)
        assert done.records["ddn"]["run"]["settings"]["confidence"] == confidence
        np.testing.assert_array_equal(done.arrays["ddn"]["image"], same.arrays["ddn"]["image"])
    with pytest.raises(InputError, match="unknown attack"):
        series.evaluate(attack="no_such")


def test_it_runs_from_python(classifier, splits):
    done = advdet.evaluate(
        Reconstruction(30), classifier=classifier, data=splits, preset="smoke", num_images=8,
        attack="ddn", progress=False,
    )  # fmt: skip
    assert done.records["ddn"]["run"]["defense"] == "reconstruction"
