"""Signs that a threshold is not what its name says."""

from __future__ import annotations

import math

import numpy as np

from advdet.indicators.base import ADVICE, entry

_FEW_CLEAN = 100


def few_clean_images(clean_scores: np.ndarray):
    """How many clean images the thresholds rest on; raised below a hundred.

    Args:
      clean_scores: [M] of these; empty for a defence that has no thresholds.
    """
    name, count = "few_clean_images", len(clean_scores)
    if not count:
        return entry(name, None, reason="the defence has no thresholds")
    return entry(name, count, count < _FEW_CLEAN)


def coarse_score(clean_scores: np.ndarray, threshold: float | None, point: str):
    """Share of the clean images that set the thresholds which the one aimed below flags.

    Args:
      clean_scores: [M] of these.
      threshold: aimed below; None where there is none.
      point: its name; a false-positive rate, or "native", of which nothing is expected.
    """
    name, count = "coarse_score", len(clean_scores)
    if threshold is None or not count:
        return entry(name, None, reason="the defence has no thresholds")
    if point == "native":
        return entry(name, None, reason="the threshold is not one of a false-positive rate")
    rate, scores = float(point), np.asarray(clean_scores, np.float32)
    flagged = float(np.mean(scores > np.float32(threshold)))
    values = len(np.unique(scores))
    # A score without ties flags the whole part of rate x count.
    expected = math.floor(rate * count + 1e-9) / count
    room = max(1.0 / count, 0.25 * rate)
    advice = (
        f"Of {count} clean images, on which the score takes {values} values, the threshold of "
        f"{100 * rate:g} % flags {100 * flagged:.3g} %. {ADVICE[name]}"
    )
    raised = abs(flagged - expected) > room
    return entry(name, flagged, raised, advice=advice, wanted=rate, values=values)
