"""What the paper reports, with the regime it reports it in, and the bands it is reproduced within.

A band belongs to a row with the paper's objective, threshold and targets; elsewhere there is no
figure to compare with. Source: Carlini & Wagner 2017 (arXiv 1705.07263), sections as given.
"""

from __future__ import annotations

from typing import NamedTuple


class Reported(NamedTuple):
    """One row of the paper.

    Attributes:
      regime: targets, threshold and attack, in words.
      targets: the regime's name.
      operating_point: "native", or None where the row does not depend on a threshold.
      objective: "paper" where the row needs the paper's own objective, else "generic".
      success_rate, mean_l2, ratio, detection: as reported; None where not.
      band: figure's name -> (lowest, highest) that counts as reproduced.
    """

    regime: str
    targets: str
    operating_point: str | None
    objective: str
    success_rate: float | None = None
    mean_l2: float | None = None
    ratio: float | None = None
    detection: float | None = None
    band: dict[str, tuple[float, float]] = {}


# (data set, defence, threat model) -> rows, one for each target regime.
ROWS: dict[tuple[str, str, str], list[Reported]] = {
    ("mnist", "none", "perfect_knowledge"): [
        Reported(
            "C&W, random targets (baseline of sections 3 to 6)",
            "random", None, "generic", 1.0, 2.05, band={"mean_l2": (1.8, 2.3)},
        ),
        Reported(
            "C&W, untargeted (reference line of figure 3)",
            "untargeted", None, "generic", 1.0, 1.32, band={"mean_l2": (1.2, 1.5)},
        ),
    ],
    ("mnist", "dropout", "perfect_knowledge"): [
        Reported(
            "C&W on 20 networks, random targets, threshold 0.02 (section 6.1)",
            "random", "native", "paper", 0.98, 3.68, 1.80,
            band={"success_rate": (0.88, 1.0), "ratio": (1.5, 2.1)},
        ),
    ],
    ("mnist", "dropout", "zero_knowledge"): [
        Reported(
            "C&W, random targets, threshold 0.02 (section 6.1)",
            "random", "native", "generic", detection=0.75, band={"detection": (0.65, 0.85)},
        ),
    ],
}  # fmt: skip


def target_regime(dataset: str, defense: str) -> str:
    """The regime in which the paper attacks this defence; random where it says nothing."""
    for (data, name, _), rows in ROWS.items():
        if (data, name) == (dataset, defense):
            return rows[0].targets
    return "random"


def row_for(dataset: str, defense: str, threat_model: str, targets: str) -> Reported | None:
    """The paper's row in this regime, if it has one."""
    rows = ROWS.get((dataset, defense, threat_model), [])
    return next((row for row in rows if row.targets == targets), None)


def compare(dataset: str, run: dict, figures: dict[str, float | None]) -> dict:
    """The `paper` part of a record.

    Args:
      dataset: its name.
      run: the record's own `run` part.
      figures: ours by name: success_rate, mean_l2, ratio, detection.

    Returns:
      {figure, regime, in_band}; `in_band` is None wherever the regimes differ.
    """
    if dataset == "mnist_5k":
        return {"figure": None, "regime": "not comparable (mnist_5k)", "in_band": None}
    row = row_for(dataset, run["defense"], run["threat_model"], run["targets"])
    if row is None:
        return {"figure": None, "regime": "no paper figure", "in_band": None}
    figure = {
        name: getattr(row, name)
        for name in ("success_rate", "mean_l2", "ratio", "detection")
        if getattr(row, name) is not None
    }
    comparable = (
        run["attack"] == "carlini_wagner"
        and run["objective"] == row.objective
        and (row.operating_point is None or row.objective == "generic"
             or run["operating_point"] == row.operating_point)
        and (row.objective == "paper" or run["settings"]["confidence"] == 0)
    )  # fmt: skip
    in_band = None
    if comparable:
        inside = [
            figures.get(name) is not None and low <= figures[name] <= high
            for name, (low, high) in row.band.items()
        ]
        in_band = all(inside)
    return {"figure": figure, "regime": row.regime, "in_band": in_band}
