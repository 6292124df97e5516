"""Foreign classifiers and scores looked at before anything is attacked."""

from __future__ import annotations

import jax
import numpy as np

from advdet import functions, logit_range, nets
from advdet.defenses import Defense, classify_images, score_images
from advdet.detectors import DETECTORS, Detector
from advdet.indicators.model import steady
from advdet.splits import Splits
from advdet.types import Classifier, InputError

_IMAGES = 100
_FEW = 100
_DARK = 0.25


def logits_of(classifier: Classifier, images: np.ndarray) -> np.ndarray:
    """The logits as they come; what a foreign classifier raises is said in words.

    Raises:
      InputError: it cannot be called on these images.
    """
    if isinstance(classifier.apply, nets.NetApply):
        return np.asarray(classifier(images).logits)
    try:
        return np.asarray(classifier(images).logits)
    except InputError:
        raise
    except Exception as error:  # foreign code can raise anything
        raise InputError(
            f"the classifier cannot be called on images of shape {images.shape}: "
            f"{functions.first_line(error)} (a torch module belongs in "
            "advdet.bridges.torch_classifier)"
        ) from error


def check_classifier(classifier: Classifier, splits: Splits) -> None:
    """Refuses a classifier that gives probabilities, or another number of classes, or wavers.

    Raises:
      InputError: it does.
    """
    images = splits.threshold.images[:100]
    logits = logits_of(classifier, images)
    if logits.shape != (len(images), splits.num_classes):
        raise InputError(
            f"the classifier gives an array of shape {logits.shape} for {len(images)} images of "
            f"{splits.name}; wanted [{len(images)}, {splits.num_classes}] logits"
            f"{class_hint(logits, splits)}"
        )
    if not np.isfinite(logits).all():
        raise InputError("the classifier's logits are not finite on clean images")
    if why := logit_range.refusal(logits, classifier.bounded_logits):
        raise InputError(f"the classifier {why}")
    check_classifier_is_steady(classifier, images, logits)


def class_hint(logits: np.ndarray, splits: Splits) -> str:
    """What to do where the classifier knows more classes than the labels of arrays show."""
    more = logits.ndim == 2 and logits.shape[1] > splits.num_classes
    if splits.source != "arrays" or not more:
        return ""
    return f" (give Splits.from_arrays num_classes={logits.shape[1]} if it has so many)"


def check_classifier_is_steady(
    classifier: Classifier, images: np.ndarray, logits: np.ndarray
) -> None:
    """Refuses a foreign classifier whose answers depend on chance or on the rest of the batch.

    Args:
      classifier: any.
      images: [N, H, W, C].
      logits: [N, K] what it said about them.

    Raises:
      InputError: they do.
    """
    if isinstance(classifier.apply, nets.NetApply):
        return
    ask = lambda x: np.asarray(classifier(x).logits)
    _check_steady("the classifier", ask, images, logits)


def some_scores(defense: Defense, splits: Splits) -> np.ndarray | None:
    """[M] scores of a few clean images with fixed keys: the same whenever they are asked for.

    None for a defence that flags nothing, and for one whose code is advdet's own.
    """
    detector = defense.detector
    if type(detector) in DETECTORS.values() or detector.kind != "score":
        return None
    images, ids = (x[:_IMAGES] for x in (splits.threshold.images, splits.threshold.ids))
    return score_images(jax.random.key(0), defense, images, ids)


def check_score(defense: Defense, splits: Splits) -> np.ndarray | None:
    """The same for the score of a detector from elsewhere, with the keys of each image fixed.

    Returns:
      What `some_scores` gave.

    Raises:
      InputError: the score wavers.
    """
    before = some_scores(defense, splits)
    if before is not None:
        images, ids = (x[:_IMAGES] for x in (splits.threshold.images, splits.threshold.ids))
        ask = lambda x: score_images(jax.random.key(0), defense, x, ids)
        _check_steady("the score", ask, images, before)
    return before


def check_answers(defense: Defense, splits: Splits) -> None:
    """Refuses a detector from elsewhere that changes the classifier's answer to no logits.

    Raises:
      InputError: it gives probabilities.
    """
    kind = type(defense.detector)
    if kind in DETECTORS.values() or kind.logits is Detector.logits:
        return
    images, ids = (x[:_IMAGES] for x in (splits.threshold.images, splits.threshold.ids))
    logits = classify_images(jax.random.key(0), defense, images, ids)
    if why := logit_range.refusal(logits, defense.classifier.bounded_logits):
        raise InputError(f"the detector's own answer in place of the classifier's {why}")


def _check_steady(what: str, ask, images: np.ndarray, before: np.ndarray) -> None:
    if not steady(before, ask(images)).all():
        raise InputError(
            f"{what} gives another answer for the same image each time: it draws random numbers of "
            "its own (take a key, say random=True, or call .eval()), or keeps state, such as a "
            "running mean, that each call changes (take it out)"
        )
    half = len(images) // 2
    others = np.concatenate([images[:half], np.zeros_like(images[half:])])
    if not steady(before, np.concatenate([ask(others)[:half], before[half:]])).all():
        raise InputError(
            f"{what} for an image depends on the other images of its batch (statistics of the "
            "batch, a module in training mode?); each row must be answered on its own"
        )


def few_clean_warning(splits: Splits) -> str | None:
    """A warning where the clean images are too few for the lowest threshold."""
    count = len(splits.threshold.labels)
    if count >= _FEW:
        return None
    return (
        f"thresholds rest on {count} clean images: the one at 1 % is the largest score among them, "
        f"that at 5 % is known roughly; give {_FEW} or more"
    )


def copies_warning(splits: Splits) -> str | None:
    """A warning where parts of arrays share a few images, too few to be refused."""
    if splits.source != "arrays":
        return None
    found = [str(one) for one in splits.copies if one.among != one.part]
    return "; ".join(found) or None


def dark_warning(splits: Splits) -> str | None:
    """A warning where the images use a small part of [0, 1], as bytes that do not reach 255 do."""
    brightest = float(splits.threshold.images.max())
    if brightest >= _DARK:
        return None
    return (
        f"no pixel of the clean images exceeds {brightest:.3g}, and 1 is white: distances will be "
        f"as small; bytes are divided by 255, so where white is {255 * brightest:.0f} give floats "
        "in [0, 1]"
    )


def accuracy_warning(classifier: Classifier, splits: Splits) -> str | None:
    """A warning where the classifier does no better than chance on clean images."""
    batch = splits.threshold.take(slice(_IMAGES))
    right = float((logits_of(classifier, batch.images).argmax(1) == batch.labels).mean())
    chance = 1 / splits.num_classes
    if right > 2 * chance or right > 0.5:
        return None
    return (
        f"the classifier is right on {right:.0%} of {len(batch.labels)} clean images, and chance "
        f"is {chance:.0%}: are labels, layout and normalisation those that it was trained with? It "
        "gets images in [0, 1]"
    )
