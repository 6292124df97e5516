"""The checks of the contract, each against a fault that was planted for it."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_detectors
import toys

import advdet
from advdet import contract, contract_gradients, contract_scores, defenses
from advdet.detectors import NoDetector
from advdet.types import Batch, Classifier
from experiments import check as command

BATCH = Batch(toys.digits(3, 12), np.zeros(12, np.int32), np.arange(12, dtype=np.int32))


@pytest.fixture(scope="module")
def scene():
    """A classifier and its data."""
    return toy_detectors.splits(wrong=0.0)


class Sound(advdet.Detector):
    """Brightness: keeps the contract."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return jnp.mean(jnp.square(images), axis=(1, 2, 3))


def scoring(function, **attributes):
    """A detector with this score of (key, images); class attributes by name."""
    method = lambda self, key, fitted, classifier, images: function(key, images)
    body = {"score": method, "__doc__": "Planted."} | attributes
    return type("Planted", (advdet.Detector,), body)()


def guarded(detector):
    return toys.guarded(toys.network(), detector)


mean = lambda x: jnp.mean(x, axis=(1, 2, 3))
drawn = lambda key, x: mean(x) + jax.random.uniform(key, x.shape[:1])


@jax.custom_vjp
def halved(x):
    return mean(jnp.square(x))


halved.defvjp(lambda x: (halved(x), x), lambda x, g: (g[:, None, None, None] * x / x[0].size,))


@jax.custom_vjp
def rootless(x):
    return mean(x)


rootless.defvjp(
    lambda x: (mean(x), x), lambda x, g: (jnp.sqrt(-jnp.abs(x)) * g[:, None, None, None],)
)

by_image = lambda check: lambda d: check(guarded(d), BATCH.images)
by_id = lambda check: lambda d: check(guarded(d), BATCH.images, BATCH.ids)
score_shape = by_image(contract_scores.score_shape)
randomness = by_image(contract_scores.score_randomness)
mates, gradient = by_id(contract_scores.score_batch_mates), by_id(contract_gradients.gradient)
RANDOM, NO_SLOPE = dict(random=True), dict(differentiable=False)
numpy_state = np.random.RandomState(0)

# What is planted -> (check, detector, level, words that the finding holds).
PLANTED = {
    "a column": (score_shape, scoring(lambda k, x: mean(x)[:, None]), "fault", "shape [12, 1]"),
    "one number": (score_shape, scoring(lambda k, x: jnp.mean(x)), "fault", "shape []"),
    "integers": (score_shape, scoring(lambda k, x: mean(x).astype(jnp.int32)), "fault", "int32"),
    "a logarithm": (score_shape, scoring(lambda k, x: -jnp.log(mean(x))), "fault", "on a black"),
    "NaN everywhere": (score_shape, scoring(lambda k, x: mean(x) * jnp.nan), "fault", "24 of 24"),
    "silent draws": (randomness, scoring(drawn), "fault", "set `random"),
    "declared draws": (randomness, scoring(drawn, **RANDOM), "ok", "as declared"),
    "no draws": (randomness, scoring(lambda k, x: mean(x), **RANDOM), "warning", "every key"),
    "NumPy's draws": (
        by_image(contract_scores.score_compiled),
        scoring(lambda k, x: mean(x) + numpy_state.rand()), "fault", "differ by up to",
    ),
    "centred on the batch": (
        mates, scoring(lambda k, x: mean(x) - jnp.mean(x)), "fault", "other images in the batch",
    ),
    "random, on the batch": (
        mates, scoring(lambda k, x: drawn(k, x) * jnp.mean(x), **RANDOM), "fault", "each image",
    ),
    "alone": (mates, scoring(lambda k, x: mean(x)), "ok", "no influence"),
    "rounded": (gradient, scoring(lambda k, x: mean(jnp.round(9 * x))), "fault", "no rounding"),
    "stopped": (gradient, scoring(lambda k, x: jax.lax.stop_gradient(mean(x))), "fault", "zero"),
    "half of it": (gradient, scoring(lambda k, x: halved(x)), "fault", "right on 0 of 12"),
    "a root of 0": (
        gradient, scoring(lambda k, x: jnp.sqrt(jnp.sum(x, axis=(1, 2, 3)))), "fault",
        "not finite on 1",
    ),
    "NaN slopes": (gradient, scoring(lambda k, x: rootless(x)), "fault", "not finite"),
    "no jax": (
        gradient, scoring(lambda k, x: jnp.asarray(np.asarray(x).mean((1, 2, 3)))), "fault",
        "write it in jax.numpy",
    ),
    "rounded, as declared": (
        gradient, scoring(lambda k, x: mean(jnp.round(9 * x)), **NO_SLOPE), "ok", "as declared",
    ),
    "a slope undeclared": (
        gradient, scoring(lambda k, x: mean(x), **NO_SLOPE), "warning", "leave `differentiable`",
    ),
    "of many digits": (
        gradient, scoring(lambda k, x: 1e4 + jnp.sum(jnp.square(x), axis=(1, 2, 3))), "ok",
        "right on 12 of 12",
    ),
    "flat on some": (
        gradient, scoring(lambda k, x: jnp.maximum(mean(x), 0.47)), "warning", "zero on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_of_a_score_is_found(what):
    check, detector, level, said = PLANTED[what]
    found = check(detector)
    assert found.level == level, found
    assert said in f"{found.said} {found.change}", found
    assert (found.level == "ok") == (found.change == "")


def changed(network, image=lambda x: x, logit=lambda x: x):
    return Classifier(network.variables, toy_detectors.Changed(network.apply, image, logit))


CLASSIFIERS = {
    "probabilities": (dict(logit=jax.nn.softmax), "classifier_logits", "probabilities"),
    "NaN": (dict(logit=lambda x: x * jnp.nan), "classifier_logits", "not finite"),
    "nine": (dict(logit=lambda x: x[:, :9]), "classifier_logits", "(100, 9)"),
    "half precision": (dict(logit=lambda x: x.astype(jnp.float16)), "classifier_logits", "float16"),
    "0 to 255": (dict(image=lambda x: x / 255), "classifier_images", "multiplied by 255"),
    "inverted": (dict(image=lambda x: 1 - x), "classifier_images", "images inverted"),
    "turned": (
        dict(image=lambda x: x.transpose(0, 2, 1, 3)), "classifier_images", "height and width"
    ),
    "channels first": (
        dict(image=lambda x: jax.lax.slice(x, (0, 0, 0, 0), (x.shape[0], 1, 8, 8)).transpose(
            0, 2, 3, 1)), "classifier_images", "channels first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CLASSIFIERS)
def test_a_planted_fault_of_a_classifier_is_found(what, scene):
    network, data = scene
    changes, check, said = CLASSIFIERS[what]
    where = data if check == "classifier_logits" else data.test
    look = getattr(contract, check)
    assert look(network, where).level == "ok"
    found = look(changed(network, **changes), where)
    assert found.level == "fault" and said in found.said and found.change, found


def test_an_untrained_classifier_is_warned_of(scene):
    _, data = scene
    found = contract.classifier_images(toys.network(5), data.test)
    assert found.level == "warning" and "is it trained" in found.change


@dataclasses.dataclass(frozen=True)
class WithArray(Sound):
    """Keeps an array as a hyperparameter."""

    weights: object = dataclasses.field(default_factory=lambda: np.ones(3))


@dataclasses.dataclass(frozen=True)
class WithList(Sound):
    """Keeps a list."""

    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(frozen=True)
class Blind(Sound):
    """Leaves a hyperparameter out of the comparison."""

    size: int = dataclasses.field(default=3, compare=False)


class Bare(Sound):
    """Takes a hyperparameter without being a dataclass."""

    def __init__(self, size=3):
        object.__setattr__(self, "size", size)


@dataclasses.dataclass(frozen=True, eq=False)
class ById(Sound):
    """Equal to itself alone."""

    size: int = 3

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@pytest.mark.parametrize("kind", [WithArray, WithList, Blind, Bare, ById])
def test_hyperparameters_that_are_no_values_are_found(kind):
    found = contract.equality_by_value(kind())
    assert found.level == "fault" and found.change, found


def test_kinds_and_flags_that_are_not_known_are_found():
    look = lambda **attributes: contract.kind_and_flags(scoring(lambda k, x: x, **attributes))
    assert look().level == "ok"
    assert "kind is 'scores'" in look(kind="scores").said
    assert "random is no bool" in look(random=1).said
    assert "without p_value" in look(kind="set").said
    silent = type("Silent", (advdet.Detector,), {})()
    assert "without score" in contract.kind_and_flags(silent).said


def test_what_a_fit_must_not_do_is_found():
    network, detector = toys.network(), Sound()
    variables = jax.tree.map(np.array, network.variables)
    network = Classifier(variables, network.apply)
    before = contract.snapshot(detector, network)
    assert contract.unchanged_by_fit(before, detector, network).level == "ok"
    object.__setattr__(detector, "mean", 3.0)
    assert "fit wrote mean" in contract.unchanged_by_fit(before, detector, network).said
    before = contract.snapshot(detector, network)
    variables["w1"][0, 0] = np.nextafter(variables["w1"][0, 0], np.float32(9))  # its last bit
    assert "changed 1 arrays" in contract.unchanged_by_fit(before, detector, network).said
    assert contract.learned_arrays(()).level == "ok"
    assert contract.learned_arrays({"a": np.ones(3), "b": 2.0}).level == "ok"
    assert contract.learned_arrays({"a": "text"}).level == "fault"
    assert contract.learned_arrays({"a": np.array(["x"])}).level == "fault"
    assert contract.learned_arrays({"a": np.array([np.nan])}).level == "warning"


def test_a_score_that_points_the_wrong_way_is_found():
    dark = BATCH._replace(images=np.float32(0.3 * BATCH.images))
    look = lambda d, *parts: contract_scores.score_direction(guarded(d), *parts)
    assert look(Sound(), dark, BATCH).level == "ok"
    turned = scoring(lambda k, x: -mean(jnp.square(x)))
    found = look(turned, dark, BATCH)
    assert found.level == "fault" and "return the negative" in found.change
    assert found.value < 0.2
    assert look(Sound(), BATCH, BATCH).level == "warning"
    assert "fooled the classifier on 3" in look(Sound(), dark, BATCH.take(slice(3))).said


def test_thresholds_that_do_not_carry_over_are_found():
    def look(score, seen, fresh):
        fitted = defenses.with_thresholds(
            jax.random.key(0), scoring(score), toys.network(), (), seen
        )
        return contract_scores.false_positives(fitted, seen, fresh)

    part = lambda seed: Batch(toys.digits(seed, 200), np.zeros(200), np.arange(200))
    seen, fresh = part(1), part(2)
    bright = lambda k, x: mean(x)
    assert look(bright, seen, fresh).level == "ok"
    moved = fresh._replace(images=np.clip(fresh.images + 0.1, 0, 1))
    assert look(bright, seen, moved).level == "fault"
    tied = look(lambda k, x: jnp.float32(mean(x) > 0.2), seen, fresh)
    assert tied.level == "warning" and "equal the threshold" in tied.change and tied.value == 0


def test_native_thresholds_and_logits_that_are_wrong_are_found():
    planted = lambda value: scoring(lambda k, x: mean(x), native_threshold=lambda self, f: value)
    look = lambda d: contract_scores.native_threshold(defenses.FittedDefense(guarded(d), {}))
    assert look(Sound()).level == "ok" and look(planted(0.3)).level == "ok"
    for wrong in (np.float32(0.3), float("inf"), "0.3"):
        assert look(planted(wrong)).level == "fault"

    def logits(function):
        method = lambda self, key, fitted, classifier, images: function(
            key, classifier(images).logits
        )
        detector = type("Planted", (advdet.Detector,), {"logits": method, "kind": "corrector"})()
        return contract_scores.logits_shape(guarded(detector), BATCH.images, 10)

    assert logits(lambda k, x: x).level == "ok"
    assert "probabilities" in logits(lambda k, x: jax.nn.softmax(x)).said
    assert "shape [12, 9]" in logits(lambda k, x: x[:, 1:]).said
    assert "not finite" in logits(lambda k, x: jnp.log(x)).said
    assert contract_gradients.gradient(guarded(NoDetector()), BATCH.images, BATCH.ids).level == "ok"


def test_p_values_that_are_none_are_found():
    def look(function):
        p_value = lambda self, key, fitted, classifier, images: function(images)
        body = {"kind": "set", "set_size": 12, "p_value": p_value}
        return contract_scores.set_p_value(
            guarded(type("Planted", (advdet.Detector,), body)()), dark
        )

    dark = np.float32(0.3 * BATCH.images)
    assert look(lambda x: 1.0 - jnp.mean(x)).level == "ok"
    assert "1 - p" in look(lambda x: jnp.mean(x)).change
    assert "in [0, 1]" in look(lambda x: 5.0 - jnp.mean(x)).change
    assert look(lambda x: mean(x)).level == "fault"


def test_splits_that_share_an_image_are_found(scene):
    _, data = scene
    assert contract.splits_disjoint(data).level == "ok"
    ids = data.test.ids.copy()
    ids[0] = data.train.ids[0]
    shared = dataclasses.replace(data, test=data.test._replace(ids=ids))
    assert "train and test share" in contract.splits_disjoint(shared).said


@dataclasses.dataclass(frozen=True)
class Learner(toy_detectors.Near):
    """Wants adversarial images, and says where it got none."""

    needs_adversarial: ClassVar[bool] = True

    def fit(self, key, classifier, data):
        made = data.adversarial_train
        rows = np.searchsorted(np.sort(data.train.ids), made.ids)
        assert len(made.ids) > 100 and len(data.adversarial_select.ids) > 10
        assert np.isin(made.ids, data.train.ids).all() and rows.max() < len(data.train.ids)
        return super().fit(key, classifier, data)


def test_a_whole_check_of_a_sound_detector_finds_no_fault(scene):
    network, data = scene
    told = []
    found = advdet.check(Learner(), classifier=network, data=data, tell=told.append, progress=False)
    assert told == found
    names = [finding.name for finding in found]
    assert len(names) == len(set(names)) == 17
    faults = [finding for finding in found if finding.level == "fault"]
    assert not faults, faults
    assert found[-1].name == "speed" and found[-1].value > 0
    lines = "\n".join(map(command.show, found))
    assert "ok       score: gradient" in lines


@dataclasses.dataclass(frozen=True)
class Raises(Sound):
    """Fails where it is told to."""

    where: str = "fit"

    def fit(self, key, classifier, data):
        if self.where == "fit":
            raise RuntimeError("no such layer\nand more")
        return ()

    def score(self, key, fitted, classifier, images):
        if self.where == "score":
            raise ValueError("bad shapes")
        return super().score(key, fitted, classifier, images)


@pytest.mark.parametrize("where", ["fit", "score"])
def test_what_a_detector_raises_is_a_finding(where, scene):
    network, data = scene
    found = advdet.check(Raises(where), classifier=network, data=data, progress=False)
    last = found[-1]
    assert last.level == "fault" and last.name.startswith(where)
    assert {"fit": "RuntimeError: no such layer", "score": "ValueError: bad shapes"}[where] == (
        last.said
    )


def test_the_command_ends_with_1_where_there_is_a_fault(scene, monkeypatch, capsys):
    network, data = scene
    plain = advdet.check
    flag = lambda value: type("Flag", (), {"value": value})
    for name, value in dict(DATASET="toy", DATA_SOURCE="auto", DATA_DIR=None, SEED=0).items():
        monkeypatch.setattr(command.common, name, flag(value))
    monkeypatch.setattr(advdet, "check", lambda spec, **given: plain(
        spec, **(given | dict(data=data, classifier=network, progress=False))))  # fmt: skip
    monkeypatch.setattr(command.subject, "CLASSIFIER", flag(None))
    monkeypatch.setattr(command.subject, "DEFENSE", flag("toy_detectors:Near"))
    assert command.main() == 0
    assert "0 faults" in capsys.readouterr().out
    monkeypatch.setattr(command.subject, "DEFENSE", flag("test_check:Raises:where=score"))
    assert command.main() == 1
    said = capsys.readouterr().out
    assert "1 faults" in said and "-> make it run on" in said
