"""What several attacks say together: the nearest success of each image, and which was nearer."""

from __future__ import annotations

import dataclasses

import numpy as np

from advdet import indicators, reruns, results, runs
from advdet.attacks.base import AttackResult
from advdet.judge import ATTACKERS_OWN, NUM_OWN_DRAWS, judge
from advdet.runs import Step
from advdet.types import InputError

_RELIABLE = 0.8  # of the attacker's own draws: less, and a farther image is taken


def headline(step: Step) -> None:
    """The nearest success of each image over the attacks.

    It is chosen by what the attacker is shown and by draws of his own: the judge's stay unused.
    """
    plan, done, goal = step.plan, step.done, step.goal
    names = list(done.arrays)
    used = {name: done.records[name]["run"]["settings"]["attack"] for name in names}
    part, path, stored = step.case.cell(plan, "best", used)
    if stored is not None:
        runs.enter(done, "best", path, *stored)
        return
    ranks, shares = [], []
    everyone = np.ones(len(goal), bool)
    for name in names:
        arrays = done.arrays[name]
        share = _own_share(step, arrays["image"], everyone)
        shares.append(share)
        # Reliable successes first, then mere majorities, then what the attack itself calls one.
        tier = np.where(
            share >= _RELIABLE, 0, np.where(share > 0.5, 1, np.where(arrays["success"], 2, 3))
        )
        ranks.append(1e6 * tier + np.minimum(arrays["distance"], 1e5))
    pick, rows = np.argmin(ranks, axis=0), np.arange(len(goal))
    stacked = {field: np.stack([done.arrays[n][field] for n in names])
               for field in AttackResult._fields}  # fmt: skip
    found = AttackResult(**{field: value[pick, rows] for field, value in stacked.items()})
    found = found._replace(num_gradients=stacked["num_gradients"].sum(axis=0, dtype=np.int32))
    seconds = {
        kind: sum(done.records[n]["seconds"][kind] for n in names) for kind in ("compile", "run")
    }
    attacked = done.arrays[names[0]]["clean_correct"]
    best = names[np.bincount(pick[attacked], minlength=len(names)).argmax()]
    reliable = np.stack(shares)[pick, rows] >= _RELIABLE
    sign, spent = _again(step, best, found, reliable, attacked)
    if spent:
        seconds["again"] = spent
    extra = {"attack": np.array(names)[pick]}
    runs.judge_and_enter(
        step, "best", part, path, found, seconds, best, {"nearer_again": sign}, extra
    )


def _own_share(step: Step, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[N] the share of the attacker's own draws that an image passes; 0 but for `rows`."""
    share = np.zeros(len(rows))
    share[rows] = judge(
        step.view, images[rows], step.done.clean.ids[rows], step.goal[rows],
        targeted=step.plan.targeted, seed=step.plan.seed, stream=ATTACKERS_OWN, draws=NUM_OWN_DRAWS,
    ).success(float(step.view.threshold))  # fmt: skip
    return share


def _again(step: Step, name: str, found: AttackResult, reliable: np.ndarray, attacked: np.ndarray):
    """The indicator of a second run of an attack, and its seconds; 0 where there was none."""
    case, plan, done = step.case, step.plan, step.done
    nothing = lambda why: (indicators.entry("nearer_again", None, reason=why), 0.0)
    if step.images_from is not None:
        known = step.images_from.records["best"]["indicators"].get("nearer_again")
        return (known, 0.0) if known else nothing("not known of the images that are judged here")
    if plan.preset not in reruns.PRESETS:
        return nothing(f"not looked at in the preset {plan.preset}")
    if name not in indicators.MINIMAL_DISTANCE:
        return nothing(f"{name} does not look for the nearest image")
    each = 2.0 * done.arrays[name]["num_gradients"].mean()
    rows = reruns.affordable(attacked, float(found.num_gradients.sum()), each)
    if not rows.any():
        return nothing("five images would cost over a tenth of the run")
    return reruns.again(
        name, runs.made(step, name), step.objective, step.view, done.clean, step.goal, found,
        reliable, rows, is_reliable=lambda images: _own_share(step, images, rows) >= _RELIABLE,
        label=f"{case.defense_name}, {name} with its steps doubled, {rows.sum()} images",
        start=lambda variant: runs.start(step, name, variant), seed=plan.seed,
        progress=case.progress,
    )  # fmt: skip


def compare(step: Step) -> None:
    """Tells each attack's record whether another attack, run now or before, is nearer."""
    case, plan, done = step.case, step.plan, step.done
    known = {name: done.arrays[name] for name in plan.attacks}
    comparable = set(plan.attacks) & set(indicators.MINIMAL_DISTANCE)
    for name in indicators.MINIMAL_DISTANCE if comparable else ():
        if name not in known and case.results_dir is not None:
            try:
                _, _, stored = case.cell(plan, name, dataclasses.asdict(runs.made(step, name)))
            except InputError:  # a damaged record of another run is none of this run's business
                stored = None
            if stored is not None:
                known[name] = stored[1]
    for name in plan.attacks:
        record = done.records[name]
        if "nearer_attack" not in record["indicators"]:  # one that an older version wrote
            continue
        others = {other: known[other] for other in indicators.MINIMAL_DISTANCE
                  if other != name and other in known}  # fmt: skip
        sign = indicators.nearer_attack(known[name], others)
        if name not in comparable:
            why = "this attack does not look for the nearest image"
            sign = indicators.entry("nearer_attack", None, reason=why)
        if sign != record["indicators"]["nearer_attack"]:
            done.records[name] = indicators.amended(record, "nearer_attack", sign)
            if done.paths[name] is not None:
                results.write_json(done.paths[name], done.records[name])
