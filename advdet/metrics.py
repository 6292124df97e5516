"""Rates, distances and their uncertainty; NumPy in, plain numbers out.

A number that is not defined is None, never NaN or 0.
"""

from __future__ import annotations

import math

import numpy as np

_Z95 = 1.959963984540054
_BOOTSTRAP_DRAWS = 2000
FEWEST_FOR_AUC = 10  # images on either side


def wilson(successes: float, n: int) -> list[float] | None:
    """The 95 % Wilson interval of a rate; None without observations.

    Args:
      successes: how many, possibly a sum of shares.
      n: of how many.
    """
    if n == 0:
        return None
    rate, z2 = successes / n, _Z95**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mean_interval(values: np.ndarray) -> list[float] | None:
    """The 95 % bootstrap interval (percentiles) of a mean over images; None below two values."""
    if len(values) < 2:
        return None
    picks = np.random.RandomState(0).randint(len(values), size=(_BOOTSTRAP_DRAWS, len(values)))
    low, high = np.percentile(np.asarray(values, np.float64)[picks].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def paired_ratio(own: np.ndarray, other: np.ndarray) -> tuple[float | None, list[float] | None]:
    """The ratio of two means over the same images, and its 95 % bootstrap interval over images.

    Args:
      own, other: [N] distances.

    Returns:
      The ratio, None without images or where `other` is 0; and its interval, None below two.
    """
    if not len(own) or not np.sum(other) > 0:
        return None, None
    ratio = float(np.sum(own, dtype=np.float64) / np.sum(other, dtype=np.float64))
    if len(own) < 2:
        return ratio, None
    picks = np.random.RandomState(0).randint(len(own), size=(_BOOTSTRAP_DRAWS, len(own)))
    above, below = (np.asarray(a, np.float64)[picks].sum(axis=1) for a in (own, other))
    ratios = np.where(below > 0, above / np.where(below > 0, below, 1.0), np.inf)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return ratio, [float(low), float(high)] if np.isfinite(high) else None


def mean_or_none(values) -> float | None:
    """The mean; None where there is nothing to average."""
    return float(np.mean(values, dtype=np.float64)) if len(values) else None


def median_l2(distances: np.ndarray, succeeded: np.ndarray) -> float | None:
    """The median over all attacked images with failures at infinity; None where over half fail.

    Args:
      distances: [N] L2 of the attacked images.
      succeeded: [N] bool.
    """
    if len(distances) == 0:
        return None
    middle = float(np.median(np.where(succeeded, distances, np.inf)))
    return middle if math.isfinite(middle) else None


def l2(images: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """[N] plain L2 distances between [N, H, W, C] images, summed in float64."""
    difference = np.asarray(images, np.float64) - np.asarray(clean, np.float64)
    return np.sqrt(np.sum(np.square(difference), axis=tuple(range(1, difference.ndim))))


def auc(negatives: np.ndarray, positives: np.ndarray) -> float | None:
    """Area under the ROC curve of clean and adversarial scores; None if either is empty.

    What is no number counts as the most suspicious: the judge flags it.
    """
    if len(negatives) == 0 or len(positives) == 0:
        return None
    from sklearn.metrics import roc_auc_score

    labels = np.r_[np.zeros(len(negatives)), np.ones(len(positives))]
    scores = np.r_[negatives, positives].astype(np.float64)
    return float(roc_auc_score(labels, np.nan_to_num(scores, nan=np.finfo(np.float64).max)))


def auc_of_many(negatives: np.ndarray, positives: np.ndarray) -> float | None:
    """`auc`; None where the images on either side are too few to say."""
    if min(len(negatives), len(positives)) < FEWEST_FOR_AUC:
        return None
    return auc(negatives, positives)
