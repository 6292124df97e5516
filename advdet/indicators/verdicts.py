"""What a record says in a word, and how that changes with one indicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BROKEN, INVALID = "broken", "evaluation invalid"
NOT_BROKEN = "not broken by these attacks at this budget"
TOO_FEW_SETS = "too few sets to say"  # whether half of them are told


def verdict(
    interval: list[float] | None,
    indicators: Mapping[str, Any],
    sets: Mapping[str, Any] | None = None,
) -> str:
    """What a record says; never that a defence holds.

    Args:
      interval: 95 % interval of success at the point aimed at.
      indicators: of the record.
      sets: of the record of a detector of kind "set"; then half of the sets must pass, too, for
        which there must be enough of them.
    """
    if any(sign["raised"] and sign["invalidates"] for sign in indicators.values()):
        return INVALID
    if interval is None or interval[0] < 0.5:
        return NOT_BROKEN
    if sets is None:
        return BROKEN
    low, high = sets["adversarial"]["interval"] or (0.0, 1.0)
    if low <= 0.5 < high:
        return TOO_FEW_SETS
    return NOT_BROKEN if low > 0.5 else BROKEN


def amended(record: dict[str, Any], name: str, sign: dict[str, Any]) -> dict[str, Any]:
    """The record with one indicator put in, and the verdict that follows."""
    indicators = {**record["indicators"], name: sign}
    said = verdict(record["intervals"]["success_rate"], indicators, record["sets"])
    return {**record, "indicators": indicators, "verdict": said}
