"""Fits the number of images and of steps to a time, by rates measured on the machine at hand.

What is chosen takes the place of flags that were left open, before anything is hashed: the record
is that of a run with these flags by hand, and the printed command repeats it without the budget.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from advdet import cells, indicators, reruns, settings, starts
from advdet.attacks import driver, presets
from advdet.attacks.objectives import Generic
from advdet.cases import Case
from advdet.defenses import Defense, undefended
from advdet.settings import Settings
from advdet.threat_models import attacker_view
from advdet.types import InputError

_MEASURE, _MEASURE_SECONDS = 0x4D45, 2.0
_SPARE = 0.15  # of the time that is left, for compiling again, judging and writing
_FEWEST, _FEW, _MANY = 16, 50, 1000  # images: as in `smoke`, before steps are cut, as in `thorough`
_LEAST, _MOST = 50, 1000  # steps: those of `smoke` and `thorough`
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


class Choice(NamedTuple):
    """What a time buys.

    Attributes:
      num_images, steps: for `evaluate`; None leaves what the preset or the user says.
      seconds: what it takes at most.
    """

    num_images: int | None
    steps: int | None
    seconds: float

    @property
    def arguments(self) -> dict[str, int]:
        """As arguments of `evaluate`."""
        given = {"num_images": self.num_images, "steps": self.steps}
        return {name: value for name, value in given.items() if value is not None}


def seconds_of(budget: float | str) -> float:
    """Seconds of a number or of a text such as 90s, 20m or 1.5h.

    Raises:
      InputError: it is neither, or not above 0.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smh]?)", str(budget).strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise InputError(f"time_budget must be a time such as 90s, 20m or 1.5h, not {budget!r}")
    return seconds


def repeated(command: str, choice: Choice) -> str:
    """The command with what was chosen in place of the budget."""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        if word in ("--time_budget", "-time_budget"):
            next(words, None)
        elif not re.match("--?time_budget=", word):
            kept.append(word)
    return shlex.join(kept + [f"--{name}={value}" for name, value in choice.arguments.items()])


def choose(
    usual: float,
    each: float,
    seconds: float,
    *,
    steps: int,
    available: int,
    num_images: int | None = None,
    steps_stay: bool = False,
) -> Choice:
    """What fits into a time.

    Images first, to the thousand of `thorough`; then steps, to its thousand; then images again.
    Where time is short, images down to 50, then steps down to 50, then images down to 16.

    Args:
      usual: seconds that one image costs at most with `steps` steps.
      each: seconds a step of them.
      seconds: the time.
      steps: of the preset, or by hand.
      available: test images.
      num_images: by hand, or None.
      steps_stay: whether the steps are by hand.

    Raises:
      InputError: it buys not even the least.
    """
    cost = lambda count: usual if count == steps else each * count
    images_for = lambda count: _rounded(int(seconds / cost(count)))
    steps_for = lambda count: _rounded(int(seconds / (each * count)))
    few, many = min(_FEW, available), min(_MANY, available)
    taken, images = steps, num_images
    if not steps_stay:
        fitting = images_for(steps) if images is None else None
        if images is not None:
            taken = max(min(steps_for(images), max(_MOST, steps)), min(_LEAST, steps))
        elif fitting < few:
            taken = max(min(steps_for(few), steps), min(_LEAST, steps))
        elif fitting > many:
            taken = max(min(steps_for(many), max(_MOST, steps)), steps)
    if images is None:
        images = min(max(images_for(taken), min(_FEWEST, available)), available)
    needed = images * cost(taken)
    if needed > 1.05 * seconds:
        raise InputError(
            f"the time budget leaves {seconds:.0f} s for attacks, and {images} images with {taken} "
            f"steps may take {needed:.0f} s here; give more time, or fewer images by hand"
        )
    return Choice(images if num_images is None else None, taken if taken != steps else None, needed)


def _rounded(count: int) -> int:
    """Rounded down to two digits."""
    digits = 10 ** max(0, len(str(count)) - 2)
    return count // digits * digits


class _Enough(Exception):
    """Ends a measurement."""


def rate(attack, objective, view: Defense, case: Case, lanes: int) -> tuple[float, float]:
    """Steps a second of an attack with all lanes busy, and the seconds that it took to compile."""
    batch = case.splits.test.take(slice(lanes * len(jax.devices())))
    labels, last = np.asarray(batch.labels), None
    targets = cells.random_targets(case.seed, labels, batch.ids, case.splits.num_classes)

    def stop(now):
        nonlocal last
        last = now
        if now.run_seconds > _MEASURE_SECONDS:
            raise _Enough

    key = jax.random.fold_in(jax.random.key(case.seed), _MEASURE)
    try:
        driver.run(
            key, attack, objective, view, batch.images, targets if objective.targeted else labels,
            batch.ids, lanes=lanes, on_slice=stop, slice_seconds=0.5,
        )  # fmt: skip
    except _Enough:
        pass
    return last.lane_steps / last.run_seconds, last.compile_seconds


def fit(
    case: Case,
    plans: Sequence[Settings],
    seconds: float,
    *,
    num_images: int | None,
    steps: int | None,
) -> Choice:
    """Chooses images and steps for evaluations that are to share a time.

    Args:
      case: ready to be attacked.
      plans: of the evaluations, as without a budget.
      seconds: what is left of the time, measuring included.
      num_images, steps: by hand, or None.

    Raises:
      InputError: it buys not even the least.
    """
    began, plan, name = time.perf_counter(), plans[0], case.defense_name
    usual = each = compiling = 0.0
    for word in plan.attacks:
        attack = settings.make_attack(plan, word, case.splits, name)
        for objective, view, times in _runs(case, plans):
            speed, spent = rate(attack, objective, view, case, plan.lanes)
            case.say(f"time budget: {word} takes {speed:,.0f} steps a second")
            usual += times * attack.max_steps() / speed
            each += times * attack.max_steps() / attack.steps / speed
            compiling += spent
    if len(plan.attacks) > 1 and plan.preset in reruns.PRESETS:
        usual, each = (value * (1.0 + reruns.SHARE) for value in (usual, each))
    left = (1.0 - _SPARE) * (seconds - (time.perf_counter() - began)) - compiling
    if left <= 0:
        raise InputError(
            "the time budget is used up by loading, fitting, measuring and compiling; give more "
            "time"
        )
    return choose(
        usual, each, left, steps=int(attack.steps), available=len(case.splits.test.labels),
        num_images=num_images,
        steps_stay=steps is not None or plan.attacks[0] not in presets.STRONG,
    )  # fmt: skip


def _runs(case: Case, plans: Sequence[Settings]) -> list[tuple]:
    """(objective, view, how often) of what an attack is run on."""
    plan, bare = plans[0], undefended(case.classifier)
    generic = Generic(targeted=plan.targeted)
    if case.threat_model == "zero_knowledge":  # at each confidence, and at none for the ratio
        return [(generic, bare, len(plans) + 1)]
    if case.victim.defense.detector.kind == "none":
        return [(generic, bare, len(plans))]
    point, images = plan.operating_point, case.splits.test.images[: plan.num_images]
    shown = attacker_view(case.threat_model, case.victim.at(point), case.copy_at(point))
    objective = settings.make_objective(plan, case.defense_name)
    variants = objective.variants()
    times = [len(plans)] * len(variants)
    minimal = any(name in indicators.MINIMAL_DISTANCE for name in plan.attacks)
    if starts.again(case.threat_model, objective, minimal):  # at most all images
        times[0] *= 2
    views = [(v, v.view(shown, images, images), often) for v, often in zip(variants, times)]
    return [(generic, bare, 1), *views]


def stated(case: Case, plan: Settings, choice: Choice) -> Case:
    """Says what a time bought, and gives the case the command that repeats it without a budget."""
    attack = settings.make_attack(plan, plan.attacks[0], case.splits, case.defense_name)
    again = ", ".join(f"{name}={value}" for name, value in choice.arguments.items())
    command = None if case.command is None else repeated(case.command, choice)
    case.say(
        f"time budget: {plan.num_images:,} images with {attack.steps:,} steps, at most "
        f"{choice.seconds / 60:.1f} min; the same without the budget: {command or again}"
    )
    return dataclasses.replace(case, command=command)
