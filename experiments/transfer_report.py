"""A sweep of limited knowledge as text."""

from __future__ import annotations

from experiments import report


def show(result: dict) -> str:
    """The sweep as text: a line for each run, then what was chosen, of all and by attack."""
    percent, number = report.percent, report.number
    head = ("attack", "steps", "confidence", "margin", "on the copy", "transfer", "95 %", "mean L2")
    of_sets = any("sets_rejected" in row for row in result["rows"])
    lines = [(*head, "sets told") if of_sets else head]
    told = lambda row: (percent(row.get("sets_rejected")),) if of_sets else ()
    left_out = {}
    for row in result["rows"]:
        if "left_out" in row:
            left_out.setdefault(row["left_out"], []).append(asked(row))
            continue
        searches = row.get("binary_search_steps")
        lines.append((
            row["attack"], f"{searches} x {row['steps']}" if searches else str(row["steps"]),
            f"{row['confidence']:g}", f"{row['detector_margin']:.3g}",
            percent(row["on_surrogate"]), percent(row["transfer"]),
            report.span(row["interval"], lambda v: f"{100 * v:.1f}"), number(row["mean_l2"]),
            *told(row),
        ))  # fmt: skip
    text = ["", *report.aligned(lines), ""]
    for why, pairs in left_out.items():
        text.append(f"left out, {why} (confidence/margin): {', '.join(pairs)}")
    if not result["search_ended"]:
        text.append("the search was stopped by --most_pairs")

    def line(chosen):
        if chosen is None:
            return "not reached"
        sets = f", sets told apart {percent(chosen['sets_rejected'])}" if of_sets else ""
        return (
            f"{percent(chosen['transfer'])} at mean L2 {number(chosen['mean_l2'])} "
            f"({chosen['attack']}, {asked(chosen)}{sets})"
        )

    parts = {"of all": result}
    parts |= {f"{name} alone": found for name, found in result["by_attack"].items()}
    text += [
        "",
        "chosen on half of the images (attack, confidence/margin), told of the other half:",
    ]
    for title, found in parts.items():
        text.append(f"  {title}")
        levels = {f"cheapest of {float(n):.0%}": chosen for n, chosen in found["levels"].items()}
        within = {f"most within L2 {n}": chosen for n, chosen in found["within"].items()}
        for name, chosen in (levels | {"most": found["most"]} | within).items():
            text.append(f"    {name}: {line(chosen)}")
    return "\n".join(text) + "\n"


def asked(row: dict) -> str:
    """What a pair asks of the copy: confidence/margin."""
    margin = row.get("detector_margin")
    return f"{row['confidence']:g}" + ("" if not margin else f"/{margin:.3g}")
