"""Signs that the images found are not the nearest, or not good for much."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from advdet import metrics
from advdet.indicators.base import TOLERATED, entry, exceeds


def not_transferred(limited: bool, fooled: float | None, own: float | None):
    """Share of attacked images that fool the victim's classifier, beside the attacker's own count.

    Args:
      limited: whether the attack was on a copy.
      fooled: the share; None where no image was attacked.
      own: share that the attacker believes to have won on.
    """
    name = "not_transferred"
    if not limited:
        return entry(name, None, reason="the attack was not on a copy")
    if fooled is None or not own:
        return entry(name, None, reason="the attack found nothing on the copy")
    return entry(name, fooled, fooled < 0.5 * own, own=own)


def lost_to_8bit(rate: float | None, rate_8bit: float | None):
    """Share of the success that rounding to 8 bit costs."""
    name = "lost_to_8bit"
    if not rate:
        return entry(name, None, reason="there is no success to lose")
    lost = 1.0 - rate_8bit / rate
    return entry(name, lost, lost > 0.5)


def nearer_attack(own: Mapping[str, np.ndarray], others: Mapping[str, Mapping[str, np.ndarray]]):
    """By what share another attack's mean L2 is smaller, over the images that both break.

    Args:
      own: per-image arrays of a record.
      others: attack -> arrays of its record on the same images.
    """
    name = "nearer_attack"
    found = []
    for other, arrays in others.items():
        both = own["clean_correct"] & _won(own) & _won(arrays)
        if both.any():
            found.append((_advantage(own["distance"], arrays["distance"], both), other, both.sum()))
    if not found:
        why = "no image that both break" if others else "no record of another attack was there"
        return entry(name, None, reason=why)
    advantage, other, n = max(found)
    return entry(name, advantage, advantage > TOLERATED, attack=other, n=int(n))


def nearer_again(
    distance, success, again_distance, again_success, rows: np.ndarray, *, reliable, **more
):
    """By what share the best attack is nearer with its steps doubled, over images both break.

    Args:
      distance, success: [N] of the headline.
      again_distance, again_success: [N] of the second run, its reliable successes alone.
      rows: [N] bool, the images it was given.
      reliable: [N] bool, images of the headline that pass enough of the attacker's own draws; only
        these are compared.
      **more: {attack, steps}.
    """
    name = "nearer_again"
    both = rows & success & reliable & again_success
    gained = int((rows & again_success & ~success).sum())
    more |= {"images": int(rows.sum()), "n": int(both.sum()), "gained": gained}
    far = exceeds(gained, int(rows.sum()))
    if not both.any():
        return entry(name, None, far, "no image that both runs break", **more)
    advantage = _advantage(distance, again_distance, both)
    return entry(name, advantage, far or advantage > TOLERATED, **more)


def _won(arrays) -> np.ndarray:
    return arrays["success"] & (arrays["judged_success"] > 0.5)


def _advantage(distance, other, both) -> float:
    own = metrics.mean_or_none(distance[both])
    return 1.0 - metrics.mean_or_none(other[both]) / own if own else 0.0
