"""Detectors of kind "set": the unit is a set of images, drawn many times, never one image."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from advdet import metrics
from advdet.defenses import Defense

NUM_SETS, LEVEL = 20, 0.05
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
    """The p-values [NUM_SETS] of sets drawn from images.

    Args:
      seed: of the draws.
      number: 0 of adversarial images, 1 of clean ones.
      defense: with a detector of kind "set".
      images: [M, H, W, C].
      size: of a set.
    """
    root = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _SETS), number)
    key_rows, key_test = jax.random.split(root)
    rows = np.stack([
        jax.random.permutation(key, len(images))[:size]
        for key in jax.random.split(key_rows, NUM_SETS)
    ])  # fmt: skip
    return np.asarray(_p_values(jax.random.split(key_test, NUM_SETS), defense, images, rows))


def assess_sets(
    seed: int, defense: Defense, adversarial: np.ndarray, clean: np.ndarray
) -> dict[str, Any] | None:
    """How often sets of adversarial images are told from the training images, and clean ones too.

    Args:
      seed: of the draws.
      defense: with a detector of kind "set".
      adversarial: [M, H, W, C] images that reached the attacker's goal.
      clean: [L, H, W, C] clean test images, for control.

    Returns:
      {size, draws, level, adversarial: {rejected, interval, median_p}, clean: the same}; None where
      there are not even two adversarial images. Sets are drawn without replacement.
    """
    size = min(defense.detector.set_size, len(adversarial), len(clean))
    if size < 2:
        return None
    record = {"size": size, "draws": NUM_SETS, "level": LEVEL}
    for number, (name, images) in enumerate((("adversarial", adversarial), ("clean", clean))):
        p_values = p_values_of(seed, number, defense, images, size)
        rejected = float((p_values < LEVEL).mean())
        record[name] = {
            "rejected": rejected,
            "interval": metrics.wilson(rejected * NUM_SETS, NUM_SETS),
            "median_p": float(np.median(p_values)),
        }
    return record
