"""Signs that an attack's gradients are worth nothing."""

from __future__ import annotations

import numpy as np

from advdet import slopes
from advdet.indicators.base import ADVICE, entry, exceeds
from advdet.probes import Probe

_SHARE_WITHOUT_GRADIENT = 0.1
_SHARE_OF_WRONG = 0.25  # of the few images compared: kinks and rounding can spoil one
_NO_GRADIENTS = "the attack uses no gradients"


def zero_gradient(probe: Probe, attacked: np.ndarray, num_gradients: np.ndarray):
    """Share of attacked images with a goal that is not reached and has no gradient.

    Args:
      probe: what was found at the images.
      attacked: [N] bool.
      num_gradients: [N] that the attack took.
    """
    name, n = "zero_gradient", int(attacked.sum())
    if not n:
        return entry(name, None, reason="no image was attacked")
    if not num_gradients.any():
        return entry(name, None, reason=_NO_GRADIENTS)
    exempt = None if probe.differentiable else "the detector declares that it has no gradients"
    if not probe.dead:
        return entry(name, None, reason=exempt)
    count = lambda flags: int(flags[attacked].sum())
    counts = {goal: {point: count(flags) for point, flags in points.items()}
              for goal, points in probe.dead.items()}  # fmt: skip
    most = max(max(points.values()) for points in counts.values())
    shares = {goal: {point: value / n for point, value in points.items()}
              for goal, points in counts.items()}  # fmt: skip
    raised = exceeds(most, n, _SHARE_WITHOUT_GRADIENT)
    return entry(name, most / n, raised, exempt, shares=shares)


def wrong_gradient(probe: Probe, attacked: np.ndarray, num_gradients: np.ndarray):
    """Share of a few attacked images at which a goal's gradient is not its slope.

    Args:
      probe, attacked, num_gradients: as of `zero_gradient`.
    """
    name = "wrong_gradient"
    if not attacked.any():
        return entry(name, None, reason="no image was attacked")
    if not num_gradients.any():
        return entry(name, None, reason=_NO_GRADIENTS)
    if not probe.slopes:
        return entry(name, None, reason="it is declared that there are none, or a stand-in")
    kinds = {goal: found.counts() for goal, found in probe.slopes.items()}
    shares = {goal: float(found.wrong.mean()) for goal, found in probe.slopes.items()}
    worst = max(shares, key=shares.get)
    found = probe.slopes[worst]
    raised = exceeds(int(found.wrong.sum()), len(found.wrong), _SHARE_OF_WRONG)
    said = {kind: kinds[worst][kind] for kind in slopes.WRONG if kind in kinds[worst]}
    said = ", ".join(f"{kind} on {count}" for kind, count in said.items())
    advice = (
        f"Of the {worst}'s goal, on {len(found.wrong)} images, the gradient is {said}. "
        f"{ADVICE[name]}"
    )
    return entry(name, shares[worst], raised, advice=advice, kinds=kinds, n=len(found.wrong))
