"""A stored record's images under the judge again, with what float error leaves open.

Another machine adds the same numbers in another order. A logit may differ by `LOGIT_ERROR` of the
image's largest, a score by `SCORE_ERROR` of the spread of clean scores and `DIGITS_ERROR` of
itself. Where a stored verdict differs from ours by no more than that, it stands; where it differs
by more, ours counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from advdet.assess import squeezed, with_noise
from advdet.defenses import Defense, FittedDefense, classify_images
from advdet.judge import (
    Judgement,
    class_margins,
    is_wanted,
    judge_in_pieces,
    round_to_8_bit,
)
from advdet.types import Batch

LOGIT_ERROR, SCORE_ERROR, DIGITS_ERROR = 2e-5, 1e-3, 1e-5


class Seen(NamedTuple):
    """Images under the judge.

    Attributes:
      wanted: [N] bool, as the goal wants.
      sure: [N] bool, by more than float error.
      logits: [N, K].
      scores: [D, N], or [D, 0].
      error: of the scores, like them.
    """

    wanted: np.ndarray
    sure: np.ndarray
    logits: np.ndarray
    scores: np.ndarray
    error: np.ndarray

    def flagged(self, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
        """([D, N] surely flagged, [D, N] possibly flagged)."""
        none = np.zeros((self.scores.shape[0], len(self.wanted)), bool)
        if threshold is None or not self.scores.shape[1]:
            return none, none
        low, high = self.scores - self.error, self.scores + self.error
        return ~(low <= threshold), ~(high <= threshold)

    def success(self, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
        """([N] the least, [N] the greatest share of draws that an image survives)."""
        sure, possible = self.flagged(threshold)
        least = np.mean((self.wanted & self.sure)[None] & ~possible, axis=0)
        return least, np.mean((self.wanted | ~self.sure)[None] & ~sure, axis=0)

    def settled(self, verdicts: Judgement, rows: np.ndarray) -> Seen:
        """The same with verdicts that count, without error, in the rows [N] bool."""
        scores, error = self.scores, self.error
        if scores.shape[1]:
            scores = np.where(rows[None], verdicts.scores, scores)
            error = np.where(rows[None], 0.0, error)
        wanted = np.where(rows, verdicts.wanted, self.wanted)
        return Seen(wanted, self.sure | rows, self.logits, scores, error)

    def judgement(self, reading: int) -> Judgement:
        """How float error may read it: -1 against the attacker, 0 as it is, 1 in his favour."""
        wanted = {-1: self.wanted & self.sure, 0: self.wanted, 1: self.wanted | ~self.sure}
        scores = np.asarray(self.scores - reading * self.error, np.float32)
        return Judgement(self.logits, wanted[reading], scores)

    def take(self, rows) -> Seen:
        """Some of the images."""
        pick = lambda a: a[:, rows] if a.shape[1] else a
        return Seen(
            self.wanted[rows], self.sure[rows], self.logits[rows], pick(self.scores),
            pick(self.error),
        )  # fmt: skip


class Looks(NamedTuple):
    """A record's images under the judge.

    Attributes:
      clean: with the true labels as goal.
      adversarial: the returned images.
      rounded: the same in 8 bit.
      shown: the returned image, or the nearest miss where the attack found none.
      squeezed: the clean images after a round trip through C&W's variables.
      noisy: [M] clean images with noise of the same L2, where the attack claims a success.
    """

    clean: Seen
    adversarial: Seen
    rounded: Seen
    shown: Seen
    squeezed: Seen
    noisy: Seen


def look_again(
    victim: FittedDefense, run: dict[str, Any], arrays: dict[str, np.ndarray], clean: Batch,
    progress: bool,
) -> Looks:  # fmt: skip
    """Judges all that the record's figures rest on, with the record's own keys.

    Args:
      victim: the defence.
      run: the record's `run` part.
      arrays: the record's.
      clean: [N] the clean images.
      progress: show a bar on stderr.
    """
    ids, labels, goal = arrays["id"], arrays["label"], arrays["target_class"]
    failed, won = np.flatnonzero(~arrays["success"]), np.flatnonzero(arrays["success"])
    images = [clean.images, arrays["image"], round_to_8_bit(arrays["image"]),
              squeezed(clean.images), arrays["nearest_miss"][failed],
              with_noise(run["seed"], clean, arrays["distance"])[won]]  # fmt: skip
    images, all_ids = np.concatenate(images), np.concatenate([*[ids] * 4, ids[failed], ids[won]])
    found = judge_in_pieces(  # for logits and scores; the goals differ, and come below
        victim.defense, images, all_ids, np.zeros_like(all_ids), targeted=True, seed=run["seed"],
        progress=progress,
    )  # fmt: skip
    count, targeted = len(ids), run["targets"] != "untargeted"
    see = lambda rows, classes, towards: _seen(victim, found.take(rows), classes, towards)
    part = lambda k: np.arange(k * count, (k + 1) * count)
    rows = part(1)
    rows[failed] = 4 * count + np.arange(len(failed))
    noisy = 4 * count + len(failed) + np.arange(len(won))
    return Looks(
        clean=see(part(0), labels, True),
        adversarial=see(part(1), goal, targeted),
        rounded=see(part(2), goal, targeted),
        shown=see(rows, goal, targeted),
        squeezed=see(part(3), goal, targeted),
        noisy=see(noisy, goal[won], targeted),
    )


def see_classes(
    defense: Defense, images: np.ndarray, ids: np.ndarray, goal: np.ndarray, regime: str
) -> Seen:
    """The classes alone of images [N, H, W, C], without scores.

    Args:
      defense: whose logits.
      images: [N, H, W, C].
      ids: [N].
      goal: [N] wanted classes, or the true ones where untargeted.
      regime: of the targets.
    """
    logits = classify_images(jax.random.key(0), defense, images, ids)
    none = np.zeros((1, 0), np.float32)
    sure = np.abs(class_margins(logits, goal)) > logit_error(logits)
    return Seen(is_wanted(logits, goal, regime != "untargeted"), sure, logits, none, none)


def _seen(victim, found: Judgement, classes, targeted: bool) -> Seen:
    sure = np.abs(class_margins(found.logits, classes)) > logit_error(found.logits)
    wanted = is_wanted(found.logits, classes, targeted)
    error = score_error(victim, found.scores)
    return Seen(wanted, sure, found.logits, found.scores, error)


def logit_error(logits: np.ndarray) -> np.ndarray:
    """[N] how far a margin may be off."""
    return LOGIT_ERROR * np.maximum(1.0, np.abs(logits).max(axis=1))


def score_error(victim: FittedDefense, scores) -> np.ndarray:
    """How far scores, or a threshold, may be off."""
    spread = float(victim.defense.scale)
    return SCORE_ERROR * spread + DIGITS_ERROR * np.abs(np.asarray(scores, np.float64))
