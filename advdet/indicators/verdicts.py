"""What a record says in a word, and how that changes with one indicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advdet.indicators.base import by_values

BROKEN, INVALID = "broken", "evaluation invalid"
NOT_BROKEN = "not broken by these attacks at this budget"
NOT_BY_VALUES = "not broken by gradient-free attacks alone"  # which prove little
TOO_FEW_SETS = "too few sets to say"  # whether half of them are told


def verdict(
    interval: list[float] | None,
    indicators: Mapping[str, Any],
    sets: Mapping[str, Any] | None = None,
    *,
    by_values: bool = False,
) -> str:
    """What a record says; never that a defence holds.

    Args:
      interval: 95 % interval of success at the point aimed at.
      indicators: of the record.
      sets: of the record of a detector of kind "set"; then half of the sets must pass, too, for
        which there must be enough of them.
      by_values: whether none of its attacks follows gradients (`base.by_values`).
    """
    if any(sign["raised"] and sign["invalidates"] for sign in indicators.values()):
        return INVALID
    withstood = NOT_BY_VALUES if by_values else NOT_BROKEN
    if interval is None or interval[0] < 0.5:
        return withstood
    if sets is None:
        return BROKEN
    low, high = sets["adversarial"]["interval"] or (0.0, 1.0)
    if low <= 0.5 < high:
        return TOO_FEW_SETS
    return withstood if low > 0.5 else BROKEN


def amended(record: dict[str, Any], name: str, sign: dict[str, Any]) -> dict[str, Any]:
    """The record with one indicator put in, and the verdict that follows."""
    indicators = {**record["indicators"], name: sign}
    said = verdict(
        record["intervals"]["success_rate"], indicators, record["sets"],
        by_values=by_values(record["run"]),
    )  # fmt: skip
    return {**record, "indicators": indicators, "verdict": said}
