"""The detectors that are networks: what they learn from, what they say, what they leave alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learned_toys
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from advdet import fitting, nets
from advdet.detector_nets import Subnetwork, halved
from advdet.detectors import learned_rows, learning
from advdet.detectors.binary import Binary
from advdet.detectors.inner_layer import InnerLayer, draw_recipe
from advdet.detectors.outlier_class import OutlierClass
from advdet.types import Batch, InputError

SMALL = {
    "outlier_class": OutlierClass(epochs=100),
    "binary": Binary(epochs=40),
    "inner_layer": InnerLayer(trials=1, trial_images=64, epochs=10),
}
every = pytest.mark.parametrize("name", SMALL)


@functools.cache
def classifier(name=""):
    """The MNIST network; for the inner layer one with batch statistics and the feature ad2."""
    few, many = nets.ResNet32(learned_toys.CLASSES, blocks=0), nets.MnistNet(learned_toys.CLASSES)
    net = few if name == "inner_layer" else many
    return nets.init(jax.random.key(0), net, learned_toys.SHAPE)


@functools.cache
def fit_toy(name):
    """What the detector learned, and what each of its trainings ended with."""
    ends, plain = [], fitting.fit

    def watched(*arguments, **options):
        ends.append(plain(*arguments, **options))
        return ends[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "fit", watched)
        fitted = SMALL[name].fit(jax.random.key(1), classifier(name), learned_toys.data())
    return fitted, ends


def fitted_toy(name):
    return fit_toy(name)[0]


@functools.partial(jax.jit, static_argnums=0)
def compiled_scores(detector, fitted, classifier, images):
    return detector.score(jax.random.key(0), fitted, classifier, images)


def scores(name, images):
    net = classifier(name)
    return np.asarray(compiled_scores(SMALL[name], fitted_toy(name), net, images))


def fresh():
    """32 clean images and the same ones marked; and which are marked."""
    batch = learned_toys.clean(3, 32, 5000)
    images = np.concatenate([batch.images, learned_toys.marked(batch).images])
    return images, batch.labels, np.arange(64) >= 32


@every
def test_marked_images_that_were_never_seen_are_told_from_clean_ones(name):
    images, _, is_marked = fresh()
    found = scores(name, images)
    assert found.shape == (64,) and found.dtype == np.float32
    assert roc_auc_score(is_marked, found) > 0.9
    assert SMALL[name].native_threshold(fitted_toy(name)) == 0.0


@every
def test_fits_are_dicts_of_plain_arrays(name):
    for leaf in jax.tree.leaves(fitted_toy(name)):
        assert isinstance(leaf, np.ndarray) and leaf.dtype == np.float32


# ---- the extra class


def test_the_extra_class_s_score_is_its_logit_above_the_best_other():
    detector, fitted = SMALL["outlier_class"], fitted_toy("outlier_class")
    images, labels, _ = fresh()
    joined = np.asarray(jax.jit(detector.joined_logits)(fitted, classifier(), images))
    assert joined.shape == (64, learned_toys.CLASSES + 1)
    logits = jax.jit(detector.logits)(jax.random.key(0), fitted, classifier(), images)
    np.testing.assert_allclose(logits, joined[:, :-1], rtol=1e-5, atol=1e-5)
    found = scores("outlier_class", images)
    np.testing.assert_allclose(found, joined[:, -1] - joined[:, :-1].max(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found > 0, joined.argmax(1) == learned_toys.CLASSES)
    assert (np.asarray(logits)[:32].argmax(1) == labels).mean() > 0.8


def test_the_extra_class_learns_from_as_many_adversarial_rows_as_clean_ones(monkeypatch):
    seen = {}

    def remember(key, name, detector, net, loss, rows, data, recipe):
        seen.update(rows=rows, net=net, epochs=recipe.epochs)

    monkeypatch.setattr(learning, "train_network", remember)
    data = learned_toys.data(train=30)
    few = data._replace(adversarial_train=data.adversarial_train.take(slice(10, 17)))
    OutlierClass(epochs=3).fit(jax.random.key(0), classifier(), few)
    rows = seen["rows"]
    assert seen["net"].num_classes == learned_toys.CLASSES + 1 and seen["epochs"] == 3
    extra = rows.labels == learned_toys.CLASSES
    np.testing.assert_array_equal(extra, np.arange(60) % 2 == 1)
    np.testing.assert_array_equal(rows.images[~extra], data.train.images)
    np.testing.assert_array_equal(rows.labels[~extra], data.train.labels)
    np.testing.assert_array_equal(rows.ids[extra], 10 + np.arange(30) % 7)
    again = np.tile(few.adversarial_train.images, (5, 1, 1, 1))[:30]
    np.testing.assert_array_equal(rows.images[extra], again)


# ---- networks of their own


def test_equal_keys_give_equal_bits_and_others_do_not():
    fit = lambda seed: SMALL["binary"].fit(jax.random.key(seed), None, learned_toys.data())
    jax.tree.map(np.testing.assert_array_equal, fit(1), fitted_toy("binary"))
    one, other = fit(2)["params"], fitted_toy("binary")["params"]
    assert (one["conv1"]["kernel"] != other["conv1"]["kernel"]).any()


def test_a_training_taken_up_again_ends_with_the_same_bits_and_knows_its_data(tmp_path):
    data = learned_toys.data(work=tmp_path)
    fit = lambda data: SMALL["binary"].fit(jax.random.key(1), None, data)
    whole = fitted_toy("binary")
    jax.tree.map(np.testing.assert_array_equal, whole, fit(data))
    folder = tmp_path / "binary"
    assert {path.name for path in folder.glob("*.npz")} == {"state-0.npz", "state-1.npz"}
    for path in folder.glob("state-0.*"):  # of the last epoch, an even one
        path.unlink()
    jax.tree.map(np.testing.assert_array_equal, whole, fit(data))
    darker = data.adversarial_train._replace(images=0.5 * data.adversarial_train.images)
    with pytest.raises(InputError, match="other settings"):
        fit(data._replace(adversarial_train=darker))


@pytest.mark.parametrize("stalls", [0, 1, 2, 3])
def test_a_training_that_learns_nothing_begins_anew(monkeypatch, stalls):
    """Half the rows are marked, so that 50 % are right by one answer for all."""
    tried = []

    def fit(key, name, detector, recipe, loss, params, state, rows, data):
        tried.append((name, jax.random.key_data(key).tolist()))
        accuracy = 0.51 if len(tried) <= stalls else 0.9
        return fitting.Fitted(params, state, {"accuracy": accuracy})

    monkeypatch.setattr(learning, "fit", fit)
    train = lambda: SMALL["binary"].fit(jax.random.key(0), None, learned_toys.data())
    if stalls == 3:
        with pytest.raises(InputError, match="51.0%.*commonest label does for 50.0%"):
            train()
    else:
        fitted = train()
        assert set(fitted["params"]) >= {"conv1", "logits"}
    names = ["binary", "binary start 2", "binary start 3"]
    assert [name for name, _ in tried] == names[: min(stalls + 1, 3)]
    assert len({str(key) for _, key in tried}) == len(tried)


def test_the_binary_score_is_the_network_s_logit():
    images, fitted = fresh()[0], fitted_toy("binary")
    net = nets.NetApply(nets.MnistNet(1))
    expected = jax.jit(lambda fitted, images: net(fitted, images).logits[:, 0])(fitted, images)
    np.testing.assert_allclose(scores("binary", images), expected, rtol=1e-4, atol=1e-5)


def test_a_network_with_batch_statistics_keeps_those_of_all_its_rows(monkeypatch):
    small = lambda dataset, outputs, image_shape: nets.ResNet32(outputs, blocks=0)
    monkeypatch.setattr(nets, "net_for", small)
    monkeypatch.setattr(learning, "_LEARNED", -1.0)  # it need not, here
    data = learned_toys.data()
    fitted = Binary(epochs=1).fit(jax.random.key(1), None, data)
    images = np.concatenate([data.train.images, data.adversarial_train.images])
    first = fitted["params"]["conv"]
    maps = nets.conv(jnp.asarray(images) - 0.5, jnp.asarray(first["kernel"]), 1, "SAME")
    maps = np.asarray(maps, np.float64) + first["bias"]
    found = fitted["batch_stats"]["norm"]
    np.testing.assert_allclose(found["mean"], maps.mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["var"], maps.var((0, 1, 2)), rtol=1e-4, atol=1e-6)
    assert np.isfinite(compiled_scores(Binary(), fitted, classifier(), images[:4])).all()


def test_the_binary_loss_is_the_cross_entropy(rng):
    logits = (5 * rng.randn(40)).astype(np.float32)
    labels = rng.randint(0, 2, 40).astype(np.int32)
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    by_hand = -np.mean(labels * np.log(chance) + (1 - labels) * np.log(1 - chance))
    compiled = jax.jit(learning.binary_cross_entropy)
    loss, hits = compiled(logits, labels)
    np.testing.assert_allclose(loss, by_hand, rtol=1e-5)
    np.testing.assert_allclose(hits, ((logits > 0) == labels).mean(), rtol=1e-6)
    far, _ = compiled(np.float32([1e4, -1e4]), np.int32([0, 1]))
    assert far == 1e4


# ---- the subnetwork


def test_halving_takes_the_maximum_of_each_square(rng):
    x = rng.randn(2, 7, 6, 3).astype(np.float32)
    by_hand = x[:, :6].reshape(2, 3, 2, 3, 2, 3).max((2, 4))
    np.testing.assert_array_equal(halved(jnp.asarray(x)), by_hand)


@pytest.mark.parametrize("side, before_the_average", [(32, 8), (16, 8), (14, 7), (8, 8)])
def test_the_subnetwork_s_last_map_has_metzen_s_size(side, before_the_average):
    net, x = Subnetwork(), jax.ShapeDtypeStruct((2, side, side, 16), jnp.float32)

    def run(x):
        variables = net.init(jax.random.key(0), x)
        return net.apply(variables, x, capture_intermediates=True), variables

    (outputs, inner), variables = jax.eval_shape(run, x)
    assert outputs.logits.shape == (2, 1)
    (last,) = inner["intermediates"]["conv4"]["__call__"]
    assert last.shape == (2, before_the_average, before_the_average, 1)
    kernels = [variables["params"][f"conv{place}"]["kernel"].shape for place in (1, 2, 3, 4)]
    assert kernels == [(3, 3, 16, 96), (3, 3, 96, 192), (3, 3, 192, 192), (1, 1, 192, 1)]


def test_the_trunk_is_frozen_weights_and_batch_statistics():
    net = nets.ResNet32(learned_toys.CLASSES, blocks=0)
    untouched = nets.init(jax.random.key(0), net, learned_toys.SHAPE).variables
    assert set(untouched) == {"params", "batch_stats"}
    fitted, ends = fit_toy("inner_layer")
    assert len(ends) == 2 and set(fitted) == {"params", "batch_stats"}
    for end in ends:
        jax.tree.map(np.testing.assert_array_equal, end.state["trunk"], untouched)
        assert (end.state["batch_stats"]["norm1"]["mean"] != 0).any()
    jax.tree.map(np.testing.assert_array_equal, classifier("inner_layer").variables, untouched)


def test_the_subnetwork_reads_its_feature_in_inference_mode():
    images, fitted = fresh()[0], fitted_toy("inner_layer")
    feature = jax.jit(lambda net, images: net(images).features["ad2"])
    by_hand = jax.jit(lambda fitted, maps: nets.NetApply(Subnetwork())(fitted, maps).logits[:, 0])
    expected = by_hand(fitted, feature(classifier("inner_layer"), images))
    found = scores("inner_layer", images)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    turned = scores("inner_layer", images[::-1])  # other batch mates for none, other places for all
    np.testing.assert_allclose(turned[::-1], found, rtol=1e-4, atol=1e-5)


def test_the_best_trial_goes_on_and_is_kept_where_that_makes_it_no_better(monkeypatch):
    runs = []
    mark = lambda params: float(params["conv4"]["bias"][0])

    def fit(key, name, detector, recipe, loss, params, state, rows, data):
        runs.append((name, recipe, mark(params), len(rows.labels)))
        marked = params | {"conv4": params["conv4"] | {"bias": np.float32([len(runs)])}}
        return fitting.Fitted(marked, state, {})

    def logits(whole, images):  # rows are clean and adversarial in turns
        right = shares[int(mark(whole.variables["subnetwork"]["params"])) - 1] * len(images)
        truth = np.where(np.arange(len(images)) % 2 == 1, 1.0, -1.0)
        return (truth * np.where(np.arange(len(images)) < right, 1.0, -1.0)).reshape(-1, 1)

    monkeypatch.setattr(learning, "fit", fit)
    monkeypatch.setattr("advdet.training.logits", logits)
    detector = InnerLayer(trials=3, trial_images=20, epochs=4)
    for shares, kept in (((0.5, 0.75, 0.25, 1.0), 4), ((0.5, 0.75, 0.25, 0.5), 2)):
        runs.clear()
        net = classifier("inner_layer")
        fitted = detector.fit(jax.random.key(3), net, learned_toys.data())
        assert mark(fitted["params"]) == kept
        assert [run[0] for run in runs[:3]] == [f"inner_layer trial {n}" for n in (1, 2, 3)]
        assert [run[2:] for run in runs] == [(0.0, 20)] * 3 + [(2.0, 64)]
        assert len({run[1] for run in runs[:3]}) == 3
        assert runs[3][1] == dataclasses.replace(runs[1][1], epochs=4)


def test_settings_of_short_trainings_are_drawn_by_key():
    drawn = [draw_recipe(key) for key in jax.random.split(jax.random.key(0), 20)]
    assert draw_recipe(jax.random.key(3)) == draw_recipe(jax.random.key(3))
    rates = np.log10([recipe.learning_rate for recipe in drawn])
    momenta = np.array([recipe.momentum for recipe in drawn])
    assert -2.5 <= rates.min() < -1.9 and -1.0 < rates.max() <= -0.5
    assert 0.0 <= momenta.min() < 0.25 and 0.7 < momenta.max() <= 0.95
    assert {recipe.batch_size for recipe in drawn} == {32, 64, 128}


# ---- rows


def toy_pair(count):
    first = learned_toys.clean(1, count, 0)
    return first, learned_toys.marked(first)


def test_sources_are_found_by_id():
    train, crafted = toy_pair(12)
    some = crafted.take(np.array([7, 2, 2, 11]))
    shuffled = train.take(np.random.RandomState(0).permutation(12))
    sources, same = learned_rows.with_sources(shuffled, some, "binary")
    assert same is some
    np.testing.assert_array_equal(sources.ids, [7, 2, 2, 11])
    np.testing.assert_array_equal(sources.images, train.images[[7, 2, 2, 11]])
    with pytest.raises(InputError, match="binary holds 1 images, such as id 11"):
        learned_rows.with_sources(train.take(slice(11)), some, "binary")


def test_clean_and_adversarial_rows_take_turns():
    train, crafted = toy_pair(5)
    rows = learned_rows.clean_or_not(train, crafted)
    np.testing.assert_array_equal(rows.labels, [0, 1] * 5)
    np.testing.assert_array_equal(rows.ids, np.repeat(np.arange(5), 2))
    np.testing.assert_array_equal(rows.images[::2], train.images)
    np.testing.assert_array_equal(rows.images[1::2], crafted.images)
    assert rows.labels.dtype == np.int32 and isinstance(rows, Batch)


def test_batches_are_padded_and_cut():
    images = np.arange(7, dtype=np.float32).reshape(7, 1, 1, 1)
    found = learned_rows.in_batches(lambda x: 2 * x[:, 0, 0], images, size=3)
    np.testing.assert_array_equal(found, 2 * images[:, 0, 0])


# ---- refusals


@every
def test_adversarial_images_are_needed(name):
    data = learned_toys.data(train=8, select=8)._replace(adversarial_train=None)
    with pytest.raises(InputError, match=f"{name} learns from adversarial.*adversarial_train"):
        SMALL[name].fit(jax.random.key(0), classifier(), data)


def test_the_subnetwork_needs_held_out_images_and_a_feature_map():
    data = learned_toys.data(train=8, select=8)
    fit = lambda detector, data: detector.fit(jax.random.key(0), classifier(), data)
    with pytest.raises(InputError, match="needs adversarial_select"):
        fit(InnerLayer(), data._replace(adversarial_select=None))
    with pytest.raises(InputError, match="wants the features ad3; this classifier has: conv1, "):
        fit(InnerLayer(feature="ad3"), data)
    with pytest.raises(InputError, match=r"penultimate has the shape \[32\]"):
        fit(InnerLayer(feature="penultimate"), data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OutlierClass(epochs=0),
        lambda: Binary(epochs=0),
        lambda: InnerLayer(epochs=0),
        lambda: InnerLayer(trials=0),
        lambda: InnerLayer(trial_images=0),
    ],
)
def test_hyperparameters_below_one_are_refused(make):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        make()
