"""One statement of a stored record held against what was found, with room for float error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "not decidable"
_EQUAL = 1e-6  # relative: sums of the same numbers differ by less, whatever their order


class Range(NamedTuple):
    """What a figure may be: the least and the most that float error allows; None if undefined."""

    low: float | None
    high: float | None


class Claim(NamedTuple):
    """One statement of a record, and what became of it.

    Attributes:
      name: where it stands in the record, with dots; a per-image array by its name.
      verdict: confirmed, refuted or not decidable.
      stored: what the record says, where that is one value.
      found: what it is, a value or a `Range`.
      note: why, or how many images.
    """

    name: str
    verdict: str
    stored: Any = None
    found: Any = None
    note: str = ""

    def is_empty(self) -> bool:
        """Whether it says, rightly, that a figure is not defined."""
        nothing = self.stored is None and self.found in (None, Range(None, None))
        return nothing and not self.note


def compare(name: str, stored, found, why: str = "") -> Claim:
    """A figure against what it should be.

    Args:
      name: of the claim.
      stored: a number, or None where it is not defined.
      found: the same, or a `Range`.
      why: what is missing to decide, where `found` rests on other stored figures alone: it can
        then be refuted, but not confirmed.
    """
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


def undecided(name: str, why: str, stored=None) -> Claim:
    """A claim for which something is missing."""
    return Claim(name, UNDECIDED, stored, note=why)
