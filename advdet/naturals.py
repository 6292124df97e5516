"""Natural images that are what an attacker wants as they are, which leaves him no excuse.

They are none that the detector has learned from: one that remembers its training images takes each
of those for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from advdet import starts
from advdet.defenses import Defense
from advdet.judge import NUM_DRAWS, Judgement, class_margins, judge
from advdet.splits import Splits
from advdet.types import Batch

_LOOKS = 2000  # of the judge, at natural images


class Naturals(NamedTuple):
    """Natural images under the judge.

    Attributes:
      batch: [N] images with their labels.
      judged: with these labels as the wanted ones.
    """

    batch: Batch
    judged: Judgement


def look(defense: Defense, splits: Splits, seed: int) -> Naturals | None:
    """Natural images from all over the held-out ones, judged; None where there are none.

    Args:
      defense: the true one.
      splits: the data.
      seed: of the judge's draws.
    """
    held_out = starts.held_out(splits, limited=False)
    most = _LOOKS // (NUM_DRAWS if defense.detector.random else 1)
    count = min(most, len(held_out.ids))
    if not count:
        return None
    batch = held_out.take(np.arange(count) * len(held_out.ids) // count)
    judged = judge(defense, batch.images, batch.ids, batch.labels, targeted=True, seed=seed)
    return Naturals(batch, judged)


def nearest(
    naturals: Naturals | None,
    threshold: float | None,
    images: np.ndarray,
    goal: np.ndarray,
    rows: np.ndarray,
    *,
    targeted: bool,
    confidence: float = 0.0,
    detector_margin: float = 0.0,
) -> np.ndarray | None:
    """[N] L2 to the nearest natural image that most of the judge's draws take for a success.

    It must be all that the attack was asked for: one that fails at a confidence which no natural
    image has is not at fault.

    Args:
      naturals: of `look`.
      threshold: of the judge.
      images: [N, H, W, C] clean images under attack.
      goal: [N] wanted classes, or the true ones where not targeted.
      rows: [N] bool, those to look for; others get inf, as do those without such an image.
      targeted: which of the two.
      confidence, detector_margin: what the attack was asked for beyond the decisions.
    """
    found = np.full(len(images), np.inf)
    if not rows.any():
        return found
    if naturals is None:
        return None
    labels = np.asarray(naturals.batch.labels)
    limit = None if threshold is None else threshold - detector_margin
    passes = naturals.judged.success(limit) > 0.5
    passes &= class_margins(naturals.judged.logits, labels) > confidence
    flat = np.asarray(naturals.batch.images, np.float64).reshape(len(labels), -1)
    for row in np.flatnonzero(rows):
        there = flat[passes & ((labels == goal[row]) == targeted)]
        if len(there):
            away = there - np.asarray(images[row], np.float64).ravel()
            found[row] = np.sqrt(np.square(away).sum(axis=1).min())
    return found
