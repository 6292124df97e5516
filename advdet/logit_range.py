"""Whether what a classifier gives are logits, told from their values: one rule for all who ask.

Probabilities saturate, gradients through them vanish, and any detector looks strong. A softmax is
known by its sum, in percent too, and in half precision. Sigmoids cannot be told from logits that
lie in [0, 1] by their nature, cosines say; whoever has such logits says so (`bounded_logits`).
"""

from __future__ import annotations

import numpy as np

_SUM_ERROR = 5e-3  # relative: bfloat16 rounds each entry by up to 2^-9
_FEWEST_SUMS = 3  # of fewer images equal sums say nothing, unless they are 1
OVERRIDE = "bounded_logits=True"


def share_of_probabilities(logits: np.ndarray, bounded: bool = False) -> float:
    """Share of images whose logits look like probabilities, or a multiple of them.

    Args:
      logits: [N, K] finite, N at least 1.
      bounded: whether their author says that they are logits though they lie in [0, 1].

    Returns:
      1 where `refusal` has something to say, else less.
    """
    inside = _in_unit_range(logits) & (not bounded)
    return max(float(rows.mean()) for rows in (_sums_to_one(logits), _shares_a_sum(logits), inside))


def refusal(logits: np.ndarray, bounded: bool = False) -> str | None:
    """Why logits cannot be taken for such, and what to change; None where they can.

    Args: as those of `share_of_probabilities`.
    """
    vanish = "gradients through them vanish and any detector would look strong"
    if _sums_to_one(logits).all():
        return (
            f"returns probabilities (rows that sum to 1), not logits: {vanish}; return what goes "
            "into the softmax"
        )
    if _shares_a_sum(logits).all():
        total = float(np.median(logits.sum(axis=1, dtype=np.float64)))
        return (
            f"returns a multiple of probabilities (nothing below 0, rows that sum to {total:.4g}), "
            f"not logits: {vanish}; return what goes into the softmax"
        )
    if _in_unit_range(logits).all() and not bounded:
        return (
            f"returns numbers from {logits.min():.3g} to {logits.max():.3g}, as sigmoids do: "
            f"{vanish}; return what goes into the sigmoid, or, where they are logits that lie in "
            f"[0, 1] by their nature (cosines, say), declare that: {OVERRIDE} of "
            "Classifier.from_function, torch_classifier or keras_classifier, or an attribute "
            "bounded_logits of your own `apply`"
        )
    return None


def _sums_to_one(logits: np.ndarray) -> np.ndarray:
    """[N] bool."""
    sums = logits.sum(axis=1, dtype=np.float64)
    return (logits >= 0).all(axis=1) & (np.abs(sums - 1.0) <= _SUM_ERROR)


def _shares_a_sum(logits: np.ndarray) -> np.ndarray:
    """[N] bool: nothing is negative, and the sum is that of most of the others."""
    sums = logits.sum(axis=1, dtype=np.float64)
    middle = float(np.median(sums))
    shared = (logits >= 0).all(axis=1) & (np.abs(sums - middle) <= _SUM_ERROR * middle)
    return shared & (len(logits) >= _FEWEST_SUMS) & (middle > 0)


def _in_unit_range(logits: np.ndarray) -> np.ndarray:
    """[N] bool; none of those that are all equal, which are no sigmoids but say nothing."""
    inside = ((logits >= 0) & (logits <= 1)).all(axis=1)
    return inside & (logits.min() < logits.max())
