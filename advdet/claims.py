"""One statement of a stored record held against what was found, with room for float error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "not decidable"
CLAIMED = "claimed"  # no file can show it: what the attacker knew, say
LACKING = "the record lacks it, as an older version wrote it"
# What a record is read for: verdicts on images, scores, thresholds, success, and what they give.
_CORE = (
    "file", "seal", "arrays", "image", "image_uint8", "id, label", "label, target_class",
    "target_class", "distance", "clean_correct", "clean_score", "classified_as_wanted",
    "adversarial_score", "flagged", "judged_success", "fresh draws", "run.defense", "run.fit",
    "counts", "clean", "attack.success_rate", "attack.success_rate_8bit", "attack.mean_l2",
    "attack.median_l2", "intervals.success_rate", "detection", "correction", "sets", "verdict",
)  # fmt: skip
_EQUAL = 1e-6  # relative: sums of the same numbers differ by less, whatever their order


class Range(NamedTuple):
    """What a figure may be: the least and the most that float error allows; None if undefined."""

    low: float | None
    high: float | None


class Claim(NamedTuple):
    """One statement of a record, and what became of it.

    Attributes:
      name: where it stands in the record, with dots; a per-image array by its name.
      verdict: confirmed, refuted, not decidable or claimed.
      stored: what the record says, where that is one value.
      found: what it is, a value or a `Range`.
      note: why, or how many images.
    """

    name: str
    verdict: str
    stored: Any = None
    found: Any = None
    note: str = ""

    @property
    def is_core(self) -> bool:
        """Whether a record is worth nothing without it."""
        return self.verdict != CLAIMED and any(
            self.name == name or self.name.startswith(f"{name}.") for name in _CORE
        )

    def is_empty(self) -> bool:
        """Whether it says, rightly, that a figure is not defined."""
        nothing = self.stored is None and self.found in (None, Range(None, None))
        return nothing and not self.note


def status(claims: Iterable[Claim]) -> int:
    """An exit status: 1 where a claim is refuted, 3 where a core claim is left open, else 0."""
    claims = list(claims)
    if any(claim.verdict == REFUTED for claim in claims):
        return 1
    return 3 if any(claim.is_core and claim.verdict == UNDECIDED for claim in claims) else 0


class _Missing:
    """What a record lacks; whatever is looked for in it is missing, too."""

    def __getitem__(self, name):
        return self

    def get(self, name, default=None):
        return self

    def __bool__(self) -> bool:
        return False

    def __iter__(self):
        return iter(())


MISSING = _Missing()


class Stored(dict):
    """A part of a record in which what is missing is `MISSING`, and not an error."""

    def __missing__(self, name):
        return MISSING

    def get(self, name, default=MISSING):
        return super().get(name, default)


def stored(value):
    """A part of a record with all that is in it as `Stored`."""
    if isinstance(value, dict):
        return Stored({name: stored(part) for name, part in value.items()})
    return value


def compare(name: str, stored, found, why: str = "") -> Claim:
    """A figure against what it should be.

    Args:
      name: of the claim.
      stored: a number, None where it is not defined, or `MISSING`.
      found: the same, or a `Range`.
      why: what is missing to decide, where `found` rests on other stored figures alone: it can
        then be refuted, but not confirmed.
    """
    if stored is MISSING:
        return undecided(name, LACKING)
    low, high = found if isinstance(found, Range) else (found, found)
    if stored is None or low is None or high is None:
        right = stored is None and low is None and high is None
    else:
        slack = _EQUAL * max(abs(low), abs(high), 1e-9)
        right = bool(low - slack <= stored <= high + slack)
    if right and why:
        note = f"{why}; it follows from what is stored beside it"
        return Claim(name, UNDECIDED, stored, found, note)
    return Claim(name, CONFIRMED if right else REFUTED, stored, found)


def compare_ends(name: str, stored, found, why: str = "") -> list[Claim]:
    """The ends of an interval; None where there is none."""
    if stored is MISSING:
        return [undecided(name, LACKING)]
    ends = [(None, None) if value is None else value for value in (stored, found)]
    return [compare(f"{name}.{side}", *pair, why) for side, *pair in zip(("low", "high"), *ends)]


def compare_rows(name: str, wrong: np.ndarray, note: str, near: np.ndarray | None = None) -> Claim:
    """A per-image array.

    Args:
      name: of the array.
      wrong: [N] bool, the images that contradict it.
      note: what is wrong with these.
      near: [N] bool, images on which float error decides: told, and never wrong.
    """
    count = int(wrong.sum())
    said = f"{len(wrong)} images"
    if count:
        said = f"{count} of {len(wrong)} images (the first is {np.argmax(wrong)}): {note}"
    if near is not None and near.any():
        said += f"; {int(near.sum())} within float error of a decision"
    return Claim(name, REFUTED if count else CONFIRMED, note=said)


def claimed(name: str, why: str, stored=None) -> Claim:
    """A claim that the files cannot show."""
    return Claim(name, CLAIMED, None if stored is MISSING else stored, note=why)


def undecided(name: str, why: str, stored=None) -> Claim:
    """A claim for which something is missing."""
    return Claim(name, UNDECIDED, stored, note=why)
