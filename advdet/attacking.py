"""All attacks of a plan on a case, and on the undefended classifier beside it."""

from __future__ import annotations

import dataclasses

import numpy as np

from advdet import cells, headline, runs, training
from advdet.attacks import presets
from advdet.cases import Case, Evaluation
from advdet.defenses import FittedDefense, undefended
from advdet.settings import Settings
from advdet.types import Batch


def attack_case(case: Case, plan: Settings) -> Evaluation:
    """Runs the plan's attacks on a case, or reads what was run before; judges and records."""
    if plan.margin_rate is not None:
        shown = case.copy or case.victim
        margin = shown.margin_to(plan.margin_rate, plan.operating_point)
        plan = plan._replace(detector_margin=margin)
    baseline = images_from = None
    follow = not set(plan.attacks) <= set(presets.GRADIENT_FREE)
    possible = case.classifier.differentiable or not follow  # a copy may have what he has not
    if case.victim.defense.detector.kind != "none" and possible:
        baseline = baseline_of(case, plan)
        if case.threat_model == "zero_knowledge":
            images_from = baseline_of(case, plan, plan.confidence)
    clean = case.splits.test.take(slice(plan.num_images))
    goal = _targets(case, plan, clean)
    done = Evaluation({}, {}, {}, baseline, clean)
    step = runs.Step(case, plan, done, goal, images_from, {})
    for name in plan.attacks:
        runs.one_attack(step, name)
    if len(plan.attacks) > 1:
        headline.headline(step)
    headline.compare(step)
    return done


def baseline_of(case: Case, plan: Settings, confidence: float = 0.0, **changes) -> Evaluation:
    """The plan's attacks on the undefended classifier; read from the results, or run once."""
    bare = plan._replace(
        objective="generic", objective_settings={}, operating_point="none",
        confidence=confidence, detector_margin=0.0, margin_rate=None, train_attack=None,
    )._replace(**changes)  # fmt: skip
    by_hand = tuple(sorted(bare.attack_settings.items()))
    known = (bare.attacks, bare.regime, bare.preset, confidence, by_hand)
    if known not in case.baselines:
        alone = dataclasses.replace(
            case, defense_name="none", threat_model="perfect_knowledge", copy=None,
            victim=FittedDefense(undefended(case.classifier), {}), scores_before=None,
        )  # fmt: skip
        case.baselines[known] = attack_case(alone, bare)
    return case.baselines[known]


def _targets(case: Case, plan: Settings, clean: Batch) -> np.ndarray:
    """[N] wanted classes; the true ones for an untargeted run."""
    labels = np.asarray(clean.labels)
    if not isinstance(plan.targets, str):
        return plan.targets
    if plan.targets == "untargeted":
        return labels
    if plan.targets == "random":
        return cells.random_targets(plan.seed, labels, clean.ids, case.splits.num_classes)
    rows = np.arange(len(labels))
    if plan.targets == "least_likely":
        logits = np.array(training.logits(case.classifier, clean.images))
        logits[rows, labels] = np.inf
        return logits.argmin(axis=1).astype(np.int32)
    untargeted = baseline_of(case, plan, targets="untargeted", attacks=("ddn",), attack_settings={})
    logits = np.array(training.logits(case.classifier, untargeted.arrays["ddn"]["image"]))
    logits[rows, labels] = -np.inf
    return logits.argmax(axis=1).astype(np.int32)
