"""Pixels in [0, 1]: the one place that says whether given images keep to it."""

from __future__ import annotations

import numpy as np

from advdet.types import InputError

ROUNDING = 1e-6  # beyond the box by no more than a few float32 roundings


def in_box(images: np.ndarray, said: str, hint: str) -> np.ndarray:
    """Images of any float type as float32 in [0, 1]; what rounding led out of it is clipped.

    Args:
      images: finite, of any shape but empty.
      said: how the message begins, up to "range from".
      hint: what to do, for its end.

    Raises:
      InputError: pixels lie outside by more than `ROUNDING`.
    """
    low, high = float(images.min()), float(images.max())
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise InputError(f"{said} range from {low:.9g} to {high:.9g}; {hint}")
    images = images.astype(np.float32)
    return images if low >= 0 and high <= 1 else np.clip(images, 0.0, 1.0)
