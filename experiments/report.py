"""What a person sees of a result: small tables, and a curve."""

from __future__ import annotations

import textwrap
from pathlib import Path

from experiments import pictures

_POINTS = {"native": "native", "0.01": "1 %", "0.05": "5 %", "0.5": "50 %"}
_WORDS = {
    "zero_knowledge": "an attacker who does not know of the detector",
    "perfect_knowledge": "an attacker who knows everything but the random draws",
    "limited_knowledge": "an attacker who knows the scheme and has other data",
}


def table(evaluation) -> str:
    """The records of one evaluation beside the baseline and the paper's figure.

    Args:
      evaluation: an `advdet.Evaluation`.

    Returns:
      Some lines of text.
    """
    last = list(evaluation.records.values())[-1]
    run = last["run"]
    lines = ["", _title(last), ""]
    header = ("", "success", "95 %", "8 bit", "mean L2", "95 %", "x baseline", "gradients")
    rows = [header] + [_row(name, record) for name, record in evaluation.records.items()]
    if evaluation.baseline is not None:
        name, record = list(evaluation.baseline.records.items())[-1]
        rows.append(_row(f"undefended, {name}", record))
    if last["paper"]["figure"]:
        rows.append(_paper_row(last))
    lines += aligned(rows)
    wanted = "any wrong label" if run["targets"] == "untargeted" else "the wanted label"
    hidden = "" if run["operating_point"] == "none" else ", not flagged"
    counts = last["counts"]
    lines += [
        "",
        f"success: {wanted}{hidden}; over the {counts['attacked']} of {counts['requested']} images "
        "that are classified rightly",
        "8 bit: success once pixels are rounded; "
        + (
            "L2: of the first success inside the radius, not what the defence costs"
            if ball(run)
            else "L2: over successes alone, so compare it at like success"
        ),
    ]
    if run["operating_point"] != "none":
        lines += ["", *_detection(last)]
    if last.get("correction") is not None:
        lines += ["", _correction(last["correction"])]
    if last.get("sets") is not None:
        lines += ["", *_sets(last["sets"])]
    lines += ["", *_verdict(last), *_invalid_parts(evaluation.records)]
    return "\n".join(lines) + "\n"


def ball(run) -> str | None:
    """The radius that all attacks of a record kept to, in words; None where there is no such.

    Args:
      run: the record's `run` part.
    """
    settings = run["settings"].get("attack", {})
    parts = [part for part in settings.values() if isinstance(part, dict)] or [settings]
    balls = {(part.get("norm", "linf"), part.get("epsilon")) for part in parts}
    if len(balls) != 1:
        return None
    ((norm, epsilon),) = balls
    return None if epsilon is None else f"{norm} {epsilon:.3g}"


def _title(record) -> str:
    run = record["run"]
    within = ball(run)
    aim = ""
    if run["operating_point"] != "none":
        threshold = record["clean"]["thresholds"][run["operating_point"]]
        point = _POINTS[run["operating_point"]]
        set_for = f"{point} of clean images" if point != "native" else "the paper's own"
        aim = f"; flagged above {threshold:.4g} ({set_for})"
    accuracy = record["clean"]["accuracy"]
    whom = f"{run['defense']} on {run['dataset']}, {_WORDS[run['threat_model']]}"
    if run["defense"] == "none":
        whom = f"none (the undefended classifier) on {run['dataset']}"
    return (
        f"{whom}\n"
        f"{run['targets']} targets, objective {run['objective']}, confidence "
        f"{run['settings']['confidence']:g}{f', within {within}' if within else ''}\n"
        f"clean accuracy {accuracy:.2%}{aim}"
    )


def _rate(record):
    rates = record["attack"]["success_rate"]
    point = record["run"]["operating_point"]
    return rates["misclassified"] if point == "none" else rates[point]


def _row(name, record):
    attack, intervals = record["attack"], record["intervals"]
    return (
        name,
        percent(_rate(record)),
        span(intervals["success_rate"], lambda v: f"{100 * v:.1f}"),
        percent(attack["success_rate_8bit"]),
        number(attack["mean_l2"]),
        span(intervals["mean_l2"], lambda v: f"{v:.2f}"),
        "-" if ball(record["run"]) else number(attack["baseline_ratio"]),
        "-" if attack["gradients_per_image"] is None else f"{attack['gradients_per_image']:,.0f}",
    )


def _paper_row(record):
    figure = record["paper"]["figure"] or {}
    return (
        "paper",
        percent(figure.get("success_rate")),
        "",
        "",
        number(figure.get("mean_l2")),
        "",
        number(figure.get("ratio")),
        "",
    )


def _detection(record):
    clean, detection = record["clean"], record["detection"]
    rows = [("threshold", *_POINTS.values())]
    rows.append(
        ("clean images flagged", *(percent(clean["false_positive_rate"][p]) for p in _POINTS))
    )
    limits = record["intervals"]["false_positive_rate"]
    rows.append(("", *(span(limits.get(p), lambda v: f"{100 * v:.1f}") for p in _POINTS)))
    rows.append(
        ("adversarial flagged", *map(percent, map(detection["true_positive_rate"].get, _POINTS)))
    )
    area = number(detection["auc"])
    note = (
        f"over {record['counts']['clean_judged']:,} clean test images, and {detection['n']} "
        f"adversarial ones that met the classifier's goal; AUC {area}"
    )
    figure = (record["paper"]["figure"] or {}).get("detection")
    if figure is not None:
        note += f"; the paper reports {figure:.0%} at its threshold"
    return [*aligned(rows), note]


def _correction(correction):
    return (
        f"corrected: of {correction['n']} images that reached the attacker's goal on what he was "
        f"shown, {percent(correction['target_broken'])} lose his label and "
        f"{percent(correction['label_restored'])} regain their own"
    )


_SETS = {"adversarial": "adversarial images", "originals": "the clean images they were made from",
         "clean": "other clean images"}  # fmt: skip


def sets_told(part) -> str:
    """How many sets are told, of how many; of records with overlapping sets, the share alone."""
    if "told" not in part:
        return percent(part["rejected"])
    return f"{part['told']} of {part['sets']}"


def _sets(sets):
    for name, what in _SETS.items():
        if name not in sets:
            continue
        part = sets[name]
        limits = span(part["interval"], lambda v: f"{100 * v:.0f}") if part["interval"] else ""
        yield (
            f"sets of {sets['size']} of {what} told from training images (p < {sets['level']:g}): "
            + " ".join(filter(None, (sets_told(part), limits)))
            + f"; median p {part['median_p']:.3f}"
        )
    if reason := sets["adversarial"].get("reason"):
        yield reason


def _verdict(record):
    attack, reported = record["attack"], record["paper"]
    within = ball(record["run"])
    cost = f", within {within}" if within else ""
    if not within and attack["median_l2"] is not None:
        cost = f", at a median L2 of {attack['median_l2']:.2f}"
        if attack.get("median_ratio") is not None:
            cost += f" ({attack['median_ratio']:.2f} x the undefended)"
        elif attack["baseline_ratio"] is not None:
            cost += f" (mean {attack['baseline_ratio']:.2f} x the undefended)"
    lines = [f"verdict: {record['verdict']}{cost}", *_paired(record, within)]
    lines += _signs(record["indicators"])
    band = {None: "", True: ": in band", False: ": OUTSIDE the band"}[reported["in_band"]]
    lines.append(f"paper's regime: {reported['regime']}{band}")
    if reported["figure"] and reported["in_band"] is None:
        lines.append(
            "  this run's regime differs, so the figures stand beside it for orientation only"
        )
    return lines


def _paired(record, within):
    """The ratio of mean L2 over images that were won on both networks; a line, or none."""
    attack = record["attack"]
    if not within and attack.get("paired_baseline_ratio") is not None:
        limits = span(record["intervals"]["paired_baseline_ratio"], lambda v: f"{v:.2f}")
        yield (
            f"mean L2 over the {attack['paired_baseline_images']} images won with and without it: "
            f"{attack['paired_baseline_ratio']:.2f} x the undefended {limits}".rstrip()
        )


def _signs(signs):
    """What the indicators say: those that invalidate, with what to change; then those that warn."""
    raised = {name: sign for name, sign in signs.items() if sign["raised"]}
    broken = [name for name, sign in raised.items() if sign.get("invalidates", True)]
    if broken:
        yield f"signs that the attack or the model is broken: {', '.join(broken)}"
    if warnings := [name for name in raised if name not in broken]:
        yield f"warnings: {', '.join(warnings)}"
    for name, sign in raised.items():
        figure = "-" if sign["value"] is None else f"{sign['value']:.3g}"
        advice = f"{name} ({figure}): {sign['advice']}" if sign.get("advice") else ""
        yield from textwrap.wrap(advice, 96, initial_indent="  ", subsequent_indent="    ")
    if not raised:
        known = sum(sign["value"] is not None for sign in signs.values())
        yield f"checks of attack and model: {known} looked at, none raised"


def _invalid_parts(records):
    """A line for each single attack whose own record is not valid."""
    for name, record in list(records.items())[:-1]:
        if record["verdict"] == "evaluation invalid":
            signs = record["indicators"].items()
            found = [key for key, sign in signs if sign["raised"] and sign.get("invalidates", True)]
            yield f"{name} alone: {record['verdict']} ({', '.join(found)})"


def percent(value) -> str:
    """A rate in percent, `-` where there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def number(value) -> str:
    """A number with two digits, `-` where there is none."""
    return "-" if value is None else f"{value:.2f}"


def span(interval, show) -> str:
    """An interval [low, high], each end by `show`; empty where there is none."""
    return "" if interval is None else f"[{show(interval[0])}, {show(interval[1])}]"


def aligned(rows) -> list[str]:
    """Rows of strings as lines with columns, the first to the left, the others to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    first, *rest = widths
    return [
        "  ".join(
            [row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], rest))]
        ).rstrip()
        for row in rows
    ]


def curve(name: str, values, records) -> str:
    """One line for each record of a sweep.

    Args:
      name: of the setting that was swept.
      values: its values.
      records: one record for each.
    """
    rows = [(name, "success", "95 %", "8 bit", "mean L2", "95 %", "x baseline", "gradients")]
    rows += [_row(f"{value:g}", record) for value, record in zip(values, records)]
    return "\n".join(["", _title(records[0]), "", *aligned(rows), ""])


def curve_picture(path: Path, name: str, values, records) -> None:
    """Saves success against mean L2, a point for each value of the setting.

    Args: as in `curve`, and the PNG's path.
    """
    with pictures.saved(path, figsize=(5.5, 4)) as axis:
        points = [
            (record["attack"]["mean_l2"], _rate(record), record["intervals"]["success_rate"], value)
            for value, record in zip(values, records)
            if record["attack"]["mean_l2"] is not None
        ]
        for distance, rate, (low, high), value in points:
            axis.plot([distance, distance], [low, high], color="C0", linewidth=1)
            axis.annotate(f"{name} = {value:g}", (distance, rate), textcoords="offset points",
                          xytext=(6, -4), fontsize=8)  # fmt: skip
        axis.plot([p[0] for p in points], [p[1] for p in points], "o-", color="C0", markersize=4)
        axis.set_xlabel("mean L2 of the successes")
        axis.set_ylabel("success, undetected (95 % interval)")
        axis.set_title(_title(records[0]).splitlines()[0], fontsize=9)
