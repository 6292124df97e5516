"""The headline's best attack once more, with its steps doubled: has the search settled?

It costs a run, so only some images get it, as many as cost a tenth of what the headline has cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from advdet import cells, indicators
from advdet.attacks.base import AttackResult
from advdet.defenses import Defense
from advdet.types import Batch

PRESETS = ("fast", "thorough")  # `smoke` proves nothing anyway, `paper` has one attack
MOST, LEAST, SHARE = 25, 5, 0.1


def affordable(attacked: np.ndarray, spent: float, each: float) -> np.ndarray:
    """[N] bool, the first attacked images that a second run can be paid for; none below five.

    Args:
      attacked: [N] bool.
      spent: gradients that the headline has cost.
      each: gradients that an image will cost.
    """
    count = min(MOST, int(SHARE * spent / max(each, 1.0)))
    rows = np.zeros(len(attacked), bool)
    if count >= LEAST:
        rows[np.flatnonzero(attacked)[:count]] = True
    return rows


def again(
    name: str,
    attack,
    objective,
    view: Defense,
    clean: Batch,
    goal: np.ndarray,
    found: AttackResult,
    reliable: np.ndarray,
    rows: np.ndarray,
    *,
    is_reliable: Callable[[np.ndarray], np.ndarray],
    label: str,
    start: Callable[..., np.ndarray | None],
    seed: int,
    progress: bool,
) -> tuple[dict[str, Any], float]:
    """The indicator `nearer_again`, and the seconds that it took.

    Args:
      name: of the attack.
      attack, objective, view: what ran.
      clean: [N] all images; goal: [N] their targets.
      found: [N] the headline.
      reliable: [N] bool, images of the headline that pass enough of the attacker's own draws.
      rows: of `affordable`.
      is_reliable: takes images [N, H, W, C], returns the same of the second run's, so that both
        are held to one condition: a random score lets nearer images through now and then.
      label: for the progress line.
      start: as in `cells.attack_in_variants`.
      seed: of the run.
      progress: show a line on stderr.
    """
    longer = dataclasses.replace(attack, steps=2 * attack.steps)
    second, seconds = cells.attack_in_variants(
        label, longer, objective, view, clean, goal, start=start, seed=seed, only=rows,
        lanes=cells.default_lanes(int(rows.sum())), progress=progress,
    )  # fmt: skip
    sign = indicators.nearer_again(
        found.distance, found.success, second.distance, second.success & is_reliable(second.image),
        rows, reliable=reliable, attack=name, steps=int(longer.steps),
    )  # fmt: skip
    return sign, sum(seconds.values())
