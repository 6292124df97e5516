"""Experiments that change one thing in a row of the paper's, and weights that the user trained."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from cli_tools import read_record

from advdet import provenance, training
from advdet.attacks.base import AttackResult
from advdet.detectors import KernelDensity
from advdet.types import Batch
from experiments import ablation
from experiments.own_density import OwnThreshold, own_levels

pytest_plugins = ["cli_tools"]

_DATA = ("--dataset=mnist_5k", "--data_source=embedded")
_SHORT = ("--num_images=4", "--steps=20", "--binary_search_steps=1")


def test_a_ratio_is_over_the_images_that_both_attacks_break():
    blank = np.zeros(4)
    base = AttackResult(
        blank, np.array([True, True, False, True]), np.array([1.0, 2.0, 9.0, 3.0]), *[blank] * 4
    )
    won, distance = np.array([True, True, True, False]), np.array([2.0, 4.0, 50.0, 70.0])
    found = ablation.figures(won, distance, base)
    assert found["ratio"] == 2.0 and found["success_rate"] == 0.75
    assert found["mean_l2"] == pytest.approx(56 / 3)
    assert ablation.figures(~won & ~base.success, distance, base)["ratio"] is None


def test_each_image_has_a_threshold_of_its_own():
    """The goal of an image is met by its own density exactly, whatever row it stands in."""
    net = toys.network()
    images, labels = toys.digits(count=6), np.arange(6, dtype=np.int32) % 2
    features = np.asarray(net(jnp.asarray(images)).features["penultimate"])
    centres = features + 0.1 * np.arange(1, 7)[:, None]
    fitted = {"centres": centres, "labels": labels, "sigma": np.float32(1.0), "native": 0.0}
    defense = toys.guarded(net, KernelDensity(sigma=1.0), fitted, threshold=123.0)
    clean = Batch(images, labels, np.arange(6))
    levels = own_levels(defense, clean)
    assert len(np.unique(levels)) == len(levels)
    shown = dataclasses.replace(defense, fitted={**defense.fitted, "levels": jnp.asarray(levels)})
    objective = OwnThreshold(num_classes=10)
    goals = jax.jit(lambda image, code: objective(jax.random.key(0), shown, image, code))
    for row in range(len(images)):
        met = goals(jnp.asarray(images[row]), jnp.int32(10 * row + labels[row]))
        np.testing.assert_allclose(met.detector, [0.0], atol=1e-4)
        other = goals(jnp.asarray(images[row]), jnp.int32(10 * (row - 1) % 60 + labels[row]))
        assert abs(float(other.detector[0])) > 1e-3


@pytest.mark.slow  # it trains a network
def test_weights_that_the_user_trained_are_named_by_their_file(cli, tmp_path, splits):
    folder = tmp_path / "results"
    words = (*_DATA, "--defense=none", "--preset=smoke", "--attack=ddn", "--num_images=4")
    ran = cli(*_DATA, "--epochs=1", "--seed=3", f"--out={tmp_path / 'mine.npz'}", module="train")
    assert ran.status == 0, ran.err
    named = f"--classifier={tmp_path / 'mine.npz'}"
    ran = cli(*words, named, f"--results_dir={folder}")
    assert ran.status == 0, ran.err
    (path,) = folder.rglob("*.json")
    run = read_record(path)[0]["run"]
    mine = training.load_classifier(tmp_path / "mine.npz", splits)
    assert run["classifier"] == provenance.fingerprint(mine, splits.test.images)
    assert ", 0 refuted, 0 not decidable" in cli(str(folder), named, *_DATA, module="verify").out
    shutil.copy(tmp_path / "mine.npz", tmp_path / "alone.npz")
    ran = cli(*words, f"--classifier={tmp_path / 'alone.npz'}", f"--results_dir={folder}")
    assert ran.status == 2 and "alone" in ran.err and ran.err.count("\n") == 1


_OF_DENSITY = {"what the attack believes", "own threshold, all centres", "median, all centres"}
_OF_BASE = {
    "shipped classifier", "base", "extra class, to the base", "extra class, to the shipped"
}  # fmt: skip
_FEW = ("--defense=outlier_class:epochs=1", "--crafted=120", "--craft_steps=20")


@pytest.mark.slow  # they train networks, and compile up to four attacks
@pytest.mark.parametrize(
    ("module", "words", "rows"),
    [
        ("own_density", ("--defense=kernel_density:sigma=20",), _OF_DENSITY),
        ("outlier_base", _FEW, _OF_BASE),
    ],
)
def test_an_ablation_leaves_its_figures_and_how_to_repeat_them(cli, tmp_path, module, words, rows):
    ran = cli(*_DATA, *words, *_SHORT, f"--results_dir={tmp_path / 'new'}", module=module)
    assert ran.status == 0, ran.err
    (path,) = (tmp_path / "new").glob(f"mnist_5k-{module}*.json")
    kept = json.loads(path.read_text())
    assert kept["kind"] == module and set(kept["rows"]) == rows
    assert kept["command"].startswith(f"python -m experiments.{module} ")
    assert all(row["n"] == 4 for row in kept["rows"].values())
    assert all(name in ran.out for name in rows)
    ran = cli(*_DATA, "--defense=mean_blur", *_SHORT, module=module)
    assert ran.status == 2 and "mean_blur" in ran.err
