"""A record's figures against what its images give; see `verify`."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from advdet import metrics, sets
from advdet.assess import reference_figures
from advdet.attacks import objectives
from advdet.claims import (
    CONFIRMED,
    LACKING,
    MISSING,
    Claim,
    Range,
    claimed,
    compare,
    compare_ends,
    compare_rows,
    undecided,
)
from advdet.defenses import POINTS, classify_images, undefended
from advdet.judge import Judgement, class_margins
from advdet.rebuild import Evidence
from advdet.rejudge import Looks, Seen, logit_error, score_error, see_classes

_ELSEWHERE = "of the undefended classifier's record, which is not beside this one"
_P_ERROR = 0.005  # of a permutation test's p-value: a few permutations that tie
_REFERENCE_IMAGES = 2000


class Verdicts(NamedTuple):
    """What counts: stored verdicts where float error explains them, ours elsewhere.

    Attributes:
      clean: on the clean images with their true labels.
      adversarial: on the returned images.
      thresholds: by operating point, None where there is none.
    """

    clean: Judgement
    adversarial: Judgement
    thresholds: dict[str, float | None]


def of_verdicts(evidence: Evidence, seen: Verdicts) -> list[Claim]:
    """Counts, success rates, distances, their intervals, the verdict.

    Args:
      evidence: the record and what it speaks of.
      seen: the verdicts; as stored where there is no judge.
    """
    record, arrays, run = evidence.record, evidence.arrays, evidence.run
    why = evidence.built.why if evidence.built.victim is None else ""
    point, thresholds = run["operating_point"], seen.thresholds
    threshold, attacked = thresholds.get(point), seen.clean.wanted
    success = seen.adversarial.success(threshold)
    succeeded, count = success > 0.5, int(attacked.sum())
    counts, attack = record["counts"], record["attack"]

    rates: dict[str, float | None] = dict.fromkeys(("misclassified", *POINTS))
    rates["misclassified"] = metrics.mean_or_none(seen.adversarial.wanted[attacked])
    for name in POINTS if run["threat_model"] == "zero_knowledge" else (point,):
        if thresholds.get(name) is not None:
            share = seen.adversarial.success(thresholds[name])
            rates[name] = metrics.mean_or_none(share[attacked])
    interval = metrics.wilson(success[attacked].sum(), count)
    return [
        compare("run.settings.num_images", run["settings"]["num_images"], len(attacked)),
        compare("counts.requested", counts["requested"], len(attacked)),
        compare("counts.clean_correct", counts["clean_correct"], count, why),
        compare("counts.attacked", counts["attacked"], count, why),
        compare("counts.clean_flagged", counts["clean_flagged"],
                metrics.mean_or_none(seen.clean.flagged(threshold).sum(axis=1)), why),
        compare("counts.succeeded", counts["succeeded"], int((attacked & succeeded).sum()), why),
        *(compare(f"attack.success_rate.{name}", attack["success_rate"][name], rate, why)
          for name, rate in rates.items()),
        compare("attack.own_success_rate", attack["own_success_rate"],
                metrics.mean_or_none(arrays["success"][attacked]), why),
        _gradients(attack["gradients_per_image"], arrays["num_gradients"]),
        *_distances(evidence, attacked, succeeded, why),
        *compare_ends("intervals.success_rate", record["intervals"]["success_rate"], interval, why),
    ]  # fmt: skip


def _gradients(stored, counts: np.ndarray) -> Claim:
    """The mean of stored counts, which are the attack's own word."""
    claim = compare("attack.gradients_per_image", stored, metrics.mean_or_none(counts))
    if claim.verdict != CONFIRMED:
        return claim
    return claimed(claim.name, "the mean of counts that are the attack's own word", stored)


def _distances(evidence: Evidence, attacked, succeeded, why: str) -> list[Claim]:
    record, attack = evidence.record, evidence.record["attack"]
    names = ("mean_l2", "median_l2", "mean_l2_unfiltered")
    if evidence.clean is None:
        return [undecided(f"attack.{name}", why, attack[name]) for name in names]
    distance = metrics.l2(evidence.arrays["image"], evidence.clean.images)
    counted = distance[attacked & succeeded]
    values = (
        metrics.mean_or_none(counted),
        metrics.median_l2(distance[attacked], succeeded[attacked]),
        metrics.mean_or_none(distance[succeeded & evidence.arrays["success"]]),
    )
    found = [compare(f"attack.{name}", attack[name], value, why)
             for name, value in zip(names, values)]  # fmt: skip
    for what, value in (("mean", values[0]), ("median", values[1])):
        name = "baseline_ratio" if what == "mean" else "median_ratio"
        base, missing = attack.get(f"baseline_{what}_l2"), why
        if base is MISSING:
            found.append(undecided(f"attack.baseline_{what}_l2", LACKING))
            found.append(undecided(f"attack.{name}", "what it is a ratio to is lacking"))
            continue
        if base is not None and evidence.baseline is None:
            missing = _ELSEWHERE
            found.append(undecided(f"attack.baseline_{what}_l2", missing, base))
        elif base is not None:
            there = evidence.baseline.attack[f"{what}_l2"]
            found.append(compare(f"attack.baseline_{what}_l2", base, there))
        ratio = value / base if value is not None and base else None
        found.append(compare(f"attack.{name}", attack.get(name), ratio, missing))
    spread = metrics.mean_interval(counted)
    return found + compare_ends("intervals.mean_l2", record["intervals"]["mean_l2"], spread, why)


def of_looks(evidence: Evidence, seen: Verdicts, looks: Looks | None) -> list[Claim]:
    """What no array keeps: 8 bit, detection, correction, sets.

    Args:
      evidence: the record and what it speaks of.
      seen: the verdicts.
      looks: None where there is no judge.
    """
    if looks is None:
        names = ("attack.success_rate_8bit", "detection", "correction", "sets")
        some = [name for name in names if evidence.record.get(name, True) is not None]
        return [undecided(name, evidence.built.why) for name in some]
    arrays, attacked = evidence.arrays, seen.clean.wanted
    threshold = seen.thresholds.get(evidence.run["operating_point"])
    eight_bit = _mean_range(*(side[attacked] for side in looks.rounded.success(threshold)))
    stored = evidence.record["attack"]["success_rate_8bit"]
    reached = attacked & (arrays["success"] | arrays["missed"])
    shown = looks.shown.settled(seen.adversarial, arrays["success"])
    return [
        compare("attack.success_rate_8bit", stored, eight_bit),
        _goal(evidence, shown, reached),
        *_detection(evidence.record, seen, shown, reached),
        *_correction(evidence, shown, reached),
        *_sets(evidence, reached),
    ]


def _goal(evidence: Evidence, shown: Seen, reached) -> Claim:
    """Images that count as having reached the classifier's goal do so in the attacker's view."""
    name, run, arrays = "success, missed", evidence.run, evidence.arrays
    if run["threat_model"] == "limited_knowledge":
        return undecided(name, "reached on a copy, not looked at here")
    try:
        kind = objectives.kind_of(run["objective"], run["defense"])
    except KeyError:
        return undecided(name, f"there is no objective {run['objective']!r} here")
    if not kind.defended_label:
        return undecided(name, "reached on other networks than the defended one")
    if run["threat_model"] == "zero_knowledge":
        success = arrays["success"][:, None, None, None]
        images = np.where(success, arrays["image"], arrays["nearest_miss"])
        bare = undefended(evidence.built.victim.defense.classifier)
        shown = see_classes(bare, images, arrays["id"], arrays["target_class"], run["targets"])
    wrong = reached & ~shown.wanted & shown.sure
    return compare_rows(name, wrong, "the classifier's goal is not reached")


def _detection(record, seen: Verdicts, shown: Seen, reached) -> list[Claim]:
    stored, some, count = record["detection"], shown.take(reached), int(reached.sum())
    found = [compare("detection.n", stored["n"], count)]
    for name in POINTS:
        rate = None
        if seen.thresholds.get(name) is not None and count:
            rate = Range(*(float(side.mean()) for side in some.flagged(seen.thresholds[name])))
        said = stored["true_positive_rate"][name]
        found.append(compare(f"detection.true_positive_rate.{name}", said, rate))
        found += _ends(record, f"true_positive_rate.{name}", said, count)
    area = lower = None
    if count and shown.scores.shape[1]:
        plain, scores, error = seen.clean.scores[0], some.scores[0], some.error[0]
        both = [scores - error, scores + error]
        area = Range(*(metrics.auc_of_many(plain[seen.clean.wanted], each) for each in both))
        lower = Range(*(float(np.mean(each < plain[reached])) for each in both[::-1]))
    found.append(compare("detection.auc", stored["auc"], area))
    return [*found, compare("detection.reversed", stored["reversed"], lower)]


def _correction(evidence: Evidence, shown: Seen, reached) -> list[Claim]:
    stored = evidence.record["correction"]
    if evidence.built.victim.defense.detector.kind != "corrector":
        return [compare("correction", stored and 1.0, None)]
    some, labels = shown.take(reached), evidence.arrays["label"][reached]
    restored = some.logits.argmax(axis=1) == labels
    close = np.abs(class_margins(some.logits, labels)) <= logit_error(some.logits)
    broken = _mean_range(~some.wanted & some.sure, ~some.wanted | ~some.sure)
    return [
        compare("correction.n", stored["n"], int(reached.sum())),
        compare("correction.target_broken", stored["target_broken"], broken),
        compare("correction.label_restored", stored["label_restored"],
                _mean_range(restored & ~close, restored | close)),
    ]  # fmt: skip


def _sets(evidence: Evidence, reached) -> list[Claim]:
    stored, defense = evidence.record["sets"], evidence.built.victim.defense
    if defense.detector.kind != "set":
        return [compare("sets", stored and 1.0, None)]
    first = len(reached)
    images = {
        "adversarial": evidence.arrays["image"][reached & evidence.arrays["success"]],
        "clean": evidence.built.splits.test.images[first : first + _REFERENCE_IMAGES],
    }
    size = sets.size_of(defense.detector, *images.values())
    found = [compare("sets.size", stored and stored["size"], size)]
    if size is None or stored is None:
        return found
    if "originals" not in stored:
        return [*found, undecided("sets", "the sets of this record overlap, as none are drawn now")]
    images["originals"] = evidence.clean.images[reached & evidence.arrays["success"]]
    for number, (name, rows) in zip((0, 1, 0), images.items()):
        p = sets.p_values_of(evidence.run["seed"], number, defense, rows, size)
        limits = (sets.LEVEL - _P_ERROR, sets.LEVEL + _P_ERROR)
        told, rejected = stored[name]["told"], Range(*(float(np.mean(p < x)) for x in limits))
        ends = metrics.wilson(told, len(p)) if len(p) >= sets.FEWEST_FOR_INTERVAL else None
        middle = Range(float(np.median(p)) - _P_ERROR, float(np.median(p)) + _P_ERROR)
        found.append(compare(f"sets.{name}.rejected", stored[name]["rejected"], rejected))
        found.append(compare(f"sets.{name}.median_p", stored[name]["median_p"], middle))
        found.append(compare(f"sets.{name}.sets", stored[name]["sets"], len(p)))
        found.append(compare(f"sets.{name}.told", told, stored[name]["rejected"] * len(p)))
        found += compare_ends(f"sets.{name}.interval", stored[name]["interval"], ends)
    return found


def of_many_clean_images(evidence: Evidence, kept: dict[Any, Any], progress: bool) -> list[Claim]:
    """Accuracy and false-positive rates; at thresholds moved by float error, either way.

    Args:
      evidence: the record and what it speaks of.
      kept: receives what was found, for further records of one defence.
      progress: say on stderr what takes long.
    """
    victim, stored = evidence.built.victim, evidence.record["clean"]
    if victim is None:
        names = ("accuracy", "false_positive_rate")
        return [undecided(f"clean.{name}", evidence.built.why) for name in names]
    figures = _clean_figures(evidence, kept, progress)
    rates, count = figures["false_positive_rate"], figures["n"]
    batch, ties = evidence.built.splits.test.take(slice(count)), 0.0
    if stored["accuracy"] != figures["accuracy"]:
        logits = classify_images(jax.random.key(0), victim.defense, batch.images, batch.ids)
        close = np.abs(class_margins(logits, np.asarray(batch.labels))) <= logit_error(logits)
        ties = float(close.mean())
    accuracy = Range(figures["accuracy"] - ties, figures["accuracy"] + ties)
    found = [
        compare("counts.clean_judged", evidence.record["counts"]["clean_judged"], count),
        compare("clean.accuracy", stored["accuracy"], accuracy),
    ]
    for name in POINTS:
        said = stored["false_positive_rate"][name]
        rate = Range(rates.get(f"{name} low"), rates.get(f"{name} high"))
        found.append(compare(f"clean.false_positive_rate.{name}", said, rate))
        found += _ends(evidence.record, f"false_positive_rate.{name}", said, count)
    return found


def reference(evidence: Evidence, kept: dict[Any, Any], progress: bool) -> dict[str, Any]:
    """The same figures as a record has them: as stored, where float error explains that.

    Args: those of `of_many_clean_images`.

    Returns:
      {accuracy, false_positive_rate, n} as `assess.reference_figures` gives them.
    """
    figures = _clean_figures(evidence, kept, progress)
    stored, rates = evidence.record["clean"]["false_positive_rate"], {}
    for name in POINTS:
        low, high = (figures["false_positive_rate"].get(f"{name} {end}") for end in ("low", "high"))
        said = stored[name]
        near = isinstance(said, float) and low is not None and low <= said <= high
        rates[name] = said if near else low
    return {**figures, "false_positive_rate": rates}


def _clean_figures(evidence: Evidence, kept: dict[Any, Any], progress: bool) -> dict[str, Any]:
    """Figures over many clean images, at thresholds moved up ("low") and down ("high")."""
    victim, test = evidence.built.victim, evidence.built.splits.test
    facts = ("clean images", id(victim), evidence.run["seed"])
    if facts not in kept:
        if progress:
            print("accuracy and false positives over clean images", file=sys.stderr, flush=True)
        moved = {}
        for name, value in victim.thresholds.items():
            if value is not None:
                error = 2 * float(score_error(victim, value))  # of the scores and of the limit
                moved |= {f"{name} low": value + error, f"{name} high": value - error}
        figures = reference_figures(evidence.run["seed"], victim._replace(thresholds=moved), test)
        kept[facts] = figures, victim  # whose id must not be given to another
    return kept[facts][0]


def _ends(record, name: str, said: float | None, n: int) -> list[Claim]:
    """The interval of a stored rate over n images; what is no rate is refuted as it is."""
    if said is MISSING or said is None or not 0 <= said <= 1:
        return []
    kind, point = name.split(".", 1)
    ends = metrics.wilson(said * n, n)
    return compare_ends(f"intervals.{name}", record["intervals"][kind][point], ends)


def _mean_range(low: np.ndarray, high: np.ndarray) -> Range:
    return Range(metrics.mean_or_none(low), metrics.mean_or_none(high))
