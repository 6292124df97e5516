"""Signs that classifier or detector are not what they should be."""

from __future__ import annotations

import numpy as np

from advdet import logit_range
from advdet.indicators.base import FEWEST, entry, exceeds

_HARDLY_RIGHT = 0.55  # of two classes, of which chance gives half


def probabilities(logits: np.ndarray, bounded: bool = False):
    """Share of images [N, K] whose logits look like probabilities, or a multiple of them.

    Args:
      logits: of the clean images that are attacked.
      bounded: whether they lie in [0, 1] by their nature, as their author says.
    """
    name = "probabilities"
    if not len(logits):
        return entry(name, None, reason="no image was attacked")
    value = logit_range.share_of_probabilities(logits, bounded)
    return entry(name, value, value == 1.0 and len(logits) >= FEWEST)


def classifier_at_chance(accuracy: float, classes: int, n: int):
    """Accuracy on n clean images; raised where it is surely below twice chance and 55 %."""
    limit = min(_HARDLY_RIGHT, 2.0 / classes)
    raised = exceeds(n * (1.0 - accuracy), n, 1.0 - limit)
    return entry("classifier_at_chance", accuracy, raised)


def constant_score(scores: np.ndarray):
    """Spread of the scores of clean and adversarial images [D, N]; 0 is a constant."""
    name = "constant_score"
    scores = scores[np.isfinite(scores)]
    if not scores.size:
        return entry(name, None, reason="there are no finite scores")
    spread = float(scores.max()) - float(scores.min())
    return entry(name, spread, spread <= 1e-6 * float(np.abs(scores).max()))


def score_reversed(unaware: bool, area: float | None, found: int, clean: int):
    """The AUC, where the attacker did not know of the detector; raised where it is below a half.

    Args:
      unaware: whether he did not.
      area: the AUC; None where there is none.
      found, clean: images on its two sides.
    """
    name = "score_reversed"
    if not unaware:
        return entry(name, None, reason="the attacker knows the detector, and lowers its score")
    if area is None:
        return entry(name, None, reason="there is no AUC")
    error = np.sqrt((found + clean + 1) / (12 * found * clean))
    return entry(name, area, area < 0.5 - 3 * error)


def score_not_a_number(scores: np.ndarray):
    """Share of scores [D, N], of clean and adversarial images, that are no numbers.

    The judge flags such an image, clean or not.
    """
    name = "score_not_a_number"
    if not scores.size:
        return entry(name, None, reason="there are no scores")
    share = float(np.isnan(scores).mean())
    return entry(name, share, share > 0)
