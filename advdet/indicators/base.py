"""What every indicator is: a figure, a flag, and advice; and when a share of images is too many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advdet import metrics
from advdet.attacks import presets

MINIMAL_DISTANCE = ("carlini_wagner", "ddn")  # of others, distances say little
INVALIDATING = (
    "zero_gradient", "wrong_gradient", "noise_success_rate", "one_step", "classifier_goal_missed",
    "natural_image_missed", "probabilities", "silent_success", "classifier_at_chance",
    "score_drifts",
)  # fmt: skip
ADVICE = {
    "zero_gradient": "Attack a differentiable stand-in for what kills the gradient (rounding, a "
    "hard decision, saturation), or use an attack without gradients.",
    "wrong_gradient": "The gradient is not the slope: compare it with finite differences (advdet "
    'check), mend it, or attack without gradients: attack="square".',
    "noise_success_rate": "Random noise does as well: look for a slip in the model or in its "
    "labels before anything is said of the attack.",
    "one_step": "The attack's steps or loss are at fault: look at step size, number of steps and "
    "objective.",
    "classifier_goal_missed": "The attack misses the label even with no detector in its way: raise "
    "steps or learning rate, and test it on the undefended classifier.",
    "natural_image_missed": "An attack without a limit must reach what a natural image reaches as "
    "it is: look at gradients and objective, raise steps, or begin at natural images.",
    "probabilities": "Return what goes into the softmax or sigmoid: gradients through it vanish.",
    "silent_success": "The judge lets pass what the attack calls a failure: compare what the "
    "attack optimises with what the judge measures.",
    "classifier_at_chance": "The classifier does not know these images: look at labels, layout and "
    "normalisation before anything is said of a detector.",
    "not_transferred": "Most images do not fool the victim's classifier, which says little of its "
    "detector: ask for confidence (10, 20), or let experiments.limited_knowledge find how much.",
    "score_reversed": "Attacked images look less suspicious than clean ones to a detector that the "
    "attacker does not know of: is higher the more suspicious?",
    "score_not_a_number": "A score that is no number counts as flagged, and has no gradient: guard "
    "divisions, logarithms and roots in the detector.",
    "lost_to_8bit": "Images do not survive rounding to a file; ask for some confidence.",
    "nearer_attack": "Another attack is nearer: read the distance of `best`, or raise the steps.",
    "nearer_again": "The search has not settled: raise steps, or take the preset thorough.",
    "score_drifts": "The score of the same image changed while the attack ran, so that thresholds "
    "and verdicts are of different detectors: it keeps state (a running mean, a cache, a module in "
    "training mode) or draws random numbers of its own; take that out, or ask for a `key`.",
    "coarse_score": "The score takes few values, so that no threshold flags the share of clean "
    "images that its name says: give what the decision is made from (a logit, a distance).",
    "few_clean_images": "Thresholds rest on few clean images: give a hundred or more (`clean` of "
    "Splits.from_arrays), and more than a thousand for the one at 1 %.",
    "constant_score": "The detector gives every image the same score: look at its fit and inputs.",
}
TOLERATED = 0.02  # of images or of a distance: less is taken for chance
FEWEST = 3  # images that a flag may hang on


def entry(
    name: str,
    value,
    raised: bool = False,
    reason: str | None = None,
    *,
    advice: str | None = None,
    **more,
) -> dict:
    """One indicator.

    Args:
      name: in the record.
      value: the figure; None where there is none.
      raised: whether it is a sign of something broken.
      reason: why there is no figure, or what it leaves out.
      advice: what to change, where more is known than `ADVICE` says.
      **more: other figures that belong to it.

    Returns:
      {value, raised, invalidates, advice, reason, ...}.
    """
    return {
        "value": value,
        "raised": bool(raised),
        "invalidates": name in INVALIDATING,
        "advice": (advice or ADVICE[name]) if raised else None,
        "reason": reason,
        **more,
    }


def exceeds(count: float, n: int, tolerated: float = TOLERATED) -> bool:
    """Whether a share of images is surely more than is tolerated: its lower 95 % bound is.

    Of few images this takes many of them, and never fewer than three.

    Args:
      count: how many, possibly a sum of shares.
      n: of how many.
      tolerated: the share.
    """
    return bool(n and count >= FEWEST and metrics.wilson(count, n)[0] > tolerated)


def is_minimal(run: Mapping[str, Any]) -> bool:
    """Whether a record's attack, or one of those of `best`, looks for the nearest image."""
    return any(name in MINIMAL_DISTANCE for name in _attacks(run))


def by_values(run: Mapping[str, Any]) -> bool:
    """Whether a record's attack, or each of those of `best`, follows no gradients."""
    return all(name in presets.GRADIENT_FREE for name in _attacks(run))


def _attacks(run: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(run["settings"]["attack"]) if run["attack"] == "best" else (run["attack"],)
