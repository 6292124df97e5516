"""Signs that an attack misses what is there to be found."""

from __future__ import annotations

import numpy as np

from advdet import metrics
from advdet.indicators.base import TOLERATED, entry, exceeds
from advdet.probes import Probe

_SHARE_OF_LUCK = 0.1  # of images that a random score may let pass by chance
_TOLERATED_FAILURES = 0.01  # of an attack without a limit, where a natural image succeeds


def noise(noisy: np.ndarray | None, adversarial: np.ndarray):
    """Success of random noise of equal L2, beside that of the attack on the same images.

    Args:
      noisy: [M] shares of the judge's draws that noise passes, for images that the attack claims;
        None where it claims none.
      adversarial: [M] the same of the attack's images.
    """
    name = "noise_success_rate"
    if noisy is None:
        return entry(name, None, reason="the attack found nothing whose L2 noise could have")
    rate, own = float(noisy.mean()), float(adversarial.mean())
    raised = exceeds(float(noisy.sum()), len(noisy), max(TOLERATED, 0.5 * own))
    return entry(name, rate, raised, attack=own)


def one_step(probe: Probe, attacked: np.ndarray, success: np.ndarray, minimal: bool):
    """What one step breaks, beside what the attack does.

    Args:
      probe: what was found at the images.
      attacked: [N] bool.
      success: [N] bool, what the attack claims.
      minimal: it is an attack without a radius; then it must break all that one step does. Else its
        rate is compared with that of one step of the same length.
    """
    name, n, broken = "one_step", int(attacked.sum()), probe.one_step
    if broken is None:
        why = "no step of a like length is known"
        if not probe.dead:
            why = "the attack uses no gradients" if n else "no image was attacked"
        return entry(name, None, reason=why)
    lost = int((broken & attacked & ~success).sum())
    if minimal:
        return entry(name, lost / n, exceeds(lost, n))
    one, own = (int(flags[attacked].sum()) for flags in (broken, success))
    gained = int((success & attacked & ~broken).sum())
    raised = exceeds(one - own, n) and exceeds(lost, lost + gained, 0.5)
    return entry(name, one / n, raised, attack=own / n)


def classifier_goal_missed(
    met: np.ndarray,
    attacked: np.ndarray,
    *,
    alone: np.ndarray | None,
    minimal: bool,
    confidence: float,
    defended: bool,
):
    """Share of attacked images whose label this attack never reached, whatever the distance.

    Args:
      met: [N] bool, reached at some image visited on the way.
      attacked: [N] bool.
      alone: [N] bool, the same attack reaches it with the detector left out; None if not known.
      minimal: whether the attack has no limit.
      confidence: of the goal.
      defended: whether the label is asked of the defended classifier itself.
    """
    name, n = "classifier_goal_missed", int(attacked.sum())
    if not n:
        return entry(name, None, reason="no image was attacked")
    if not minimal:
        return entry(name, None, reason="the attack has a limit of its own")
    if confidence:
        return entry(name, None, reason="the goal asks for confidence beyond the label")
    if not defended:
        return entry(name, None, reason="the label is asked of other networks than the defended")
    missed = attacked & ~met
    count, without, advice = int(missed.sum()), None, None
    if alone is not None and count:
        without = float(alone[missed].mean())
        if without > 0.5:
            advice = (
                "With the detector in its way the attack misses labels that it reaches without: "
                "look at how the objective weighs label and score, and raise steps."
            )
    return entry(name, count / n, exceeds(count, n), advice=advice, reached_alone=without)


def natural_image_missed(
    failed: np.ndarray,
    natural: np.ndarray | None,
    attacked: np.ndarray,
    *,
    shown: bool,
    minimal: bool,
):
    """Share of attacked images that fail although some natural image is what is wanted.

    Args:
      failed: [N] bool, attacked images that the judge takes for failures.
      natural: [N] L2 to the nearest natural image that the judge takes for a success, inf where
        there is none; only failures are looked at. None where nothing was looked for.
      attacked: [N] bool.
      shown: whether the attacker was shown the defence that judges.
      minimal: whether the attack has no limit: then it could have gone there.
    """
    name, n = "natural_image_missed", int(attacked.sum())
    if not n:
        return entry(name, None, reason="no image was attacked")
    if not shown:
        return entry(name, None, reason="the attacker was not shown the defence that judges")
    if not minimal:
        return entry(name, None, reason="the attack has a limit of its own")
    if natural is None:
        return entry(name, None, reason="there are no natural images to look at")
    there = failed & attacked & np.isfinite(natural)
    count = int(there.sum())
    return entry(
        name, count / n, exceeds(count, n, _TOLERATED_FAILURES), count=count,
        failed=int((failed & attacked).sum()), interval=metrics.wilson(count, n),
        mean_l2=metrics.mean_or_none(natural[there]),
    )  # fmt: skip


def silent_success(passes, attacked: np.ndarray, *, shown: bool, judges_alike: bool, random: bool):
    """How many images the judge lets pass of those that the attack visited and does not claim.

    Args:
      passes: [N] shares of the judge's draws that the nearest miss passes, 0 where there is none or
        the attack claims a success.
      attacked: [N] bool.
      shown: whether the attacker was shown the defence that judges.
      judges_alike: whether attack and judge ask for the same: a threshold, without a margin.
      random: whether the score is; then all draws must be passed, and some luck is granted.
    """
    name = "silent_success"
    if not shown:
        return entry(name, None, reason="the attacker was not shown the defence that judges")
    if not judges_alike:
        return entry(name, None, reason="the attack asks for more than the judge does")
    silent = attacked & ((passes == 1.0) if random else (passes > 0.5))
    count, tolerated = int(silent.sum()), _SHARE_OF_LUCK if random else TOLERATED
    return entry(name, count, exceeds(count, int(attacked.sum()), tolerated))
