"""From judged images to a record: counts, rates with intervals, distances, indicators, verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from advdet import checkpoints, metrics, paper, results
from advdet.attacks.base import AttackResult
from advdet.defenses import Defense
from advdet.judge import Judgement
from advdet.results import SCHEMA
from advdet.splits import Splits
from advdet.types import Classifier, PyTree

POINTS = ("native", "0.01", "0.05", "0.5")


def run_part(
    plan,
    splits: Splits,
    *,
    attack: str,
    attack_settings: dict[str, Any],
    objective,
    defense_name: str,
    defense: Defense,
    threat_model: str,
    surrogate: Defense | None,
    command: str | None,
) -> dict[str, Any]:
    """What was run: the record's `run`, with a hash of everything that can change the result.

    Args:
      plan: the `Settings`.
      splits: the data.
      attack: its name, "best" for the headline.
      attack_settings: its settings by name.
      objective: the objective itself.
      defense_name: the judged defence's.
      defense: the judged defence.
      threat_model: what the attacker knew.
      surrogate: the attacker's own copy, if he has one.
      command: how it was called.
    """
    device = jax.devices()[0]
    hashed = {
        "dataset": splits.name,
        "defense": defense_name,
        "detector": dataclasses.asdict(defense.detector),
        "attack": attack,
        "objective": plan.objective,
        "train_attack": plan.train_attack,
        "threat_model": threat_model,
        "targets": plan.regime,
        "operating_point": plan.operating_point,
        "seed": plan.seed,
        "lanes": plan.lanes,
        "splits": splits.hashes,
        "classifier": fingerprint(defense.classifier),
        "surrogate": surrogate
        and {
            "classifier": fingerprint(surrogate.classifier),
            "detector": dataclasses.asdict(surrogate.detector),
        },
        "settings": {
            "num_images": plan.num_images,
            "confidence": plan.confidence,
            "detector_margin": plan.detector_margin,
            "objective": {
                name: value
                for name, value in dataclasses.asdict(objective).items()
                if name not in ("confidence", "detector_margin")
            },
            "attack": attack_settings,
        },
    }
    given = None if isinstance(plan.targets, str) else [int(t) for t in plan.targets]
    kinds = [f"{type(d.detector).__module__}.{type(d.detector).__qualname__}"
             for d in (defense, surrogate) if d is not None]  # fmt: skip
    digest = results.settings_hash({**hashed, "given": given, "classes": kinds})
    unhashed = {
        "data_source": splits.source,
        "versions": checkpoints.versions(),
        "device": {
            "kind": device.device_kind,
            "platform": device.platform,
            "count": jax.device_count(),
        },
        "settings_hash": digest,
        "detector_class": kinds[0],
        "fit": digest_of(defense.fitted),
    }
    return {"command": command, **hashed, **unhashed}


def fingerprint(classifier: Classifier) -> str:
    """Sixteen hex digits of a classifier's weights."""
    return digest_of(classifier.variables)


def digest_of(tree: PyTree) -> str:
    """Sixteen hex digits of a pytree's arrays."""
    leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}
    return results.digest(leaves)[:16]


def build(
    *,
    run: dict[str, Any],
    thresholds: dict[str, float | None],
    found: AttackResult,
    clean: Judgement,
    adversarial: Judgement,
    rounded: Judgement,
    shown: Judgement,
    nearest: Judgement,
    noisy: Judgement | None,
    squeezed: Judgement,
    reference: dict[str, Any],
    clean_images: np.ndarray,
    labels: np.ndarray,
    kind: str,
    sets: Callable[[np.ndarray], dict[str, Any] | None],
    baseline_l2: float | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The record of one attack on one defence.

    Args:
      run: what was run.
      thresholds: of the judged defence, by operating point; empty where it flags nothing.
      found: what the attack returned, [N].
      clean: the judge on the clean images with their true labels.
      adversarial: the judge on the returned images.
      rounded: the same after rounding to 8 bit.
      shown: the judge on the returned images, or the nearest misses where there are none.
      nearest: the judge on the nearest misses.
      noisy: the judge on clean images with noise of the successes' L2; None without successes.
      squeezed: the judge on clean images after a round trip through C&W's variables.
      reference: {accuracy, false_positive_rate, n} on many clean test images.
      clean_images: [N, H, W, C].
      labels: [N] true classes.
      kind: of the detector.
      sets: tests sets drawn from given rows [N] bool; called for detectors of kind "set".
      baseline_l2: mean L2 on the undefended classifier, same attack and targets.
      seconds: {compile, run}.

    Returns:
      The record, of plain numbers, strings and None.
    """
    point = run["operating_point"]
    flags_images = bool(thresholds)
    threshold = thresholds.get(point)
    attacked = clean.wanted
    count = int(attacked.sum())
    success = adversarial.success(threshold)
    succeeded = success > 0.5
    distance = metrics.l2(found.image, clean_images)
    counted = distance[attacked & succeeded]

    rates: dict[str, float | None] = dict.fromkeys(("misclassified", *POINTS))
    rates["misclassified"] = metrics.mean_or_none(adversarial.wanted[attacked])
    aimed = POINTS if run["threat_model"] == "zero_knowledge" else (point,)
    if flags_images:
        for name in aimed:
            if thresholds.get(name) is not None:
                rates[name] = metrics.mean_or_none(adversarial.success(thresholds[name])[attacked])
    rate = rates[point] if flags_images else rates["misclassified"]
    mean_l2 = metrics.mean_or_none(counted)
    ratio = mean_l2 / baseline_l2 if mean_l2 is not None and baseline_l2 else None

    reached = attacked & (found.success | found.missed)
    detection = _detection(shown, clean, reached, attacked, thresholds)
    eight_bit = metrics.mean_or_none(rounded.success(threshold)[attacked])
    silent = attacked & ~succeeded & found.missed & (nearest.success(threshold) > 0.5)
    if len(adversarial.scores) > 1:  # random scores: a near miss that gets by is luck, not a fault
        silent[:] = False
    indicators = _indicators(rate, eight_bit, silent.sum(), noisy, threshold)
    interval = metrics.wilson(success[attacked].sum(), count)
    record = {
        "schema": SCHEMA,
        "run": run,
        "counts": {
            "requested": len(attacked),
            "clean_correct": count,
            "attacked": count,
            "clean_flagged": metrics.mean_or_none(clean.flagged(threshold).sum(axis=1)),
            "succeeded": int((attacked & succeeded).sum()),
            "clean_judged": reference["n"],
        },
        "clean": {
            "accuracy": reference["accuracy"],
            "false_positive_rate": reference["false_positive_rate"],
            "thresholds": {name: thresholds.get(name) for name in POINTS},
        },
        "attack": {
            "success_rate": rates,
            # What the attacker believes, on what he was shown; under limited knowledge, a copy.
            "own_success_rate": metrics.mean_or_none(found.success[attacked]),
            "success_rate_8bit": eight_bit,
            "mean_l2": mean_l2,
            "median_l2": metrics.median_l2(distance[attacked], succeeded[attacked]),
            # A failure hands back the clean image, which may be taken as wanted as it is.
            "mean_l2_unfiltered": metrics.mean_or_none(distance[succeeded & found.success]),
            "baseline_mean_l2": baseline_l2,
            "baseline_ratio": ratio,
            "gradients_per_image": metrics.mean_or_none(found.num_gradients),
        },
        "detection": detection,
        "controls": {
            "tanh_round_trip": _flagged(squeezed.take(attacked), thresholds),
            "noise_of_equal_l2": noisy and _flagged(noisy, thresholds),
        },
        "correction": _correction(shown, labels, reached) if kind == "corrector" else None,
        "sets": sets(reached) if kind == "set" else None,
        "verdict": _verdict(interval, indicators),
        "intervals": {
            "success_rate": interval,
            "mean_l2": metrics.mean_interval(counted),
            "true_positive_rate": {
                name: metrics.wilson(value * detection["n"], detection["n"])
                for name, value in detection["true_positive_rate"].items()
                if value is not None
            },
            "false_positive_rate": {
                name: metrics.wilson(value * reference["n"], reference["n"])
                for name, value in reference["false_positive_rate"].items()
                if value is not None
            },
        },
        "indicators": indicators,
        "seconds": seconds,
    }
    record["paper"] = paper.compare(run["dataset"], run, paper.figures(record))
    return record


def _detection(shown, clean, reached, attacked, thresholds) -> dict[str, Any]:
    """True positive rates over attacked images that met the classifier's goal, and the AUC.

    `reversed` is the share of them that look less suspicious than the clean image they come from.
    """
    count = int(reached.sum())
    tpr: dict[str, float | None] = dict.fromkeys(POINTS)
    area = lower = None
    if thresholds and count:
        for name in POINTS:
            if thresholds[name] is not None:
                tpr[name] = float(shown.flagged(thresholds[name])[:, reached].mean())
        lower = float((shown.scores[0][reached] < clean.scores[0][reached]).mean())
        area = metrics.auc(clean.scores[0][attacked], shown.scores[0][reached])
    reason = None
    if not thresholds:
        reason = "this defence flags nothing"
    elif not count:
        reason = "no attacked image met the classifier's goal"
    return {"true_positive_rate": tpr, "n": count, "auc": area, "reversed": lower, "reason": reason}


def _flagged(judgement: Judgement, thresholds) -> dict[str, float | None]:
    """The share of draws and images flagged, by operating point."""
    rates: dict[str, float | None] = dict.fromkeys(POINTS)
    for name, threshold in thresholds.items():
        if threshold is not None and len(judgement.wanted):
            rates[name] = float(judgement.flagged(threshold).mean())
    return rates


def _correction(shown: Judgement, labels: np.ndarray, reached: np.ndarray) -> dict[str, Any]:
    """What a corrector makes of images that reached the attacker's goal on what he was shown."""
    count = int(reached.sum())
    restored = shown.logits.argmax(axis=1) == labels
    return {
        "target_broken": metrics.mean_or_none(~shown.wanted[reached]),
        "label_restored": metrics.mean_or_none(restored[reached]),
        "n": count,
    }


def _indicators(rate, eight_bit, silent, noisy, threshold) -> dict[str, Any]:
    """Signs that the attack or the model is broken: name -> {value, raised}."""
    noise = None if noisy is None else float(noisy.success(threshold).mean())
    lost = None if not rate else 1.0 - eight_bit / rate
    return {
        "noise_success_rate": {
            "value": noise,
            "raised": noise is not None and bool(rate) and noise >= 0.5 * rate,
        },
        "silent_success": {"value": int(silent), "raised": bool(silent)},
        "lost_to_8bit": {"value": lost, "raised": lost is not None and lost > 0.5},
    }


_INVALIDATING = ("noise_success_rate", "silent_success")


def _verdict(interval, indicators) -> str:
    if any(indicators[name]["raised"] for name in _INVALIDATING):
        return "evaluation invalid"
    if interval is not None and interval[0] >= 0.5:
        return "broken"
    return "not broken by these attacks at this budget"
