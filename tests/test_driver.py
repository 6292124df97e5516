"""Continuous batching: what an image's result does not depend on, and what is compiled once."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import advdet
from advdet.attacks import DDN, CarliniWagner, driver
from advdet.attacks.objectives import Generic, Quantile
from advdet.defenses import undefended
from advdet.detectors import Dropout

# Images take different numbers of steps here: the attack gives up early.
SEARCH = CarliniWagner(4, 60, 0.1, 1.0)
COUNT = 13


def scene():
    net = toys.network()
    images = toys.digits(21, COUNT)
    return net, images, toys.wrong_targets(net, images), np.arange(100, 100 + COUNT, dtype=np.int32)


def cases():
    net = toys.network()
    random = toys.guarded(net, Dropout(num_samples=4), threshold=0.3, scale=0.1)
    return {
        "carlini_wagner": (SEARCH, Generic(), undefended(net)),
        "ddn": (DDN(40), Generic(), undefended(net)),
        "random detector": (CarliniWagner(2, 20, 0.1, 1.0), Generic(), random),
    }


def run(case, rows=None, lanes=3, **options):
    """Results of the scene's images in the given order."""
    _, images, targets, ids = scene()
    rows = np.arange(COUNT) if rows is None else np.asarray(rows)
    progress = driver.run(
        jax.random.key(7), *cases()[case], images[rows], targets[rows], ids[rows],
        lanes=lanes, **options,
    )  # fmt: skip
    return progress


@pytest.fixture(scope="module")
def whole():
    """All images of each case, run once."""
    found = {}

    def get(case):
        if case not in found:
            found[case] = run(case).results
        return found[case]

    return get


every_case = pytest.mark.parametrize("case", list(cases()))


@every_case
def test_the_cases_have_successes_and_differ_by_image(case, whole):
    result = whole(case)
    assert result.success.sum() >= 5
    assert len(np.unique(result.distance)) > 5


@every_case
def test_order_lane_and_neighbours_change_no_bit(case, whole):
    for order in (np.arange(COUNT)[::-1], np.random.RandomState(0).permutation(COUNT)):
        permuted = run(case, order).results
        rows = np.argsort(order)
        back = jax.tree.map(lambda a: a[rows], permuted)  # noqa: B023
        toys.assert_same_bits(back, whole(case))


@every_case
def test_what_was_left_undone_comes_out_the_same(case, whole):
    """Resuming runs some rows only, in queues of the same length."""
    for todo in ([4], [12, 0, 7], list(range(5, 13))):
        progress = run(case, todo=np.array(todo))
        assert sorted(np.flatnonzero(progress.finished)) == sorted(todo)
        toys.assert_same_bits(progress.results, whole(case), rows=todo)


@every_case
def test_a_batch_of_fewer_images_changes_no_bit(case, whole):
    rows = [3, 9, 6]
    few = run(case, rows).results
    toys.assert_same_bits(few, jax.tree.map(lambda a: a[rows], whole(case)))


@every_case
def test_slices_of_the_loop_change_no_bit(case, whole):
    toys.assert_same_bits(run(case, slice_seconds=1e-9).results, whole(case))


@pytest.mark.parametrize("case", ["carlini_wagner", "ddn"])
def test_one_device_and_two_agree(case, whole):
    one = run(case, devices=jax.devices()[:1]).results
    assert len(jax.devices()) == 2
    np.testing.assert_array_equal(one.success, whole(case).success)
    np.testing.assert_allclose(one.distance, whole(case).distance, rtol=1e-4)
    np.testing.assert_allclose(one.image, whole(case).image, atol=1e-4)


EIGHT_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import test_driver
assert jax.device_count() == 8
found = test_driver.run("carlini_wagner").results._asdict()
np.savez(sys.argv[1], **found)
"""


def test_eight_devices_find_what_two_find(whole, tmp_path):
    tests = pathlib.Path(__file__).parent
    package = pathlib.Path(advdet.__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(package), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, str(tmp_path / "found.npz")],
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found, wanted = np.load(tmp_path / "found.npz"), whole("carlini_wagner")
    np.testing.assert_array_equal(found["success"], wanted.success)
    np.testing.assert_allclose(found["distance"], wanted.distance, rtol=1e-4)
    np.testing.assert_allclose(found["image"], wanted.image, atol=1e-4)


def test_images_of_one_id_under_two_seeds_draw_different_numbers(whole):
    _, images, targets, ids = scene()
    other = driver.run(
        jax.random.key(8), *cases()["random detector"], images, targets, ids, lanes=3
    ).results
    assert (other.distance != whole("random detector").distance).any()


# ---- what is compiled once


def traces(work):
    """How often the toys were traced while `work` ran."""
    before = sum(toys.calls.values())
    work()
    return sum(toys.calls.values()) - before


@pytest.fixture
def sweep(rng):
    """Runs an attack on a linear detector whose arrays, threshold and settings may differ."""
    net = toys.network()
    images = toys.digits(2)
    targets = toys.wrong_targets(net, images)
    direction = rng.randn(toys.PIXELS).astype(np.float32)

    def go(attack, objective=Generic(), seed=0, scale=1.0, threshold=0.0):  # noqa: B008
        defense = toys.guarded(
            toys.network(seed), toys.LinearScore(), jnp.asarray(scale * direction), threshold
        )
        return toys.attack(attack, objective, defense, images, targets)

    return go


@pytest.mark.parametrize("attack", [CarliniWagner(2, 10, 0.1, 1.0), DDN(20)], ids=["c&w", "ddn"])
def test_another_defence_of_the_same_kind_compiles_nothing(attack, sweep):
    sweep(attack)
    assert traces(lambda: sweep(attack, seed=1, scale=2.0, threshold=0.7)) == 0


@pytest.mark.parametrize("attack", [CarliniWagner(2, 10, 0.1, 1.0), DDN(20)], ids=["c&w", "ddn"])
def test_a_sweep_over_settings_compiles_nothing(attack, sweep):
    sweep(attack)

    def many():
        for confidence in np.linspace(0, 4, 9):
            sweep(attack, Generic(confidence=float(confidence)))
        for detector_margin in (0.1, 0.5):
            sweep(attack, Generic(detector_margin=detector_margin))
        sweep(dataclasses.replace(attack, steps=7))
        if isinstance(attack, CarliniWagner):
            sweep(dataclasses.replace(attack, learning_rate=0.03, initial_const=0.5))
            sweep(dataclasses.replace(attack, binary_search_steps=3))
        else:
            sweep(dataclasses.replace(attack, gamma=0.1, first_step=0.5, initial_radius=2.0))

    assert traces(many) == 0


def test_what_changes_the_program_is_compiled_again(sweep):
    sweep(DDN(20))
    assert traces(lambda: sweep(DDN(20), Generic(targeted=False))) > 0


def test_a_sweep_over_z_compiles_nothing():
    net = toys.network()
    images = toys.digits(2)
    targets = toys.wrong_targets(net, images)
    defense = toys.guarded(net, Dropout(num_samples=2), threshold=0.3, scale=0.1)
    quantile = Quantile(num_groups=3, gradient_groups=2)
    go = lambda z: toys.attack(
        DDN(10), dataclasses.replace(quantile, z=z), defense, images, targets
    )
    first = go(0.0)
    assert traces(lambda: go(1.0)) == 0
    assert (go(3.0).distance != first.distance).any()


# ---- the driver's own manners


def small(count, lanes=toys.LANES, ids=None, **options):
    net = toys.network()
    images = toys.digits(2, count)
    targets = toys.wrong_targets(net, images)
    ids = np.arange(count) if ids is None else ids
    return driver.run(
        jax.random.key(0), DDN(20), Generic(), undefended(net), images, targets, ids,
        lanes=lanes, **options,
    )  # fmt: skip


def test_ids_that_repeat_are_refused():
    with pytest.raises(ValueError, match="ids repeat"):
        small(3, ids=np.array([1, 2, 1]))


@pytest.mark.parametrize("lanes", [0, -1])
def test_less_than_one_lane_is_refused(lanes):
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        small(3, lanes=lanes)


def test_one_image_and_fewer_images_than_lanes_are_all_attacked():
    one, three = small(1), small(3)
    assert one.finished.all() and three.finished.all()
    toys.assert_same_bits(one.results, jax.tree.map(lambda a: a[:1], three.results))
    assert (three.results.num_gradients == 20).all()


def test_progress_grows_and_its_counts_are_those_of_the_work():
    seen = []
    last = small(toys.ROWS, on_slice=seen.append, slice_seconds=1e-9)
    finished = np.array([now.finished for now in seen])
    steps = np.array([[now.lane_steps, now.loop_steps] for now in seen])
    assert (finished[1:] >= finished[:-1]).all()  # what is finished stays so
    assert not finished[0].any() and finished[-1].all()
    assert (np.diff(steps, axis=0) >= 0).all() and len(seen) > 10
    assert 0 < finished[len(seen) // 2 + 1].sum() < toys.ROWS
    assert last.lane_steps == last.results.num_gradients.sum() == 20 * toys.ROWS
    # Two devices of four lanes each take two rounds.
    assert last.loop_steps == 40
    middle = seen[len(seen) // 2 + 1]
    toys.assert_same_bits(middle.results, last.results, rows=np.flatnonzero(middle.finished))
    assert last.compile_seconds > 0 and last.run_seconds > 0


def test_lanes_take_the_next_image_as_soon_as_one_is_done():
    """Images of unequal need cost the sum of their needs, not the largest times their number."""
    result = run("carlini_wagner", lanes=1, devices=jax.devices()[:1])
    needs = result.results.num_gradients
    assert needs.max() > needs.min()
    assert result.loop_steps == result.lane_steps == needs.sum()
