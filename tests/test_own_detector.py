"""A detector of thirty lines, from the command line and from Python, under all threat models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import read_record
from own_detector import Reconstruction

import advdet
from advdet.types import FitData

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
        "limited_knowledge", "--confidences=0,2", "--margin_rates=0.05,0.3", "--all_pairs"
    )
    assert "cheapest pair" in ran.out
    cell = folder / "mnist_5k" / "limited_knowledge" / "reconstruction"
    assert len(list(cell.glob("ddn.generic/*.json"))) == 4
    (path,) = cell.glob("transfer-*.json")
    result = json.loads(path.read_text())
    assert [row["confidence"] for row in result["rows"]] == [0, 2, 0, 2]
    margins = [row["detector_margin"] for row in result["rows"]]
    assert margins[:2] == [0.0, 0.0] and margins[2] == margins[3] > 0
    assert all(0 <= row["transfer"] <= row["on_surrogate"] <= 1 for row in result["rows"])
    assert set(result["levels"]) == {"0.84", "0.9", "0.98"}


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


def test_it_runs_from_python(classifier, splits):
    done = advdet.evaluate(
        Reconstruction(30), classifier=classifier, data=splits, preset="smoke", num_images=8,
        attack="ddn", progress=False,
    )  # fmt: skip
    assert done.records["ddn"]["run"]["defense"] == "reconstruction"
