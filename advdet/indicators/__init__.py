"""Signs that the attack or the model is broken, and the verdict that heeds them.

Each is a figure with a flag and, where it is raised, a sentence on what to change; where there is
no figure, a reason. Those in `INVALIDATING` mean that a success rate says nothing of the defence;
the others warn, of a distance or of what the images are good for. Each is a pure function, found
under its name in `RULES`.

Source: after Carlini et al. 2019 (arXiv 1902.06705), sections 4 and 5; Pintor et al. 2022
(arXiv 2106.09947), indicators of attack failure.
"""

from __future__ import annotations

from advdet.indicators.base import (
    ADVICE,
    FEWEST,
    INVALIDATING,
    MINIMAL_DISTANCE,
    TOLERATED,
    by_values,
    entry,
    exceeds,
    is_minimal,
)
from advdet.indicators.gradients import wrong_gradient, zero_gradient
from advdet.indicators.images import lost_to_8bit, nearer_again, nearer_attack, not_transferred
from advdet.indicators.model import (
    classifier_at_chance,
    constant_score,
    probabilities,
    score_drifts,
    score_not_a_number,
    score_reversed,
)
from advdet.indicators.search import (
    classifier_goal_missed,
    natural_image_missed,
    noise,
    one_step,
    silent_success,
)
from advdet.indicators.thresholds import coarse_score, few_clean_images
from advdet.indicators.verdicts import (
    BROKEN,
    INVALID,
    NOT_BROKEN,
    NOT_BY_VALUES,
    TOO_FEW_SETS,
    amended,
    verdict,
)

RULES = {
    "zero_gradient": zero_gradient,
    "wrong_gradient": wrong_gradient,
    "noise_success_rate": noise,
    "one_step": one_step,
    "classifier_goal_missed": classifier_goal_missed,
    "natural_image_missed": natural_image_missed,
    "probabilities": probabilities,
    "silent_success": silent_success,
    "classifier_at_chance": classifier_at_chance,
    "not_transferred": not_transferred,
    "score_reversed": score_reversed,
    "score_not_a_number": score_not_a_number,
    "lost_to_8bit": lost_to_8bit,
    "constant_score": constant_score,
    "score_drifts": score_drifts,
    "coarse_score": coarse_score,
    "few_clean_images": few_clean_images,
    "nearer_attack": nearer_attack,
    "nearer_again": nearer_again,
}

__all__ = [
    "ADVICE",
    "BROKEN",
    "FEWEST",
    "INVALID",
    "INVALIDATING",
    "MINIMAL_DISTANCE",
    "NOT_BROKEN",
    "NOT_BY_VALUES",
    "RULES",
    "TOLERATED",
    "TOO_FEW_SETS",
    "amended",
    "by_values",
    "classifier_at_chance",
    "classifier_goal_missed",
    "coarse_score",
    "constant_score",
    "entry",
    "exceeds",
    "few_clean_images",
    "is_minimal",
    "lost_to_8bit",
    "natural_image_missed",
    "nearer_again",
    "nearer_attack",
    "noise",
    "not_transferred",
    "one_step",
    "probabilities",
    "score_drifts",
    "score_not_a_number",
    "score_reversed",
    "silent_success",
    "verdict",
    "wrong_gradient",
    "zero_gradient",
]
