"""Detectors of kind "set": the unit is a set of images, never one image.

Sets share no image: only then does each tell something of its own, as the interval of a rate takes
for granted. So the number of images decides how many sets there are, and few sets say little.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from advdet import metrics
from advdet.defenses import Defense
from advdet.detectors import Detector

MOST_SETS, LEVEL = 20, 0.05
FEWEST_FOR_INTERVAL = 2
FEWEST_TO_SAY = 4  # of fewer, not even all alike tell whether half of such sets are told
_SETS = 0x5345


@jax.jit
def _p_values(keys, defense, images, rows):
    one = lambda key, chosen: defense.detector.p_value(
        key, defense.fitted, defense.classifier, images[chosen]
    )
    return jax.lax.map(lambda pair: one(*pair), (keys, rows))


def p_values_of(
    seed: int, number: int, defense: Defense, images: np.ndarray, size: int
) -> np.ndarray:
    """The p-values [S] of disjoint sets of images: as many as there are, at most `MOST_SETS`.

    Args:
      seed: of the draws.
      number: 0 of adversarial images and of their originals (equal rows then make equal sets), 1 of
        other clean ones.
      defense: with a detector of kind "set".
      images: [M, H, W, C], at least one set of them.
      size: of a set.
    """
    root = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _SETS), number)
    key_rows, key_test = jax.random.split(root)
    count = min(MOST_SETS, len(images) // size)
    rows = np.asarray(jax.random.permutation(key_rows, len(images)))[: count * size]
    keys = jax.random.split(key_test, MOST_SETS)[:count]
    return np.asarray(_p_values(keys, defense, images, rows.reshape(count, size)))


def size_of(detector: Detector, adversarial: np.ndarray, clean: np.ndarray) -> int | None:
    """Images in a set: the detector's own number, or all there are; None where these are not two.

    Args:
      detector: of kind "set".
      adversarial, clean: the images that sets are made of.
    """
    size = min(detector.set_size, len(adversarial), len(clean))
    return size if size >= 2 else None


def assess_sets(
    seed: int, defense: Defense, adversarial: np.ndarray, clean: np.ndarray, originals: np.ndarray
) -> dict[str, Any] | None:
    """How often sets of adversarial images are told from the training images, and clean ones too.

    Args:
      seed: of the draws.
      defense: with a detector of kind "set".
      adversarial: [M, H, W, C] images that reached the attacker's goal.
      clean: [L, H, W, C] other clean test images, for control.
      originals: [M, H, W, C] the clean images that the adversarial ones were made from, the nearer
        control: what sets them apart is the attack alone.

    Returns:
      {size, draws, level, adversarial, clean, originals}; each of the last three is {rejected,
      sets, told, interval, reason, median_p}: `told` of `sets` disjoint sets are rejected, and the
      interval is None, with a reason, below two sets. `draws` is the number of adversarial sets.
      None where there are not even two adversarial images.
    """
    size = size_of(defense.detector, adversarial, clean)
    if size is None:
        return None
    record: dict[str, Any] = {"size": size, "draws": None, "level": LEVEL}
    kinds = {"adversarial": (0, adversarial), "clean": (1, clean), "originals": (0, originals)}
    for name, (number, images) in kinds.items():
        record[name] = told_of(p_values_of(seed, number, defense, images, size))
    record["draws"] = record["adversarial"]["sets"]
    return record


def told_of(p_values: np.ndarray) -> dict[str, Any]:
    """What the p-values [S] of disjoint sets say."""
    count, told = len(p_values), int((p_values < LEVEL).sum())
    enough = count >= FEWEST_FOR_INTERVAL
    reason = f"{count} set is too few for an interval: give more images, or take smaller sets"
    return {
        "rejected": told / count,
        "sets": count,
        "told": told,
        "interval": metrics.wilson(told, count) if enough else None,
        "reason": None if enough else reason,
        "median_p": float(np.median(p_values)),
    }


def few_sets_warning(detector: Detector, num_images: int) -> str | None:
    """A warning where too few images are attacked for a verdict on a detector of sets."""
    if detector.kind != "set":
        return None
    size, reached = detector.set_size, num_images * 9 // 10  # a tenth may fail
    if reached >= FEWEST_TO_SAY * size:
        return None
    count = max(1, reached // size)
    return (
        f"{num_images} images make about {count} set{'s' if count > 1 else ''} of {size} that "
        f"share no image, and fewer than {FEWEST_TO_SAY} sets say nothing: attack "
        f"{-(-FEWEST_TO_SAY * size * 10 // 9)} images, or take smaller sets "
        f"(set_size={max(2, reached // FEWEST_TO_SAY)})"
    )
