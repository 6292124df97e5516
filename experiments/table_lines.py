"""A record as a line of the table: what is told of it, in which order, and what the paper says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from advdet import paper
from advdet.attacks import presets
from advdet.detectors import DETECTORS
from advdet.threat_models import THREAT_MODELS
from experiments import report, transfer_report

_DATASETS = ("mnist", "cifar10", "mnist_5k")
_TARGETS = ("random", "untargeted", "nearest", "least_likely")
HEADER = (
    "data set", "defence", "knowledge", "targets", "success [95 %]", "mean L2", "x baseline",
    "flagged / of clean", "n", "attack, objective, aim", "paper", "",
)  # fmt: skip
NUMBERS = range(4, 9)  # columns that are aligned to the right
TRANSFER_HEADER = (
    "data set", "defence", "copy", "targets", "84 % wanted", "90 % wanted", "98 % wanted",
    "most", "C&W alone", "DDN alone", "within mean L2", "n", "aim", "paper", "",
)  # fmt: skip


class Line(NamedTuple):
    """One record, ready to be shown.

    Attributes:
      path: of its JSON.
      block: a key of the blocks, None where it is not shown.
      order: what lines are sorted by.
      cells: texts under the header.
      regime: the paper's, None where it has no figure.
      in_band: as in `paper.compare`.
    """

    path: Path
    block: str | None
    order: tuple
    cells: tuple[str, ...]
    regime: str | None
    in_band: bool | None


def line_of(path: Path, record: dict[str, Any]) -> Line:
    """A record as a line; what it says of the paper is made anew from the paper's rows."""
    run, figures = record["run"], paper.figures(record)
    compared = paper.compare(run["dataset"], run, figures)
    figure = compared["figure"] or {}
    interval = record["intervals"]["success_rate"]
    success = report.percent(figures["success_rate"])
    if interval is not None:
        success += f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    cells = (
        run["dataset"],
        _defense(run),
        run["threat_model"].removesuffix("_knowledge"),
        run["targets"],
        success,
        report.number(figures["mean_l2"]),
        "-" if report.ball(run) else report.number(figures["ratio"]),
        _flagged(record, figure),
        str(record["counts"]["attacked"]),
        _manner(run),
        _reported(figure),
        _verdict(compared),
    )
    return Line(
        path, _block(run), _order(path, run), cells,
        compared["regime"] if figure else None, compared["in_band"],
    )  # fmt: skip


def transfer_line_of(path: Path, result: dict[str, Any]) -> Line:
    """A sweep of limited knowledge as a line: the cheapest pairs, and the one of most."""
    run = result["run"]
    rows = paper.ROWS.get((run["dataset"], run["defense"], "limited_knowledge"), [])
    rows = [row for row in rows if row.targets == run["targets"]]
    reported = "; ".join(
        ", ".join(f"{report.percent(row.success_rate)}" if name == "success_rate"
                  else f"L2 {row.mean_l2:.3g}"
                  for name in ("success_rate", "mean_l2") if getattr(row, name) is not None)
        for row in rows
    )  # fmt: skip
    chosen = [*map(_chosen, (*result["levels"].values(), result["most"]))]
    if "by_attack" in result:
        alone = [result["by_attack"][name]["most"] for name in ("carlini_wagner", "ddn")]
    else:  # a sweep of DDN, with C&W beside it at the pair of which most transfer
        alone = [result["most"]["carlini_wagner"], result["most"]]
    own = {f"{row.mean_l2:g}" for row in rows if row.mean_l2 is not None}
    within = ", ".join(
        f"{far}{' (the paper)' if far in own else ''}: {report.percent(row and row['transfer'])}"
        for far, row in result.get("within", {}).items()
    )
    point = "" if run["operating_point"] == "none" else run["operating_point"]
    cells = (
        run["dataset"], _defense(run), result["run"]["surrogate_spec"] or "same", run["targets"],
        *chosen, *map(_chosen, alone), within or "-", str(result["rows"][0]["n"]), point,
        reported or "-", "",
    )  # fmt: skip
    return Line(path, "transfer", _order(path, run), cells, None, None)


def _chosen(row: dict[str, Any] | None) -> str:
    """What was chosen, on the half of the images that did not choose."""
    if row is None:
        return "not reached"
    text = f"{report.percent(row['transfer'])} at L2 {report.number(row['mean_l2'])}"
    if "confidence" in row:
        made = {"carlini_wagner": "C&W ", "ddn": "DDN "}.get(row.get("attack"), "")
        text += f", {made}k {transfer_report.asked(row)}"
    if "sets_rejected" in row:
        text += f", sets told {report.percent(row['sets_rejected'])}"
    return text


def _block(run) -> str | None:
    if report.ball(run):
        return "radius" if run["attack"] in ("best", *presets.GRADIENT_FREE) else None
    if run["attack"] == "best":
        return "headline"
    # A run that has no detector in view has no other objective than the generic one; neither has
    # the paper where its own is the generic one.
    row = paper.row_for(run["dataset"], run["defense"], run["threat_model"], run["targets"])
    generic = run["threat_model"] == "zero_knowledge" or run["defense"] == "none"
    generic |= row is not None and row.objective == "generic"
    manner = run["objective"] == "paper" or (generic and run["objective"] == "generic")
    return "paper" if run["attack"] == "carlini_wagner" and manner else None


def _order(path: Path, run) -> tuple:
    place = lambda known, name: (list(known).index(name) if name in known else len(known), name)
    return (
        place(_DATASETS, run["dataset"]),
        place(DETECTORS, run["defense"]),
        json.dumps(run["detector"], sort_keys=True),
        place(THREAT_MODELS, run["threat_model"]),
        place(_TARGETS, run["targets"]),
        str(run["operating_point"]),
        float(run["settings"]["confidence"]),
        int(run["seed"]),
        str(path),
    )


def _defense(run) -> str:
    """The name, with the hyperparameters that are not at their defaults."""
    kind = DETECTORS.get(run["defense"])
    if kind is None:
        return run["defense"]
    usual = json.loads(json.dumps(dataclasses.asdict(kind())))
    changed = [f"{name}={value}" for name, value in run["detector"].items()
               if usual.get(name) != value]  # fmt: skip
    return ":".join([run["defense"], *([",".join(changed)] if changed else [])])


def _manner(run) -> str:
    point = "" if run["operating_point"] == "none" else f", {run['operating_point']}"
    confidence = run["settings"]["confidence"]
    louder = f", k {confidence:g}" if confidence else ""
    seed = f", seed {run['seed']}" if run["seed"] else ""
    within = report.ball(run)
    radius = f", within {within}" if within else ""
    return f"{run['attack']}, {run['objective']}{point}{louder}{radius}{seed}"


def _flagged(record, figure) -> str:
    """What the defence made of the adversarial images, in the terms of its kind."""
    if record["correction"] is not None:
        return f"corrects {report.percent(record['correction']['target_broken'])}"
    if record.get("sets") is not None:
        sets = [record["sets"][name] for name in ("adversarial", "clean")]
        return f"sets {' / '.join(map(report.sets_told, sets))}"
    point = record["run"]["operating_point"]
    if point == "none":
        return "-"
    rates = record["detection"]["true_positive_rate"], record["clean"]["false_positive_rate"]
    compared = {"detection", "false_positive_rate", "reversed"} & set(figure)
    shown = "native" if compared and rates[0]["native"] is not None else point
    text = " / ".join(report.percent(rate[shown]) for rate in rates)
    return text if shown == point else f"{text} ({shown})"


def _reported(figure) -> str:
    say = {
        "success_rate": lambda v: report.percent(v),
        "mean_l2": lambda v: f"L2 {v:.3g}",
        "ratio": lambda v: f"{v:.2f} x",
        "detection": lambda v: f"flags {report.percent(v)}",
        "false_positive_rate": lambda v: f"{report.percent(v)} of clean",
        "correction": lambda v: f"corrects {report.percent(v)}",
        "rejection": lambda v: f"rejects {report.percent(v)}",
        "reversed": lambda v: f"{report.percent(v)} less suspicious",
    }
    return ", ".join(say[name](value) for name, value in figure.items()) or "-"


def _verdict(compared) -> str:
    if not compared["figure"]:
        return compared["regime"]
    return {True: "in band", False: "OUTSIDE", None: "not compared"}[compared["in_band"]]
