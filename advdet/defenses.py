"""A defence: classifier, detector, what the detector learned, and the threshold in force.

A `Defense` is a pytree and the only thing that an attacker is shown. Scores are computed image by
image with keys made from the image's id, so no score depends on its batch mates.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from advdet.detectors import Detector, NoDetector
from advdet.types import Batch, Classifier, FitData, InputError, PyTree, pytree

FALSE_POSITIVE_RATES = (0.01, 0.05, 0.5)
POINTS = ("native", *map(str, FALSE_POSITIVE_RATES))  # the thresholds' names in records
_BATCH = 100  # fixed, with padding: the same image always meets the same compiled program


@pytree
@dataclasses.dataclass(frozen=True)
class Defense:
    """Everything that defends, as one pytree.

    Attributes:
      classifier: the classifier that is defended.
      fitted: what `detector.fit` returned.
      threshold: [] images with a score above it are flagged; inf where nothing is flagged.
      scale: [] the spread of clean scores (threshold at 5 % minus that at 50 % false positives), by
        which an attack brings score and logit margins to a like size.
      detector: the hyperparameters; static, equal by value.
    """

    classifier: Classifier
    fitted: PyTree
    threshold: jax.Array
    scale: jax.Array
    detector: Detector = dataclasses.field(metadata={"static": True})

    def logits(self, key: jax.Array, images: jax.Array) -> jax.Array:
        """Logits [B, K] of the defended classifier for images [B, H, W, C]."""
        return self.detector.logits(key, self.fitted, self.classifier, images)

    def score(self, key: jax.Array, images: jax.Array) -> jax.Array:
        """Suspicion [B] of images [B, H, W, C]; higher is more suspicious."""
        return self.detector.score(key, self.fitted, self.classifier, images)

    def at(self, threshold: float) -> Defense:
        """The same defence with another threshold in force."""
        return dataclasses.replace(self, threshold=jnp.float32(threshold))


class FittedDefense(NamedTuple):
    """A defence and the thresholds that it can be judged at.

    Attributes:
      defense: with the threshold of 5 % false positives in force.
      thresholds: name -> threshold; "native" (None where the paper gives none), "0.01", "0.05",
        "0.5"; empty for a defence that flags nothing.
      clean_scores: [N] of the clean images that the thresholds were set on; empty likewise.
    """

    defense: Defense
    thresholds: dict[str, float | None]
    clean_scores: np.ndarray = np.zeros(0, np.float32)

    def margin_to(self, false_positive_rate: float, operating_point: str) -> float:
        """How far the threshold of another false-positive rate lies below that of a point.

        Raises:
          InputError: the defence flags nothing, or that threshold is not below.
        """
        if not len(self.clean_scores):
            raise InputError("a margin_rate needs a defence that flags images")
        margin = self.thresholds[operating_point] - threshold_at(
            self.clean_scores, false_positive_rate
        )
        if margin < 0:
            raise InputError(
                f"margin_rate {false_positive_rate:g} gives a threshold above that of operating "
                f"point {operating_point}; give a larger rate"
            )
        return margin

    def at(self, operating_point: str) -> Defense:
        """The defence at one of its operating points.

        Raises:
          InputError: the defence has no such threshold.
        """
        if self.defense.detector.kind != "score":
            return self.defense
        threshold = self.thresholds.get(operating_point)
        if threshold is None:
            known = ", ".join(name for name, value in self.thresholds.items() if value is not None)
            raise InputError(
                f"operating point {operating_point!r} is not one of this defence's ({known})"
            )
        return self.defense.at(threshold)


def undefended(classifier: Classifier) -> Defense:
    """The classifier alone: nothing is flagged."""
    return Defense(classifier, (), jnp.float32(jnp.inf), jnp.float32(1.0), NoDetector())


def fit_defense(
    key: jax.Array, detector: Detector, classifier: Classifier, data: FitData, threshold: Batch
) -> FittedDefense:
    """Fits a detector and sets its thresholds on clean images that it has not seen.

    Args:
      key: consumed.
      detector: hyperparameters.
      classifier: the classifier to defend.
      data: what the detector may learn from.
      threshold: clean images for the thresholds, disjoint from `data` and from what is attacked.

    Returns:
      The defence and its thresholds.
    """
    key_fit, key_score = jax.random.split(key)
    fitted = detector.fit(key_fit, classifier, data)
    return with_thresholds(key_score, detector, classifier, fitted, threshold)


def with_thresholds(
    key: jax.Array, detector: Detector, classifier: Classifier, fitted: PyTree, threshold: Batch
) -> FittedDefense:
    """The defence of a detector that has been fitted, with its thresholds.

    Args:
      key: consumed.
      detector, classifier, threshold: as in `fit_defense`.
      fitted: what `detector.fit` gave.

    Raises:
      InputError: a score is not finite.
    """
    defense = Defense(classifier, fitted, jnp.float32(jnp.inf), jnp.float32(1.0), detector)
    if detector.kind != "score":
        return FittedDefense(defense, {})
    scores = score_images(key, defense, threshold.images, threshold.ids)
    if not np.isfinite(scores).all():
        raise InputError(
            f"the detector's score is not finite on {np.sum(~np.isfinite(scores))} of "
            f"{len(scores)} clean images; scores must be finite numbers"
        )
    thresholds: dict[str, float | None] = {"native": detector.native_threshold(fitted)}
    for rate in FALSE_POSITIVE_RATES:
        thresholds[str(rate)] = threshold_at(scores, rate)
    spread = thresholds["0.05"] - thresholds["0.5"]
    scale = max(spread, 1e-6 * max(1.0, abs(thresholds["0.05"])))
    defense = dataclasses.replace(defense, scale=jnp.float32(scale))
    return FittedDefense(defense.at(thresholds["0.05"]), thresholds, scores)


def threshold_at(scores: np.ndarray, false_positive_rate: float) -> float:
    """The smallest of the given scores that at most this share of them exceeds.

    Where more than that share have the largest score (decisions, 0 or 1), that one would be it and
    nothing could ever be flagged. Then it is the next one below, and more are flagged.

    Args:
      scores: [N] scores of clean images.
      false_positive_rate: in (0, 1).

    Returns:
      A threshold t with mean(scores > t) <= false_positive_rate, but for such ties.
    """
    ranked = np.sort(np.asarray(scores, np.float32))
    allowed = int(np.floor(false_positive_rate * len(ranked) + 1e-9))
    at = len(ranked) - 1 - min(allowed, len(ranked) - 1)
    below = int(np.searchsorted(ranked, ranked[-1]))  # scores that are not the largest
    if at >= below and len(ranked) - below > max(allowed, 1):
        at = max(below - 1, 0)
    return float(ranked[at])


def image_keys(key: jax.Array, ids: jax.Array) -> jax.Array:
    """One key [N] for each image id [N]; a key never depends on the other images."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)


@jax.jit
def _score_batch(key, defense, images, ids):
    one = lambda k, image: defense.score(k, image[None])[0]
    return jax.vmap(one)(image_keys(key, ids), images)


@jax.jit
def _logits_batch(key, defense, images, ids):
    one = lambda k, image: defense.logits(k, image[None])[0]
    return jax.vmap(one)(image_keys(key, ids), images)


def score_images(key: jax.Array, defense: Defense, images, ids) -> np.ndarray:
    """Scores [N] of images [N, H, W, C], each with a key of its own made from its id [N]."""
    return _rows(_score_batch, key, defense, images, ids)


def classify_images(key: jax.Array, defense: Defense, images, ids) -> np.ndarray:
    """Logits [N, K] of the defence for images [N, H, W, C]; keys as in `score_images`."""
    return _rows(_logits_batch, key, defense, images, ids)


def _rows(function, key, defense, images, ids) -> np.ndarray:
    given = np.asarray(images, np.float32), np.asarray(ids, np.int32)
    return in_batches(lambda *rows: function(key, defense, *rows), *given)


def in_batches(function, *rows: np.ndarray, size: int = _BATCH) -> PyTree:
    """A compiled function's NumPy arrays for any number of rows: it sees one size alone.

    Args:
      function: arrays [size, ...] -> pytree of arrays [size, ...], row by row independent.
      *rows: [N, ...], N at least 1; the last of them fill up the last batch.
      size: of a batch.
    """
    count, parts = len(rows[0]), []
    for begin in range(0, count, size):
        taken = np.minimum(np.arange(begin, begin + size), count - 1)
        parts.append(jax.device_get(function(*(np.asarray(row)[taken] for row in rows))))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *parts)
