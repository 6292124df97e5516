"""From judged images to a record: counts, rates with intervals, distances, indicators, verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from advdet import checkpoints, indicators, metrics, nets, paper, results
from advdet.attacks.base import AttackResult
from advdet.defenses import Defense, classify_images, score_images
from advdet.detectors import DETECTORS, Detector
from advdet.judge import Judgement
from advdet.probes import Probe
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
        "classifier": fingerprint(defense.classifier, splits.test.images),
        "surrogate": surrogate
        and {
            "classifier": fingerprint(surrogate.classifier, splits.test.images),
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
    if type(defense.detector) not in DETECTORS.values():  # its code may be another by now
        hashed["answers"] = [
            shown and answers(shown, splits.test.images) for shown in (defense, surrogate)
        ]
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


def fingerprint(classifier: Classifier, images: np.ndarray | None = None) -> str:
    """Sixteen hex digits of a classifier: of its weights and, unless its code is advdet's, answers.

    Args:
      classifier: any.
      images: [N, H, W, C] of the data that it is used on; the first few are asked for.
    """
    if images is None or isinstance(classifier.apply, nets.NetApply):
        return digest_of(classifier.variables)
    leaves = _leaves(classifier.variables)
    leaves["answers"] = np.asarray(classifier(_probes(images)).logits)
    return results.digest(leaves)[:16]


def digest_of(tree: PyTree) -> str:
    """Sixteen hex digits of a pytree's arrays."""
    return results.digest(_leaves(tree))[:16]


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}


def answers(defense: Defense, images: np.ndarray) -> str:
    """Sixteen hex digits of what a defence says about a few images, with keys that are fixed.

    Args: as those of `fingerprint`.
    """
    probes = _probes(images)
    ids, key = np.arange(len(probes)), jax.random.key(0)
    said = {"logits": classify_images(key, defense, probes, ids)}
    if defense.detector.kind == "score":
        said["scores"] = score_images(key, defense, probes, ids)
    return results.digest(said)[:16]


def _probes(images: np.ndarray) -> np.ndarray:
    """Some of the images, and as many of noise, where classifiers that agree on data differ."""
    real = np.asarray(images[:16], np.float32)
    noise = np.random.RandomState(0).uniform(0, 1, (16, *real.shape[1:]))
    return np.concatenate([real, noise.astype(np.float32)])


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
    """

    clean: Judgement
    adversarial: Judgement
    rounded: Judgement
    shown: Judgement
    nearest: Judgement
    noisy: Judgement | None
    squeezed: Judgement


class Checks(NamedTuple):
    """What was looked at beside the attack.

    Attributes:
      probe: gradients, and what one step does.
      alone: [N] bool, the same attack reaches the label with the detector's goal left out; False
        where this is not known.
      more: indicators that are known already, by name.
    """

    probe: Probe
    alone: np.ndarray
    more: dict[str, Any]


def build(
    *,
    run: dict[str, Any],
    thresholds: dict[str, float | None],
    found: AttackResult,
    judged: Judged,
    reference: dict[str, Any],
    clean_images: np.ndarray,
    labels: np.ndarray,
    detector: Detector,
    sets: Callable[[np.ndarray], dict[str, Any] | None],
    baseline: dict[str, Any] | None,
    checks: Checks,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The record of one attack on one defence.

    Args:
      run: what was run.
      thresholds: of the judged defence, by operating point; empty where it flags nothing.
      found: what the attack returned, [N].
      judged: what the judge says.
      reference: {accuracy, false_positive_rate, n} on many clean test images.
      clean_images: [N, H, W, C].
      labels: [N] true classes.
      detector: the judged defence's.
      sets: tests sets drawn from given rows [N] bool; called for detectors of kind "set".
      baseline: the record's `attack` part for the undefended classifier, same attack and targets.
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

    attack = _attack(run, thresholds, found, judged, distance, baseline or {})
    detection = _detection(judged.shown, judged.clean, reached, attacked, thresholds)
    signs = _indicators(run, thresholds, found, judged, attack, detector, checks)
    signs |= _signs_of_figures(run, reference["accuracy"], judged, attack, detection)
    interval = metrics.wilson(success[attacked].sum(), int(attacked.sum()))
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
            "false_positive_rate": reference["false_positive_rate"],
            "thresholds": {name: thresholds.get(name) for name in POINTS},
        },
        "attack": attack,
        "detection": detection,
        "controls": {
            "tanh_round_trip": _flagged(judged.squeezed.take(attacked), thresholds),
            "noise_of_equal_l2": judged.noisy and _flagged(judged.noisy, thresholds),
        },
        "correction": _correction(judged.shown, labels, reached) if kind == "corrector" else None,
        "sets": sets(reached) if kind == "set" else None,
        "verdict": indicators.verdict(interval, signs),
        "intervals": {
            "success_rate": interval,
            "mean_l2": metrics.mean_interval(distance[attacked & succeeded]),
            "true_positive_rate": _intervals(detection["true_positive_rate"], detection["n"]),
            "false_positive_rate": _intervals(reference["false_positive_rate"], reference["n"]),
        },
        "indicators": signs,
        "seconds": seconds,
    }
    record["paper"] = paper.compare(run["dataset"], run, paper.figures(record))
    return record


def _attack(run, thresholds, found, judged, distance, baseline) -> dict[str, Any]:
    """Success rates over the attacked images, distances over the successes."""
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
        "baseline_median_l2": baseline.get("median_l2"),
        "median_ratio": ratio(median_l2, baseline.get("median_l2")),
        "gradients_per_image": metrics.mean_or_none(found.num_gradients),
    }


def _rate(run, thresholds, attack) -> float | None:
    """The success rate at the point aimed at."""
    return attack["success_rate"][run["operating_point"] if thresholds else "misclassified"]


def _intervals(rates: dict[str, float | None], n: int) -> dict[str, Any]:
    """95 % intervals of the rates over n images that are known."""
    return {name: metrics.wilson(rate * n, n) for name, rate in rates.items() if rate is not None}


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


def _signs_of_figures(run, accuracy, judged, attack, detection) -> dict[str, Any]:
    """Signs that a person would see in the record's figures."""
    knowledge, (count, classes) = run["threat_model"], judged.clean.logits.shape
    fooled, own = attack["success_rate"]["misclassified"], attack["own_success_rate"]
    return {
        "classifier_at_chance": indicators.classifier_at_chance(accuracy, classes),
        "not_transferred": indicators.not_transferred(
            knowledge == "limited_knowledge", fooled, own
        ),
        "score_reversed": indicators.score_reversed(
            knowledge == "zero_knowledge", detection["auc"], detection["n"], count
        ),
    }


def _indicators(run, thresholds, found, judged, attack, detector, checks) -> dict[str, Any]:
    """Signs that the attack or the model is broken, by name."""
    threshold = thresholds.get(run["operating_point"])
    attacked, settings, probe = judged.clean.wanted, run["settings"], checks.probe
    share = judged.adversarial.success(threshold)
    noisy = judged.noisy and judged.noisy.success(threshold)
    minimal = indicators.is_minimal(run)
    met = found.success | found.missed | checks.alone
    unclaimed = found.missed & ~found.success & (share <= 0.5)
    passes = np.where(unclaimed, judged.nearest.success(threshold), 0.0)
    scores = np.concatenate([judged.clean.scores, judged.shown.scores])
    return {
        "zero_gradient": indicators.zero_gradient(probe, attacked, found.num_gradients),
        "noise_success_rate": indicators.noise(noisy, share[attacked & found.success]),
        "one_step": indicators.one_step(probe, attacked, found.success, minimal),
        "classifier_goal_missed": indicators.classifier_goal_missed(
            met, attacked, minimal, settings["confidence"]
        ),
        "probabilities": indicators.probabilities(judged.clean.logits[attacked]),
        "silent_success": indicators.silent_success(
            passes,
            attacked,
            shown=run["threat_model"] == "perfect_knowledge",
            judges_alike=detector.kind != "set" and not settings["detector_margin"],
            random=detector.random,
        ),
        "lost_to_8bit": indicators.lost_to_8bit(
            _rate(run, thresholds, attack), attack["success_rate_8bit"]
        ),
        "constant_score": indicators.constant_score(scores[:, attacked] if thresholds else scores),
        **checks.more,
    }
