"""Signs that the attack or the model is broken, and the verdict that heeds them.

Each is a figure with a flag and, where it is raised, a sentence on what to change; where there is
no figure, a reason. Those in `INVALIDATING` mean that a success rate says nothing of the defence;
the others warn, of a distance or of what the images are good for.

Source: after Carlini et al. 2019 (arXiv 1902.06705), sections 4 and 5; Pintor et al. 2022
(arXiv 2106.09947), indicators of attack failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from advdet import logit_range, metrics
from advdet.probes import Probe

MINIMAL_DISTANCE = ("carlini_wagner", "ddn")  # of others, distances say little
INVALIDATING = (
    "zero_gradient", "noise_success_rate", "one_step", "classifier_goal_missed", "probabilities",
    "silent_success", "classifier_at_chance",
)  # fmt: skip
_ADVICE = {
    "zero_gradient": "Attack a differentiable stand-in for what kills the gradient (rounding, a "
    "hard decision, saturation), or use an attack without gradients.",
    "noise_success_rate": "Random noise does as well: look for a slip in the model or in its "
    "labels before anything is said of the attack.",
    "one_step": "The attack's steps or loss are at fault: look at step size, number of steps and "
    "objective.",
    "classifier_goal_missed": "The attack misses the label even with no detector in its way: raise "
    "steps or learning rate, and test it on the undefended classifier.",
    "probabilities": "Return what goes into the softmax or sigmoid: gradients through it vanish.",
    "silent_success": "The judge lets pass what the attack calls a failure: compare what the "
    "attack optimises with what the judge measures.",
    "classifier_at_chance": "The classifier does not know these images: look at labels, layout and "
    "normalisation before anything is said of a detector.",
    "not_transferred": "Most images do not fool the victim's classifier, which says little of its "
    "detector: ask for confidence (10, 20), or let experiments.limited_knowledge find how much.",
    "score_reversed": "Attacked images look less suspicious than clean ones to a detector that the "
    "attacker does not know of: is higher the more suspicious?",
    "lost_to_8bit": "Images do not survive rounding to a file; ask for some confidence.",
    "nearer_attack": "Another attack is nearer: read the distance of `best`, or raise the steps.",
    "nearer_again": "The search has not settled: raise steps, or take the preset thorough.",
    "constant_score": "The detector gives every image the same score: look at its fit and inputs.",
}
BROKEN, INVALID = "broken", "evaluation invalid"
NOT_BROKEN = "not broken by these attacks at this budget"
TOO_FEW_SETS = "too few sets to say"  # whether half of them are told
TOLERATED = 0.02  # of images or of a distance: less is taken for chance
_SHARE_WITHOUT_GRADIENT = 0.1
_SHARE_OF_LUCK = 0.1  # of images that a random score may let pass by chance


def entry(name: str, value, raised: bool = False, reason: str | None = None, **more) -> dict:
    """One indicator.

    Args:
      name: in the record.
      value: the figure; None where there is none.
      raised: whether it is a sign of something broken.
      reason: why there is no figure, or what it leaves out.
      **more: other figures that belong to it.

    Returns:
      {value, raised, invalidates, advice, reason, ...}.
    """
    return {
        "value": value,
        "raised": bool(raised),
        "invalidates": name in INVALIDATING,
        "advice": _ADVICE[name] if raised else None,
        "reason": reason,
        **more,
    }


def verdict(
    interval: list[float] | None,
    indicators: Mapping[str, Any],
    sets: Mapping[str, Any] | None = None,
) -> str:
    """What a record says; never that a defence holds.

    Args:
      interval: 95 % interval of success at the point aimed at.
      indicators: of the record.
      sets: of the record of a detector of kind "set"; then half of the sets must pass, too, for
        which there must be enough of them.
    """
    if any(sign["raised"] and sign["invalidates"] for sign in indicators.values()):
        return INVALID
    if interval is None or interval[0] < 0.5:
        return NOT_BROKEN
    if sets is None:
        return BROKEN
    low, high = sets["adversarial"]["interval"] or (0.0, 1.0)
    if low <= 0.5 < high:
        return TOO_FEW_SETS
    return NOT_BROKEN if low > 0.5 else BROKEN


def is_minimal(run: Mapping[str, Any]) -> bool:
    """Whether a record's attack, or one of those of `best`, looks for the nearest image."""
    used = run["settings"]["attack"] if run["attack"] == "best" else (run["attack"],)
    return any(name in MINIMAL_DISTANCE for name in used)


def amended(record: dict[str, Any], name: str, sign: dict[str, Any]) -> dict[str, Any]:
    """The record with one indicator put in, and the verdict that follows."""
    indicators = {**record["indicators"], name: sign}
    said = verdict(record["intervals"]["success_rate"], indicators, record["sets"])
    return {**record, "indicators": indicators, "verdict": said}


def _many(count, n, tolerated=TOLERATED) -> bool:
    """More than is tolerated of n, and more than one."""
    return bool(count > 1 and count > tolerated * n)


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
        return entry(name, None, reason="the attack uses no gradients")
    exempt = None if probe.differentiable else "the detector declares that it has no gradients"
    if not probe.dead:
        return entry(name, None, reason=exempt)
    count = lambda flags: int(flags[attacked].sum())
    counts = {goal: {point: count(flags) for point, flags in points.items()}
              for goal, points in probe.dead.items()}  # fmt: skip
    most = max(max(points.values()) for points in counts.values())
    shares = {goal: {point: value / n for point, value in points.items()}
              for goal, points in counts.items()}  # fmt: skip
    raised = _many(most, n, _SHARE_WITHOUT_GRADIENT)
    return entry(name, most / n, raised, exempt, shares=shares)


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
    raised = _many(noisy.sum(), len(noisy)) and rate >= 0.5 * own
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
    if minimal:
        count = int((broken & attacked & ~success).sum())
        return entry(name, count / n, _many(count, n))
    one, own = (int(flags[attacked].sum()) for flags in (broken, success))
    return entry(name, one / n, _many(one - own, n), attack=own / n)


def classifier_goal_missed(met, attacked: np.ndarray, minimal: bool, confidence: float):
    """Share of attacked images whose label was never reached, with no limit on the distance.

    Args:
      met: [N] bool, reached at some image visited, with the detector in the loop or without.
      attacked: [N] bool.
      minimal: whether the attack has no limit.
      confidence: of the goal.
    """
    name, n = "classifier_goal_missed", int(attacked.sum())
    if not n:
        return entry(name, None, reason="no image was attacked")
    if not minimal:
        return entry(name, None, reason="the attack has a limit of its own")
    if confidence:
        return entry(name, None, reason="the goal asks for confidence beyond the label")
    count = int((attacked & ~met).sum())
    return entry(name, count / n, _many(count, n))


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
    return entry(name, value, value == 1.0)


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
    return entry(name, count, _many(count, int(attacked.sum()), tolerated))


def classifier_at_chance(accuracy: float, classes: int):
    """Accuracy on many clean images; raised where it is not even twice chance, nor above half."""
    return entry("classifier_at_chance", accuracy, accuracy <= min(0.5, 2.0 / classes))


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


def lost_to_8bit(rate: float | None, rate_8bit: float | None):
    """Share of the success that rounding to 8 bit costs."""
    name = "lost_to_8bit"
    if not rate:
        return entry(name, None, reason="there is no success to lose")
    lost = 1.0 - rate_8bit / rate
    return entry(name, lost, lost > 0.5)


def constant_score(scores: np.ndarray):
    """Spread of the scores of clean and adversarial images [D, N]; 0 is a constant."""
    name = "constant_score"
    scores = scores[np.isfinite(scores)]
    if not scores.size:
        return entry(name, None, reason="there are no finite scores")
    spread = float(scores.max()) - float(scores.min())
    return entry(name, spread, spread <= 1e-6 * float(np.abs(scores).max()))


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
    far = _many(gained, int(rows.sum()))
    if not both.any():
        return entry(name, None, far, "no image that both runs break", **more)
    advantage = _advantage(distance, again_distance, both)
    return entry(name, advantage, far or advantage > TOLERATED, **more)


def _won(arrays) -> np.ndarray:
    return arrays["success"] & (arrays["judged_success"] > 0.5)


def _advantage(distance, other, both) -> float:
    own = metrics.mean_or_none(distance[both])
    return 1.0 - metrics.mean_or_none(other[both]) / own if own else 0.0
