"""Are a random defence's stored successes luck? Its images judged again by draws of one's own.

The judge's draws follow from the record's seed, so whoever makes images can try them first. Of
honest images the judge's round of draws is one like any other round: which of the rounds was the
judge's is then a matter of chance, image by image, whatever the chance of the image itself. The
test compares the judge's successes with all ways of choosing a round for each image; it is exact,
and one-sided: refuted is what passes the judge's draws more often than others'.
"""

from __future__ import annotations

import secrets

import numpy as np

from advdet.claimed_figures import Verdicts
from advdet.claims import CONFIRMED, REFUTED, Claim
from advdet.judge import NUM_DRAWS, judge
from advdet.rebuild import Evidence

ROUNDS = 4
LEVEL = 0.001  # for all records that are verified together
_STREAM = 0x5645


def entropy() -> int:
    """A seed that nobody can have known."""
    return secrets.randbits(31)


def of_fresh_draws(evidence: Evidence, seen: Verdicts, seed: int, level: float) -> list[Claim]:
    """Compares successes by the judge's own draws with those by fresh ones.

    Args:
      evidence: a record whose defence is here.
      seen: the verdicts that count.
      seed: of the fresh draws.
      level: the chance at which an honest record may be refuted.

    Returns:
      One claim; none for a defence that draws nothing, or where nothing was attacked.
    """
    defense = evidence.built.victim.defense
    rows = np.flatnonzero(seen.clean.wanted)
    if not defense.detector.random or not len(rows):
        return []
    run, arrays = evidence.run, evidence.arrays
    threshold = seen.thresholds.get(run["operating_point"])

    def successes(judgement):
        return np.round(judgement.success(threshold) * NUM_DRAWS).astype(int)

    fresh = [
        judge(
            defense, arrays["image"][rows], arrays["id"][rows], arrays["target_class"][rows],
            targeted=run["targets"] != "untargeted", seed=seed, stream=_STREAM + number,
        )
        for number in range(ROUNDS)
    ]  # fmt: skip
    public = successes(seen.adversarial.take(rows))
    others = np.stack([successes(judgement) for judgement in fresh])
    p = p_value(public, others)
    stored, found = (float(counts.mean()) / NUM_DRAWS for counts in (public, others))
    note = f"p {p:.2g} that chance does it, refuted below {level:.2g}; seed {seed}"
    return [Claim("fresh draws", REFUTED if p < level else CONFIRMED, stored, found, note)]


def p_value(public: np.ndarray, fresh: np.ndarray) -> float:
    """The chance of as many successes, if each image's round were drawn from all of its rounds.

    Args:
      public: [N] integers, successes of each image in the judge's round.
      fresh: [R, N] in the other rounds.
    """
    rounds = np.concatenate([public[None], fresh])
    chances = np.ones(1)
    for counts in rounds.T:
        chances = np.convolve(chances, np.bincount(counts) / len(counts))
    return float(min(1.0, chances[int(public.sum()) :].sum()))
