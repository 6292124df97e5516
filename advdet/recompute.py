"""A stored record built once more, by the functions that build records, from its images.

Float error of another machine is let through by building it three times: as the judge sees the
images, with all that is within error read in the attacker's favour, and with it read against him.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from advdet import beside, indicators, naturals, probes, records, starts
from advdet.assess import unaware_scores
from advdet.attacks import objectives
from advdet.attacks.base import AttackResult
from advdet.claimed_figures import Verdicts
from advdet.claims import MISSING
from advdet.detectors import Detector
from advdet.rebuild import Evidence
from advdet.rejudge import Looks
from advdet.threat_models import attacker_view
from advdet.types import InputError

_READINGS = (-1, 0, 1)


class Again(NamedTuple):
    """A record built again.

    Attributes:
      readings: records, of float error read each way.
      unasked: why gradients could not be asked for; empty where they were.
      unpaired: the undefended classifier's images are not here to compare with.
    """

    readings: tuple[dict[str, Any], ...]
    unasked: str
    unpaired: bool


def again(evidence: Evidence, seen: Verdicts, looks: Looks, reference: dict[str, Any]) -> Again:
    """Builds a record again; a judge is needed.

    Args:
      evidence: the record and what it speaks of.
      seen: verdicts that count.
      looks: everything under the judge.
      reference: of `claimed_figures.reference`.
    """
    run, arrays, victim = evidence.run, evidence.arrays, evidence.built.victim
    found = AttackResult(*(arrays[field] for field in AttackResult._fields))
    try:
        probe, unasked = _probe(evidence, found, seen.clean.wanted), ""
    except (InputError, KeyError, TypeError, ValueError) as error:
        said = f"lacking: {error}" if isinstance(error, KeyError) else str(error)
        probe, unasked = probes.Probe({}, None, True), " ".join(said.split())
    noisy = looks.noisy.take(seen.clean.wanted[arrays["success"]])
    shown = looks.shown.settled(seen.adversarial, arrays["success"])
    least, most = _alone(evidence)
    alone = {-1: least, 0: least, 1: most}
    baseline, unpaired = _baseline(evidence)
    natural = _natural(evidence, seen)
    unaware = unaware_scores(
        victim, evidence.clean, arrays["target_class"], evidence.baseline and
        evidence.baseline.arrays, run["seed"],
    )  # fmt: skip
    defended_label = objective_of(run).defended_label

    def build(reading):
        read = lambda looked: looked.judgement(reading)
        return records.build(
            run=run,
            thresholds=seen.thresholds if victim.thresholds else {},
            clean_scores=victim.clean_scores,
            found=found,
            judged=records.Judged(
                clean=seen.clean, adversarial=seen.adversarial, rounded=read(looks.rounded),
                shown=read(shown), nearest=read(shown), squeezed=read(looks.squeezed),
                noisy=read(noisy) if len(noisy.wanted) else None,
                unaware=unaware,
            ),
            reference=reference,
            clean_images=np.asarray(evidence.clean.images),
            labels=np.asarray(evidence.clean.labels),
            detector=victim.defense.detector,
            sets=lambda rows: evidence.record["sets"] or None,  # with claims of its own
            baseline=baseline,
            checks=records.Checks(probe, alone[reading], defended_label, natural, {}),
            seconds={},
        )  # fmt: skip

    return Again(tuple(build(reading) for reading in _READINGS), unasked, unpaired)


def _baseline(evidence: Evidence):
    """The undefended classifier's record with its arrays, and whether these are a stand-in.

    Figures that are not here are taken as stored; arrays that are not, as those of failures.
    """
    there, stored = evidence.baseline, evidence.record["attack"]
    if there is not None and there.arrays is not None:
        return ({"attack": there.attack}, there.arrays), False
    figures = {part: stored.get(f"baseline_{part}") for part in ("mean_l2", "median_l2")}
    figures = {part: None if value is MISSING else value for part, value in figures.items()}
    if figures["mean_l2"] is None:
        return None, False
    none = np.zeros(len(evidence.arrays["id"]), np.float32)
    arrays = {"clean_correct": none > 0, "judged_success": none, "distance": none}
    return ({"attack": figures if there is None else there.attack}, arrays), True


def _alone(evidence: Evidence):
    """([N] at least, [N] at most) where the attack reaches the label with no detector's goal.

    None where it was not asked.
    """
    detector, there = evidence.built.victim.defense.detector, evidence.baseline
    own = type(detector).logits is not Detector.logits  # then labels are not the baseline's
    if own or evidence.run["threat_model"] != "perfect_knowledge":
        return None, None
    if there is not None and there.arrays is not None:
        return there.arrays["success"], there.arrays["success"]
    if not evidence.record["attack"]["baseline_mean_l2"]:
        return None, None
    none = np.zeros(len(evidence.arrays["id"]), bool)
    return none, ~none


def _natural(evidence: Evidence, seen: Verdicts) -> np.ndarray | None:
    """[N] L2 of natural images that succeed as they are, for failures, as the attack was asked."""
    run, victim = evidence.run, evidence.built.victim
    threshold = seen.thresholds.get(run["operating_point"])
    failed = seen.clean.wanted & (seen.adversarial.success(threshold) <= 0.5)
    known = None
    if run["threat_model"] == "perfect_knowledge" and indicators.is_minimal(run) and failed.any():
        known = naturals.look(victim.defense, evidence.built.splits, run["seed"])
    return naturals.nearest(
        known, threshold, np.asarray(evidence.clean.images), evidence.arrays["target_class"],
        failed, targeted=run["targets"] != "untargeted",
        confidence=run["settings"]["confidence"],
        detector_margin=run["settings"]["detector_margin"],
    )  # fmt: skip


# ---- gradients at the stored images


def _probe(evidence: Evidence, found: AttackResult, attacked: np.ndarray) -> probes.Probe:
    """What `probes.probe` finds, asked as it was after the attack.

    Raises:
      InputError: what the attacker was shown is not here.
    """
    run, victim, clean = evidence.run, evidence.built.victim, evidence.clean
    if run["threat_model"] == "limited_knowledge":
        raise InputError("the attacker's copy is not here")
    view = attacker_view(run["threat_model"], victim.at(run["operating_point"]))
    objective = objective_of(run)
    ran = run["attack"]
    if ran == "best":  # the manner of that one which most images come from
        names = list(run["settings"]["attack"])
        counts = [np.sum(evidence.arrays["attack"][attacked] == name) for name in names]
        ran = names[int(np.argmax(counts))]
    given = run["settings"]["attack"].get(ran, run["settings"]["attack"])
    reach = probes.Reach(
        indicators.is_minimal(run), given.get("epsilon"), given.get("norm", "linf")
    )
    goal, variant = evidence.arrays["target_class"], objective.variants()[0]
    start = None
    if variant.begins == "natural":
        known = starts.held_out(evidence.built.splits, False)
        start = starts.natural(variant, view, known, clean, goal)
    elif variant.begins == "undefended":
        start = _first_stage(evidence, ran)
    return probes.probe(
        objective, view, clean, goal, found, attacked, seed=run["seed"], reach=reach, start=start
    )


def objective_of(run: dict[str, Any]) -> objectives.Objective:
    """The attacker's objective, as the record names it.

    Raises:
      KeyError, TypeError: there is none of that name, or it has other settings.
    """
    settings, kind = run["settings"], objectives.kind_of(run["objective"], run["defense"])
    return kind(
        confidence=settings["confidence"], detector_margin=settings["detector_margin"],
        **settings["objective"],
    )  # fmt: skip


def _first_stage(evidence: Evidence, ran: str) -> np.ndarray:
    """[N, H, W, C] what the attack found on the bare classifier, from its own record."""
    found = beside.first_stage(evidence.path, evidence.run, ran)
    if found is None or found["image"].shape != evidence.clean.images.shape:
        raise InputError(
            f"it began at images of {ran} on the undefended classifier, whose record is not beside "
            "this one"
        )
    won = found["success"][:, None, None, None]
    return np.where(won, found["image"], evidence.clean.images)
