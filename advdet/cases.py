"""A defence that stands ready to be attacked, and the attacks on it, judged and recorded."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from advdet import cells, records, results, settings, starts, training
from advdet.assess import assess, reference_figures
from advdet.attacks import presets
from advdet.attacks.base import AttackResult
from advdet.attacks.objectives import Generic, Objective
from advdet.defenses import Defense, FittedDefense, undefended
from advdet.detectors import Detector
from advdet.judge import ATTACKERS_OWN, NUM_OWN_DRAWS, judge
from advdet.settings import Settings
from advdet.splits import Splits
from advdet.threat_models import attacker_view
from advdet.types import Batch, Classifier, InputError
from advdet.victims import defend

_RELIABLE = 0.8  # of the attacker's own draws: less, and a farther image is taken


class Evaluation(NamedTuple):
    """What `evaluate` gives back.

    Attributes:
      records: attack -> record (see design of records in the README); "best" too where several ran.
      arrays: attack -> per-image arrays, as stored in the npz.
      paths: attack -> where the record lies, None where nothing is stored.
      baseline: the same for the undefended classifier; None for the baseline itself.
      clean: the attacked images.
    """

    records: dict[str, dict[str, Any]]
    arrays: dict[str, dict[str, np.ndarray]]
    paths: dict[str, Path | None]
    baseline: Evaluation | None
    clean: Batch


@dataclasses.dataclass(frozen=True)
class Case:
    """A victim, what the attacker is shown of it, and where results go.

    Attributes:
      splits: the data.
      defense_name: the victim's.
      threat_model: see `threat_models`.
      classifier: the one defended.
      victim: the true defence, the judge.
      copy: the attacker's own, under limited knowledge.
      seed: of the judge's draws.
      results_dir: of records; None keeps nothing.
      resume: go on with partial results.
      command: stored in records.
      progress: show what is done on stderr.
    """

    splits: Splits
    defense_name: str
    threat_model: str
    classifier: Classifier
    victim: FittedDefense
    copy: FittedDefense | None
    seed: int
    results_dir: str | Path | None
    resume: bool
    command: str | None
    progress: bool
    _baselines: dict[tuple, Evaluation] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def reference(self) -> dict[str, Any]:
        """Accuracy and false-positive rates over many clean test images."""
        return reference_figures(self.seed, self.victim, self.splits.test)

    def copy_at(self, operating_point: str) -> Defense | None:
        """The attacker's copy at that point."""
        return None if self.copy is None else self.copy.at(operating_point)

    def say(self, text: str) -> None:
        """One line on stderr, where progress is shown."""
        if self.progress:
            print(text, file=sys.stderr, flush=True)

    def cell(self, plan: Settings, attack: str, attack_settings: dict):
        """The `run` part of an attack's record, where it lies, and the record if it is there."""
        part = records.run_part(
            plan, self.splits, attack=attack, attack_settings=attack_settings,
            objective=settings.make_objective(plan, self.defense_name),
            defense_name=self.defense_name, defense=self.victim.defense,
            threat_model=self.threat_model, surrogate=self.copy_at(plan.operating_point),
            command=self.command,
        )  # fmt: skip
        if self.results_dir is None:
            return part, None, None
        path = results.record_path(self.results_dir, part)
        stored = results.load(path)
        if stored is not None:
            results.drop_partial(path)  # one that a kill left behind just after the record
        return part, path, stored

    def baseline(self, plan: Settings, confidence: float = 0.0, **changes) -> Evaluation:
        """The plan's attacks on the undefended classifier; read from the results, or run once."""
        bare = plan._replace(
            objective="generic", objective_settings={}, operating_point="none",
            confidence=confidence, detector_margin=0.0, margin_rate=None, train_attack=None,
        )._replace(**changes)  # fmt: skip
        by_hand = tuple(sorted(bare.attack_settings.items()))
        known = (bare.attacks, bare.regime, bare.preset, confidence, by_hand)
        if known not in self._baselines:
            alone = dataclasses.replace(
                self, defense_name="none", threat_model="perfect_knowledge", copy=None,
                victim=FittedDefense(undefended(self.classifier), {}),
            )  # fmt: skip
            self._baselines[known] = attack_case(alone, bare)
        return self._baselines[known]


def prepare(
    detector: Detector,
    defense_name: str,
    splits: Splits,
    plan: Settings,
    *,
    classifier: Classifier | None,
    threat_model: str,
    surrogate: tuple[Classifier, Detector] | None,
    results_dir: str | Path | None,
    resume: bool,
    command: str | None,
    progress: bool,
) -> Case:
    """Takes or trains the classifier, fits victim and copy.

    Args: those of `benchmark.evaluate`, with the settings filled.

    Raises:
      InputError: a classifier gives no logits, or something cannot be fitted.
    """
    fit = functools.partial(
        defend, splits=splits, seed=plan.seed, train_attack=plan.train_attack, progress=progress
    )
    limited = threat_model == "limited_knowledge"
    half = "defender" if limited else "full"
    if classifier is None:
        classifier = training.classifier_for(splits, half=half, progress=progress)
    check_classifier(classifier, splits)
    copy = None
    if limited:
        if surrogate is None:
            other = splits.half("attacker")
            other = training.classifier_for(other, half="attacker", progress=progress)
            surrogate = other, detector
        check_classifier(surrogate[0], splits)
        copy = fit(surrogate[1], surrogate[0], half="attacker")
    return Case(
        splits, defense_name, threat_model, classifier, fit(detector, classifier, half=half), copy,
        plan.seed, results_dir, resume, command, progress,
    )  # fmt: skip


def check_classifier(classifier: Classifier, splits: Splits) -> None:
    """Refuses a classifier that gives probabilities, or another number of classes.

    Raises:
      InputError: it does.
    """
    images = splits.threshold.images[:100]
    logits = np.asarray(classifier(images).logits)
    if logits.shape != (len(images), splits.num_classes):
        raise InputError(
            f"the classifier gives an array of shape {logits.shape} for {len(images)} images of "
            f"{splits.name}; wanted [{len(images)}, {splits.num_classes}] logits"
        )
    if not np.isfinite(logits).all():
        raise InputError("the classifier's logits are not finite on clean images")
    if (logits >= 0).all() and np.allclose(logits.sum(axis=1), 1.0, atol=1e-3):
        raise InputError(
            "the classifier returns probabilities (rows that sum to 1), not logits: gradients "
            "through a softmax vanish and any detector would look strong; return what goes into "
            "the softmax"
        )


def attack_case(case: Case, plan: Settings) -> Evaluation:
    """Runs the plan's attacks on a case, or reads what was run before; judges and records."""
    if plan.margin_rate is not None:
        shown = case.copy or case.victim
        margin = shown.margin_to(plan.margin_rate, plan.operating_point)
        plan = plan._replace(detector_margin=margin)
    baseline = images_from = None
    if case.victim.defense.detector.kind != "none":
        baseline = case.baseline(plan)
        if case.threat_model == "zero_knowledge":
            images_from = case.baseline(plan, plan.confidence)
    clean = case.splits.test.take(slice(plan.num_images))
    goal = _targets(case, plan, clean)
    done = Evaluation({}, {}, {}, baseline, clean)
    step = _Step(case, plan, done, goal, images_from)
    for name in plan.attacks:
        _one_attack(step, name)
    if len(plan.attacks) > 1:
        _headline(step)
    return done


class _Step(NamedTuple):
    """What every attack of a plan needs.

    Attributes:
      case, plan: as in `attack_case`.
      done: what is finished so far.
      goal: [N] wanted classes, the true ones of an untargeted run.
      images_from: the evaluation whose images are judged, None where attacks are run.
    """

    case: Case
    plan: Settings
    done: Evaluation
    goal: np.ndarray
    images_from: Evaluation | None

    @property
    def view(self) -> Defense:
        """The defence that the attacker is shown."""
        case, point = self.case, self.plan.operating_point
        return attacker_view(case.threat_model, case.victim.at(point), case.copy_at(point))


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
    untargeted = case.baseline(plan, targets="untargeted", attacks=("ddn",), attack_settings={})
    logits = np.array(training.logits(case.classifier, untargeted.arrays["ddn"]["image"]))
    logits[rows, labels] = -np.inf
    return logits.argmax(axis=1).astype(np.int32)


def _one_attack(step: _Step, name: str) -> None:
    """Runs one attack, or takes its images from the undefended baseline, and judges them."""
    case, plan, done = step.case, step.plan, step.done
    # Images of the baseline were made by its settings, which a preset may tie to the defence.
    maker = "none" if step.images_from is not None else case.defense_name
    attack = settings.make_attack(plan, name, case.splits, maker)
    part, path, stored = case.cell(plan, name, dataclasses.asdict(attack))
    if stored is not None:
        case.say(f"{case.defense_name}, {name}: finished before, read from {path}")
        _enter(done, name, path, *stored)
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
        objective = settings.make_objective(plan, case.defense_name)
        found, seconds = cells.attack_in_variants(
            f"{case.defense_name}, {name}", attack, objective, step.view, done.clean, step.goal,
            start=lambda variant: _start(step, name, attack, variant), seed=plan.seed,
            lanes=plan.lanes, path=path, resume=case.resume, progress=case.progress,
        )  # fmt: skip
    _judge_and_enter(step, name, part, path, found, seconds)


def _start(step: _Step, name: str, attack, objective: Objective) -> np.ndarray | None:
    """Where an attack begins; None for the clean images."""
    if objective.begins == "undefended":
        return _first_stage(step, name, attack)
    if objective.begins == "natural":
        case, done = step.case, step.done
        half = "attacker" if case.threat_model == "limited_knowledge" else "full"
        return starts.natural(
            objective, step.view, case.splits.half(half).train, done.clean, step.goal
        )
    return None


def _first_stage(step: _Step, name: str, attack) -> np.ndarray:
    """[N, H, W, C] what the attack finds on the bare classifier; the clean image where nothing."""
    case, plan, done = step.case, step.plan, step.done
    if case.threat_model == "limited_knowledge":  # the baseline is the victim's
        found, _ = cells.attack_images(
            f"{case.defense_name}, {name}, first stage", attack,
            Generic(targeted=plan.targeted), undefended(step.view.classifier), done.clean,
            step.goal, seed=plan.seed, lanes=plan.lanes, progress=case.progress,
        )  # fmt: skip
        success, image = found.success, found.image
    else:
        arrays = done.baseline.arrays[name]
        success, image = arrays["success"], arrays["image"]
    return np.where(success[:, None, None, None], image, done.clean.images)


def _headline(step: _Step) -> None:
    """The nearest success of each image over the attacks.

    It is chosen by what the attacker is shown and by draws of his own: the judge's stay unused.
    """
    plan, done, goal, view = step.plan, step.done, step.goal, step.view
    names = list(done.arrays)
    used = {name: done.records[name]["run"]["settings"]["attack"] for name in names}
    part, path, stored = step.case.cell(plan, "best", used)
    if stored is not None:
        _enter(done, "best", path, *stored)
        return
    ranks = []
    for name in names:
        arrays = done.arrays[name]
        share = judge(
            view, arrays["image"], done.clean.ids, goal, targeted=plan.targeted,
            seed=plan.seed, stream=ATTACKERS_OWN, draws=NUM_OWN_DRAWS,
        ).success(float(view.threshold))  # fmt: skip
        # Reliable successes first, then mere majorities, then what the attack itself calls one.
        tier = np.where(
            share >= _RELIABLE, 0, np.where(share > 0.5, 1, np.where(arrays["success"], 2, 3))
        )
        ranks.append(1e6 * tier + np.minimum(arrays["distance"], 1e5))
    pick, rows = np.argmin(ranks, axis=0), np.arange(len(goal))
    stacked = {field: np.stack([done.arrays[n][field] for n in names])
               for field in AttackResult._fields}  # fmt: skip
    found = AttackResult(**{field: value[pick, rows] for field, value in stacked.items()})
    found = found._replace(num_gradients=stacked["num_gradients"].sum(axis=0, dtype=np.int32))
    seconds = {
        kind: sum(done.records[n]["seconds"][kind] for n in names) for kind in ("compile", "run")
    }
    extra = {"attack": np.array(names)[pick]}
    _judge_and_enter(step, "best", part, path, found, seconds, extra)


def _judge_and_enter(step: _Step, name, part, path, found, seconds, extra=None) -> None:
    case, plan, done = step.case, step.plan, step.done
    baseline_l2 = None
    if done.baseline is not None:
        baseline_l2 = done.baseline.records[name]["attack"]["mean_l2"]
    record, arrays = assess(
        run=part, victim=case.victim, clean=done.clean, test=case.splits.test, goal=step.goal,
        targeted=plan.targeted, found=found, reference=case.reference, baseline_l2=baseline_l2,
        seconds=seconds,
    )  # fmt: skip
    arrays |= extra or {}
    if path is not None:
        results.save(path, record, arrays)
        objective = settings.make_objective(plan, case.defense_name)
        for number in range(len(objective.variants())):
            results.drop_partial(cells.variant_path(path, number))
        results.drop_partial(path)
    _enter(done, name, path, record, arrays)


def _enter(done: Evaluation, name: str, path, record, arrays) -> None:
    done.records[name], done.arrays[name], done.paths[name] = record, arrays, path
