"""What an attacked defence gives at a few points: has it gradients, and does one step break it?

Asked after an attack, of the goals and the defence that the attacker had. Each image has keys of
its own, so no answer depends on batch mates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from advdet import goal_slopes
from advdet.attacks.base import AttackResult
from advdet.attacks.goals import Objective
from advdet.defenses import Defense
from advdet.slopes import Compared
from advdet.types import Batch

_PROBE, _SLOPES = 0x5052, 0x534C
_LENGTHS = tuple(2.0**-k for k in range(8, 0, -1))  # of one step, in shares of the box's width
_COMPARED = 8  # images at which gradients are compared with finite differences
POINTS = ("clean", "end")


class Reach(NamedTuple):
    """How far an attack may go from an image.

    Attributes:
      minimal: it looks for the nearest image, and there is no limit.
      epsilon: else its radius, None where it has none either.
      norm: of the radius, "linf" or "l2".
    """

    minimal: bool
    epsilon: float | None = None
    norm: str = "linf"


class Probe(NamedTuple):
    """What was found at the attacked images; rows of others are False.

    Attributes:
      dead: goal ("classifier", "detector") -> point (in `POINTS`) -> [N] bool: a goal is not
        reached there and has no gradient, or one that is not finite. A goal that cannot be asked
        is left out.
      one_step: [N] bool, one step from the clean image reaches all goals; None where not tried.
      differentiable: whether the detector shown says that it is.
      slopes: goal -> the gradient near a few of the clean images, compared with finite differences;
        empty where none are promised or none are asked for.
    """

    dead: dict[str, dict[str, np.ndarray]]
    one_step: np.ndarray | None
    differentiable: bool
    slopes: dict[str, Compared] = {}


def probe(
    objective: Objective,
    view: Defense,
    clean: Batch,
    targets: np.ndarray,
    found: AttackResult,
    attacked: np.ndarray,
    *,
    seed: int,
    reach: Reach,
    start: np.ndarray | None = None,
) -> Probe:
    """Looks at gradients where an attack began and ended, and at what one step does.

    A step follows the sign of the gradient and the gradient itself, over eight lengths each; of an
    attack with a radius, in its own norm and at its own radius. It is tried where an attack without
    a limit failed, and at all attacked images where there is one.

    Args:
      objective: the attacker's; the first of its variants is asked.
      view: the defence that he was shown.
      clean: [N] images with their labels.
      targets: [N] wanted classes, or true ones where untargeted.
      found: [N] what the attack returned; of one that took no gradients nothing is asked.
      attacked: [N] bool, the images to look at.
      seed: of the run.
      reach: of the attack.
      start: [N, H, W, C] as in `cells.attack_images`.
    """
    rows, differentiable = np.flatnonzero(attacked), view.detector.differentiable
    if not len(rows) or not found.num_gradients.any():  # to ask where there are none can fail
        return Probe({}, None, differentiable)
    variant = objective.variants()[0]
    shown, free = variant.view(view, start, clean.images), variant.free(view)
    root = jax.random.fold_in(jax.random.key(seed), _PROBE)
    key_clean, key_end, key_steps = jax.random.split(root, 3)
    ask = lambda key, images: _goals(key, variant, shown, images[rows], targets[rows],
                                     clean.ids[rows], free)  # fmt: skip
    images = np.asarray(clean.images)
    at_clean = ask(key_clean, images)
    pick = lambda flags: flags.reshape(-1, 1, 1, 1)
    end = np.where(pick(found.missed), found.nearest_miss, images)
    at_end = ask(key_end, np.where(pick(found.success), found.image, end))

    whole = lambda flags: _scatter(flags, rows, len(attacked))
    dead = {}
    if differentiable or shown.detector.kind != "corrector":
        dead["classifier"] = [at.dead_classifier for at in (at_clean, at_end)]
    if differentiable and at_clean.has_detector:
        dead["detector"] = [at.dead_detector for at in (at_clean, at_end)]
    dead = {goal: dict(zip(POINTS, map(whole, flags))) for goal, flags in dead.items()}

    slopes = {}
    promised = differentiable or shown.detector.kind == "score"
    if shown.classifier.differentiable and promised:
        few = rows[:_COMPARED]
        slopes = goal_slopes.compared(
            jax.random.fold_in(root, _SLOPES), variant, shown, images[few], targets[few],
            clean.ids[few], detector=differentiable,
        )  # fmt: skip
    tried = ~found.success[rows] if reach.minimal else np.ones(len(rows), bool)
    if not (reach.minimal or reach.epsilon):
        return Probe(dead, None, differentiable, slopes)
    broken = np.zeros(len(rows), bool)
    for number, moved in enumerate(_moves(images[rows], at_clean.descent, reach)):
        left = np.flatnonzero(tried & ~broken)
        look = rows[left]
        broken[left] = goal_slopes.accepted(
            jax.random.fold_in(key_steps, number), variant, shown, moved[left], targets[look],
            clean.ids[look],
        )  # fmt: skip
    return Probe(dead, whole(broken), differentiable, slopes)


def _scatter(flags: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros(count, bool)
    out[rows] = flags
    return out


class _Goals(NamedTuple):
    """Goals of N images: [N] bool each, and [N, H, W, C] the way down of those not reached."""

    has_detector: bool
    dead_classifier: np.ndarray
    dead_detector: np.ndarray
    descent: np.ndarray


def _goals(key, objective, defense, images, targets, ids, free) -> _Goals:
    goals, gradients = goal_slopes.goals_and_slopes(key, objective, defense, images, targets, ids)
    if free is not None:
        gradients = np.where(free[None, None], gradients, np.float32(0.0))
    values = np.concatenate([goals.classifier, goals.detector], axis=1)
    first, both = goals.classifier.shape[1], values.shape[1]
    slopes = gradients[:, :both]
    open_goals = np.concatenate([goals.classifier >= 0, goals.detector > 0], axis=1)
    finite = np.isfinite(values) & np.isfinite(slopes).all(axis=(2, 3, 4))
    dead = ~finite | (open_goals & (slopes == 0).all(axis=(2, 3, 4)))

    wanted = goals.losses > 0  # what is reached needs no step, unless all of it is
    wanted |= ~wanted.any(axis=1, keepdims=True)
    weighted = np.where(wanted[:, :, None, None, None], gradients[:, both:], np.float32(0.0))
    descent = np.nan_to_num(-weighted.sum(axis=1))
    dead_by_goal = dead[:, :first].any(axis=1), dead[:, first:].any(axis=1)
    return _Goals(both > first, *dead_by_goal, descent)


def _moves(images: np.ndarray, descent: np.ndarray, reach: Reach) -> Iterator[np.ndarray]:
    """Images [N, H, W, C] one step away, shortest steps first."""
    norms = np.sqrt(np.sum(np.square(descent, dtype=np.float64), axis=(1, 2, 3), keepdims=True))
    units = {
        "linf": np.sign(descent),
        "l2": (descent / np.where(norms > 0, norms, 1.0)).astype(np.float32),
    }
    full = {"linf": 1.0, "l2": float(np.sqrt(descent[0].size))}
    steps = [(reach.norm, reach.epsilon)]
    if reach.minimal:
        steps = [(norm, share * full[norm]) for share in _LENGTHS for norm in units]
    for norm, length in steps:
        yield np.clip(images + np.float32(length) * units[norm], 0.0, 1.0)
