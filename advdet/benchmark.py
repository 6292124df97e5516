"""The whole flow as one function: data, classifier, defence, attack, judge, record.

    evaluation = advdet.evaluate("dropout", data="mnist", num_images=100)
    evaluation.records["best"]["attack"]["success_rate"]["0.05"]

No flags are read here, and nothing is printed but progress on stderr.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from advdet import (
    cells,
    datasets,
    detectors,
    records,
    results,
    settings,
    training,
)
from advdet.assess import assess
from advdet.attacks import presets
from advdet.attacks.base import AttackResult
from advdet.attacks.objectives import Generic
from advdet.defenses import Defense, FittedDefense, undefended
from advdet.detectors import Detector, NoDetector
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


def evaluate(
    detector: Detector | str,
    *,
    classifier: Classifier | None = None,
    data: str | Splits = "mnist",
    threat_model: str = "perfect_knowledge",
    attack: str | None = None,
    objective: str | None = None,
    surrogate: tuple[Classifier, Detector] | None = None,
    preset: str = "fast",
    num_images: int | None = None,
    targets: str | np.ndarray | None = None,
    operating_point: str | float | None = None,
    confidence: float | None = None,
    detector_margin: float | None = None,
    margin_rate: float | None = None,
    binary_search_steps: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    initial_const: float | None = None,
    lanes: int | None = None,
    train_attack: str | None = None,
    seed: int = 0,
    data_source: str = "auto",
    data_dir: str | None = None,
    results_dir: str | Path | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Evaluates a detector under one threat model.

    Args:
      detector: hyperparameters, or their spec such as "dropout:num_samples=50".
      classifier: the one to defend; None takes the data set's own (shipped, cached or trained).
      data: a data set's name, or its `Splits`.
      threat_model: zero_knowledge, perfect_knowledge or limited_knowledge.
      attack: carlini_wagner, ddn or all, which means both (None: all, or what the preset says);
        the defenders' own weak ones, fast_gradient and jsma, by name.
      objective: auto, generic, or another of `attacks.objectives`; settings follow a colon, as in
        "quantile:z=1.5".
      surrogate: the attacker's own (classifier, detector), for limited knowledge; None trains both
        on the attacker's half.
      preset: smoke, fast, thorough or paper; fills every setting that is None.
      num_images: the first so many test images.
      targets: random, untargeted, least_likely, nearest, paper, or an array of classes [N].
      operating_point: native, 0.01, 0.05 or 0.5: the threshold that the attacker aims below.
      confidence: logit margin beyond the decision.
      detector_margin: how far below the threshold the score must come, in its own units.
      margin_rate: the same, given as the false-positive rate of the threshold to come below, on
        the defence that the attacker is shown.
      binary_search_steps, steps, learning_rate, initial_const: the attack's, see `attacks`.
      lanes: images under attack at once on each device.
      train_attack: the attack that made the adversarial images a detector learns from.
      seed: of everything random.
      data_source, data_dir: see `datasets.load`.
      results_dir: where records are kept and looked up; None keeps nothing.
      resume: go on with partial results there.
      command: stored in the record.
      progress: show what is done on stderr.

    Returns:
      Records, per-image arrays and the undefended baseline.

    Raises:
      InputError: something given cannot be used; nothing has been written then.
    """
    if isinstance(detector, str):
        detector = detectors.from_spec(detector)
    name = detectors.name_of(detector)
    plan = settings.fill(
        name, detector, data=data, preset=preset, attack=attack, objective=objective,
        threat_model=threat_model, num_images=num_images, targets=targets,
        operating_point=operating_point, confidence=confidence, detector_margin=detector_margin,
        margin_rate=margin_rate, lanes=lanes, train_attack=train_attack, seed=seed,
        attack_settings=dict(
            binary_search_steps=binary_search_steps, steps=steps, learning_rate=learning_rate,
            initial_const=initial_const,
        ),
    )  # fmt: skip
    if surrogate is not None and threat_model != "limited_knowledge":
        raise InputError(f"{threat_model} has no use for a surrogate; leave it out")
    if results_dir is not None:
        results.check_writable(results_dir)
    splits = data if isinstance(data, Splits) else datasets.load(data, data_source, data_dir)
    plan = settings.for_data(plan, splits)

    half = "defender" if threat_model == "limited_knowledge" else "full"
    if classifier is None:
        classifier = training.classifier_for(splits, half=half, progress=progress)
    check_classifier(classifier, splits)
    run = _Run(splits, plan, name, threat_model, results_dir, resume, command, progress, None)
    clean = splits.test.take(slice(plan.num_images))
    baseline = images_from = None
    if detector.kind != "none":
        baseline = _baseline(run, classifier, confidence=0.0)
        if threat_model == "zero_knowledge":
            images_from = baseline
            if plan.confidence > 0:
                images_from = _baseline(run, classifier, plan.confidence)
    victim = _fit(run, detector, classifier, half)
    copy = None
    if threat_model == "limited_knowledge":
        fitted_copy = _surrogate(run, detector, surrogate)
        copy = fitted_copy.at(plan.operating_point)
        run = run._replace(surrogate=copy)
    if margin_rate is not None:
        shown = victim if copy is None else fitted_copy
        plan = plan._replace(detector_margin=shown.margin_to(margin_rate, plan.operating_point))
        run = run._replace(plan=plan)
    view = attacker_view(threat_model, victim.at(plan.operating_point), copy)
    goal = _targets(run, classifier, clean)

    done = Evaluation({}, {}, {}, baseline, clean)
    for attack_name in plan.attacks:
        _one_attack(run, done, attack_name, victim, view, goal, images_from)
    if len(plan.attacks) > 1:
        _headline(run, done, victim, view, goal)
    return done


class _Run(NamedTuple):
    """What every step of one evaluation needs."""

    splits: Splits
    plan: Settings
    defense_name: str
    threat_model: str
    results_dir: str | Path | None
    resume: bool
    command: str | None
    progress: bool
    surrogate: Defense | None

    def say(self, text: str) -> None:
        if self.progress:
            print(text, file=sys.stderr, flush=True)

    def cell(self, attack: str, attack_settings: dict, victim: FittedDefense):
        """The `run` part of an attack's record, where it lies, and the record if it is there."""
        objective = settings.make_objective(self.plan, self.defense_name)
        part = records.run_part(
            self.plan, self.splits, attack=attack, attack_settings=attack_settings,
            objective=objective, defense_name=self.defense_name, defense=victim.defense,
            threat_model=self.threat_model, surrogate=self.surrogate, command=self.command,
        )  # fmt: skip
        if self.results_dir is None:
            return part, None, None
        path = results.record_path(self.results_dir, part)
        stored = results.load(path)
        if stored is not None:
            results.drop_partial(path)  # one that a kill left behind just after the record
        return part, path, stored


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


def _baseline(run: _Run, classifier: Classifier, confidence: float, **changes) -> Evaluation:
    """The same attacks on the undefended classifier; read from the results folder, or run."""
    plan = run.plan._replace(**changes)
    return evaluate(
        NoDetector(), classifier=classifier, data=run.splits, preset=plan.preset,
        attack=plan.attacks[0] if len(plan.attacks) == 1 else "all", objective="generic",
        num_images=plan.num_images, targets=plan.targets, confidence=confidence, lanes=plan.lanes,
        seed=plan.seed, results_dir=run.results_dir, resume=run.resume, command=run.command,
        progress=run.progress, **plan.attack_settings,
    )  # fmt: skip


def _fit(run: _Run, detector: Detector, classifier: Classifier, half: str) -> FittedDefense:
    """The defence on its half of the data."""
    return defend(
        detector, classifier, run.splits, half=half, seed=run.plan.seed,
        train_attack=run.plan.train_attack, progress=run.progress,
    )  # fmt: skip


def _surrogate(run: _Run, detector: Detector, given) -> FittedDefense:
    """The attacker's own copy: another classifier and detector, from the attacker's half."""
    if given is None:
        half = run.splits.half("attacker")
        given = training.classifier_for(half, half="attacker", progress=run.progress), detector
    classifier, scheme = given
    check_classifier(classifier, run.splits)
    return _fit(run, scheme, classifier, "attacker")


def _targets(run: _Run, classifier: Classifier, clean: Batch) -> np.ndarray:
    """[N] wanted classes; the true ones for an untargeted run."""
    plan, labels = run.plan, np.asarray(clean.labels)
    if not isinstance(plan.targets, str):
        return plan.targets
    if plan.targets == "untargeted":
        return labels
    if plan.targets == "random":
        return cells.random_targets(plan.seed, labels, clean.ids, run.splits.num_classes)
    rows = np.arange(len(labels))
    if plan.targets == "least_likely":
        logits = np.array(training.logits(classifier, clean.images))
        logits[rows, labels] = np.inf
        return logits.argmin(axis=1).astype(np.int32)
    untargeted = _baseline(
        run, classifier, 0.0, targets="untargeted", attacks=("ddn",), attack_settings={}
    )
    logits = np.array(training.logits(classifier, untargeted.arrays["ddn"]["image"]))
    logits[rows, labels] = -np.inf
    return logits.argmax(axis=1).astype(np.int32)


def _one_attack(run: _Run, done: Evaluation, name: str, victim, view, goal, images_from) -> None:
    """Runs one attack, or takes its images from the undefended baseline, and judges them."""
    plan, clean = run.plan, done.clean
    # Images of the baseline were made by its settings, which a preset may tie to the defence.
    maker = "none" if images_from is not None else run.defense_name
    attack = settings.make_attack(plan, name, run.splits, maker)
    part, path, stored = run.cell(name, dataclasses.asdict(attack), victim)
    if stored is not None:
        run.say(f"{run.defense_name}, {name}: finished before, read from {path}")
        _enter(done, name, path, *stored)
        return
    if images_from is not None:
        images = images_from.arrays[name]
        found = AttackResult(*(images[field] for field in AttackResult._fields))
        seconds = dict(images_from.records[name]["seconds"])
    else:
        if warning := presets.frozen_edge_warning(attack, clean.images):
            run.say(f"warning: {warning}")
        if path is not None and not run.resume and results.partial_path(path).exists():
            run.say(
                f"a partial result lies in {results.partial_path(path)}; without --resume this run "
                "starts anew"
            )
        objective, start = settings.make_objective(plan, run.defense_name), None
        if objective.starts_undefended:
            start = _first_stage(run, done, name, attack, view, goal)
        found, seconds = cells.attack_in_variants(
            f"{run.defense_name}, {name}", attack, objective, view, clean, goal, start=start,
            seed=plan.seed, lanes=plan.lanes, path=path, resume=run.resume, progress=run.progress,
        )  # fmt: skip
    _judge_and_enter(run, done, name, part, path, victim, goal, found, seconds)


def _first_stage(run: _Run, done: Evaluation, name: str, attack, view, goal) -> np.ndarray:
    """[N, H, W, C] what the attack finds on the bare classifier; the clean image where nothing."""
    if run.threat_model == "limited_knowledge":  # the baseline is the victim's
        found, _ = cells.attack_images(
            f"{run.defense_name}, {name}, first stage", attack,
            Generic(targeted=run.plan.targeted), undefended(view.classifier), done.clean, goal,
            seed=run.plan.seed, lanes=run.plan.lanes, progress=run.progress,
        )  # fmt: skip
        success, image = found.success, found.image
    else:
        arrays = done.baseline.arrays[name]
        success, image = arrays["success"], arrays["image"]
    return np.where(success[:, None, None, None], image, done.clean.images)


def _headline(run: _Run, done: Evaluation, victim: FittedDefense, view, goal) -> None:
    """The nearest success of each image over the attacks.

    It is chosen by what the attacker is shown and by draws of his own: the judge's stay unused.
    """
    plan, names = run.plan, list(done.arrays)
    used = {name: done.records[name]["run"]["settings"]["attack"] for name in names}
    part, path, stored = run.cell("best", used, victim)
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
    _judge_and_enter(run, done, "best", part, path, victim, goal, found, seconds, extra)


def _judge_and_enter(
    run: _Run, done: Evaluation, name, part, path, victim, goal, found, seconds, extra=None
) -> None:
    baseline_l2 = None
    if done.baseline is not None:
        baseline_l2 = done.baseline.records[name]["attack"]["mean_l2"]
    record, arrays = assess(
        run=part, victim=victim, clean=done.clean, test=run.splits.test, goal=goal,
        targeted=run.plan.targeted, found=found, baseline_l2=baseline_l2, seconds=seconds,
    )  # fmt: skip
    arrays |= extra or {}
    if path is not None:
        results.save(path, record, arrays)
        objective = settings.make_objective(run.plan, run.defense_name)
        for number in range(len(objective.variants())):
            results.drop_partial(cells.variant_path(path, number))
        results.drop_partial(path)
    _enter(done, name, path, record, arrays)


def _enter(done: Evaluation, name: str, path, record, arrays) -> None:
    done.records[name], done.arrays[name], done.paths[name] = record, arrays, path
