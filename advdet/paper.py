"""Our figures beside the paper's: which row a run belongs to, and whether it is reproduced.

A band belongs to a row with the paper's objective, threshold, targets and confidence; elsewhere
there is no figure to compare with.
"""

from __future__ import annotations

import math
from typing import Any

from advdet.paper_rows import ROWS, Reported

# What a row may report, in the order it is told in.
FIGURES = (
    "success_rate", "mean_l2", "ratio", "detection", "false_positive_rate", "correction",
    "rejection", "reversed",
)  # fmt: skip


def target_regime(dataset: str, defense: str) -> str:
    """The regime in which the paper attacks this defence; random where it says nothing."""
    for (data, name, _), rows in ROWS.items():
        if (data, name) == (dataset, defense):
            return rows[0].targets
    return "random"


def row_for(
    dataset: str, defense: str, threat_model: str, targets: str, confidence: float | None = None
) -> Reported | None:
    """The paper's row in this regime, if it has one.

    Args:
      dataset, defense, threat_model, targets: by name.
      confidence: the attack's, to tell rows that differ in it alone; None takes the first.

    Returns:
      The row of that confidence, else the first one with these targets, else None.
    """
    rows = ROWS.get((dataset, defense, threat_model), [])
    rows = [row for row in rows if row.targets == targets]
    if confidence is not None:
        rows = [row for row in rows if _at_its_confidence(row, confidence)] or rows
    return rows[0] if rows else None


def _at_its_confidence(row: Reported, confidence: float) -> bool:
    same = math.isclose(confidence, row.confidence, abs_tol=1e-6)
    return not same and confidence > row.confidence if row.raised else same


def figures(record: dict[str, Any]) -> dict[str, float | None]:
    """The figures of a record that can stand beside the paper's.

    Args:
      record: all but its `paper` part.

    Returns:
      Values by the names in `FIGURES`; None where undefined, left out where not measured.
    """
    attack, detection, point = (
        record["attack"],
        record["detection"],
        record["run"]["operating_point"],
    )
    sets = (record.get("sets") or {}).get("adversarial", {})
    measured = {"reversed": detection["reversed"]} if "reversed" in detection else {}
    if "interval" not in sets or sets["interval"]:  # else too few sets for a rate
        measured["rejection"] = sets.get("rejected")
    return measured | {
        "success_rate": attack["success_rate"]["misclassified" if point == "none" else point],
        "mean_l2": attack["mean_l2"],
        "ratio": attack["baseline_ratio"],
        "detection": detection["true_positive_rate"]["native"],
        "false_positive_rate": record["clean"]["false_positive_rate"]["native"],
        "correction": (record["correction"] or {}).get("target_broken"),
    }


def compare(dataset: str, run: dict, figures: dict[str, float | None]) -> dict:
    """The `paper` part of a record.

    Args:
      dataset: its name.
      run: the record's own `run` part.
      figures: ours by the names in `FIGURES`; one that is left out is not measured.

    Returns:
      {figure, regime, in_band}; `in_band` is None wherever the regimes differ, where the row has no
      band, or where what it is about was not measured. A figure that is measured and undefined (the
      mean distance of no successes, say) is outside.
    """
    if dataset == "mnist_5k":
        return {"figure": None, "regime": "not comparable (mnist_5k)", "in_band": None}
    confidence = run["settings"]["confidence"]
    row = row_for(dataset, run["defense"], run["threat_model"], run["targets"], confidence)
    if row is None:
        return {"figure": None, "regime": "no paper figure", "in_band": None}
    figure = {name: getattr(row, name) for name in FIGURES if getattr(row, name) is not None}
    comparable = (
        run["attack"] == "carlini_wagner"
        # Where the paper's objective is the generic one, both names mean the same.
        and run["objective"] in (row.objective, "paper")
        # An attack that aims at no threshold is judged at the paper's, whatever the run names.
        and (row.operating_point is None or row.objective == "generic"
             or run["operating_point"] == row.operating_point)
        and _at_its_confidence(row, confidence)
        and bool(row.band)
        and all(name in figures for name in row.band)
    )  # fmt: skip
    in_band = None
    if comparable:
        inside = [
            figures[name] is not None and low <= figures[name] <= high
            for name, (low, high) in row.band.items()
        ]
        in_band = all(inside)
    return {"figure": figure, "regime": row.regime, "in_band": in_band}
