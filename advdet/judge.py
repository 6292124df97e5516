"""The judge: the true defence, looking at finished images with keys that no attack has used.

For a detector that draws random numbers the judge draws five times; draw d of image i under seed s
uses the key `fold_in(fold_in(fold_in(key(s), 0x4A55), d), i)`, so that anyone can draw it again.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from advdet.defenses import Defense, classify_images, score_images

_JUDGE, ATTACKERS_OWN = 0x4A55, 0x4F57
NUM_DRAWS, NUM_OWN_DRAWS = 5, 40
_LOGITS = 2**20  # beyond any number of draws
_PIECE = 200  # images between two steps of a progress bar


class Judgement(NamedTuple):
    """What the true defence says of N images.

    Attributes:
      logits: [N, K] of the defended classifier (the first draw's, where they are random).
      wanted: [N] bool, the target is the one best class (or the true one is not), ties failing.
      scores: [D, N] in D draws; empty [D, 0] where the defence flags nothing.
    """

    logits: np.ndarray
    wanted: np.ndarray
    scores: np.ndarray

    def flagged(self, threshold: float | None) -> np.ndarray:
        """[D, N] bool; without a threshold nothing is flagged, with one NaN is, too."""
        if threshold is None or self.scores.shape[1] == 0:
            return np.zeros((self.scores.shape[0], len(self.wanted)), bool)
        return ~(self.scores <= np.float32(threshold))

    def take(self, rows: np.ndarray) -> Judgement:
        """The judgement of some of the images."""
        scores = self.scores[:, rows] if self.scores.shape[1] else self.scores
        return Judgement(self.logits[rows], self.wanted[rows], scores)

    def success(self, threshold: float | None) -> np.ndarray:
        """[N] the share of draws in which an image is taken as wanted and is not flagged."""
        return np.mean(self.wanted[None] & ~self.flagged(threshold), axis=0)


def judge(
    defense: Defense,
    images: np.ndarray,
    ids: np.ndarray,
    targets: np.ndarray,
    *,
    targeted: bool,
    seed: int,
    stream: int = _JUDGE,
    draws: int = NUM_DRAWS,
) -> Judgement:
    """Judges images [N, H, W, C] in [0, 1].

    Args:
      defense: the true one; its threshold is not used.
      images: [N, H, W, C].
      ids: [N] the source images' ids.
      targets: [N] wanted classes, or the true ones where not targeted.
      targeted: which of the two.
      seed: of the run.
      stream: another one gives draws that are independent of the judge's.
      draws: of a random score; one is taken of any other.
    """
    root = jax.random.fold_in(jax.random.key(seed), stream)
    draws = draws if defense.detector.random else 1
    draw_keys = [jax.random.fold_in(root, draw) for draw in range(draws)]
    if defense.detector.kind == "score":
        scores = np.stack([score_images(key, defense, images, ids) for key in draw_keys])
    else:
        scores = np.zeros((draws, 0), np.float32)
    logits = classify_images(jax.random.fold_in(root, _LOGITS), defense, images, ids)
    return Judgement(logits, is_wanted(logits, targets, targeted), scores)


def judge_in_pieces(
    defense: Defense,
    images: np.ndarray,
    ids: np.ndarray,
    targets: np.ndarray,
    *,
    targeted: bool,
    seed: int,
    progress: bool,
) -> Judgement:
    """`judge` with a bar on stderr, where there are many images; the same verdicts."""
    pieces = []
    starts = range(0, len(ids), _PIECE)
    show = progress and len(starts) > 1
    for k in tqdm(starts, "judging", file=sys.stderr, disable=not show, leave=False):
        rows = slice(k, k + _PIECE)
        pieces.append(
            judge(defense, images[rows], ids[rows], targets[rows], targeted=targeted, seed=seed)
        )
    logits, wanted, scores = zip(*pieces)
    return Judgement(np.concatenate(logits), np.concatenate(wanted), np.concatenate(scores, axis=1))


def class_margins(logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """[N] the logit of a class [N] less the best other one."""
    rows, others = np.arange(len(logits)), logits.copy()
    others[rows, classes] = -np.inf
    return logits[rows, classes] - others.max(axis=1)


def is_wanted(logits: np.ndarray, targets: np.ndarray, targeted: bool) -> np.ndarray:
    """[N] bool: the target alone is best (targeted), or some other class beats it (untargeted)."""
    rows = np.arange(len(logits))
    own = logits[rows, targets]
    others = logits.copy()
    others[rows, targets] = -np.inf
    other = others.max(axis=1)
    return own > other if targeted else other > own


def round_to_8_bit(images: np.ndarray) -> np.ndarray:
    """Images as a file would hold them: the nearest of 256 levels, in [0, 1] again."""
    return np.round(images * 255.0).astype(np.uint8).astype(np.float32) / np.float32(255.0)
