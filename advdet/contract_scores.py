"""The contract for what a detector gives: scores, thresholds, logits, p-values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from advdet import logit_range, metrics
from advdet.contract import FAULT, OK, WARNING, Finding, hard_images, noise, percent
from advdet.defenses import Defense, FittedDefense, score_images, threshold_at
from advdet.types import Batch

_FLOAT_ERROR = 1e-4  # of the scores' spread: less than any difference that counts


@jax.jit
def _score(key, defense, images):
    return defense.score(key, images)


def _compiled_score(defense, key, images):
    return _score(key, defense, jnp.asarray(images))


def score_shape(defense: Defense, images: np.ndarray) -> Finding:
    """One finite float32 for each image, black, white and noise included.

    Args:
      defense: with a detector of kind "score".
      images: [B, H, W, C] in [0, 1].
    """
    name, count = "score: shape, finite", len(images)
    found = np.asarray(_compiled_score(defense, jax.random.key(0), images))
    if found.shape != (count,):
        said = f"shape {list(found.shape)} for {count} images"
        return Finding(name, FAULT, said, "return one number an image, [B]")
    if found.dtype != np.float32:
        said = f"scores are {found.dtype}"
        return Finding(name, FAULT, said, "return float32; a verdict is made by the threshold")
    hard = np.resize(hard_images(images.shape[1:]), images.shape)  # one shape, one compilation
    looks = found, np.asarray(_compiled_score(defense, jax.random.key(0), hard))
    if bad := sum(int(np.sum(~np.isfinite(scores))) for scores in looks):
        said = f"{bad} of {2 * count} scores are not finite"
        if np.isfinite(found).all():
            said += " (on a black, a white or a noise image)"
        change = "guard logarithms, divisions and norms (log(x + 1e-12), sqrt(x + 1e-12))"
        return Finding(name, FAULT, said, change, bad)
    low, high = np.min(looks), np.max(looks)
    return Finding(name, OK, f"[B] float32, from {low:.3g} to {high:.3g}")


def score_compiled(defense: Defense, images: np.ndarray) -> Finding:
    """The same score compiled and not; a difference betrays state or NumPy's random numbers."""
    name = "score: compiled"
    key = lambda: jax.random.key(0)
    plain = np.asarray(defense.score(key(), jnp.asarray(images)))
    quick = np.asarray(_compiled_score(defense, key(), images))
    worst = float(np.max(np.abs(plain - quick) / (1e-6 + 1e-3 * np.abs(quick))))
    if not worst <= 1.0:
        said = f"compiled and plain scores differ by up to {np.abs(plain - quick).max():.3g}"
        change = "draw random numbers from `key` alone; no state, no NumPy inside `score`"
        return Finding(name, FAULT, said, change, worst)
    return Finding(name, OK, "the same as not compiled", value=worst)


def score_randomness(defense: Defense, images: np.ndarray) -> Finding:
    """Equal keys give equal scores; other keys other ones if, and only if, `random` says so."""
    name, declared = "score: randomness", defense.detector.random
    one, again, other = (
        np.asarray(_compiled_score(defense, jax.random.key(seed), images)) for seed in (0, 0, 1)
    )
    if not np.array_equal(one, again, equal_nan=True):
        said = "two calls with one key differ"
        return Finding(name, FAULT, said, "draw random numbers from `key` alone")
    differ = int(np.sum(one != other))
    if differ and not declared:
        said = f"another key gives another score ({differ} of {len(one)} images)"
        change = "set `random: ClassVar[bool] = True`, else one lucky draw counts as a verdict"
        return Finding(name, FAULT, said, change, differ)
    if declared and not differ:
        said = "declared random, and every key gives the same score"
        return Finding(name, WARNING, said, "leave `random` False, or use the key", differ)
    return Finding(name, OK, "random, as declared" if declared else "none", value=differ)


def score_batch_mates(defense: Defense, images: np.ndarray, ids: np.ndarray) -> Finding:
    """An image's score depends on the image (and its key), not on what else is in the batch.

    Args:
      defense: with a detector of kind "score".
      images: [N, H, W, C], a few.
      ids: [N].
    """
    name = "score: batch mates"
    change = "write `score` for each image by itself; statistics of many belong into `fit`"
    count = max(2, len(images) // 2)
    mates = np.concatenate([images[:count], noise(images[count:].shape)])
    one, other = (
        np.asarray(_compiled_score(defense, jax.random.key(0), part)) for part in (images, mates)
    )
    spread = max(float(np.ptp(one)), 1e-6)
    moved = float(np.max(np.abs(one - other)[:count]))
    if not defense.detector.random:  # there a lone image draws other numbers than one in a batch
        alone = score_images(jax.random.key(0), defense, images, ids)
        moved = max(moved, float(np.max(np.abs(alone - one))))
    moved /= spread
    if not moved <= 10 * _FLOAT_ERROR:
        said = f"other images in the batch move a score by {moved:.1%} of the scores' range"
        return Finding(name, FAULT, said, change, moved)
    run = lambda rows: score_images(jax.random.key(2), defense, images[rows], ids[rows])
    whole, order = run(np.arange(len(images))), np.random.RandomState(0).permutation(len(images))
    places = (order, np.array([len(images) - 1]), np.arange(1, len(images)))
    if not all(np.array_equal(run(rows), whole[rows]) for rows in places):
        said = "a score's last bits depend on the image's place in the batch"
        change = "write products with one column as a multiplication and a sum"
        return Finding(name, WARNING, said, change, moved)
    return Finding(name, OK, "no influence", value=moved)


def score_direction(defense: Defense, clean: Batch, adversarial: Batch, seed: int = 0) -> Finding:
    """Adversarial images are scored higher than clean ones; noise stands beside them.

    Args:
      defense: with a detector of kind "score".
      clean: [N] images.
      adversarial: [M] made by a cheap attack that does not know of the detector.
      seed: of random scores, and of the noise.
    """
    name = "score: direction"
    if len(adversarial.ids) < 8:
        said = f"a cheap attack fooled the classifier on {len(adversarial.ids)} images only"
        return Finding(name, WARNING, said, "does the classifier have gradients?")
    score = lambda images, ids: score_images(jax.random.key(seed), defense, images, ids)
    plain = score(clean.images, clean.ids)
    area, area_noise = (
        metrics.auc(plain, score(images, ids))
        for images, ids in (
            (adversarial.images, adversarial.ids),
            (noise(clean.images.shape), clean.ids),
        )
    )
    error = auc_error(len(clean.ids), len(adversarial.ids))
    said = f"AUC {area:.2f} of {len(adversarial.ids)} adversarial images, {area_noise:.2f} of noise"
    if area > 0.5 + 2 * error:
        return Finding(name, OK, said, value=area)
    if area < 0.5 - 2 * error and area_noise < 0.5:
        change = "higher must mean more suspicious: return the negative"
        return Finding(name, FAULT, said, change, area)
    change = "it does not see even a cheap attack that does not know of it: is the score the one?"
    return Finding(name, WARNING, said, change, area)


def auc_error(negatives: int, positives: int) -> float:
    """The standard error of an AUC of 0.5 (of the rank sum of two like samples)."""
    return float(np.sqrt((negatives + positives + 1) / (12 * negatives * positives)))


# ---- thresholds, logits, sets


def false_positives(
    fitted: FittedDefense, seen: Batch, fresh: Batch, *, rate: float = 0.05, z: float = 3.0
) -> Finding:
    """A threshold set on some clean images flags about as many of others.

    Args:
      fitted: the defence with its thresholds.
      seen: the clean images that thresholds were set on.
      fresh: clean images that nothing has seen.
      rate: of `defenses.FALSE_POSITIVE_RATES`.
      z: how many standard errors count as chance.
    """
    name = f"threshold at {rate:.0%}"
    ours, others = (
        score_images(jax.random.key(3), fitted.defense, part.images, part.ids)
        for part in (seen, fresh)
    )
    again, stored = threshold_at(ours, rate), fitted.thresholds[str(rate)]
    error = np.sqrt(rate * (1 - rate) * (1 / len(ours) + 1 / len(others)))
    rates = [float(np.mean(others > np.float32(limit))) for limit in (again, stored)]
    low, high = metrics.wilson(rates[1] * len(others), len(others))
    said = (
        f"{stored:.4g} flags {percent(rates[1])} of {len(others)} held-out clean images "
        f"[{100 * low:.1f}, {100 * high:.1f}]"
    )
    if np.mean(ours > np.float32(again)) > rate:
        change = "the score is not the same from call to call"
        return Finding(name, FAULT, f"{said}; above {rate:.0%} of its own images", change)
    tied = float(np.mean(ours == np.float32(again)))
    if tied > rate:  # no threshold can flag more than those above, or fewer than these too
        change = f"{percent(tied)} of the clean scores equal the threshold: give a finer score"
        return Finding(name, WARNING, said, change, rates[1])
    if max(abs(found - rate) for found in rates) <= z * error:
        return Finding(name, OK, said, value=rates[1])
    change = "scores of held-out images differ from those of the others: what did `fit` see?"
    return Finding(name, FAULT, said, change, rates[1])


def native_threshold(fitted: FittedDefense) -> Finding:
    """The paper's own threshold is a finite number, or None."""
    name, native = "native threshold", fitted.defense.detector.native_threshold(
        fitted.defense.fitted
    )  # fmt: skip
    if native is None:
        return Finding(name, OK, "none given")
    if not (isinstance(native, float) and np.isfinite(native)):
        said = f"{native!r} of type {type(native).__name__}"
        return Finding(name, FAULT, said, "return a finite float, or None")
    return Finding(name, OK, f"{native:.4g}", value=native)


def logits_shape(defense: Defense, images: np.ndarray, num_classes: int) -> Finding:
    """The defended classifier's logits: [B, K] float32, finite, no probabilities, one for a key."""
    name = "logits of the defence"
    logits = jax.jit(defense.logits)
    one, again = (np.asarray(logits(jax.random.key(0), images)) for _ in range(2))
    if one.shape != (len(images), num_classes) or one.dtype != np.float32:
        said = f"{one.dtype} of shape {list(one.shape)} for {len(images)} images"
        return Finding(name, FAULT, said, f"return float32 [B, {num_classes}]")
    if not np.isfinite(one).all():
        said = f"{np.sum(~np.isfinite(one))} logits are not finite"
        return Finding(name, FAULT, said, "guard logarithms and divisions")
    if why := logit_range.refusal(one, defense.classifier.bounded_logits):
        said, change = why.split(": ", 1)
        return Finding(name, FAULT, said, change)
    if not np.array_equal(one, again):
        return Finding(name, FAULT, "two calls with one key differ", "draw from `key` alone")
    return Finding(name, OK, f"[B, {num_classes}] float32, from {one.min():.3g} to {one.max():.3g}")


def set_p_value(defense: Defense, clean: np.ndarray) -> Finding:
    """A p-value for a set: in [0, 1], one for a key, not small for clean images, smaller for noise.

    Args:
      defense: with a detector of kind "set".
      clean: [set_size, H, W, C] clean images that `fit` has not seen.
    """
    name, detector = "p-value of a set", defense.detector
    test = jax.jit(
        lambda key, images: detector.p_value(key, defense.fitted, defense.classifier, images)
    )
    like, again = (np.asarray(test(jax.random.key(1), clean)) for _ in range(2))
    unlike = np.asarray(test(jax.random.key(1), noise(clean.shape)))
    if like.shape != ():
        return Finding(name, FAULT, f"shape {list(like.shape)}", "return one number a set, []")
    said = f"{like:.3g} of {len(clean)} clean images, {unlike:.3g} of noise"
    if not all(0 <= value <= 1 for value in (like, unlike)):
        return Finding(name, FAULT, said, "return a probability in [0, 1]", float(like))
    if like != again:
        return Finding(name, FAULT, "two calls with one key differ", "draw from `key` alone")
    if unlike >= like:
        change = "low must mean suspicious: is it 1 - p, or blind to noise?"
        return Finding(name, FAULT, said, change, float(like))
    if like < 0.01:
        return Finding(name, WARNING, said, "clean sets are rejected, too", float(like))
    return Finding(name, OK, said, value=float(like))
