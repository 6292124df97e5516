"""Gradients against finite differences: right, or wrong in which way.

A function is compared where it is smooth. Images on a flat ground (a digit's black) lie on ties of
max-pooling and kinks of ReLUs, where no gradient is the slope; a little noise takes them off these.
Each image is moved both ways along its gradient and along random directions, over several lengths
of which the best counts: short ones drown in float32's rounding, long ones cross kinks. Along the
gradient its norm must come out; along random directions what it leaves out would show.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RIGHT = ("right", "kinked", "still")  # the last is flat, as the function is
STAND_IN = "stand-in"  # for a function in steps: some slope is given where there is none
FLAT = ("flat", "rounded")  # no gradient, and the function moves
WRONG = ("negated", "scaled", "partial", "unrelated")
UNDEFINED = "undefined"  # not finite: another check's business
_STEPS = (1e-2, 3e-2, 3e-3, 1e-1, 1e-3, 3e-1)  # L2; the likeliest first
_SHORT = 3e-2  # a rounded function does not move over less
_DIRECTIONS = 3  # random ones
_ALONG, _ACROSS = 0.1, 0.35  # relative errors, along the gradient and along random directions
_NOISE = 0.02  # about the box's middle, into which images are drawn a little


class Compared(NamedTuple):
    """What was found at N images.

    Attributes:
      kinds: [N] one of `RIGHT`, `FLAT`, `WRONG`, `STAND_IN` or `UNDEFINED`.
      ratio: [N] slope along the gradient as a multiple of its norm: 1 is right, -1 its reverse;
        NaN where there is no gradient.
    """

    kinds: np.ndarray
    ratio: np.ndarray

    @property
    def wrong(self) -> np.ndarray:
        """[N] bool, there is a gradient and it is not the slope."""
        return np.isin(self.kinds, WRONG)

    def counts(self) -> dict[str, int]:
        """How many images of each kind that there is."""
        return dict(sorted(collections.Counter(self.kinds.tolist()).items()))


def off_kinks(images: np.ndarray) -> np.ndarray:
    """Images [N, H, W, C] a little off flat ground and off the edges of the box, always alike."""
    noise = np.random.RandomState(0).uniform(-_NOISE, _NOISE, images.shape[1:])
    return np.asarray(0.12 + 0.76 * images + noise, np.float32)


def compare(
    look: Callable[[np.ndarray, np.ndarray], np.ndarray], images: np.ndarray, gradients: np.ndarray
) -> Compared:
    """Compares gradients with finite differences.

    Args:
      look: images [M, H, W, C] and the rows [M] that they are moved from -> values [M]; a random
        function draws the same for one row.
      images: [N, H, W, C], of `off_kinks`.
      gradients: [N, H, W, C] there.
    """
    count = len(images)
    kinds, ratio = np.full(count, UNDEFINED, dtype="<U9"), np.full(count, np.nan)
    norms = np.sqrt(np.sum(np.square(gradients, dtype=np.float64), axis=(1, 2, 3)))
    left = np.isfinite(gradients).all(axis=(1, 2, 3)) & np.isfinite(norms)
    if not left.any():
        return Compared(kinds, ratio)
    units = _units(gradients, norms)
    slopes = np.einsum("nkhwc,nhwc->nk", units, np.where(left[:, None, None, None], gradients, 0))
    base = np.asarray(look(images, np.arange(count)), np.float64)
    found = []  # (rows, step, [R, 1 + K] central, forward and backward differences)
    for step in _STEPS:
        rows = np.flatnonzero(left)
        if not len(rows):
            break
        differences = _differences(look, images, units, base, rows, step)
        found.append((rows, step, *differences))
        smooth, kinked = _agreement(
            slopes[rows], norms[rows], _rounding(base[rows]) / step, *differences
        )
        kinds[rows[kinked]], kinds[rows[smooth]] = "kinked", "right"
        settled = rows[kinked | smooth]
        ratio[settled], left[settled] = 1.0, False
    for row in np.flatnonzero(left):
        steps = [(step, *(each[rows == row][0] for each in rest))
                 for rows, step, *rest in found if (rows == row).any()]  # fmt: skip
        kinds[row], ratio[row] = _kind(steps, slopes[row], norms[row], base[row])
    return Compared(kinds, ratio)


def _units(gradients: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """[N, 1 + K, H, W, C] unit directions: the gradient (noise where it is 0), and random ones."""
    random = np.random.RandomState(1).randn(_DIRECTIONS, *gradients.shape[1:])
    random /= np.sqrt(np.sum(np.square(random), axis=(1, 2, 3), keepdims=True))
    usable = np.isfinite(norms) & (norms > 0)
    pick = usable[:, None, None, None]
    along = np.where(pick, gradients, random[:1])
    along = along / np.where(usable, norms, 1.0)[:, None, None, None]
    others = np.broadcast_to(random, (len(gradients), *random.shape))
    return np.concatenate([along[:, None], others], axis=1)


def _differences(look, images, units, base, rows, step):
    """[R, 1 + K] central, forward and backward difference quotients."""
    moves = step * units[rows]
    both = np.stack([images[rows, None] + moves, images[rows, None] - moves])
    flat = both.reshape(-1, *images.shape[1:]).astype(np.float32)
    origins = np.broadcast_to(rows[None, :, None], both.shape[:3]).reshape(-1)
    values = np.asarray(look(flat, origins), np.float64).reshape(both.shape[:3])
    here = base[rows, None]
    with np.errstate(invalid="ignore"):  # a function may be infinite there
        forward, backward = (values[0] - here) / step, (here - values[1]) / step
        return (forward + backward) / 2, forward, backward


def _rounding(values):
    """What float32 leaves open of a value, after some arithmetic."""
    return 16 * np.finfo(np.float32).eps * np.abs(values)


def _agreement(slopes, norms, rounding, central, forward, backward):
    """[R] bool, the central differences agree; [R] bool, those to one side do."""
    sized = np.where(norms > 0, norms, np.inf)  # a gradient of 0 agrees with nothing

    def agrees(found):
        with np.errstate(invalid="ignore", over="ignore"):
            along = np.abs(found[:, 0] - slopes[:, 0]) <= _ALONG * sized
            error = np.linalg.norm(found[:, 1:] - slopes[:, 1:], axis=1)
            size = np.maximum(*(np.linalg.norm(a[:, 1:], axis=1) for a in (found, slopes)))
            return along & (error <= _ACROSS * size + rounding) & (norms > 0)

    return agrees(central), agrees(forward) | agrees(backward)


def _kind(steps, slopes, norm: float, base: float) -> tuple[str, float]:
    """What a gradient is that agrees at no step; and the slope along it, as a share of its norm."""
    lengths = np.array([step for step, *_ in steps])
    central = np.array([found for _, found, *_ in steps])
    moved = np.abs(central) * 2 * lengths[:, None]
    rounding = _rounding(base)
    if norm == 0:
        if not (moved > rounding).any():  # NaN moves nothing
            return "still", np.nan
        short = lengths < _SHORT
        return ("flat" if (moved[short] > rounding).any() else "rounded"), np.nan
    finite = np.isfinite(central).all(axis=1)
    if not finite.any() or norm * lengths.max() < rounding:
        return UNDEFINED, np.nan
    still = finite & (moved[:, 0] <= rounding) & (norm * lengths > rounding)
    if still.sum() > 1 and central[lengths.argmax(), 0] >= 0:
        return STAND_IN, np.nan
    # Where the two sides agree best, and the values are not mere rounding, the slope is known best.
    gap = [abs(forward[0] - backward[0]) / max(abs(forward[0]), abs(backward[0]), 1e-30)
           + rounding / max(length * max(abs(forward[0]), abs(backward[0])), 1e-30)
           for length, _, forward, backward in steps]  # fmt: skip
    best = int(np.argmin(np.where(finite, np.nan_to_num(gap, nan=np.inf), np.inf)))
    ratio, across = central[best, 0] / norm, central[best, 1:]
    error = np.linalg.norm(across - ratio * slopes[1:])
    alike = error <= _ACROSS * max(np.linalg.norm(across), 1e-30)
    if alike:
        return ("negated" if ratio < 0 else "scaled"), float(ratio)
    return ("partial" if abs(ratio - 1) <= _ALONG else "unrelated"), float(ratio)
