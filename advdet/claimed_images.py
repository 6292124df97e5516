"""What a record's images, distances and targets are, before anything is judged."""

from __future__ import annotations

import jax
import numpy as np

from advdet.cells import random_targets
from advdet.claims import REFUTED, Claim, compare_rows, undecided
from advdet.defenses import classify_images, undefended
from advdet.metrics import l2
from advdet.rebuild import Evidence
from advdet.rejudge import logit_error

_DISTANCE_ERROR = 1e-4  # the attack sums in float32
# Arrays by kind of number: bool, integer, unsigned, float.
_ARRAYS = {
    "b": ("clean_correct", "flagged", "classified_as_wanted", "success", "missed"),
    "i": ("id", "label", "target_class", "num_gradients"),
    "u": ("image_uint8",),
    "f": ("clean_score", "adversarial_score", "judged_success", "image", "distance",
          "nearest_miss"),
}  # fmt: skip
_BY_DRAW = ("clean_score", "adversarial_score", "flagged")


def misshapen(arrays) -> str:
    """What is wrong with the arrays' names, types and shapes; empty where nothing is."""
    for kind, names in _ARRAYS.items():
        for name in names:
            if name not in arrays:
                return f"there is no array {name}"
            array, count = arrays[name], len(np.atleast_1d(arrays.get("id", 0)))
            if array.dtype.kind != kind:
                return f"array {name} is {array.dtype}"
            if name in _BY_DRAW:
                right = array.ndim == 2 and array.shape[1] in (0, count)
            else:
                right = array.ndim in (1, 4) and len(array) == count
            if not right:
                return f"array {name} has the shape {array.shape} for {count} images"
    shapes = {arrays[name].shape for name in ("image", "nearest_miss", "image_uint8")}
    return "" if len(shapes) == 1 else f"images have the shapes {sorted(shapes)}"


def of_images(evidence: Evidence) -> tuple[list[Claim], bool]:
    """What can be said of the images without a judge; and whether they are of this data set."""
    arrays, clean, axes = evidence.arrays, evidence.clean, (1, 2, 3)
    image = arrays["image"]
    outside = ~((image >= 0) & (image <= 1)).all(axis=axes)
    inside = np.clip(np.nan_to_num(image), 0.0, 1.0)
    other = (np.round(inside * 255.0).astype(np.uint8) != arrays["image_uint8"]).any(axis=axes)
    found = [
        compare_rows("image", outside, "pixels outside of [0, 1]"),
        compare_rows("image_uint8", other, "not the image in 8 bit"),
    ]
    if clean is None:
        names = ("id, label", "distance")
        return found + [undecided(name, evidence.built.why) for name in names], True
    if clean.images.shape != image.shape:
        note = f"shape {image.shape}, where the data set has {clean.images.shape}"
        return [*found, Claim("image", REFUTED, note=note)], False
    moved = (arrays["id"] != clean.ids) | (arrays["label"] != clean.labels)
    note = "not those of the data set's first test images"
    found.append(compare_rows("id, label", moved, note))
    classes = evidence.built.splits.num_classes
    bad = np.zeros(len(image), bool)
    for name in ("label", "target_class"):
        bad |= (arrays[name] < 0) | (arrays[name] >= classes)
    if bad.any():
        return [*found, compare_rows("label, target_class", bad, "no class of the data set")], False
    stored, distance = arrays["distance"].astype(np.float64), l2(image, clean.images)
    with np.errstate(invalid="ignore"):
        near = np.abs(stored - distance) <= _DISTANCE_ERROR * (distance + 1e-3)
    right = np.where(arrays["success"], near, np.isposinf(stored) & (distance == 0))
    note = "not the L2 from the clean image, or a failure that is not the clean image"
    return [*found, compare_rows("distance", ~right, note)], True


def of_targets(evidence: Evidence) -> list[Claim]:
    """Targets that seed, labels or classifier decide are made again."""
    name, clean, built = "target_class", evidence.clean, evidence.built
    regime, goal = evidence.run["targets"], evidence.arrays["target_class"]
    if clean is None:
        return [undecided(name, built.why)]
    labels = np.asarray(clean.labels)
    if regime == "untargeted":
        return [compare_rows(name, goal != labels, "not the true class")]
    classes = built.splits.num_classes
    if (bad := (goal == labels) | (goal < 0) | (goal >= classes)).any():
        return [compare_rows(name, bad, "the true class, or none")]
    if regime == "random":
        again = random_targets(evidence.run["seed"], labels, clean.ids, classes)
        return [compare_rows(name, goal != again, "not what the seed gives")]
    if regime == "least_likely" and built.victim is not None:
        bare = undefended(built.victim.defense.classifier)
        logits = classify_images(jax.random.key(0), bare, clean.images, clean.ids)
        error, rows = logit_error(logits), np.arange(len(labels))
        logits[rows, labels] = np.inf
        other = logits[rows, goal] > logits.min(axis=1) + error
        return [compare_rows(name, other, "not the least likely class")]
    return [undecided(name, f"wrong classes; targets {regime!r} are not made again here")]
