"""What papers on detectors claim: success within a fixed radius, at 1, 5 and 50 % false positives.

SR@N is the share of the images that an attack brings to the wanted label, and below the threshold
that N % of the clean images exceed, without leaving the radius. An attack aims at one threshold, so
each SR is from runs of its own. `best` counts an image if any of the attacks won it.

python -m experiments.fixed_radius --defense=kernel_density
python -m experiments.fixed_radius --defense=kernel_density --norm=l2 --epsilon=1.5 --attack=pgd
"""

from __future__ import annotations

import numpy as np
from absl import flags

from experiments import common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
POINTS = ("0.01", "0.05", "0.5")
_NAMES = {"none": "success", "native": "SR, native", "0.01": "SR@1", "0.05": "SR@5", "0.5": "SR@50"}


def accuracy_under_attack(arrays, threshold: float | None) -> tuple[float, float]:
    """Of all images, those that are classified rightly and not flagged: before and under an attack.

    A clean image that is flagged counts as lost (Tramer 2022, arXiv 2107.11630): a low threshold
    has its price.

    Args:
      arrays: per-image arrays of a record.
      threshold: of the operating point; None where nothing is flagged.
    """
    passes = arrays["clean_correct"].astype(np.float64)
    if threshold is not None:
        passes = passes * np.mean(arrays["clean_score"] <= np.float32(threshold), axis=0)
    return float(passes.mean()), float((passes * (1.0 - arrays["judged_success"])).mean())


def show(done: list) -> str:
    """A table with a line for each attack and columns for each operating point.

    Args:
      done: an `advdet.Evaluation` for each point.
    """
    from experiments import report

    percent = report.percent
    *names, last = done[0].records
    records = [each.records[last] for each in done]
    points = [record["run"]["operating_point"] for record in records]
    rows = [("", *(word for point in points for word in (_NAMES[point], "95 %")))]
    for name in (*names, last):
        cells = []
        for each, point in zip(done, points):
            record = each.records[name]
            limits = record["intervals"]["success_rate"]
            cells += [
                percent(_rate(record, point)),
                report.span(limits, lambda v: f"{100 * v:.1f}"),
            ]
        rows.append((name, *cells))
    thresholds = [r["clean"]["thresholds"].get(point) for r, point in zip(records, points)]
    kept = [accuracy_under_attack(e.arrays[last], t) for e, t in zip(done, thresholds)]
    for which, words in enumerate(("accurate and not flagged", f"the same, under {last}")):
        rows.append((words, *(word for pair in kept for word in (percent(pair[which]), ""))))

    run, counts = records[0]["run"], records[0]["counts"]
    lines = [
        "",
        f"{run['defense']} on {run['dataset']}, within {report.ball(run)}: {run['targets']} "
        f"targets, objective {run['objective']}, confidence {run['settings']['confidence']:g}",
        "",
        *report.aligned(rows),
        "",
        f"SR: of the {counts['attacked']} of {counts['requested']} images that are classified "
        "rightly; accuracy: of all of them",
    ]
    if done[0].baseline is not None:
        name, record = list(done[0].baseline.records.items())[-1]
        lines.append(f"undefended, {name}: {percent(_rate(record, 'none'))} within the same radius")
    for record, point in zip(records, points):
        aim = "" if point == "none" else f" at {point}"
        lines.append(f"verdict{aim}: {record['verdict']}")
    return "\n".join(lines) + "\n"


def _rate(record: dict, point: str) -> float | None:
    return record["attack"]["success_rate"]["misclassified" if point == "none" else point]


def evaluate_one(spec: str) -> None:
    """Evaluates one defence at all points, and prints the table."""
    import advdet
    from advdet import detectors
    from advdet.attacks import presets
    from advdet.types import InputError

    settings = evaluation.settings()
    attack, point = settings.pop("attack") or "fixed_radius", settings.pop("operating_point")
    known = presets.FIXED_RADIUS
    if attack != "fixed_radius" and not set(attack.split(",")) <= set(known):
        raise InputError(
            f"attack {attack!r} does not stay within a radius; take {', '.join(known)}, or "
            "fixed_radius (all of them)"
        )
    detector = detectors.from_spec(spec)
    points = POINTS if point is None else (point,)
    if detector.kind != "score":
        points = (point,)
    done = advdet.sweep(
        [{"operating_point": each} for each in points], detector, attack=attack,
        command=evaluation.command("fixed_radius"), **settings,
    )  # fmt: skip
    print(show(done))
    for each in done:
        for path in each.paths.values():
            print(f"record  {path}")


if __name__ == "__main__":
    common.run(lambda: evaluation.each_defense(evaluate_one))
