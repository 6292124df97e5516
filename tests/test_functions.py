"""Plain functions as classifiers and detectors: what they are given, what is refused, records."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import own_data
import own_jax
import pytest
import toys

import advdet
from advdet import bridges, detectors, fits, inputs, nets, provenance, settings, victims
from advdet.attacks.objectives import Generic
from advdet.defenses import score_images
from advdet.detectors.function import Held
from advdet.types import Batch, Classifier, FitData, InputError, Outputs

IMAGES = toys.digits()
BATCH = Batch(IMAGES, np.arange(16, dtype=np.int32) % 10, np.arange(16, dtype=np.int32))
from_function = advdet.Detector.from_function


def brightness(images):
    return jnp.mean(images, axis=(1, 2, 3))


# ---- what a function is given


def test_a_score_gets_what_its_parameters_ask_for():
    seen = {}

    def all_of_it(key, x, classifier, fitted):
        seen.update(key=key, classifier=classifier, fitted=fitted)
        return brightness(x)

    detector = from_function(all_of_it)
    key, network = jax.random.key(4), toys.network()
    scores = detector.score(key, {"a": 1}, network, jnp.asarray(IMAGES))
    np.testing.assert_allclose(scores, IMAGES.mean((1, 2, 3)), rtol=1e-6)
    assert seen == {"key": key, "classifier": network, "fitted": {"a": 1}}


@pytest.mark.parametrize(
    "fit",
    [
        lambda x, y: (x, y),
        lambda labels, images: (images, labels),
        lambda x, labels, key=None: (x, labels),
        lambda *arrays: arrays,
        functools.partial(lambda x, y, more: (x, y), more=3),
    ],
)
def test_a_fit_gets_images_and_labels_however_they_are_called(fit):
    detector = from_function(brightness, fit=fit)
    images, labels = detector.fit(jax.random.key(0), toys.network(), FitData(BATCH, BATCH))
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(labels, BATCH.labels)
    assert detector.learns and not from_function(brightness).learns


def test_a_fit_gets_key_seed_classifier_and_data_by_name():
    seen = {}

    def fit(images, labels, key, seed, classifier, data):
        seen.update(locals())
        return object()

    network, data = toys.network(), FitData(BATCH, BATCH)
    held = from_function(brightness, fit=fit).fit(jax.random.key(0), network, data)
    assert isinstance(held, Held) and jax.tree.leaves(held) == []  # no array: carried as it is
    assert seen["classifier"] is network and seen["data"] is data
    assert isinstance(seen["seed"], int) and jnp.issubdtype(seen["key"].dtype, jax.dtypes.prng_key)


def test_what_is_said_of_a_score_follows_from_it_unless_told():
    plain, drawn = from_function(brightness), from_function(lambda key, x: brightness(x))
    assert (plain.name, plain.differentiable, plain.random) == ("brightness", True, False)
    assert (drawn.name, drawn.random) == ("own_detector", True)
    numpy = from_function(bridges.numpy_score(brightness))
    assert not numpy.differentiable and numpy.name == "brightness"
    told = from_function(brightness, differentiable=False, random=True, name="mine")
    assert (told.name, told.differentiable, told.random) == ("mine", False, True)


def test_detectors_of_one_function_are_equal_and_share_programs():
    one, other = from_function(brightness), from_function(brightness)
    assert one == other and hash(one) == hash(other) and one != from_function(brightness, name="b")
    assert one != from_function(lambda x: brightness(x), name="brightness")


def test_names_are_those_of_files():
    assert detectors.name_of(from_function(brightness, name="dropout")) == "own_dropout"
    with pytest.raises(InputError, match="name 'my own' must be one word"):
        from_function(brightness, name="my own")


def test_a_classifier_may_give_features_and_take_a_key():
    def logits(images, key):
        flat = images.reshape(len(images), -1)
        return Outputs(flat[:, :10] + (0 if key is None else 1), {"penultimate": flat})

    classifier = Classifier.from_function(logits)
    assert classifier(IMAGES).features["penultimate"].shape == (16, 64)
    with_key = classifier(IMAGES, jax.random.key(0)).logits
    np.testing.assert_allclose(with_key, classifier(IMAGES).logits + 1)
    with pytest.raises(InputError, match="dropout on by a key, and logits_fn has no parameter"):
        own_data.jax_classifier()(IMAGES, jax.random.key(0))


def test_foreign_code_runs_under_jax_s_usual_settings():
    # The tests refuse implicit promotion; a stranger's code need not know.
    classifier = Classifier.from_function(lambda x: x.reshape(len(x), -1)[:, :10] + np.ones(10))
    assert classifier(IMAGES).logits.dtype == jnp.float32


# ---- refusals


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: from_function(3), "score_fn must be a function, not int"),
        (lambda: from_function(lambda: 0), "score_fn takes no images"),
        (lambda: from_function(lambda x, beta: x), "a parameter 'beta' that nothing is known for"),
        (lambda: from_function(brightness, fit=lambda x, y, z: x), "fit has a parameter 'z'"),
        (lambda: Classifier.from_function(lambda x, fitted: x), "logits_fn has a parameter 'fit"),
        (lambda: Classifier.from_function(lambda x: x.sum((1, 2, 3)))(IMAGES),
         r"shape \(16,\) for 16 images; wanted \[16, K\]"),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_used_are_refused_in_words(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "score, message",
    [
        (lambda x: x.sum(1)[:, :3, 0], r"shape \(1, 3\) for 1 images; wanted \[1\]"),
        (lambda x: x.sum(1)[:, :2, 0], r"z\[:, 1\] - z\[:, 0\] is a score"),
        (lambda x: np.sum(np.asarray(x), axis=(1, 2, 3)), "no JAX function .*numpy_score"),
        (lambda x: brightness(x) if x.max() > 0 else 0, "no JAX function"),
    ],
)
def test_scores_that_jax_cannot_trace_are_refused_in_words(score, message):
    defense = toys.guarded(toys.network(), from_function(score))
    with pytest.raises(InputError, match=message):
        score_images(jax.random.key(0), defense, IMAGES, BATCH.ids)


@pytest.fixture(scope="module")
def data():
    return own_data.splits()


def _evaluate(detector=brightness, **given):
    given = (
        dict(classifier=own_data.jax_classifier(), data=own_data.splits(), progress=False) | given
    )
    return advdet.evaluate(from_function(detector) if callable(detector) else detector, **given)


def test_limited_knowledge_without_a_copy_is_refused_before_anything_runs():
    said = r"needs a surrogate: a detector with a `fit`, or surrogate=\(classifier, detector\)"
    with pytest.raises(InputError, match=said):
        _evaluate(threat_model="limited_knowledge", classifier=None, data="no such set")


def test_a_fit_needs_training_images():
    bare = own_data.splits(with_train=False)
    with pytest.raises(InputError, match="reconstruction has a `fit`, and the data hold no train"):
        _evaluate(own_jax.detector, data=bare)
    assert victims.defend(from_function(brightness), own_data.jax_classifier(), bare).thresholds


def test_a_score_without_gradients_asks_for_an_attack_without():
    blind = from_function(bridges.numpy_score(lambda x: x.mean((1, 2, 3))))
    for given in (
        {"attack": "ddn"},
        {"attack": "carlini_wagner", "threat_model": "perfect_knowledge"},
    ):
        with pytest.raises(InputError, match=r"it has none .*take square"):
            _evaluate(blind, **given)
    unseen = Classifier.from_function(lambda x: x, differentiable=False)

    def choose(detector=blind, attack=None, threat_model="perfect_knowledge", classifier=None):
        plan = settings.fill(
            "own", detector, data="mnist", preset="fast", attack=attack, objective=None,
            threat_model=threat_model, num_images=None, targets=None, operating_point=None,
            confidence=None, detector_margin=None, margin_rate=None, lanes=None, train_attack=None,
            seed=0, attack_settings={}, classifier=classifier,
        )  # fmt: skip
        return plan.attacks

    assert choose() == choose(attack="square") == ("square",)
    strong = ("carlini_wagner", "ddn")
    assert choose(threat_model="zero_knowledge") == strong  # he follows the classifier alone
    assert choose(from_function(brightness)) == strong
    assert choose(from_function(brightness), classifier=unseen) == ("square",)
    with pytest.raises(InputError, match="the classifier says that it has none"):
        choose(attack="ddn", threat_model="zero_knowledge", classifier=unseen)


def test_classifiers_are_looked_at_before_anything_runs(data):
    weights, bias = own_data.linear()
    flat = lambda x: x.reshape(len(x), -1)
    for logits, message in (
        (lambda x: jax.nn.softmax(flat(x) @ weights + bias), "returns probabilities"),
        (lambda x: flat(x) @ weights * np.nan, "logits are not finite"),
        (lambda x: flat(x)[:, :12], r"wanted \[100, 10\] logits \(give .*num_classes=12"),
        (lambda x: flat(x - x.mean(0)) @ weights, "depends on the other images of its batch"),
        (lambda x: x.transpose(0, 3, 1, 2) @ weights, "cannot be called on images of shape"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            inputs.check_classifier(Classifier.from_function(logits), data)
    assert inputs.accuracy_warning(own_data.jax_classifier(), data) is None
    shifted = Classifier.from_function(lambda x: jnp.roll(flat(x) @ weights + bias, 1, axis=1))
    assert "trained with?" in inputs.accuracy_warning(shifted, data)


def test_scores_that_waver_are_refused(data):
    counter = iter(range(10_000))
    by_batch = bridges.numpy_score(lambda x: x.mean((1, 2, 3)) - x.mean())
    by_time = bridges.numpy_score(lambda x: x.mean((1, 2, 3)) + next(counter))
    for score, message in ((by_batch, "other images of its batch"), (by_time, "each time")):
        defense = toys.guarded(own_data.jax_classifier(), from_function(score))
        with pytest.raises(InputError, match=f"the score .*{message}"):
            inputs.check_score(defense, data)
    inputs.check_score(toys.guarded(own_data.jax_classifier(), from_function(brightness)), data)


@pytest.mark.parametrize(
    ("detector", "classifier", "message"),
    [
        (brightness, None, "a detector is expected, not function: wrap"),
        (from_function(brightness), brightness, "an advdet.Classifier is expected, not function"),
        (from_function(lambda x: x.flatten(1).sum(1, 2)), own_data.jax_classifier(),
         "score_fn cannot be called on images of shape"),
    ],
)  # fmt: skip
def test_what_nobody_has_wrapped_is_refused_in_words(detector, classifier, message, data):
    with pytest.raises(InputError, match=message):
        advdet.evaluate(detector, classifier=classifier, data=data, progress=False)


def test_few_clean_images_are_warned_of(data):
    assert inputs.few_clean_warning(data) is None
    few = dataclasses.replace(data, threshold=data.threshold.take(slice(30)))
    assert "rest on 30 clean images" in inputs.few_clean_warning(few)


def test_bytes_that_do_not_reach_255_are_pointed_out(data):
    assert inputs.dark_warning(data) is None
    digits = np.round(data.test.images * 16).astype(np.uint8)  # as scikit-learn has them
    test, clean = ((digits[rows], data.test.labels[rows]) for rows in (slice(9), slice(9, None)))
    dark = advdet.Splits.from_arrays(test=test, clean=clean, num_classes=10)
    assert "exceeds 0.0627" in inputs.dark_warning(dark)
    assert "where white is 16 give floats" in inputs.dark_warning(dark)


def test_without_a_surrogate_a_copy_that_cannot_be_trained_is_named(data):
    detector = advdet.Detector.from_function(
        lambda x, fitted: x.mean((1, 2, 3)) - fitted, fit=lambda images, labels: images.mean()
    )
    with pytest.raises(InputError, match="attacker's classifier is advdet's own .* pass surrogate"):
        advdet.evaluate(
            detector, classifier=own_data.jax_classifier(), data=data, progress=False,
            threat_model="limited_knowledge",
        )  # fmt: skip


def test_an_evaluation_is_a_few_lines_to_look_at(data):
    done = advdet.evaluate(
        from_function(brightness), classifier=own_data.jax_classifier(), data=data, attack="ddn",
        preset="smoke", num_images=8, progress=False,
    )  # fmt: skip
    head, line = repr(done).splitlines()
    assert head == "Evaluation of 8 images" and line.startswith(
        f"  ddn: {done.records['ddn']['verdict']}"
    )
    assert "; success " in line and " at 0.05" in line


# ---- whose record is it


def test_classifiers_without_arrays_have_fingerprints_of_their_own(data):
    images = data.test.images
    marks = {provenance.fingerprint(own_data.jax_classifier(half), images) for half in
             ("full", "defender", "attacker")}  # fmt: skip
    assert len(marks) == 3
    weights, bias = own_data.linear()
    same = Classifier.from_function(lambda x: x.reshape(len(x), -1) @ weights + bias)
    assert provenance.fingerprint(same, images) in marks


def test_fingerprints_of_advdet_s_own_networks_are_of_their_weights_alone():
    classifier = nets.init(jax.random.key(0), nets.MnistNet(10), (28, 28, 1))
    plain = provenance.fingerprint(classifier)
    assert plain == provenance.fingerprint(classifier, np.ones((2, 28, 28, 1), np.float32))
    leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(classifier.variables))}
    assert plain == provenance.results.digest(leaves)[:16]


_IN_ANOTHER_PROCESS = """
import sys; sys.path[:0] = {paths!r}
import jax; jax.config.update("jax_num_cpu_devices", 2)
import importlib, own_data
from advdet import provenance
for name in {names!r}:
    module = importlib.import_module(name)
    print(provenance.fingerprint(module.classifier(), own_data.splits().test.images))
"""


def test_another_process_finds_the_same_fingerprints(data):
    names = ["own_jax"]
    try:
        import own_torch  # noqa: F401

        names.append("own_torch")
    except ImportError:
        pass
    here = [sys.modules[name].classifier() for name in names]
    wanted = [provenance.fingerprint(found, data.test.images) for found in here]
    code = _IN_ANOTHER_PROCESS.format(paths=[p for p in sys.path if p], names=names)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout.split() == wanted, ran.stderr[-2000:]


def _run_part(detector, data, fitted=(), classifier=None):
    given = dict(
        data=data, preset="smoke", attack="ddn", objective=None, threat_model="perfect_knowledge",
        num_images=None, targets=None, operating_point=None, confidence=None,
        detector_margin=None, margin_rate=None, lanes=None, train_attack=None, seed=0,
        attack_settings={},
    )  # fmt: skip
    name = detectors.name_of(detector)
    plan = settings.for_data(settings.fill(name, detector, **given), data)
    return provenance.run_part(
        plan, data, attack="ddn", attack_settings={}, objective=Generic(), defense_name=name,
        defense=toys.guarded(classifier or own_data.jax_classifier(), detector, fitted),
        threat_model="perfect_knowledge", surrogate=None, command=None,
    )  # fmt: skip


def test_scores_of_one_name_are_told_apart_by_their_answers(data):
    part = lambda *a, **k: _run_part(*a, data, **k)["settings_hash"]
    score = lambda scale: from_function(lambda x: scale * brightness(x), name="mine")
    assert part(score(1.0)) == part(score(1.0)) != part(score(2.0))
    fitted = from_function(lambda x, fitted: fitted * brightness(x), name="mine")
    ones = [part(fitted, fitted=jnp.float32(value)) for value in (1, 1, 3)]
    assert ones[0] == ones[1] != ones[2]
    assert part(score(1.0), classifier=own_data.jax_classifier("attacker")) != part(score(1.0))
    assert "answers" in _run_part(score(1.0), data)
    assert "answers" not in _run_part(detectors.from_spec("mean_blur_detector"), data)


def test_fits_for_foreign_classifiers_are_kept_apart(data, tmp_path, monkeypatch):
    monkeypatch.setenv("ADVDET_CACHE", str(tmp_path))
    made = []
    monkeypatch.setattr(
        fits,
        "save",
        lambda path, *a, save=fits.save, **k: (made.append(path.name), save(path, *a, **k)),
    )
    detector = detectors.from_spec("input_pca")
    for half in ("full", "full", "attacker"):
        victims.defend(detector, own_data.jax_classifier(half), data, progress=False)
    assert len(made) == len(set(made)) == 2  # the second was read, the third is another's


def test_a_score_may_be_a_column():
    column = lambda x: x.mean((1, 2, 3))[:, None]
    in_numpy = bridges.numpy_score(column, gradient=column, name="in_numpy")
    plain, *columns = (
        score_images(jax.random.key(0), toys.guarded(toys.network(), from_function(score)), IMAGES,
                     BATCH.ids)
        for score in (brightness, column, in_numpy)
    )  # fmt: skip
    for found in columns:
        np.testing.assert_allclose(found, plain, rtol=1e-6)
