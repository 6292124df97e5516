"""The figures of a record: rates over the attacked images, distances over the successes."""

from __future__ import annotations

from typing import Any

import numpy as np

from advdet import metrics
from advdet.defenses import POINTS
from advdet.judge import Judgement


def attack(run, thresholds, found, judged, distance, baseline, paired) -> dict[str, Any]:
    """Success rates over the attacked images, distances over the successes.

    `baseline` is the same part of the record of the undefended classifier, `paired` comes from the
    function of that name; both are None where there is no such record.
    """
    baseline, both = baseline or {}, paired or {}
    ratio = lambda own, other: own / other if own is not None and other else None
    point = run["operating_point"]
    threshold = thresholds.get(point)
    attacked, adversarial = judged.clean.wanted, judged.adversarial
    succeeded = adversarial.success(threshold) > 0.5
    mean_l2 = metrics.mean_or_none(distance[attacked & succeeded])
    median_l2 = metrics.median_l2(distance[attacked], succeeded[attacked])

    rates: dict[str, float | None] = dict.fromkeys(("misclassified", *POINTS))
    rates["misclassified"] = metrics.mean_or_none(adversarial.wanted[attacked])
    aimed = POINTS if run["threat_model"] == "zero_knowledge" else (point,)
    for name in aimed if thresholds else ():
        if thresholds.get(name) is not None:
            rates[name] = metrics.mean_or_none(adversarial.success(thresholds[name])[attacked])
    return {
        "success_rate": rates,
        # What the attacker believes, on what he was shown; under limited knowledge, a copy.
        "own_success_rate": metrics.mean_or_none(found.success[attacked]),
        "success_rate_8bit": metrics.mean_or_none(judged.rounded.success(threshold)[attacked]),
        "mean_l2": mean_l2,
        "median_l2": median_l2,
        # A failure hands back the clean image, which may be taken as wanted as it is.
        "mean_l2_unfiltered": metrics.mean_or_none(distance[succeeded & found.success]),
        "baseline_mean_l2": baseline.get("mean_l2"),
        "baseline_ratio": ratio(mean_l2, baseline.get("mean_l2")),
        # The same over the images that both attacks won: no other images in the one mean.
        "paired_baseline_ratio": both.get("ratio"),
        "paired_baseline_images": both.get("n"),
        "baseline_median_l2": baseline.get("median_l2"),
        "median_ratio": ratio(median_l2, baseline.get("median_l2")),
        "gradients_per_image": metrics.mean_or_none(found.num_gradients),
    }


def paired(distance, succeeded, baseline: dict[str, np.ndarray]) -> dict[str, Any]:
    """How much farther an attack goes than on the undefended classifier, where it won on both.

    Args:
      distance: [N] L2 of the attack's images.
      succeeded: [N] bool, judged, of attacked images.
      baseline: per-image arrays of the undefended classifier's record.

    Returns:
      {ratio, interval, n}, of the mean L2 over these images.
    """
    both = succeeded & baseline["clean_correct"] & (baseline["judged_success"] > 0.5)
    found, interval = metrics.paired_ratio(distance[both], baseline["distance"][both])
    return {"ratio": found, "interval": interval, "n": int(both.sum())}


def rate(run, thresholds, attack) -> float | None:
    """The success rate at the point aimed at."""
    return attack["success_rate"][run["operating_point"] if thresholds else "misclassified"]


def intervals(rates: dict[str, float | None], n: int) -> dict[str, Any]:
    """95 % intervals of the rates over n images that are known."""
    return {name: metrics.wilson(rate * n, n) for name, rate in rates.items() if rate is not None}


def detection(shown, clean, reached, attacked, thresholds) -> dict[str, Any]:
    """True positive rates over attacked images that met the classifier's goal, and the AUC.

    `reversed` is the share of them that look less suspicious than the clean image they come from.
    """
    count = int(reached.sum())
    tpr: dict[str, float | None] = dict.fromkeys(POINTS)
    found = lower = None
    if thresholds and count:
        for name in POINTS:
            if thresholds[name] is not None:
                tpr[name] = float(shown.flagged(thresholds[name])[:, reached].mean())
        suspicion = lambda scores: np.where(np.isnan(scores), np.inf, scores)[reached]
        lower = float((suspicion(shown.scores[0]) < suspicion(clean.scores[0])).mean())
        found = metrics.auc_of_many(clean.scores[0][attacked], shown.scores[0][reached])
    reason = None
    if not thresholds:
        reason = "this defence flags nothing"
    elif not count:
        reason = "no attacked image met the classifier's goal"
    elif found is None:
        reason = f"no AUC of fewer than {metrics.FEWEST_FOR_AUC} images on either side"
    return {
        "true_positive_rate": tpr, "n": count, "auc": found, "reversed": lower, "reason": reason,
    }  # fmt: skip


def flagged(judgement: Judgement, thresholds) -> dict[str, float | None]:
    """The share of draws and images flagged, by operating point."""
    rates: dict[str, float | None] = dict.fromkeys(POINTS)
    for name, threshold in thresholds.items():
        if threshold is not None and len(judgement.wanted):
            rates[name] = float(judgement.flagged(threshold).mean())
    return rates


def correction(shown: Judgement, labels: np.ndarray, reached: np.ndarray) -> dict[str, Any]:
    """What a corrector makes of images that reached the attacker's goal on what he was shown."""
    count = int(reached.sum())
    restored = shown.logits.argmax(axis=1) == labels
    return {
        "target_broken": metrics.mean_or_none(~shown.wanted[reached]),
        "label_restored": metrics.mean_or_none(restored[reached]),
        "n": count,
    }
