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

import jax
import numpy as np

from advdet import cells, datasets, detectors, records, results, settings, training
from advdet.assess import assess
from advdet.attacks import objectives, presets
from advdet.attacks.base import AttackResult
from advdet.defenses import Defense, FittedDefense, fit_defense, undefended
from advdet.detectors import Detector, NoDetector
from advdet.judge import ATTACKERS_OWN, NUM_OWN_DRAWS, judge
from advdet.settings import Settings
from advdet.splits import Splits
from advdet.threat_models import attacker_view
from advdet.types import Batch, Classifier, FitData, InputError

_FIT = 0x4649
_CRAFTED_IMAGES = 10_000
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
      attack: carlini_wagner, ddn or all (None: all, or what the preset says).
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
        lanes=lanes, train_attack=train_attack, seed=seed,
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
        copy = _surrogate(run, detector, surrogate).at(plan.operating_point)
        run = run._replace(surrogate=copy)
    view = attacker_view(threat_model, victim.at(plan.operating_point), copy)
    goal = _targets(run, classifier, clean)

    done = Evaluation({}, {}, {}, baseline, clean)
    for attack_name in plan.attacks:
        _one_attack(run, done, attack_name, victim, view, goal, images_from)
    if len(plan.attacks) > 1:
        _headline(run, done, victim, goal)
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
    """The defence on its half of the data, with its thresholds."""
    if detector.kind == "none":
        return FittedDefense(undefended(classifier), {})
    splits = run.splits.half(half)
    data = FitData(splits.train, splits.select)
    if detector.needs_adversarial:
        data = data._replace(
            adversarial_train=_crafted(run, classifier, data.train),
            adversarial_select=_crafted(run, classifier, data.select),
        )
    key = jax.random.fold_in(jax.random.key(run.plan.seed), _FIT)
    return fit_defense(key, detector, classifier, data, splits.threshold)


def _surrogate(run: _Run, detector: Detector, given) -> FittedDefense:
    """The attacker's own copy: another classifier and detector, from the attacker's half."""
    if given is None:
        half = run.splits.half("attacker")
        given = training.classifier_for(half, half="attacker", progress=run.progress), detector
    classifier, scheme = given
    check_classifier(classifier, run.splits)
    return _fit(run, scheme, classifier, "attacker")


def _crafted(run: _Run, classifier: Classifier, source: Batch) -> Batch:
    """Adversarial images, random targets, made from clean ones that a detector learns from."""
    plan, batch = run.plan, source.take(slice(_CRAFTED_IMAGES))
    targets = cells.random_targets(plan.seed, batch.labels, batch.ids, run.splits.num_classes)
    attack = settings.make_attack(
        plan._replace(preset="fast", attack_settings={}), plan.train_attack, run.splits, "none"
    )
    found, _ = cells.attack_images(
        f"training images by {plan.train_attack}", attack, objectives.Generic(),
        undefended(classifier), batch, targets, seed=plan.seed, lanes=plan.lanes,
        progress=run.progress,
    )  # fmt: skip
    already = found.success & (found.distance == 0)  # taken for the target as they are
    changed = found.success & ~already
    share = changed.sum() / max(1, (~already).sum())
    if share < 0.99:
        raise InputError(
            f"{plan.train_attack} changed the label of only {share:.1%} of the images that the "
            "detector should learn from; choose another --train_attack"
        )
    return Batch(found.image, batch.labels, batch.ids).take(changed)


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
    attack = settings.make_attack(plan, name, run.splits, run.defense_name)
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
        found, seconds = cells.attack_images(
            f"{run.defense_name}, {name}", attack,
            settings.make_objective(plan, run.defense_name), view, clean, goal, seed=plan.seed,
            lanes=plan.lanes, path=path, resume=run.resume, progress=run.progress,
        )  # fmt: skip
    _judge_and_enter(run, done, name, part, path, victim, goal, found, seconds)


def _headline(run: _Run, done: Evaluation, victim: FittedDefense, goal: np.ndarray) -> None:
    """The nearest success of each image over the attacks.

    It is chosen by draws of the attacker's own, so that the judge's draws stay unused.
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
            victim.defense, arrays["image"], done.clean.ids, goal, targeted=plan.targeted,
            seed=plan.seed, stream=ATTACKERS_OWN, draws=NUM_OWN_DRAWS,
        ).success(victim.thresholds.get(plan.operating_point))  # fmt: skip
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
        results.drop_partial(path)
    _enter(done, name, path, record, arrays)


def _enter(done: Evaluation, name: str, path, record, arrays) -> None:
    done.records[name], done.arrays[name], done.paths[name] = record, arrays, path
