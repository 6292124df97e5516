"""A defence that stands ready to be attacked: the victim, and what the attacker is shown of it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from advdet import inputs, naturals, provenance, results, sets, settings, training
from advdet.assess import reference_figures
from advdet.defenses import Defense, FittedDefense
from advdet.detectors import Detector
from advdet.settings import Settings
from advdet.splits import Splits
from advdet.types import Batch, Classifier, InputError
from advdet.victims import defend


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

    def __repr__(self) -> str:
        """A line for each attack."""
        head = f"Evaluation of {len(self.clean.labels)} images"
        return "\n".join([head, *map(_line, self.records.items())])


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
      scores_before: of `inputs.some_scores`, before anything was attacked.
      baselines: settings -> what the attacks did to the undefended classifier, as far as known.
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
    scores_before: np.ndarray | None = None
    baselines: dict[tuple, Evaluation] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def reference(self) -> dict[str, Any]:
        """Accuracy and false-positive rates over many clean test images."""
        return reference_figures(self.seed, self.victim, self.splits.test)

    @functools.cached_property
    def naturals(self) -> naturals.Naturals | None:
        """Natural images under the judge."""
        return naturals.look(self.victim.defense, self.splits, self.seed)

    def copy_at(self, operating_point: str) -> Defense | None:
        """The attacker's copy at that point."""
        return None if self.copy is None else self.copy.at(operating_point)

    def say(self, text: str) -> None:
        """One line on stderr, where progress is shown."""
        if self.progress:
            print(text, file=sys.stderr, flush=True)

    def cell(self, plan: Settings, attack: str, attack_settings: dict):
        """The `run` part of an attack's record, where it lies, and the record if it is there."""
        part = provenance.run_part(
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
    inputs.check_classifier(classifier, splits)
    warnings = (
        inputs.accuracy_warning(classifier, splits),
        inputs.few_clean_warning(splits),
        inputs.dark_warning(splits),
        inputs.copies_warning(splits),
        sets.few_sets_warning(detector, plan.num_images),
    )
    for warning in filter(None, warnings if progress else ()):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    copy = None
    if limited:
        if surrogate is None:
            surrogate = _trained_copy(splits, progress), detector
        inputs.check_classifier(surrogate[0], splits)
        copy = fit(surrogate[1], surrogate[0], half="attacker")
    victim = fit(detector, classifier, half=half)
    before = inputs.check_score(victim.defense, splits)
    if copy is not None:
        inputs.check_score(copy.defense, splits)
    for fitted in filter(None, (victim, copy)):
        inputs.check_answers(fitted.defense, splits)
    return Case(
        splits, defense_name, threat_model, classifier, victim, copy,
        plan.seed, results_dir, resume, command, progress, before,
    )  # fmt: skip


def _trained_copy(splits: Splits, progress: bool) -> Classifier:
    """The attacker's own classifier: advdet's network, trained on his half."""
    half = splits.half("attacker")
    try:
        return training.classifier_for(half, half="attacker", progress=progress)
    except InputError as error:
        raise InputError(
            "without a surrogate the attacker's classifier is advdet's own network, trained on his "
            f"half of the data, and that cannot be had: {error}; pass surrogate=(classifier, "
            "detector)"
        ) from error


def _line(item: tuple[str, dict[str, Any]]) -> str:
    """An attack's name, verdict, success and distance."""
    name, record = item
    attack, point = record["attack"], record["run"]["operating_point"]
    rate = attack["success_rate"]["misclassified" if point == "none" else point]
    text = f"  {name}: {record['verdict']}"
    if rate is not None:
        low, high = record["intervals"]["success_rate"]
        text += f"; success {rate:.1%} [{low:.1%}, {high:.1%}] at {point}"
    if attack["mean_l2"] is not None:
        text += f", mean L2 {attack['mean_l2']:.3g}"
    signs = [sign for sign, value in record["indicators"].items() if value["raised"]]
    return text + (f"; look at: {', '.join(signs)}" if signs else "")
