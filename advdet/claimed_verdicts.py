"""Verdicts on images, scores and thresholds against the judge's own."""

from __future__ import annotations

import jax
import numpy as np

from advdet import provenance
from advdet.claims import (
    CONFIRMED,
    REFUTED,
    Claim,
    Range,
    compare,
    compare_rows,
    undecided,
)
from advdet.defenses import POINTS
from advdet.judge import Judgement
from advdet.rebuild import Evidence
from advdet.rejudge import Looks, Seen, score_error

_SAME_FIT = 0.5  # of the clean scores agree: what was learned is the record's
_EQUAL = 1e-6


def of_fit(evidence: Evidence, looks: Looks) -> Claim:
    """What was learned here is what the record's detector learned; else nothing can be judged.

    Args:
      evidence: a record whose detector is here.
      looks: its images under the judge.

    Returns:
      A claim that is not decidable where what was learned is another thing.
    """
    fitted, there = evidence.built.victim.defense.fitted, evidence.run.get("fit")
    here, where = provenance.digest_of(fitted), "run.fit"
    if here is not None and here == there:
        return Claim(where, CONFIRMED, there)
    if here is not None and not jax.tree.leaves(fitted):  # then there is one digest, everywhere
        if there is None:
            return Claim(where, CONFIRMED, note="it learns nothing")
        return Claim(where, REFUTED, there, here, "it learns nothing")
    stored, scores = evidence.arrays["clean_score"], looks.clean.scores
    near = np.zeros(0, bool)  # float error changes every bit, and hardly a score
    if scores.shape[1]:
        near = np.broadcast_to(False, scores.shape)
        if stored.shape == scores.shape:
            near = np.abs(stored - scores) <= looks.clean.error
    agree = f"{int(near.sum())} of {near.size} clean scores agree" if near.size else "no scores"
    if near.size and near.mean() >= _SAME_FIT:
        return Claim(where, CONFIRMED, there, note=f"by its scores: {agree}")
    if there is None:
        why = f"what was learned here may not be the record's, which lacks run.fit ({agree})"
    else:
        why = f"what the detector learned here ({here}) is not the record's ({there}; {agree})"
    return undecided(where, why)


def as_stored(arrays) -> tuple[Judgement, Judgement]:
    """(clean, adversarial) verdicts as stored; logits are not."""
    none = np.zeros((0, 0), np.float32)
    return (
        Judgement(none, arrays["clean_correct"], arrays["clean_score"]),
        Judgement(none, arrays["classified_as_wanted"], arrays["adversarial_score"]),
    )


def of_looks(evidence: Evidence, looks: Looks, clean: Judgement, adversarial: Judgement):
    """Stored verdicts where float error explains them, ours elsewhere.

    Args:
      evidence: a record whose defence is here.
      looks: its images under the judge.
      clean, adversarial: as stored.

    Returns:
      (claims, clean, adversarial, thresholds).
    """
    arrays = evidence.arrays
    found, thresholds = _threshold_claims(evidence)
    made, clean = _settled(("clean_correct", "clean_score"), looks.clean, clean)
    found += made
    names = ("classified_as_wanted", "adversarial_score")
    made, adversarial = _settled(names, looks.adversarial, adversarial)
    found += made
    threshold = thresholds.get(evidence.run["operating_point"])
    flags, stored = adversarial.flagged(threshold), arrays["flagged"]
    if flags.shape == stored.shape:
        other = (flags != stored).any(axis=0)
        found.append(compare_rows("flagged", other, "not what the judge says"))
    else:
        note = f"shape {stored.shape}, not {flags.shape}"
        found.append(Claim("flagged", REFUTED, note=note))
    wrong = np.abs(arrays["judged_success"] - adversarial.success(threshold)) > _EQUAL
    least, most = looks.adversarial.success(threshold)
    found.append(compare_rows("judged_success", wrong, "not what the judge says", least != most))
    return found, clean, adversarial, thresholds


def _settled(names, seen: Seen, stored: Judgement) -> tuple[list[Claim], Judgement]:
    """Claims on classes and scores, and what counts of them."""
    wrong = (seen.wanted != stored.wanted) & seen.sure
    found = [compare_rows(names[0], wrong, "not what the classifier says", ~seen.sure)]
    wanted, scores = np.where(seen.sure, seen.wanted, stored.wanted), seen.scores
    if stored.scores.shape != scores.shape:
        note = f"shape {stored.scores.shape}, not {scores.shape}"
        found.append(Claim(names[1], REFUTED, note=note))
    elif scores.shape[1]:
        far = ~(np.abs(stored.scores - scores) <= seen.error)
        found.append(compare_rows(names[1], far.any(axis=0), "not what the detector says"))
        scores = np.where(far, scores, stored.scores)
    return found, Judgement(seen.logits, wanted, scores)


def _threshold_claims(evidence: Evidence) -> tuple[list[Claim], dict[str, float | None]]:
    """Claims on the thresholds, and those that count."""
    victim, stored = evidence.built.victim, evidence.record["clean"]["thresholds"]
    found, settled = [], {}
    for name in POINTS:
        ours, theirs, allowed = victim.thresholds.get(name), stored[name], None
        if ours is not None:
            error = float(score_error(victim, ours))
            allowed = Range(ours - error, ours + error)
        found.append(compare(f"clean.thresholds.{name}", theirs, allowed))
        settled[name] = theirs if found[-1].verdict == CONFIRMED else ours
    return found, settled
