"""What a detector and its classifier must keep to: checks, each of which gives one finding.

`advdet.check` runs them on a detector of yours, the tests run them on every detector that ships.
A check looks at one promise of `Detector` or `Classifier`; where it is not kept, the finding says
what to change. Checks take what they look at and never fit, load or attack anything. Those of the
classifier, of the detector as a value and of its fit are here; `contract_scores` and
`contract_gradients` have the others.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from advdet.detectors import Detector
from advdet.detectors.function import Held
from advdet.inputs import check_classifier
from advdet.splits import Splits, assert_disjoint
from advdet.training import accuracy
from advdet.types import Batch, Classifier, InputError, PyTree

OK, WARNING, FAULT = "ok", "warning", "fault"
KINDS = ("score", "corrector", "set", "none")
_FLAGS = ("needs_adversarial", "differentiable", "random", "logit_score")
_MUCH_BETTER = 0.1  # in accuracy, for another range or layout to be the right one


class Finding(NamedTuple):
    """What one check found.

    Attributes:
      name: of the check, in words.
      level: ok, warning or fault.
      said: what was found, with its figure.
      change: what to change; empty where all is well.
      value: the figure as a number, where there is one.
    """

    name: str
    level: str
    said: str
    change: str = ""
    value: float | None = None


# ---- the classifier and the data


def splits_disjoint(splits: Splits) -> Finding:
    """No image serves two purposes: training, choosing, thresholds, test."""
    name = "splits"
    try:
        assert_disjoint(splits)
    except AssertionError as error:
        return Finding(name, FAULT, str(error), "give each image one id and put it into one split")
    counts = [f"{len(getattr(splits, s).ids):,} {s}" for s in ("train", "select", "threshold")]
    return Finding(name, OK, f"{', '.join(counts)}, {len(splits.test.ids):,} test, all disjoint")


def classifier_logits(classifier: Classifier, splits: Splits) -> Finding:
    """Logits, not probabilities, one finite row of K for each image."""
    name = "classifier: logits"
    try:
        check_classifier(classifier, splits)
    except InputError as error:
        return Finding(name, FAULT, str(error), "return what goes into the softmax, [B, K]")
    found = np.asarray(classifier(splits.threshold.images[:100]).logits)
    if found.dtype != np.float32:
        said = f"logits are {found.dtype}"
        return Finding(name, FAULT, said, "compute in float32: attacks flip on anything less")
    return Finding(
        name, OK, f"{splits.num_classes} classes, from {found.min():.3g} to {found.max():.3g}"
    )


def classifier_images(classifier: Classifier, batch: Batch) -> Finding:
    """Images in [0, 1], channels last, are what it wants: no other range or layout does better.

    Args:
      classifier: to be looked at.
      batch: [N] clean images with their labels.
    """
    name, right = "classifier: range, layout", "divide or normalise inside `apply`: it gets [0, 1]"
    turned = "transpose inside `apply`: it gets [B, H, W, C]"
    others = {
        "multiplied by 255": (lambda x: 255.0 * x, right),
        "moved to [-1, 1]": (lambda x: 2.0 * x - 1.0, right),
        "moved by -0.5": (lambda x: x - 0.5, right),
        "inverted": (lambda x: 1.0 - x, right),
        "with height and width exchanged": (lambda x: x.transpose(0, 2, 1, 3), turned),
        "with channels in reverse": (lambda x: x[..., ::-1], "exchange the channels in `apply`"),
        "with channels first": (lambda x: x.transpose(0, 3, 1, 2), turned),
    }
    rate, refused = _accuracy(classifier, batch)
    best, found = None, rate or 0.0
    for what, (change, _) in others.items():
        other, _ = _accuracy(classifier, batch._replace(images=change(batch.images)))
        if other is not None and other > found + (_MUCH_BETTER if best is None else 0.0):
            best, found = what, other
    if best is not None:
        said = f"{percent(rate)} right as given, {percent(found)} with images {best}"
        return Finding(name, FAULT, said, others[best][1], rate)
    if rate is None:
        return Finding(name, FAULT, refused, "take images [B, H, W, C]: any B, channels last")
    said = f"{percent(rate)} of {len(batch.labels)} clean images right"
    if rate < 0.5:
        change = "is it trained, on these classes, with pixels in [0, 1] and channels last?"
        return Finding(name, WARNING, said, change, rate)
    return Finding(name, OK, said, value=rate)


def _accuracy(classifier, batch) -> tuple[float | None, str]:
    """The accuracy, or None and why the classifier refused such images."""
    try:
        return accuracy(classifier, batch), ""
    except Exception as error:  # whatever a foreign network raises
        return None, said_by(error)


# ---- the detector as a value


def kind_and_flags(detector: Detector) -> Finding:
    """The kind is known, flags are booleans, and the kind's own methods are there."""
    name = "detector: kind, flags"
    if detector.kind not in KINDS:
        said, change = f"kind is {detector.kind!r}", f"choose one of {', '.join(KINDS)}"
        return Finding(name, FAULT, said, change)
    if wrong := [flag for flag in _FLAGS if not isinstance(getattr(detector, flag), bool)]:
        return Finding(name, FAULT, f"{wrong[0]} is no bool", "set the class attribute True/False")
    needed = {"score": ("score",), "set": ("p_value", "set_size")}.get(detector.kind, ())
    if missing := [what for what in needed if not hasattr(detector, what)]:
        said = f"kind {detector.kind!r} without {missing[0]}"
        return Finding(name, FAULT, said, f"define {missing[0]}, or declare another kind")
    flags, kind = [flag for flag in _FLAGS if getattr(detector, flag)], type(detector)
    said = f"{detector.kind}{': ' if flags else ''}{', '.join(flags)}"
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):  # dataclass wrote its own
        return Finding(name, WARNING, f"{said}; no docstring", "say in a line what it does")
    return Finding(name, OK, said)


def equality_by_value(detector: Detector) -> Finding:
    """A frozen dataclass, equal and hashed by hyperparameters: equal ones share one program."""
    name, kind = "detector: hash, equality", type(detector)
    frozen = "decorate the class with @dataclasses.dataclass(frozen=True)"
    own = kind.__dict__.get("__annotations__") or "__init__" in kind.__dict__
    if "__dataclass_fields__" not in kind.__dict__ and own:
        return Finding(name, FAULT, f"{kind.__name__} is no dataclass of its own", frozen)
    fields = {field.name: getattr(detector, field.name) for field in dataclasses.fields(detector)}
    try:
        twin = dataclasses.replace(detector)
        if not (twin == detector and hash(twin) == hash(detector)):
            said = "two of the same hyperparameters differ"
            return Finding(name, FAULT, said, f"{frozen} and no __eq__ or __hash__ of its own")
    except (TypeError, ValueError) as error:  # unhashable, or arrays that compare to arrays
        change = "numbers, strings and tuples alone; arrays belong into what `fit` returns"
        return Finding(name, FAULT, said_by(error), change)
    stuck = []
    for field, value in fields.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        other = _changed(detector, field, value)
        if other is None:
            stuck.append(field)
        elif other == detector:
            said = f"another {field} makes no difference to =="
            return Finding(name, FAULT, said, f"leave compare=True of field {field}")
    if stuck:
        said, change = f"{stuck[0]} takes no other value", "drop it, or let it be changed"
        return Finding(name, WARNING, said, change)
    return Finding(name, OK, f"by value over {len(fields)} hyperparameters", value=len(fields))


def _changed(one: Detector, name: str, value) -> Detector | None:
    """The detector with another value: the first of a few that it takes."""
    for other in (value + 1, value + 2, value / 2):
        try:
            return dataclasses.replace(one, **{name: other})
        except (ValueError, TypeError):
            continue
    return None


def snapshot(detector: Detector, classifier: Classifier) -> tuple[dict, PyTree]:
    """What `fit` must leave alone: the detector's attributes, the classifier's arrays (copied)."""
    return dict(vars(detector)), jax.tree.map(np.array, classifier.variables)


def unchanged_by_fit(before: tuple[dict, PyTree], detector, classifier) -> Finding:
    """The classifier is the same bit for bit, and nothing was learned onto the detector.

    Args:
      before: of `snapshot`, taken before the fit.
      detector, classifier: after it.
    """
    name = "fit: side effects"
    attributes, variables = before
    now = vars(detector)
    if changed := [key for key in now if attributes.get(key, now) is not now[key]]:
        said = f"fit wrote {changed[0]} on the detector"
        return Finding(name, FAULT, said, "return it: whatever `fit` returns is given back")
    pairs = zip(jax.tree.leaves(variables), jax.tree.leaves(classifier.variables), strict=True)
    count = sum(not np.array_equal(a, b, equal_nan=True) for a, b in pairs)
    if count:
        said = f"fit changed {count} arrays of the classifier"
        return Finding(name, FAULT, said, "train a copy and return it", count)
    return Finding(name, OK, "the classifier is the same bit for bit", value=0)


def learned_arrays(fitted: PyTree) -> Finding:
    """What `fit` returned holds finite numbers in arrays alone, to be compiled and kept."""
    name, leaves = "fit: what was learned", jax.tree.leaves(fitted)
    if isinstance(fitted, Held):
        kind = type(fitted.value).__name__
        return Finding(name, OK, f"an object of type {kind}, which JAX does not look into")
    for leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
            said, change = f"a leaf of type {type(leaf).__name__}", "arrays, in dicts or tuples"
            return Finding(name, FAULT, said, change)
        if not np.issubdtype(np.asarray(leaf).dtype, np.number) and np.asarray(leaf).dtype != bool:
            said = f"an array of {np.asarray(leaf).dtype}"
            return Finding(name, FAULT, said, "numbers alone")
    bad = sum(not np.isfinite(np.asarray(leaf)).all() for leaf in leaves)
    size = sum(np.asarray(leaf).nbytes for leaf in leaves) / 2**20
    if bad:
        said = f"{bad} of {len(leaves)} arrays hold NaN or infinite values"
        return Finding(name, WARNING, said, "guard divisions and logarithms", bad)
    said = f"{len(leaves)} arrays, {size:.1f} MiB" if leaves else "nothing is learned"
    return Finding(name, OK, said, value=size)


# ---- what checks look with


def noise(shape: tuple[int, ...]) -> np.ndarray:
    """Uniform noise in [0, 1] of a shape, always the same."""
    return np.random.RandomState(0).uniform(size=shape).astype(np.float32)


def hard_images(shape: tuple[int, ...]) -> np.ndarray:
    """[3, H, W, C]: black, white and noise."""
    return np.stack([np.zeros(shape), np.ones(shape), noise(shape)]).astype(np.float32)


def said_by(error: Exception) -> str:
    """An exception in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160].rstrip(": ")


def percent(rate: float | None) -> str:
    """A rate as text."""
    return "none" if rate is None else f"{100 * rate:.1f} %"
