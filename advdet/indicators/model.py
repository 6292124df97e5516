"""Signs that classifier or detector are not what they should be."""

from __future__ import annotations

import numpy as np

from advdet import logit_range, metrics
from advdet.indicators.base import FEWEST, entry, exceeds

_FLOAT_ERROR = 1e-3  # of the spread of the answers
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


def score_reversed(clean: np.ndarray, unaware: np.ndarray | None):
    """The AUC of images made without knowledge of the detector; raised where it is below a half.

    Args:
      clean: [M] scores of clean images.
      unaware: [L] scores of images that the attack on the bare classifier made; None where these
        are not there. (An attacker who knows the detector lowers its score, whatever the sign.)
    """
    name = "score_reversed"
    if unaware is None:
        return entry(name, None, reason="no images by an attacker who is unaware of it were there")
    area = metrics.auc_of_many(clean, unaware)
    if area is None:
        return entry(name, None, reason="there is no AUC")
    found, others = len(unaware), len(clean)
    error = np.sqrt((found + others + 1) / (12 * found * others))
    return entry(name, area, area < 0.5 - 3 * error, n=found)


def score_drifts(before: np.ndarray | None, after: np.ndarray | None):
    """Share of a few clean images whose score is another after the attack than before.

    Args:
      before, after: [M] with the same keys; None where nothing was asked.
    """
    name = "score_drifts"
    if before is None or after is None:
        return entry(name, None, reason="the defence flags nothing, or its code is advdet's own")
    share = float(np.mean(~steady(before, after)))
    return entry(name, share, share > 0)


def steady(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Whether each of two answers, asked twice, is the same but for float error.

    Args:
      before, after: [N, ...] of finite numbers.
    """
    largest = float(np.abs(before).max())
    room = _FLOAT_ERROR * max(float(np.std(before)), 1e-6 * largest, 1e-30)
    return np.abs(np.asarray(after, np.float64) - before) <= room


def score_not_a_number(scores: np.ndarray):
    """Share of scores [D, N], of clean and adversarial images, that are no numbers.

    The judge flags such an image, clean or not.
    """
    name = "score_not_a_number"
    if not scores.size:
        return entry(name, None, reason="there are no scores")
    share = float(np.isnan(scores).mean())
    return entry(name, share, share > 0)
