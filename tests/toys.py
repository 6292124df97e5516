"""Small classifiers and detectors whose truth is known, and one way to attack them.

Everything that is attacked through `attack` has one image shape, one number of rows and one number
of lanes, so that tests share compiled programs.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from advdet import defenses, nets
from advdet.attacks import driver
from advdet.attacks.goals import margin
from advdet.detectors import Detector
from advdet.splits import Splits
from advdet.types import Classifier, Outputs

SHAPE, PIXELS, CLASSES, HIDDEN = (8, 8, 1), 64, 10, 16
ROWS, LANES = 16, 4

# How often each toy's Python code ran: once for each trace (or each call outside of jit).
calls = collections.Counter()


@dataclasses.dataclass(frozen=True)
class ToyApply:
    """logits = dropout(tanh(x w1)) w2 + x skip + bias, of x = image - 0.5; linear where w2 = 0."""

    def __call__(self, variables, images, key=None):
        calls["classifier"] += 1
        flat = images.reshape(images.shape[0], -1) - 0.5
        product = lambda a, name: jnp.matmul(a, variables[name], precision="highest")
        hidden = jnp.tanh(product(flat, "w1"))
        used = hidden if key is None else nets.dropout(key, hidden)
        logits = product(used, "w2") + product(flat, "skip") + variables["bias"][None]
        return Outputs(logits, {"penultimate": hidden})


def classifier(*, w1=None, w2=None, skip=None, bias=None, classes=CLASSES) -> Classifier:
    """A toy classifier; what is not given is zero."""
    shapes = {
        "w1": (PIXELS, HIDDEN),
        "w2": (HIDDEN, classes),
        "skip": (PIXELS, classes),
        "bias": (classes,),
    }
    given = {"w1": w1, "w2": w2, "skip": skip, "bias": bias}
    zero_where_none = lambda name: np.zeros(shapes[name]) if given[name] is None else given[name]
    return Classifier({n: jnp.asarray(zero_where_none(n), jnp.float32) for n in shapes}, ToyApply())


def network(seed: int = 0, **changes) -> Classifier:
    """A two-layer network with fixed random weights."""
    random = np.random.RandomState(seed)
    weights = {
        "w1": 0.4 * random.randn(PIXELS, HIDDEN),
        "w2": random.randn(HIDDEN, CLASSES),
        "bias": 0.1 * random.randn(CLASSES),
    }
    return classifier(**(weights | changes))


def logits64(variables, image: np.ndarray) -> np.ndarray:
    """The toy's logits [K] of one image, in float64."""
    v = {name: np.asarray(value, np.float64) for name, value in variables.items()}
    flat = np.asarray(image, np.float64).ravel() - 0.5
    return np.tanh(flat @ v["w1"]) @ v["w2"] + flat @ v["skip"] + v["bias"]


def margin64(variables, image: np.ndarray, target: int) -> tuple[float, np.ndarray]:
    """Best other logit minus the target's and its gradient (shape of the image), in float64."""
    v = {name: np.asarray(value, np.float64) for name, value in variables.items()}
    logits = logits64(variables, image)
    others = np.where(np.arange(len(logits)) == target, -np.inf, logits)
    slope = np.zeros(len(logits))
    slope[others.argmax()], slope[target] = 1.0, -1.0
    hidden = np.tanh((np.asarray(image, np.float64).ravel() - 0.5) @ v["w1"])
    gradient = v["w1"] @ ((1.0 - hidden**2) * (v["w2"] @ slope)) + v["skip"] @ slope
    return others.max() - logits[target], gradient.reshape(np.shape(image))


@dataclasses.dataclass(frozen=True)
class LinearScore(Detector):
    """Suspicion is a linear function of the image; `fitted` is its direction [PIXELS]."""

    def score(self, key, fitted, classifier, images):
        del key, classifier
        calls["detector"] += 1
        return jnp.matmul(images.reshape(images.shape[0], -1), fitted, precision="highest")


@dataclasses.dataclass(frozen=True)
class Coin(Detector):
    """Suspicion is a uniform number, whatever the image."""

    random: ClassVar[bool] = True

    def score(self, key, fitted, classifier, images):
        del fitted, classifier
        return jax.random.uniform(key, (images.shape[0],)) + 0.0 * images[:, 0, 0, 0]


@dataclasses.dataclass(frozen=True)
class Ink(Detector):
    """Suspects much ink: an honest detector that is easily got round."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return jnp.mean(images, axis=(1, 2, 3))


@dataclasses.dataclass(frozen=True)
class Certainty(Detector):
    """The wrong way round: attacked images are the uncertain ones."""

    def score(self, key, fitted, classifier, images):
        del key, fitted
        best = jax.lax.top_k(classifier(images).logits, 2)[0]
        return best[:, 0] - best[:, 1]


@dataclasses.dataclass(frozen=True)
class Dark(Ink):
    """Decides instead of scoring: a ninth of clean images are flagged."""

    differentiable: ClassVar[bool] = False

    def score(self, key, fitted, classifier, images):
        found = super().score(key, fitted, classifier, images)
        return (found > 0.545).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Mark(Detector):
    """Reads the label from the first pixels too, and suspects images whose classes differ.

    `hard` is a step: the same decision, and no gradient.
    """

    hard: bool = False

    def score(self, key, fitted, classifier, images):
        del key, fitted
        marks = images.reshape(images.shape[0], -1)[:, :CLASSES]
        logits = classifier(images).logits
        given = jnp.arange(CLASSES)[None] == jnp.argmax(logits, axis=1)[:, None]
        own, other = (jnp.max(jnp.where(m, marks, 0.0), axis=1) for m in (given, ~given))
        return (other > own).astype(jnp.float32) if self.hard else other - own


@dataclasses.dataclass(frozen=True)
class DeclaredMark(Mark):
    """The same, and says that it has no gradients."""

    differentiable: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class SquareRoots(Detector):
    """The mean root of the pixels, whose gradient at a black one is infinite."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return jnp.mean(jnp.sqrt(images), axis=(1, 2, 3))


@dataclasses.dataclass(frozen=True)
class Constant(Detector):
    """The same suspicion of everything."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        return 0.5 + 0.0 * images[:, 0, 0, 0]


@dataclasses.dataclass(frozen=True)
class WrongInk(Ink):
    """Suspects much ink, and hands out another gradient: "negated", or "shattered"."""

    how: str = "negated"

    def score(self, key, fitted, classifier, images):
        honest = super().score(key, fitted, classifier, images)
        away = {"negated": -images, "shattered": jnp.cos(1e5 * images)}[self.how]
        other = jnp.mean(away, axis=(1, 2, 3))
        return jax.lax.stop_gradient(honest - other) + other


@dataclasses.dataclass(frozen=True)
class SometimesNaN(Detector):
    """Suspects much ink; of images with few pixels that are black or white it says no number."""

    def score(self, key, fitted, classifier, images):
        del key, fitted, classifier
        extreme = jnp.mean((images <= 0) | (images >= 1), axis=(1, 2, 3))
        return jnp.where(extreme < 0.27, jnp.nan, jnp.mean(images, axis=(1, 2, 3)))


@dataclasses.dataclass(frozen=True)
class SoftmaxCorrector(Detector):
    """Changes nothing but the form of the answer: probabilities where logits belong."""

    kind: ClassVar[str] = "corrector"

    def logits(self, key, fitted, classifier, images):
        del key, fitted
        return jax.nn.softmax(classifier(images).logits)


@dataclasses.dataclass(frozen=True)
class Changed:
    """A toy's logits, put through a function."""

    how: str

    def __call__(self, variables, images, key=None):
        logits = ToyApply()(variables, images, key).logits
        functions = {
            "rounded": lambda x: jnp.round(4.0 * x) / 4.0,
            "sigmoid": jax.nn.sigmoid,
            "percent": lambda x: 100.0 * jax.nn.softmax(x),
            "waves": lambda x: jnp.sin(300.0 * x),
        }
        return Outputs(functions[self.how](logits), {})


def changed(classifier: Classifier, how: str) -> Classifier:
    """The classifier with its logits rounded, as sigmoids, in percent, or as waves."""
    return Classifier(classifier.variables, Changed(how))


def blind_network(seed: int = 0) -> Classifier:
    """A network that does not see the pixels of the mark."""
    w1 = 0.4 * np.random.RandomState(seed).randn(PIXELS, HIDDEN)
    w1[:CLASSES] = 0.0
    return network(seed, w1=w1)


def splits(classifier: Classifier, count: int = 100, marked: bool = False) -> Splits:
    """Random images with the labels that the classifier gives them, marked with these or not."""
    parts = {}
    for part, seed, number in (("test", 10, count), ("clean", 11, 5 * count)):
        images = digits(seed, number)
        labels = predicted(classifier, images)
        if marked:
            marks = images.reshape(number, -1)[:, :CLASSES]
            marks[:] = 0.2 * marks + 0.7 * np.eye(CLASSES)[labels]
        parts[part] = images, labels
    return Splits.from_arrays(name="toy", class_names=tuple("0123456789"), **parts)


def guarded(classifier, detector, fitted=(), threshold=0.0, scale=1.0) -> defenses.Defense:
    """A defence with a threshold given by hand."""
    return defenses.Defense(
        classifier, fitted, jnp.float32(threshold), jnp.float32(scale), detector
    )


def digits(seed: int = 1, count: int = ROWS) -> np.ndarray:
    """Random images of which half of the pixels are exactly 0 or 1, as a digit's are."""
    values = np.random.RandomState(seed).uniform(-0.5, 1.5, (count, *SHAPE))
    return np.clip(values, 0.0, 1.0).astype(np.float32)


def predicted(classifier: Classifier, images: np.ndarray) -> np.ndarray:
    """The classes that the classifier gives."""
    return np.asarray(classifier(jnp.asarray(images)).logits.argmax(1), np.int32)


def wrong_targets(classifier: Classifier, images: np.ndarray) -> np.ndarray:
    """A class other than the predicted one for each image."""
    steps = 1 + np.arange(len(images), dtype=np.int32) % (CLASSES - 1)
    return (predicted(classifier, images) + steps) % np.int32(CLASSES)


def attack(attack, objective, defense, images, targets, *, seed=0, todo=None, **options):
    """Runs up to ROWS images through the driver, padded to ROWS; the results of these images.

    Rows not in `todo` are meaningless.
    """
    count = len(images)
    pad = lambda a: np.concatenate([a, np.repeat(a[:1], ROWS - count, axis=0)])
    ids = options.pop("ids", np.arange(count, dtype=np.int32))
    for name in ("start", "free"):
        if name in options:
            options[name] = pad(options[name])
    progress = driver.run(
        jax.random.key(seed),
        attack,
        objective,
        defense,
        pad(np.asarray(images, np.float32)),
        pad(np.asarray(targets, np.int32)),
        np.concatenate([ids, 10_000 + np.arange(ROWS - count, dtype=np.int32)]),
        lanes=LANES,
        todo=np.arange(count) if todo is None else todo,
        **options,
    )
    return jax.tree.map(lambda a: a[:count], progress.results)


def margins(classifier: Classifier, images: np.ndarray, targets, targeted: bool = True):
    """[N] margins that an attacker brings below zero."""
    one = lambda logits, target: margin(logits, target, targeted)
    return np.asarray(jax.vmap(one)(classifier(jnp.asarray(images)).logits, jnp.asarray(targets)))


def assert_same_bits(one, other, rows=slice(None)):
    """All fields of two results are equal bit for bit (NaN equals NaN) in these rows."""
    for name, left, right in zip(one._fields, one, other):
        np.testing.assert_array_equal(left[rows], right[rows], err_msg=name)
