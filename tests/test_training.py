"""Training: it learns, it can be interrupted, and the shipped weights are what they say."""

import dataclasses
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from advdet import checkpoints, datasets, fitting, nets, plans, training
from advdet.augment import Affine
from advdet.recipes import Recipe, learning_rate
from advdet.splits import Splits
from advdet.types import Batch, InputError

HALVES = ["full", "defender", "attacker"]


def separable(count=256, classes=4, side=16, seed=0):
    """Images whose class is the brightest quarter: any network learns it."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count).astype(np.int32)
    images = rng.random((count, side, side, 1), np.float32) * 0.4
    for row, label in enumerate(labels):
        top, left = divmod(int(label), 2)
        half = side // 2
        images[row, top * half :, left * half :][:half, :half] += 0.6
    return Batch(images, labels, np.arange(count, dtype=np.int32))


NET = nets.MnistNet(4)


def fit_small(net=NET, recipe=None, data=None, **options):
    recipe = recipe or Recipe(epochs=6, batch_size=32, learning_rate=0.1, average=0.9)
    data = data or separable()
    start = nets.init(jax.random.key(5), net, data.images.shape[1:])
    loss = training.ClassifierLoss(net)
    state = start.variables.get("batch_stats", {})
    fitted = fitting.fit(
        jax.random.key(1), recipe, loss, start.variables["params"], state, data, **options
    )
    variables = {"params": fitted.params} | ({"batch_stats": fitted.state} if state else {})
    return dataclasses.replace(start, variables=variables), fitted


@pytest.fixture(scope="module")
def trained():
    return fit_small(augment=Affine(5.0, 0.02, False))


def test_learns_a_separable_set(trained):
    classifier, fitted = trained
    assert training.accuracy(classifier, separable(seed=1)) > 0.97
    assert fitted.metrics["accuracy"] > 0.8 and fitted.metrics["loss"] < 0.6


def noisy_regression(params, state, key, batch):
    """A small loss with everything that a resumed run must get right: noise and carried state."""
    x = batch.images.reshape(len(batch.labels), -1)
    x = x - state["mean"] + 0.1 * jax.random.normal(key, x.shape)
    logits = x @ params["w"] + params["b"].reshape(1, -1)
    state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean()}
    return training.cross_entropy(logits, batch.labels), (state, {})


def fit_regression(recipe, **options):
    params, state = {"w": jnp.zeros((256, 4)), "b": jnp.zeros(4)}, {"mean": jnp.float32(0)}
    arguments = (recipe, noisy_regression, params, state, separable(70))
    return fitting.fit(jax.random.key(1), *arguments, **options)


def test_interrupted_and_resumed_training_gives_the_same_bits(tmp_path):
    recipe = Recipe(epochs=3, batch_size=16, weight_decay=5e-4, nesterov=True, average=0.9)

    run = lambda **more: fit_regression(recipe, augment=Affine(), **more)

    def same(one, other):
        jax.tree.map(np.testing.assert_array_equal, one[:2], other[:2])
        assert one.metrics == other.metrics

    whole = run()
    for stop in (1, 2):
        folder = tmp_path / str(stop)
        run(checkpoint=folder, stop_after=stop)
        # Killed while writing the next state: one slot is broken, the other whole.
        broken = folder / f"state-{(stop + 1) % 2}.npz"
        broken.write_bytes(b"PK")
        broken.with_suffix(".json").write_text("{")
        same(whole, run(checkpoint=folder))
        same(whole, run(checkpoint=folder))  # all done: nothing is trained again


def test_resuming_with_other_settings_is_refused(tmp_path):
    recipe = Recipe(epochs=2, batch_size=32)
    fit_regression(recipe, checkpoint=tmp_path, stop_after=1, settings={"seed": 0})
    with pytest.raises(InputError, match="other settings.*seed was 0, is 1"):
        fit_regression(recipe, checkpoint=tmp_path, settings={"seed": 1})


def test_fit_keeps_its_arguments_and_refuses_too_few_rows():
    params = {"w": jnp.zeros(3)}
    loss = lambda params, state, key, batch: (
        jnp.square(batch["x"] @ params["w"] - batch["y"]).mean(),
        (state, {}),
    )
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    data = {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32)}
    recipe = Recipe(epochs=40, batch_size=8, learning_rate=0.05, schedule="constant")
    fitted = fitting.fit(jax.random.key(0), recipe, loss, params, {}, data)
    np.testing.assert_allclose(fitted.params["w"], [1.0, -2.0, 0.5], atol=1e-3)
    np.testing.assert_array_equal(params["w"], 0.0)
    few = jax.tree.map(lambda a: a[:7], data)
    with pytest.raises(InputError, match="7 training rows do not fill one batch of 8"):
        fitting.fit(jax.random.key(0), recipe, loss, params, {}, few)


def test_weight_decay_spares_vectors():
    loss = lambda params, state, key, batch: (batch["x"].sum() * 0.0, (state, {}))
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    recipe = Recipe(epochs=1, batch_size=4, schedule="constant", weight_decay=0.5, momentum=0.0)
    data = {"x": np.zeros((4, 1), np.float32)}
    fitted = fitting.fit(jax.random.key(0), recipe, loss, params, {}, data)
    np.testing.assert_allclose(fitted.params["kernel"], 1 - 0.1 * 0.5)
    np.testing.assert_array_equal(fitted.params["bias"], 1.0)


@pytest.mark.parametrize("clip_norm, step", [(0.0, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_long_gradients_are_cut_over_all_arrays_and_before_weight_decay(clip_norm, step):
    """The gradient (3, 4) has norm 5, over two arrays; decay 0.5 of weight 1 comes on top."""
    loss = lambda params, state, key, batch: (
        (3 * params["a"] + 4 * params["b"]).sum() + 0.0 * batch["x"].sum(), (state, {}),
    )  # fmt: skip
    params = {"a": jnp.ones((1, 1)), "b": jnp.ones((1, 1))}
    recipe = Recipe(epochs=1, batch_size=4, schedule="constant", momentum=0.0, weight_decay=0.5,
                    clip_norm=clip_norm)  # fmt: skip
    data = {"x": np.zeros((4, 1), np.float32)}
    fitted = fitting.fit(jax.random.key(0), recipe, loss, params, {}, data)
    for name, share in (("a", 0.6), ("b", 0.8)):
        wanted = 1 - 0.1 * (step * share + 0.5)
        np.testing.assert_allclose(fitted.params[name], [[wanted]], rtol=1e-6)


def test_micro_batches_add_up_to_the_whole_batch():
    data = separable(128)
    one_step = Recipe(epochs=1, batch_size=128, schedule="constant", momentum=0.0)
    start = nets.init(jax.random.key(5), NET, data.images.shape[1:])

    def loss(params, state, key, batch):  # without dropout, to compare with one plain gradient
        del key
        return training.cross_entropy(
            NET.apply({"params": params}, batch.images).logits, batch.labels
        ), (state, {})

    fitted = fitting.fit(jax.random.key(0), one_step, loss, start.variables["params"], {}, data)
    whole = jax.jit(jax.grad(lambda p: loss(p, {}, None, data)[0]))(start.variables["params"])
    jax.tree.map(
        lambda before, gradient, after: np.testing.assert_allclose(
            before - 0.1 * gradient, after, atol=1e-6
        ),
        start.variables["params"],
        whole,
        fitted.params,
    )


def test_schedules():
    at = lambda recipe, step: float(learning_rate(recipe, 10)(jnp.int32(step)))
    halving = Recipe(epochs=30, schedule="halving")
    assert [at(halving, s) for s in (0, 9)] == pytest.approx([0.1, 0.1])
    assert at(halving, 30) == pytest.approx(0.05) and at(halving, 290) == pytest.approx(
        0.1 * 0.5 ** (290 / 30)
    )
    cycle = Recipe(epochs=10, warm_up=0.2)
    rates = [at(cycle, s) for s in range(100)]
    assert max(rates) == pytest.approx(0.1) and np.argmax(rates) in (19, 20)
    assert rates[0] == pytest.approx(0.005) and rates[-1] < 1e-5
    with pytest.raises(InputError, match="no schedule"):
        learning_rate(Recipe(epochs=1, schedule="cosine"), 10)


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 24, 3)])
def test_augmentation_keeps_shape_and_box(shape):
    images = np.random.default_rng(0).random((20, *shape), np.float32)
    changed = np.asarray(Affine()(jax.random.key(0), images))
    assert changed.shape == images.shape and changed.dtype == np.float32
    assert changed.min() >= 0 and changed.max() <= 1
    assert (np.abs(changed - images).mean((1, 2, 3)) > 0.01).all()
    again = np.asarray(Affine()(jax.random.key(0), images))
    np.testing.assert_array_equal(changed, again)


def test_augmentation_can_do_nothing_or_only_mirror():
    images = np.random.default_rng(0).random((16, 9, 12, 2), np.float32)
    same = np.asarray(Affine(0.0, 0.0, False)(jax.random.key(0), images))
    np.testing.assert_allclose(same, images, atol=1e-6)
    mirrored = np.asarray(Affine(0.0, 0.0, True)(jax.random.key(0), images))
    kinds = [
        (np.allclose(new, old, atol=1e-6), np.allclose(new, old[:, ::-1], atol=1e-6))
        for new, old in zip(mirrored, images)
    ]
    assert all(one != other for one, other in kinds)
    assert 2 <= sum(mirror for _, mirror in kinds) <= 14


def test_accuracy_counts_every_image_whatever_the_batch(trained):
    classifier, _ = trained
    data = separable(70, seed=2)
    data = data._replace(labels=(data.labels + (data.ids % 3 == 0)) % 4)  # some are wrong
    found = {training.accuracy(classifier, data, batch_size=size) for size in (1, 64, 256)}
    assert len(found) == 1 and 0.5 < found.pop() < 0.8
    one_by_one = training.logits(classifier, data.images, 1)
    np.testing.assert_allclose(one_by_one, training.logits(classifier, data.images), atol=5e-5)


def test_reestimated_statistics_are_those_of_the_clean_images():
    net = nets.ResNet32(4, blocks=1)
    classifier = nets.init(jax.random.key(0), net, (16, 16, 1))
    images = separable(300).images
    new = training.reestimate_statistics(classifier, images)
    first = images[:250] - 0.5
    conv = classifier.variables["params"]["conv"]
    hidden = nets.conv(first, conv["kernel"], 1, "SAME") + conv["bias"].reshape(1, 1, 1, -1)
    found = new.variables["batch_stats"]["norm"]
    np.testing.assert_allclose(found["mean"], hidden.mean((0, 1, 2)), atol=1e-4)
    np.testing.assert_allclose(found["var"], hidden.var((0, 1, 2)), rtol=1e-3, atol=1e-5)
    assert new.variables["params"] is classifier.variables["params"]


def small_splits(seed=0):
    arrays = lambda batch: (batch.images, batch.labels)
    return Splits.from_arrays(
        test=arrays(separable(64, seed=seed + 1)),
        clean=arrays(separable(40, seed=seed + 2)),
        train=arrays(separable(256, seed=seed)),
        name="squares",
    )


def test_classifier_for_trains_once_and_only_for_these_data(tmp_path, monkeypatch, capsys):
    short = plans.Plan(Recipe(epochs=2, batch_size=32))
    monkeypatch.setitem(plans.PLANS, ("squares", "fast"), short)
    get = lambda splits, half: training.classifier_for(
        splits, half=half, cache=tmp_path, progress=False
    )
    splits = small_splits()
    first = get(splits, "attacker")
    assert "no weights for these data yet: training MnistNet on 128" in capsys.readouterr().err
    (path,) = (tmp_path / "weights").rglob("*.npz")
    manifest = checkpoints.load_manifest(path)
    assert manifest["half"] == "attacker" and manifest["train_images"] == 128
    assert manifest["command"].endswith("--half=attacker --schedule=fast --epochs=2 --seed=0")
    assert not list((tmp_path / "training").rglob("*.npz"))

    class Trains(Exception):
        pass

    def trains(*_, **__):
        raise Trains

    monkeypatch.setattr(training, "train_classifier", trains)
    second = get(splits.half("attacker"), "full")  # the half may be given already
    assert capsys.readouterr().err == ""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first.variables, second.variables)
    with pytest.raises(Trains):
        get(splits, "defender")
    with pytest.raises(Trains):
        get(small_splits(seed=10), "attacker")
    assert "other data" in capsys.readouterr().err
    with pytest.raises(InputError, match="defender's half"):
        get(splits.half("defender"), "attacker")


@pytest.mark.parametrize("half", HALVES)
def test_shipped_mnist_weights_are_what_their_manifest_says(half):
    path = checkpoints.shipped("mnist", half)
    if path is None:
        pytest.skip(f"no MNIST weights shipped for {half}")
    manifest = checkpoints.load_manifest(path)
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["half"] == half and path.stat().st_size < 1e6
    if not os.environ.get("TFDS_DATA_DIR"):
        pytest.skip("TFDS_DATA_DIR is not set: no MNIST test images to measure accuracy on")
    splits = datasets.load("mnist", "tfds").half(half)
    classifier = training.classifier_for(splits)
    assert splits.data_hash == manifest["data_hash"]
    accuracy = training.accuracy(classifier, splits.test)
    assert accuracy >= (0.992 if half == "full" else 0.988)  # a half has 27,500 images
    assert accuracy == pytest.approx(manifest["test_accuracy"], abs=2e-4)
