"""From judged images to a record: counts, rates with intervals, distances, indicators, verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from advdet import figures, indicators, metrics, paper
from advdet.attacks.base import AttackResult
from advdet.defenses import POINTS
from advdet.detectors import Detector
from advdet.judge import Judgement
from advdet.probes import Probe
from advdet.results import SCHEMA


class Judged(NamedTuple):
    """What the true defence says of everything that was looked at, [N] images each.

    Attributes:
      clean: of the clean images with their true labels.
      adversarial: of the returned images.
      rounded: of the same after rounding to 8 bit.
      shown: of the returned images, or the nearest misses where there are none.
      nearest: of the nearest misses.
      noisy: of clean images with noise of the successes' L2, successes alone; None without any.
      squeezed: of clean images after a round trip through C&W's variables.
      unaware: [M] scores by the first draw of what the same attack made of the bare classifier,
        successes alone; None where the defence flags nothing or these images are not there.
    """

    clean: Judgement
    adversarial: Judgement
    rounded: Judgement
    shown: Judgement
    nearest: Judgement
    noisy: Judgement | None
    squeezed: Judgement
    unaware: np.ndarray | None


class Checks(NamedTuple):
    """What was looked at beside the attack.

    Attributes:
      probe: gradients, and what one step does.
      alone: [N] bool, the same attack reaches the label with the detector's goal left out; None
        where this is not known.
      defended_label: whether the label is asked of the defended classifier itself.
      natural: [N] L2 of the nearest natural images that succeed as they are, for failures; None
        where none were looked for.
      more: indicators that are known already, by name.
    """

    probe: Probe
    alone: np.ndarray | None
    defended_label: bool
    natural: np.ndarray | None
    more: dict[str, Any]


def build(
    *,
    run: dict[str, Any],
    thresholds: dict[str, float | None],
    clean_scores: np.ndarray,
    found: AttackResult,
    judged: Judged,
    reference: dict[str, Any],
    clean_images: np.ndarray,
    labels: np.ndarray,
    detector: Detector,
    sets: Callable[[np.ndarray], dict[str, Any] | None],
    baseline: tuple[dict[str, Any], dict[str, np.ndarray]] | None,
    checks: Checks,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The record of one attack on one defence.

    Args:
      run: what was run.
      thresholds: of the judged defence, by operating point; empty where it flags nothing.
      clean_scores: [M] of the clean images that these were set on.
      found: what the attack returned, [N].
      judged: what the judge says.
      reference: {accuracy, false_positive_rate, n} on many clean test images.
      clean_images: [N, H, W, C].
      labels: [N] true classes.
      detector: the judged defence's.
      sets: tests sets drawn from given rows [N] bool; called for detectors of kind "set".
      baseline: the record of the undefended classifier, same attack and targets, and its arrays.
      checks: what was looked at beside the attack.
      seconds: {compile, run, ...}.

    Returns:
      The record, of plain numbers, strings and None.
    """
    threshold, kind = thresholds.get(run["operating_point"]), detector.kind
    attacked = judged.clean.wanted
    success = judged.adversarial.success(threshold)
    succeeded = success > 0.5
    distance = metrics.l2(found.image, clean_images)
    reached = attacked & (found.success | found.missed)

    paired = baseline and figures.paired(distance, attacked & succeeded, baseline[1])
    attack = figures.attack(
        run, thresholds, found, judged, distance, baseline and baseline[0]["attack"], paired
    )
    detection = figures.detection(judged.shown, judged.clean, reached, attacked, thresholds)
    signs = _indicators(run, thresholds, found, judged, attack, detector, checks)
    signs |= _signs_of_figures(run, reference, judged, attack)
    signs |= {
        "coarse_score": indicators.coarse_score(clean_scores, threshold, run["operating_point"]),
        "few_clean_images": indicators.few_clean_images(clean_scores),
    }
    interval = metrics.wilson(success[attacked].sum(), int(attacked.sum()))
    tpr, fpr = detection["true_positive_rate"], reference["false_positive_rate"]
    drawn = sets(reached) if kind == "set" else None
    correction = None
    if kind == "corrector":
        correction = figures.correction(judged.shown, labels, reached)
    record = {
        "schema": SCHEMA,
        "run": run,
        "counts": {
            "requested": len(attacked),
            "clean_correct": int(attacked.sum()),
            "attacked": int(attacked.sum()),
            "clean_flagged": metrics.mean_or_none(judged.clean.flagged(threshold).sum(axis=1)),
            "succeeded": int((attacked & succeeded).sum()),
            "clean_judged": reference["n"],
        },
        "clean": {
            "accuracy": reference["accuracy"],
            "false_positive_rate": fpr,
            "thresholds": {name: thresholds.get(name) for name in POINTS},
        },
        "attack": attack,
        "detection": detection,
        "controls": {
            "tanh_round_trip": figures.flagged(judged.squeezed.take(attacked), thresholds),
            "noise_of_equal_l2": judged.noisy and figures.flagged(judged.noisy, thresholds),
        },
        "correction": correction,
        "sets": drawn,
        "verdict": indicators.verdict(interval, signs, drawn, by_values=indicators.by_values(run)),
        "intervals": {
            "success_rate": interval,
            "mean_l2": metrics.mean_interval(distance[attacked & succeeded]),
            "paired_baseline_ratio": paired and paired["interval"],
            "true_positive_rate": figures.intervals(tpr, detection["n"]),
            "false_positive_rate": figures.intervals(fpr, reference["n"]),
        },
        "indicators": signs,
        "seconds": seconds,
    }
    record["paper"] = paper.compare(run["dataset"], run, paper.figures(record))
    return record


def _asks_for_more(settings: dict[str, Any], minimal: bool) -> bool:
    """Whether the attack wants a score further below the threshold than the judge does.

    A quantile's z does, too; but an attack without a radius can go on until it has that as well.
    """
    quantile = settings["objective"].get("z") and not minimal
    return bool(settings["detector_margin"] or quantile)


def _signs_of_figures(run, reference, judged, attack) -> dict[str, Any]:
    """Signs that a person would see in the record's figures."""
    knowledge, classes = run["threat_model"], judged.clean.logits.shape[1]
    fooled, own = attack["success_rate"]["misclassified"], attack["own_success_rate"]
    return {
        "classifier_at_chance": indicators.classifier_at_chance(
            reference["accuracy"], classes, reference["n"]
        ),
        "not_transferred": indicators.not_transferred(
            knowledge == "limited_knowledge", fooled, own
        ),
        "score_reversed": indicators.score_reversed(
            judged.clean.take(judged.clean.wanted).scores[0], judged.unaware
        ),
    }


def _indicators(run, thresholds, found, judged, attack, detector, checks) -> dict[str, Any]:
    """Signs that the attack or the model is broken, by name."""
    threshold = thresholds.get(run["operating_point"])
    attacked, settings, probe = judged.clean.wanted, run["settings"], checks.probe
    share = judged.adversarial.success(threshold)
    noisy = judged.noisy and judged.noisy.success(threshold)
    minimal = indicators.is_minimal(run)
    shown = run["threat_model"] == "perfect_knowledge"
    unclaimed = found.missed & ~found.success & (share <= 0.5)
    passes = np.where(unclaimed, judged.nearest.success(threshold), 0.0)
    scores = np.concatenate([judged.clean.scores, judged.shown.scores])
    scores = scores[:, attacked] if thresholds else scores
    return {
        "zero_gradient": indicators.zero_gradient(probe, attacked, found.num_gradients),
        "wrong_gradient": indicators.wrong_gradient(probe, attacked, found.num_gradients),
        "noise_success_rate": indicators.noise(noisy, share[attacked & found.success]),
        "one_step": indicators.one_step(probe, attacked, found.success, minimal),
        "classifier_goal_missed": indicators.classifier_goal_missed(
            found.success | found.missed,
            attacked,
            alone=checks.alone,
            minimal=minimal,
            confidence=settings["confidence"],
            defended=checks.defended_label,
        ),
        "natural_image_missed": indicators.natural_image_missed(
            share <= 0.5, checks.natural, attacked, shown=shown, minimal=minimal
        ),
        "probabilities": indicators.probabilities(
            judged.clean.logits[attacked], run.get("bounded_logits", False)
        ),
        "silent_success": indicators.silent_success(
            passes,
            attacked,
            shown=shown,
            judges_alike=detector.kind != "set" and not _asks_for_more(settings, minimal),
            random=detector.random,
        ),
        "lost_to_8bit": indicators.lost_to_8bit(
            figures.rate(run, thresholds, attack), attack["success_rate_8bit"]
        ),
        "constant_score": indicators.constant_score(scores),
        "score_not_a_number": indicators.score_not_a_number(scores),
        **checks.more,
    }
