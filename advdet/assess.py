"""What an attack found, judged: its record and its per-image arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from advdet import metrics, records
from advdet.attacks.base import AttackResult
from advdet.attacks.variables import from_box, to_box
from advdet.defenses import POINTS, FittedDefense, classify_images, score_images
from advdet.judge import is_wanted, judge, round_to_8_bit
from advdet.probes import Probe
from advdet.sets import assess_sets
from advdet.types import Batch

_NOISE, _REFERENCE = 0x4E4F, 0x5245
_NOISE_ROUNDS = 20
_BOX = (0.0, 1.0)
_REFERENCE_IMAGES = 2000  # clean test images that accuracy and false positives are taken over


def assess(
    *,
    run: dict[str, Any],
    victim: FittedDefense,
    clean: Batch,
    test: Batch,
    goal: np.ndarray,
    targeted: bool,
    found: AttackResult,
    reference: dict[str, Any],
    baseline: tuple[dict[str, Any], dict[str, np.ndarray]] | None,
    probe: Callable[[np.ndarray], Probe],
    natural: Callable[[np.ndarray, float | None], np.ndarray | None],
    alone: np.ndarray | None,
    defended_label: bool,
    more: dict[str, Any],
    seconds: dict[str, float],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Record and per-image arrays of what an attack found.

    Args:
      run: the record's `run` part.
      victim: the true defence with its thresholds.
      clean: [N] the attacked images.
      test: the test split they come from.
      goal: [N] wanted classes, or true ones where not targeted.
      targeted: which of the two.
      found: [N] what the attack returned.
      reference: of `reference_figures`.
      baseline: the same attack's record on the undefended classifier, with its per-image arrays;
        None where there is none.
      probe: looks at gradients and at one step, for the given rows [N] bool.
      natural: takes rows [N] bool and the judge's threshold, gives [N] L2 of the nearest natural
        images that succeed as they are (`naturals.nearest`).
      alone, defended_label, more: of `records.Checks`.
      seconds: {compile, run, ...}.
    """
    defense, seed, point = victim.defense, run["seed"], run["operating_point"]
    see = lambda images: judge(defense, images, clean.ids, goal, targeted=targeted, seed=seed)
    labelled = judge(defense, clean.images, clean.ids, clean.labels, targeted=True, seed=seed)
    adversarial = see(found.image)
    images_8bit = round_to_8_bit(found.image)
    succeeded = labelled.wanted & found.success
    noisy = None
    if succeeded.any():
        noisy = see(with_noise(seed, clean, found.distance)).take(succeeded)
    judged = records.Judged(
        clean=labelled,
        adversarial=adversarial,
        rounded=see(images_8bit),
        shown=see(np.where(found.success[:, None, None, None], found.image, found.nearest_miss)),
        nearest=see(found.nearest_miss),
        noisy=noisy,
        squeezed=see(squeezed(clean.images)),
        unaware=unaware_scores(victim, clean, goal, baseline and baseline[1], seed),
    )
    threshold = victim.thresholds.get(point)
    failed = labelled.wanted & (adversarial.success(threshold) <= 0.5)
    record = records.build(
        run=run,
        thresholds=victim.thresholds,
        clean_scores=victim.clean_scores,
        found=found,
        judged=judged,
        reference=reference,
        clean_images=clean.images,
        labels=np.asarray(clean.labels),
        detector=defense.detector,
        sets=lambda rows: assess_sets(
            seed,
            defense,
            found.image[rows & found.success],
            test.images[len(goal) : len(goal) + _REFERENCE_IMAGES],
            clean.images[rows & found.success],
        ),
        baseline=baseline,
        checks=records.Checks(
            probe(labelled.wanted), alone, defended_label, natural(failed, threshold), more
        ),
        seconds=seconds,
    )
    arrays = {
        "id": np.asarray(clean.ids),
        "label": np.asarray(clean.labels),
        "target_class": np.asarray(goal, np.int32),
        "clean_score": labelled.scores,
        "adversarial_score": adversarial.scores,
        "clean_correct": labelled.wanted,
        "flagged": adversarial.flagged(threshold),
        "classified_as_wanted": adversarial.wanted,
        "judged_success": adversarial.success(threshold).astype(np.float32),
        "image_uint8": np.round(images_8bit * 255).astype(np.uint8),
        **found._asdict(),
    }
    return record, arrays


def unaware_scores(
    victim: FittedDefense, clean: Batch, goal: np.ndarray, arrays, seed: int
) -> np.ndarray | None:
    """[M] scores of images made without knowledge of the detector, by the judge's first draw.

    Args:
      victim: the true defence.
      clean: [N] the attacked images.
      goal: [N] as of `assess`; it decides nothing here.
      arrays: per-image arrays of the undefended classifier's record; None where there is none.
      seed: of the run.
    """
    if arrays is None or not victim.thresholds:
        return None
    won = arrays["clean_correct"] & arrays["success"]
    if not won.any():
        return None
    return judge(
        victim.defense, arrays["image"][won], clean.ids[won], goal[won], targeted=True, seed=seed,
        draws=1,
    ).scores[0]  # fmt: skip


def squeezed(images: np.ndarray) -> np.ndarray:
    """Images [N, H, W, C] after a round trip through C&W's variables."""
    return np.asarray(to_box(from_box(images, _BOX), _BOX))


def with_noise(seed: int, clean: Batch, distance: np.ndarray) -> np.ndarray:
    """Clean images with Gaussian noise, of these L2 norms once clipped (0 where infinite).

    Args:
      seed: of the run.
      clean: [N] images.
      distance: [N] L2.

    Returns:
      [N, H, W, C] in [0, 1].
    """
    root = jax.random.fold_in(jax.random.key(seed), _NOISE)
    shape = clean.images.shape[1:]
    draw = lambda i: jax.random.normal(jax.random.fold_in(root, i), shape)
    noise = np.asarray(jax.vmap(draw)(clean.ids))
    wanted = np.where(np.isfinite(distance), distance, 0.0).reshape(-1, 1, 1, 1)
    scale = wanted / np.sqrt(np.sum(np.square(noise), axis=(1, 2, 3), keepdims=True))
    for _ in range(_NOISE_ROUNDS):  # clipping takes some of the length away; in the end, enough
        images = np.clip(clean.images + scale * noise, 0.0, 1.0).astype(np.float32)
        reached = metrics.l2(images, clean.images).reshape(wanted.shape)
        scale = scale * np.where(reached > 0, wanted / np.where(reached > 0, reached, 1.0), 1.0)
    return images


def reference_figures(seed: int, victim: FittedDefense, test: Batch) -> dict[str, Any]:
    """Accuracy and false positive rates over many clean test images, one draw each.

    Args:
      seed: of the draws.
      victim: the true defence.
      test: the test split; its first 2,000 images are taken.

    Returns:
      {accuracy, false_positive_rate, n}.
    """
    batch = test.take(slice(_REFERENCE_IMAGES))
    root = jax.random.fold_in(jax.random.key(seed), _REFERENCE)
    key_logits, key_scores = jax.random.split(root)
    logits = classify_images(key_logits, victim.defense, batch.images, batch.ids)
    rates: dict[str, float | None] = dict.fromkeys(POINTS)
    if victim.thresholds:
        scores = score_images(key_scores, victim.defense, batch.images, batch.ids)
        for name, threshold in victim.thresholds.items():
            if threshold is not None:
                # As the judge has it: what is no number is flagged.
                rates[name] = float(np.mean(~(scores <= np.float32(threshold))))
    accuracy = float(is_wanted(logits, np.asarray(batch.labels), True).mean())
    return {"accuracy": accuracy, "false_positive_rate": rates, "n": len(batch.labels)}
