"""Images for attacks to begin at that reach the goals already, and only have to come nearer."""

from __future__ import annotations

import jax
import numpy as np

from advdet.attacks.objectives import Objective
from advdet.defenses import Defense, classify_images, score_images
from advdet.splits import Splits
from advdet.types import Batch

HELD_OUT = ("select", "threshold")  # the splits whose images no detector keeps
_MOST = 5000  # natural images that are looked at


def again(threat_model: str, objective: Objective, minimal: bool) -> bool:
    """Whether images on which an attack fails are attacked once more, from natural ones.

    On a copy only: what transfers asks for more confidence than the way from many a clean image
    leads to.

    Args:
      threat_model: what the attacker knows.
      objective: his.
      minimal: whether the attack has no radius.
    """
    return threat_model == "limited_knowledge" and minimal and not _asks_for_natural(objective)


def looks_for_natural(threat_model: str, objective: Objective, minimal: bool) -> bool:
    """Whether natural images are looked for at all; arguments as those of `again`."""
    return _asks_for_natural(objective) or again(threat_model, objective, minimal)


def _asks_for_natural(objective: Objective) -> bool:
    return "natural" in {variant.begins for variant in objective.variants()}


def held_out(splits: Splits, limited: bool) -> Batch:
    """Natural images that the attacker has and that no detector keeps.

    Never training images: a detector that remembers those takes each for itself (a kernel density
    has its full height at a centre), so that one may pass where nothing beside it would. Nor test
    images, which are attacked.

    Args:
      splits: the data, all of it.
      limited: whether he has a half of his own and no more.

    Returns:
      [N] the selection images, then those that thresholds are set on.
    """
    known = splits.half("attacker" if limited else "full")
    parts = [getattr(known, split) for split in HELD_OUT]
    return Batch(*(np.concatenate([np.asarray(part) for part in both]) for both in zip(*parts)))


def natural(
    objective: Objective, view: Defense, known: Batch, clean: Batch, goal: np.ndarray
) -> np.ndarray:
    """For each image the nearest natural one that reaches the attacker's goals as it is.

    Args:
      objective: says how far beyond the decisions; its score must be the detector's own.
      view: the defence that the attacker is shown.
      known: images that the attacker has, with their labels.
      clean: [N] the images under attack.
      goal: [N] wanted classes, or the true ones where the objective is untargeted.

    Returns:
      [N, H, W, C]; the clean image itself where no natural one will do.
    """
    known = known.take(slice(_MOST))
    key_logits, key_score = jax.random.split(jax.random.key(0))
    logits = classify_images(key_logits, view, known.images, known.ids)
    rows, labels = np.arange(len(logits)), np.asarray(known.labels)
    own = logits[rows, labels]
    logits[rows, labels] = -np.inf
    fit = logits.max(axis=1) - own + objective.confidence < 0
    if view.detector.kind == "score":
        scores = score_images(key_score, view, known.images, known.ids)
        fit &= scores + objective.detector_margin <= np.asarray(view.threshold)
    images, starts = np.asarray(known.images), np.array(clean.images)
    for row, (image, wanted) in enumerate(zip(np.asarray(clean.images), np.asarray(goal))):
        chosen = fit & ((labels == wanted) == objective.targeted)
        if chosen.any():
            distances = np.square(images[chosen] - image[None]).sum(axis=(1, 2, 3))
            starts[row] = images[chosen][distances.argmin()]
    return starts
