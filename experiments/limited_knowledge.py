"""An attacker who knows the scheme and trains a copy on other data: what transfers to the victim?

Victim and copy come from disjoint halves of the training images. The attack on the copy asks for
ever more confidence in the label, and for scores ever further below the threshold; each pair is
judged by the victim at its own threshold. Images on which it fails are attacked again from natural
images of the wanted class that have that confidence. The cheapest pair that reaches 84, 90 and 98 %
is chosen on one half of the images and reported on the other; so is the pair of which most
transfer. The sweep takes DDN with a third of its steps; at the chosen pairs DDN is run with all of
them, and C&W. A pair need not be run if it asks for more than one which reaches 98 %, or than one
which the copy itself yields to on fewer images than 84 % and than another pair wins: it is named
and left out, unless --all_pairs is given.

python -m experiments.limited_knowledge --defense=dropout
python -m experiments.limited_knowledge --defense=none        (the undefended pair)
python -m experiments.limited_knowledge --defense=kernel_density \\
    --surrogate=kernel_density:share=0.05                     (he has 5 % of the data)
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from absl import flags

from experiments import common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
CONFIDENCES = flags.DEFINE_list(
    "confidences", ["0", "5", "10", "15", "20", "25", "30", "35", "40"], "Logit margins to try."
)
MARGIN_RATES = flags.DEFINE_list(
    "margin_rates",
    ["0.05", "0.1", "0.2", "0.35", "0.5"],
    "False-positive rates of the copy whose thresholds the score must come below. Where the score "
    "is a logit, the margin is the confidence instead, and the largest of the rates is tried too.",
)
SURROGATE = flags.DEFINE_string(
    "surrogate", None, "The attacker's detector, where it is not the defence itself."
)
ALL_PAIRS = flags.DEFINE_bool("all_pairs", False, "Run also pairs that cannot be among the chosen.")
_FEWEST_STEPS = 30
LEVELS = (0.84, 0.90, 0.98)
DEARER, BEYOND = "dearer than one that reaches 98 %", "more than the copy yields to"


def pairs(detector, confidences, rates) -> list[dict]:
    """The (confidence, margin) pairs to try, as arguments of `advdet.evaluate`."""
    if detector.kind != "score":
        return [{"confidence": c} for c in confidences]
    if detector.logit_score:
        rates = [max(rates)]
        equal = [{"confidence": c, "detector_margin": c} for c in confidences]
    else:
        equal = []
    return equal + [{"confidence": c, "margin_rate": q} for q in rates for c in confidences]


def transferred(arrays, rows) -> tuple[float, float | None]:
    """Success on the victim, and mean L2 of the successes, over some of the attacked images."""
    rows = rows & arrays["clean_correct"]
    share = arrays["judged_success"][rows]
    won = share > 0.5
    distance = arrays["distance"][rows][won]
    rate = float(share.mean()) if len(share) else 0.0
    return rate, float(distance.mean()) if won.any() else None


def cheapest(tried: list[dict | None], level: float) -> int | None:
    """The pair of least mean L2 that reaches a level on the even rows; None where none does."""
    found = [
        (distance, index)
        for index, arrays in enumerate(tried)
        if arrays is not None
        for rate, distance in [transferred(arrays, _half(arrays, 0))]
        if rate >= level and distance is not None
    ]
    return min(found)[1] if found else None


def most(tried: list[dict | None]) -> int:
    """The pair of which most transfer on the even rows; the earliest of equals."""
    rates = [-1.0 if a is None else transferred(a, _half(a, 0))[0] for a in tried]
    return rates.index(max(rates))


def needless(pair: dict, tried: list[tuple[dict, dict | None]]) -> str | None:
    """Why a pair cannot be the cheapest for a level or the one of most; None where it may be.

    Args:
      pair: as of `pairs`.
      tried: (pair, per-image arrays or None where it was left out) of those before it.
    """
    known = [transferred(arrays, _half(arrays, 0))[0] for _, arrays in tried if arrays]
    for other, arrays in tried:
        if arrays is None or other.keys() != pair.keys():
            continue
        if any(other[word] > pair[word] for word in other):
            continue
        rows = _half(arrays, 0)
        if transferred(arrays, rows)[0] >= max(LEVELS):
            return DEARER
        yields = float(arrays["success"][rows & arrays["clean_correct"]].mean())
        if yields < min(LEVELS) and yields < max(known):
            return BEYOND
    return None


def _half(arrays, which: int) -> np.ndarray:
    return np.arange(len(arrays["id"])) % 2 == which


def sweep(
    spec: str, settings: dict, confidences, rates, surrogate_spec: str | None, all_pairs: bool
) -> dict:
    """Runs the pairs with a short DDN, then DDN and C&W at the chosen ones.

    Args:
      spec: of the defence.
      settings: arguments of `advdet.evaluate`.
      confidences, rates: see the flags.
      surrogate_spec: of the attacker's detector; None for the same.
      all_pairs: also those that cannot be the cheapest.

    Returns:
      {run, rows, levels, most}, JSON-able: what was run, a row for each pair, the chosen pairs.
    """
    import advdet
    from advdet import detectors, training

    detector = detectors.from_spec(spec)
    splits = common.splits()
    surrogate = None
    if surrogate_spec is not None:
        copy = training.classifier_for(splits, half="attacker")
        surrogate = copy, detectors.from_spec(surrogate_spec)
    settings = {**settings, "data": splits, "threat_model": "limited_knowledge"}
    settings["surrogate"] = surrogate
    for name in (
        "data_source", "data_dir", "attack", "confidence", "detector_margin", "margin_rate"
    ):  # fmt: skip
        settings.pop(name)
    command = evaluation.command("limited_knowledge")
    tried = pairs(detector, confidences, rates)
    whys = {}

    def skip(pair, found):
        before = [(other, each and each.arrays["ddn"]) for other, each in found]
        whys[len(found)] = None if all_pairs else needless(pair, before)
        return whys[len(found)] is not None

    short = {**settings, "steps": settings["steps"] or _few_steps(settings["preset"])}
    done = advdet.sweep(tried, detector, attack="ddn", command=command, skip=skip, **short)
    runs = [each and each.arrays["ddn"] for each in done]
    rows = [
        _row(pair, each and each.records["ddn"], whys[index])
        for index, (pair, each) in enumerate(zip(tried, done))
    ]
    chosen = {f"{level:g}": cheapest(runs, level) for level in LEVELS} | {"most": most(runs)}
    indices = sorted({index for index in chosen.values() if index is not None})
    own = dict(zip(indices, advdet.sweep(
        [tried[index] for index in indices], detector, attack="all", command=command, **settings,
    )))  # fmt: skip

    def told(index):
        arrays, records = own[index].arrays["ddn"], own[index].records
        transfer, distance = transferred(arrays, _half(arrays, 1))
        by_ddn, by_cw = (_row(tried[index], records[n]) for n in ("ddn", "carlini_wagner"))
        told_of = {"transfer": transfer, "mean_l2": distance, "carlini_wagner": by_cw}
        if "sets_rejected" in by_ddn:
            told_of["sets_rejected"] = by_ddn["sets_rejected"]
        return {**tried[index], **told_of}

    levels = {name: None if index is None else told(index) for name, index in chosen.items()}
    best = levels.pop("most")
    run = done[0].records["ddn"]["run"] | {"surrogate_spec": surrogate_spec}
    return {
        "schema": 1, "kind": "transfer", "run": run, "rows": rows, "levels": levels, "most": best
    }  # fmt: skip


def _few_steps(preset: str) -> int:
    """A third of DDN's steps in a preset."""
    from advdet.attacks import presets

    steps = presets.settings("ddn", preset, channels=1, defense="none")["steps"]
    return max(_FEWEST_STEPS, steps // 3)


def _row(pair: dict, record: dict | None, left_out: str | None = None) -> dict:
    if record is None:
        return {**pair, "left_out": left_out}
    point = record["run"]["operating_point"]
    rates = record["attack"]["success_rate"]
    sets = record["sets"]
    return {
        **pair,
        **({"sets_rejected": sets["adversarial"]["rejected"]} if sets else {}),
        "detector_margin": record["run"]["settings"]["detector_margin"],
        "on_surrogate": record["attack"]["own_success_rate"],
        "transfer": rates["misclassified" if point == "none" else point],
        "interval": record["intervals"]["success_rate"],
        "mean_l2": record["attack"]["mean_l2"],
        "n": record["counts"]["attacked"],
    }


def show(result: dict) -> str:
    """The sweep as text: a line for each pair, then the chosen ones."""
    from experiments import report

    percent, number = report.percent, report.number
    head = ("confidence", "margin", "at", "on the copy", "transfer", "95 %", "mean L2")
    of_sets = any("sets_rejected" in row for row in result["rows"])
    lines = [(*head, "sets told") if of_sets else head]
    told = lambda row: (percent(row.get("sets_rejected")),) if of_sets else ()
    left_out = {}
    for row in result["rows"]:
        rate = row.get("margin_rate")
        at = "-" if rate is None else f"{100 * rate:g} %"
        if "left_out" in row:
            left_out.setdefault(row["left_out"], []).append(f"{row['confidence']:g} at {at}")
            continue
        lines.append((
            f"{row['confidence']:g}", f"{row['detector_margin']:.3g}", at,
            percent(row["on_surrogate"]), percent(row["transfer"]),
            report.span(row["interval"], lambda v: f"{100 * v:.1f}"), number(row["mean_l2"]),
            *told(row),
        ))  # fmt: skip
    text = ["", *report.aligned(lines), ""]
    for why, pairs_ in left_out.items():
        text.append(f"left out, {why}: {', '.join(pairs_)}".replace(" at -", ""))
    text += ["", "cheapest pair, chosen on half of the images:"]
    named = {f"{float(level):.0%}": chosen for level, chosen in result["levels"].items()}
    for name, chosen in (named | {"most": result["most"]}).items():
        if chosen is None:
            text.append(f"  {name}: not reached by any pair")
            continue
        own = chosen["carlini_wagner"]
        text.append(
            f"  {name}: confidence {chosen['confidence']:g}, margin {own['detector_margin']:.3g}: "
            f"{percent(chosen['transfer'])} of the other half at mean L2 "
            f"{number(chosen['mean_l2'])}; C&W there: {percent(own['transfer'])} at "
            f"{number(own['mean_l2'])} (all images)"
            + (f"; sets told apart: {percent(chosen['sets_rejected'])}" if of_sets else "")
        )
    return "\n".join(text) + "\n"


def evaluate_one(spec: str) -> None:
    """Sweeps one defence, prints the table, and keeps it beside the records."""
    from advdet import results

    numbers = [evaluation.numbers(f.name, f.value) for f in (CONFIDENCES, MARGIN_RATES)]
    result = sweep(spec, evaluation.settings(), *numbers, SURROGATE.value, ALL_PAIRS.value)
    print(show(result))
    run = result["run"]
    digest = results.settings_hash(
        {"run": run["settings_hash"], "pairs": numbers, "surrogate": SURROGATE.value}
    )
    folder = Path(evaluation.RESULTS_DIR.value, run["dataset"], run["threat_model"], run["defense"])
    path = folder / f"transfer-{run['targets']}-{run['operating_point']}-{digest}.json"
    results.write_json(path, json.loads(json.dumps(result)))
    print(f"sweep  {path}")


if __name__ == "__main__":
    common.run(lambda: evaluation.each_defense(evaluate_one))
