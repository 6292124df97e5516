"""One attack on a case: run, or its images taken from elsewhere; judged and recorded."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from advdet import cells, indicators, inputs, naturals, probes, results, settings, starts
from advdet.assess import assess
from advdet.attacks import presets
from advdet.attacks.base import AttackResult
from advdet.attacks.objectives import Generic, Objective
from advdet.cases import Case, Evaluation
from advdet.defenses import Defense, undefended
from advdet.detectors import Detector
from advdet.settings import Settings
from advdet.threat_models import attacker_view


class Step(NamedTuple):
    """What every attack of a plan needs.

    Attributes:
      case, plan: as in `attack_case`.
      done: what is finished so far.
      goal: [N] wanted classes, the true ones of an untargeted run.
      images_from: the evaluation whose images are judged, None where attacks are run.
      starts: (attack, how it begins) -> [N, H, W, C], as far as this is known.
    """

    case: Case
    plan: Settings
    done: Evaluation
    goal: np.ndarray
    images_from: Evaluation | None
    starts: dict[tuple[str, str], np.ndarray]

    @property
    def objective(self) -> Objective:
        """The attacker's."""
        return settings.make_objective(self.plan, self.case.defense_name)

    @property
    def view(self) -> Defense:
        """The defence that the attacker is shown."""
        case, point = self.case, self.plan.operating_point
        return attacker_view(case.threat_model, case.victim.at(point), case.copy_at(point))


def one_attack(step: Step, name: str) -> None:
    """Runs one attack, or takes its images from the undefended baseline, and judges them."""
    case, plan, done = step.case, step.plan, step.done
    attack = made(step, name)
    part, path, stored = case.cell(plan, name, dataclasses.asdict(attack))
    if stored is not None:
        case.say(f"{case.defense_name}, {name}: finished before, read from {path}")
        enter(done, name, path, *stored)
        return
    if step.images_from is not None:
        images = step.images_from.arrays[name]
        found = AttackResult(*(images[field] for field in AttackResult._fields))
        seconds = dict(step.images_from.records[name]["seconds"])
    else:
        if warning := presets.frozen_edge_warning(attack, done.clean.images):
            case.say(f"warning: {warning}")
        if path is not None and not case.resume and results.partial_path(path).exists():
            case.say(
                f"a partial result lies in {results.partial_path(path)}; without --resume this run "
                "starts anew"
            )
        found, seconds = cells.attack_in_variants(
            f"{case.defense_name}, {name}", attack, step.objective, step.view, done.clean,
            step.goal, start=lambda variant: start(step, name, variant),
            elsewhere=_elsewhere(step, name), seed=plan.seed, lanes=plan.lanes, path=path,
            resume=case.resume, progress=case.progress,
        )  # fmt: skip
    why = "not compared yet"
    more = {"nearer_attack": indicators.entry("nearer_attack", None, reason=why)}
    judge_and_enter(step, name, part, path, found, seconds, name, more)


def made(step: Step, name: str):
    """The attack of that name."""
    # Images of the baseline were made by its settings, which a preset may tie to the defence.
    maker = "none" if step.images_from is not None else step.case.defense_name
    return settings.make_attack(step.plan, name, step.case.splits, maker)


def start(step: Step, name: str, variant: Objective) -> np.ndarray | None:
    """Where an attack with a variant of the objective begins; None for the clean images."""
    known = name, variant.begins
    if variant.begins == "image":
        return None
    if known not in step.starts and variant.begins == "undefended":
        step.starts[known] = _first_stage(step, name, made(step, name))
    elif known not in step.starts:
        step.starts[known] = _natural(step, variant)
    return step.starts[known]


def _natural(step: Step, variant: Objective) -> np.ndarray:
    """[N, H, W, C] natural images of the attacker's that reach the goals of a variant."""
    known = starts.held_out(step.case.splits, step.case.threat_model == "limited_knowledge")
    return starts.natural(variant, step.view, known, step.done.clean, step.goal)


def _elsewhere(step: Step, name: str):
    """Where an attack begins anew on images that it fails on; None where it does not."""
    minimal = name in indicators.MINIMAL_DISTANCE
    if not starts.again(step.case.threat_model, step.objective, minimal):
        return None
    return lambda variant: _natural(step, variant)


def _first_stage(step: Step, name: str, attack) -> np.ndarray:
    """[N, H, W, C] what the attack finds on the bare classifier; the clean image where nothing."""
    case, plan, done = step.case, step.plan, step.done
    if case.threat_model == "limited_knowledge":  # the baseline is the victim's
        found, _ = cells.attack_images(
            f"{case.defense_name}, {name}, first stage", attack,
            Generic(targeted=plan.targeted, confidence=plan.confidence),
            undefended(step.view.classifier), done.clean, step.goal, seed=plan.seed,
            lanes=plan.lanes, progress=case.progress,
        )  # fmt: skip
        success, image = found.success, found.image
    else:
        arrays = done.baseline.arrays[name]
        success, image = arrays["success"], arrays["image"]
    return np.where(success[:, None, None, None], image, done.clean.images)


def judge_and_enter(step: Step, name, part, path, found, seconds, ran, more, extra=None) -> None:
    """Judges what was found, keeps the record, drops partial files.

    Args:
      name: of the record; `ran` is that of an attack, whose manner the indicators look at.
    """
    case, plan, done, attack = step.case, step.plan, step.done, made(step, ran)
    baseline = alone = None
    if done.baseline is not None:
        baseline = done.baseline.records[name], done.baseline.arrays[name]
        answers = type(case.victim.defense.detector).logits  # else labels are not the baseline's
        if answers is Detector.logits and case.threat_model == "perfect_knowledge":
            alone = baseline[1]["success"]
    reach = probes.Reach(
        indicators.is_minimal(part), getattr(attack, "epsilon", None),
        getattr(attack, "norm", "linf"),
    )  # fmt: skip
    probe = lambda attacked: probes.probe(
        step.objective, step.view, done.clean, step.goal, found, attacked, seed=plan.seed,
        reach=reach, start=start(step, ran, step.objective.variants()[0]),
    )  # fmt: skip
    # Whether it could have gone there is asked of an attack without a limit, that was shown all.
    shown = case.threat_model == "perfect_knowledge" and reach.minimal
    natural = lambda failed, threshold: naturals.nearest(
        case.naturals if shown and failed.any() else None, threshold, done.clean.images, step.goal,
        failed, targeted=plan.targeted, confidence=plan.confidence,
        detector_margin=plan.detector_margin,
    )  # fmt: skip
    before, after = case.scores_before, None
    if before is not None:
        after = inputs.some_scores(case.victim.defense, case.splits)
    more |= {"score_drifts": indicators.score_drifts(before, after)}
    record, arrays = assess(
        run=part, victim=case.victim, clean=done.clean, test=case.splits.test, goal=step.goal,
        targeted=plan.targeted, found=found, reference=case.reference, baseline=baseline,
        probe=probe, natural=natural, alone=alone,
        defended_label=step.objective.defended_label, more=more, seconds=seconds,
    )  # fmt: skip
    arrays |= extra or {}
    record = results.sealed(record, arrays)
    if path is not None:
        results.save(path, record, arrays)
        for number in range(len(step.objective.variants()) + 1):
            results.drop_partial(cells.variant_path(path, number))
        results.drop_partial(path)
    enter(done, name, path, record, arrays)


def enter(done: Evaluation, name: str, path, record, arrays) -> None:
    """Puts a finished attack among what is done."""
    done.records[name], done.arrays[name], done.paths[name] = record, arrays, path
