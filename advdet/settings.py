"""The settings of a run: what is None is filled from the preset, what cannot be is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from advdet import cells, paper
from advdet.attacks import objectives, presets
from advdet.defenses import POINTS
from advdet.detectors import Detector, NoDetector
from advdet.splits import Splits
from advdet.threat_models import THREAT_MODELS
from advdet.types import Classifier, InputError

TARGETS = ("random", "untargeted", "least_likely", "nearest", "paper")


class Settings(NamedTuple):
    """The settings of a run, with nothing left open."""

    attacks: tuple[str, ...]
    objective: str
    objective_settings: dict[str, float]
    preset: str
    num_images: int
    targets: str | np.ndarray
    operating_point: str
    confidence: float
    detector_margin: float
    margin_rate: float | None
    attack_settings: dict[str, Any]
    lanes: int
    train_attack: str | None
    seed: int

    @property
    def regime(self) -> str:
        """The targets' name; "given" for an array."""
        return self.targets if isinstance(self.targets, str) else "given"

    @property
    def targeted(self) -> bool:
        """Whether there is a class to reach, rather than one to leave."""
        return self.regime != "untargeted"


def fill(
    name, detector, *, data, preset, attack, objective, threat_model, num_images, targets,
    operating_point, confidence, detector_margin, margin_rate, lanes, train_attack, seed,
    attack_settings, copied=None, classifier=None,
) -> Settings:  # fmt: skip
    """Fills what is None from the preset, and refuses what cannot be.

    Args: those of `benchmark.evaluate`; `name` is the defence's, `attack_settings` those of its
      arguments that belong to the attacks, `copied` the detector of a surrogate that is given,
      `classifier` the one that the attacker is shown, where it is given.

    Raises:
      InputError: unknown names, numbers out of range, an objective that does not fit.
    """
    if threat_model not in THREAT_MODELS:
        raise InputError(
            f"unknown threat model {threat_model!r}; known: {', '.join(THREAT_MODELS)}"
        )
    if preset not in presets.PRESETS:
        raise InputError(f"unknown preset {preset!r}; known: {', '.join(presets.PRESETS)}")
    fills = presets.PAPER_RUN if preset == "paper" else {}
    attack = attack or fills.get("attack", "all")
    shown = NoDetector() if threat_model == "zero_knowledge" else copied or detector
    attacks = _chosen(attack, name, shown, classifier)
    _check_radius(attacks, attack_settings)
    targets = fills.get("targets", "random") if targets is None else targets
    if operating_point is None:
        operating_point = (
            fills.get("operating_point", "0.05") if detector.kind == "score" else "none"
        )
        if operating_point == "native" and not _has_native(detector):
            operating_point = "0.05"
    objective = objective or fills.get("objective", "auto")
    if threat_model == "zero_knowledge" or detector.kind == "none":
        if objective not in ("auto", "generic", "paper"):
            raise InputError(
                f"objective {objective!r} looks at a detector, and this attacker sees none"
            )
        objective = "generic"
    objective, _, tail = objective.partition(":")
    objective = objectives.resolve(objective, name, detector)
    if confidence is None:
        confidence = presets.PAPER_CONFIDENCE.get(name, 0.0) if objective == "paper" else 0.0
    dataset = data.name if isinstance(data, Splits) else data
    if isinstance(targets, str) and targets not in TARGETS:
        raise InputError(f"unknown targets {targets!r}; known: {', '.join(TARGETS)}")
    if isinstance(targets, str) and targets == "paper":
        targets = paper.target_regime("mnist" if dataset == "mnist_5k" else dataset, name)
    operating_point = str(operating_point)
    if detector.kind == "score" and operating_point not in POINTS:
        raise InputError(f"unknown operating point {operating_point!r}; known: {', '.join(POINTS)}")
    if detector.kind != "score" and operating_point != "none":
        raise InputError(
            f"operating point {operating_point!r} is a threshold, and defence {name} flags "
            "nothing; leave it out"
        )
    if operating_point == "native" and not _has_native(detector):
        raise InputError(f"defence {name} has no native threshold; known: {', '.join(POINTS[1:])}")
    if train_attack is not None and train_attack not in presets.ATTACKS:
        raise InputError(
            f"unknown train_attack {train_attack!r}; known: {', '.join(presets.ATTACKS)}"
        )
    for what, value, least in (
        ("num_images", num_images, 1), ("lanes", lanes, 1), ("seed", seed, 0),
        ("confidence", confidence, 0), ("detector_margin", detector_margin, 0),
    ):  # fmt: skip
        if value is not None and not value >= least:
            raise InputError(f"{what} must be at least {least}, not {value}")
    if margin_rate is not None and not (0 < margin_rate < 1 and detector_margin is None):
        raise InputError(
            f"margin_rate must be a rate between 0 and 1, not {margin_rate}, and stands in place "
            "of detector_margin"
        )
    for what, value in attack_settings.items():
        if not isinstance(value, str | None) and not math.isfinite(value):
            raise InputError(f"{what} must be a finite number, not {value}")
    for known in attacks:
        made = presets.settings(known, preset, 1, name, attack_settings.get("norm"))
        presets.make(known, made | _given(attack_settings))
    plan = Settings(
        attacks=attacks,
        objective=objective,
        objective_settings=_tail_settings(tail),
        preset=preset,
        num_images=num_images or presets.NUM_IMAGES[preset],
        targets=targets,
        operating_point=operating_point,
        confidence=float(confidence),
        detector_margin=float(detector_margin or 0.0),
        margin_rate=margin_rate,
        attack_settings=_given(attack_settings),
        lanes=lanes or 0,
        train_attack=train_attack or ("carlini_wagner" if detector.needs_adversarial else None),
        seed=int(seed),
    )
    make_objective(plan, name)  # refuses what it does not know, before anything is loaded
    return plan


def _chosen(
    attack: str, name: str, shown: Detector, classifier: Classifier | None
) -> tuple[str, ...]:
    """The attacks that a word means, of those that make sense on what the attacker is shown.

    A score or classifier without a useful gradient stops attacks that follow gradients, and no
    others. So where it says so, a group means the attacks by values alone, and the others are
    refused by name; unless it says that it has a surrogate gradient: then both are run, since a
    surrogate can mislead.

    Raises:
      InputError: an unknown attack, or one that needs a gradient where there is none.
    """
    names = presets.GROUPS.get(attack) or tuple(attack.split(","))
    for known in names:
        presets.check_name(known)
    if len(set(names)) < len(names):
        raise InputError(f"attack {attack!r} names one twice")
    free, follow = presets.GRADIENT_FREE, [n for n in names if n not in presets.GRADIENT_FREE]
    smooth = getattr(classifier, "differentiable", True)
    if shown.differentiable and smooth or not follow:
        return names
    if attack in presets.GROUPS:
        return (*follow, *free) if smooth and shown.surrogate_gradient else free
    if smooth and shown.surrogate_gradient:
        return names
    lacking = f"defence {name}" if smooth else "the classifier"
    raise InputError(
        f"attack {follow[0]} follows gradients, and {lacking} says that it has none "
        f"(differentiable = False); take {' or '.join(free)}, which needs none, or all; or give "
        "the detector a surrogate gradient, and say so (surrogate_gradient = True)"
    )


def _check_radius(attacks: tuple[str, ...], attack_settings: dict[str, Any]) -> None:
    """Refuses a radius or norm for attacks that have none."""
    fields = {name: [field.name for field in dataclasses.fields(kind)]
              for name, kind in presets.ATTACKS.items()}  # fmt: skip
    for what in ("epsilon", "norm"):
        for name in attacks if attack_settings.get(what) is not None else ():
            if what not in fields[name]:
                having = ", ".join(known for known in fields if what in fields[known])
                raise InputError(
                    f"attack {name} has no {what} to be given; it belongs to the attacks at a "
                    f"fixed radius: {having}"
                )


def _has_native(detector: Detector) -> bool:
    """Whether the detector's paper gives a threshold; what it is may follow from the fit."""
    return type(detector).native_threshold is not Detector.native_threshold


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _tail_settings(tail: str) -> dict[str, float]:
    """`z=1.5,share=0.9` as numbers."""
    settings = {}
    for part in filter(None, tail.split(",")):
        name, equals, text = part.partition("=")
        try:
            settings[name] = int(text) if text.isdigit() else float(text)
        except ValueError:
            raise InputError(f"objective setting {part!r} is not of the form name=number") from None
    return settings


def for_data(plan: Settings, splits: Splits) -> Settings:
    """The settings with targets and number of images checked against the data, and lanes set.

    Raises:
      InputError: more images than there are, or targets that are no wrong classes.
    """
    available = len(splits.test.labels)
    if plan.num_images > available:
        raise InputError(
            f"{plan.num_images} images wanted, {splits.name} has {available} test images"
        )
    if not isinstance(plan.targets, str):
        targets = np.asarray(plan.targets)
        labels = np.asarray(splits.test.labels[: plan.num_images])
        if targets.shape != labels.shape or not np.issubdtype(targets.dtype, np.integer):
            raise InputError(
                f"targets must be {plan.num_images} integers, found {targets.dtype} "
                f"of shape {targets.shape}"
            )
        if ((targets < 0) | (targets >= splits.num_classes)).any():
            raise InputError(f"targets must lie in 0 ... {splits.num_classes - 1}")
        if (same := np.flatnonzero(targets == labels)).size:
            raise InputError(
                f"targets equal the true labels at {same.size} images (the first is {same[0]}): "
                "there is nothing to reach; choose wrong classes, or targets='untargeted'"
            )
        plan = plan._replace(targets=targets.astype(np.int32))
    return plan._replace(lanes=plan.lanes or cells.default_lanes(plan.num_images))


def make_attack(plan: Settings, name: str, splits: Splits, defense_name: str):
    """The attack of that name, as the preset and the settings given by hand make it."""
    values = presets.settings(
        name, plan.preset, splits.image_shape[-1], defense_name, plan.attack_settings.get("norm")
    )
    return presets.make(name, values | plan.attack_settings)


def make_objective(plan: Settings, defense_name: str) -> objectives.Objective:
    """The objective of the settings."""
    return objectives.make(
        plan.objective, defense_name, seed=plan.seed, targeted=plan.targeted,
        confidence=plan.confidence, detector_margin=plan.detector_margin,
        **plan.objective_settings,
    )  # fmt: skip
