"""An attacker who knows the scheme and trains a copy on other data: what transfers to the victim?

Victim and copy come from disjoint halves of the training images. C&W asks the copy for ever more
confidence in the label and, apart from that, for scores ever further below the threshold; each pair
of the two is judged by the victim at its own threshold. Images on which an attack fails are
attacked again from natural images of the wanted class that have that confidence. The search goes
from pair to neighbouring pair in the grid of all, with few values of c, and leaves out those
that ask for more than one which reaches 98 %, or than one which the copy yields to C&W on fewer
images than 84 % and than transfer from another pair; they are named. DDN is run beside C&W at the
pairs that it chose, and both with all their steps where most transfer.

Pair and attack are chosen on one half of the images and reported on the other: the cheapest that
reach 84, 90 and 98 %, the one of which most transfer, and the one of which most transfer within
some mean L2, the paper's among them.

python -m experiments.limited_knowledge --defense=dropout
python -m experiments.limited_knowledge --defense=none        (the undefended pair)
python -m experiments.limited_knowledge --defense=kernel_density \\
    --surrogate=kernel_density:share=0.05                     (he has 5 % of the data)
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from experiments import common, evaluation, transfer

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
CONFIDENCES = flags.DEFINE_list(
    "confidences", ["0", "5", "10", "15", "20", "25", "30", "35", "40"], "Logit margins to try."
)
MARGINS = flags.DEFINE_list(
    "margins",
    ["0", "0.5", "1", "1.5", "2", "2.5", "3"],
    "How far below the threshold the copy's score must come, in its clean spread: from the median "
    "of the clean scores to their threshold of 5 % false positives.",
)
DISTANCES = flags.DEFINE_list(
    "distances", ["3", "4", "5", "6", "7"], "Mean L2 at which to say how much transfers."
)
SURROGATE = flags.DEFINE_string(
    "surrogate", None, "The attacker's detector, where it is not the defence itself."
)
MOST_PAIRS = flags.DEFINE_integer(
    "most_pairs", 12, "Pairs that the search may run, if it has not ended before.", lower_bound=1
)
ALL_PAIRS = flags.DEFINE_bool("all_pairs", False, "Run every pair instead of a search.")
_FEWEST_STEPS = 30  # of DDN
_SHORT_SEARCH, _SHORT_CONST = 2, 1.0  # of C&W: the values of c, and the first of them at least
_IN_FULL = ("most",)  # the choices at which attacks are run with all their steps


def short_settings(attack: str, preset: str, channels: int) -> dict:
    """An attack's settings in the search: two values of C&W's c, a third of DDN's steps.

    Distances come out a few per cent larger than by all steps, for a third of the gradients. Fewer
    steps for each c would leave images far from where they could be.
    """
    from advdet.attacks import presets

    full = presets.settings(attack, preset, channels, defense="none")
    if attack == "ddn":
        return {"steps": min(full["steps"], max(_FEWEST_STEPS, full["steps"] // 3))}
    return {
        "binary_search_steps": min(full["binary_search_steps"], _SHORT_SEARCH),
        "initial_const": max(full["initial_const"], _SHORT_CONST),
    }


def sweep(
    spec: str,
    settings: dict,
    confidences,
    margins,
    distances,
    surrogate_spec: str | None,
    most_pairs: int,
    all_pairs: bool,
) -> dict:
    """Searches by a short C&W, then runs a short DDN, and both in full, at what was chosen.

    Args:
      spec: of the defence.
      settings: arguments of `advdet.evaluate`.
      confidences, margins, distances: see the flags.
      surrogate_spec: of the attacker's detector; None for the same.
      most_pairs, all_pairs: see the flags.

    Returns:
      JSON-able: `run` and the copy's clean `spread`; whether the search has ended by itself; `rows`
      of all runs and of the pairs left out; what was chosen of all runs (`levels`, `most`,
      `within`), and of each attack's alone (`by_attack`).
    """
    import advdet
    from advdet import detectors, training
    from advdet.attacks import presets

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
    series = advdet.series(
        detectors.from_spec(spec), attack="all",
        command=evaluation.command("limited_knowledge"), **settings,
    )  # fmt: skip
    scored = series.case.victim.defense.detector.kind == "score"
    spread = float(series.case.copy.defense.scale) if scored else None
    grid = confidences, [spread * margin for margin in margins] if scored else []
    shortened = {
        name: {word: value for word, value in made.items() if settings[word] is None}
        for name in presets.STRONG
        for made in [short_settings(name, settings["preset"], splits.image_shape[-1])]
    }
    runs, rows, records = [], [], []

    def attack(name, pair, short):
        given = shortened[name] if short else {}
        done = series.evaluate(attack=name, **given, **pair)
        runs.append(transfer.Run(name, pair, done.arrays[name]))
        rows.append(_row(pair, name, done.records[name], spread))
        records.append(done.records[name])

    wanted = transfer.choices(_with_the_paper_s(distances, series))
    if all_pairs:
        left_out, ended = {}, True
        for pair in transfer.pairs(*grid):
            attack("carlini_wagner", pair, True)
    else:
        while True:
            pair, left_out = transfer.propose(*grid, runs, wanted)
            ended = pair is None
            if ended or len(runs) >= most_pairs:
                break
            attack("carlini_wagner", pair, True)
    for pair in _pairs_of(runs, wanted.values()):
        attack("ddn", pair, True)
    for pair in _pairs_of(runs, [wanted[name] for name in _IN_FULL]):
        for name in filter(shortened.get, presets.STRONG):
            attack(name, pair, False)
    rows += [{**pair, "left_out": why} for why, pairs in left_out.items() for pair in pairs]
    told = lambda attacks: told_of(runs, rows, wanted, attacks)
    run = records[0]["run"] | {"surrogate_spec": surrogate_spec}
    return {
        "schema": 1, "kind": "transfer", "run": run,
        "spread": spread, "search_ended": ended, "rows": rows, **told(presets.STRONG),
        "by_attack": {name: told([name]) for name in presets.STRONG},
    }  # fmt: skip


def _with_the_paper_s(distances, series) -> list[float]:
    """The distances to compare at, and those of the paper's rows of limited knowledge."""
    from advdet import paper

    case, plan = series.case, series.plan({})
    rows = paper.ROWS.get((case.splits.name, case.defense_name, case.threat_model), [])
    own = {row.mean_l2 for row in rows if row.targets == plan.regime and row.mean_l2 is not None}
    return sorted({*distances, *own})


def _pairs_of(runs, wanted) -> list[dict]:
    """The pairs that are chosen, each once."""
    indices = [choose(runs) for choose in wanted]
    pairs = [runs[index].pair for index in indices if index is not None]
    return [pair for place, pair in enumerate(pairs) if pair not in pairs[:place]]


def told_of(runs, rows, wanted, attacks) -> dict:
    """What is chosen among the runs of some attacks, and what it does on the other half.

    Args:
      runs: all, as `transfer.Run`.
      rows: what is told of each of them.
      wanted: as of `transfer.choices`.
      attacks: names of those to choose among.

    Returns:
      {levels, most, within}: a row for each choice, with transfer, mean L2, interval and count of
      the odd half, those of the even one as `chosen_by`, and the best known runs of both attacks at
      that pair; None where nothing is chosen.
    """
    from advdet import metrics

    pool = [index for index, run in enumerate(runs) if run.attack in attacks]

    def beside(pair, name):
        same = [i for i, run in enumerate(runs) if (run.attack, run.pair) == (name, pair)]
        return rows[same[-1]] if same else None  # the last has the most steps

    def tell(index):
        run, arrays = runs[index], runs[index].arrays
        odd, even = transfer.odd(arrays), transfer.even(arrays)
        rate, distance = transfer.transferred(arrays, odd)
        count = int((odd & arrays["clean_correct"]).sum())
        chosen_by = dict(zip(("transfer", "mean_l2"), transfer.transferred(arrays, even)))
        return {
            **rows[index], "transfer": rate, "mean_l2": distance, "n": count,
            "interval": list(metrics.wilson(rate * count, count)) if count else None,
            "chosen_by": chosen_by,
            **{name: beside(run.pair, name) for name in ("carlini_wagner", "ddn")},
        }  # fmt: skip

    chosen = {name: choose([runs[index] for index in pool]) for name, choose in wanted.items()}
    found = {name: None if at is None else tell(pool[at]) for name, at in chosen.items()}
    within = {
        name.removeprefix("within "): found[name] for name in found if name.startswith("within ")
    }
    levels = {f"{level:g}": found[f"{level:g}"] for level in transfer.LEVELS}
    return {"levels": levels, "most": found["most"], "within": within}


def _row(pair: dict, attack: str, record: dict, spread: float | None) -> dict:
    point = record["run"]["operating_point"]
    rates = record["attack"]["success_rate"]
    settings, sets = record["run"]["settings"], record["sets"]
    margin = settings["detector_margin"]
    return {
        **pair,
        **({"sets_rejected": sets["adversarial"]["rejected"]} if sets else {}),
        "detector_margin": margin,
        "margin_in_spreads": margin / spread if spread else None,
        "attack": attack,
        **{name: settings["attack"][name] for name in ("binary_search_steps", "steps")
           if name in settings["attack"]},
        "on_surrogate": record["attack"]["own_success_rate"],
        "transfer": rates["misclassified" if point == "none" else point],
        "interval": record["intervals"]["success_rate"],
        "mean_l2": record["attack"]["mean_l2"],
        "n": record["counts"]["attacked"],
        "seconds": record["seconds"],
    }  # fmt: skip


def evaluate_one(spec: str) -> None:
    """Sweeps one defence, prints the table, and keeps it beside the records."""
    from advdet import results
    from experiments import transfer_report

    lists = (CONFIDENCES, MARGINS, DISTANCES)
    numbers = [sorted(set(evaluation.numbers(flag.name, flag.value))) for flag in lists]
    given = *numbers, SURROGATE.value, MOST_PAIRS.value, ALL_PAIRS.value
    result = sweep(spec, evaluation.settings(), *given)
    print(transfer_report.show(result))
    run = result["run"]
    digest = results.settings_hash({"run": run["settings_hash"], "sweep": given})
    folder = Path(evaluation.RESULTS_DIR.value, run["dataset"], run["threat_model"], run["defense"])
    path = folder / f"transfer-{run['targets']}-{run['operating_point']}-{digest}.json"
    results.write_json(path, json.loads(json.dumps(result)))
    print(f"sweep  {path}")


if __name__ == "__main__":
    common.run(lambda: evaluation.each_defense(evaluate_one))
