"""Which attacks on a copy transfer: the choice on one half of the images, the telling on the other.

Nothing is run here. A `Run` is an attack on the copy that asked for some confidence in the label
and some margin below the threshold, as the victim judged it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

LEVELS = (0.84, 0.90, 0.98)
DEARER, BEYOND = "dearer than one that reaches 98 %", "more than the copy yields to"
_WITHIN = "within "
_FIRST = 20.0  # the confidence that a search begins near


class Run(NamedTuple):
    """An attack on the copy, judged by the victim.

    Attributes:
      attack: its name.
      pair: {confidence[, detector_margin]} that it asked the copy for.
      arrays: [N] of each image: id, clean_correct, success (on the copy), judged_success (the
        victim's, a share of draws), distance.
    """

    attack: str
    pair: dict[str, float]
    arrays: dict[str, np.ndarray]


Choice = Callable[[Sequence[Run]], int | None]


def transferred(arrays, rows: np.ndarray) -> tuple[float, float | None]:
    """Success on the victim, and mean L2 of the successes, over some of the attacked images."""
    rows = rows & arrays["clean_correct"]
    share = arrays["judged_success"][rows]
    won = share > 0.5
    distance = arrays["distance"][rows][won]
    rate = float(share.mean()) if len(share) else 0.0
    return rate, float(distance.mean()) if won.any() else None


def even(arrays) -> np.ndarray:
    """[N] bool, the half of the images by which pairs and attacks are chosen."""
    return np.arange(len(arrays["id"])) % 2 == 0


def odd(arrays) -> np.ndarray:
    """[N] bool, the half of the images that says what the chosen ones do."""
    return ~even(arrays)


def cheapest(runs: Sequence[Run], level: float) -> int | None:
    """The run of least mean L2 that reaches a level on the even half; None where none does."""
    found = [(distance, i) for i, rate, distance in _on_even(runs) if rate >= level]
    return min(found)[1] if found else None


def most(runs: Sequence[Run]) -> int | None:
    """The run of which most transfer on the even half, the nearest of equals; None without runs."""
    found = [(-rate, distance, i) for i, rate, distance in _on_even(runs)]
    return min(found)[2] if found else None


def within(runs: Sequence[Run], distance: float) -> int | None:
    """The run of which most transfer on the even half, of those at a mean L2 up to a distance."""
    near = [(-rate, mean, i) for i, rate, mean in _on_even(runs) if mean <= distance]
    return min(near)[2] if near else None


def choices(distances: Sequence[float]) -> dict[str, Choice]:
    """What a sweep looks for, by name: the levels' cheapest, the most of all, the most within L2.

    Args:
      distances: mean L2 at which attacks are compared.
    """
    levels = {f"{level:g}": lambda runs, v=level: cheapest(runs, v) for level in LEVELS}
    near = {f"{_WITHIN}{d:g}": lambda runs, v=d: within(runs, v) for d in distances}
    return {"most": most, **levels, **near}


def pairs(confidences: Sequence[float], margins: Sequence[float]) -> list[dict[str, float]]:
    """The grid of all pairs, as arguments of `advdet.evaluate`; row by row of equal confidence."""
    if not len(margins):
        return [{"confidence": k} for k in confidences]
    return [{"confidence": k, "detector_margin": m} for k in confidences for m in margins]


def needless(pair: dict[str, float], runs: Sequence[Run]) -> str | None:
    """Why a pair cannot be chosen; None where it may be.

    An attack is held to its own success on the copy alone: that another one fails where the copy is
    asked for much says nothing of it.

    Args:
      pair: what would be asked of the copy.
      runs: of one attack, so far.
    """
    known = [transferred(run.arrays, even(run.arrays))[0] for run in runs]
    for run, rate in zip(runs, known):
        if any(run.pair[word] > pair[word] for word in pair):
            continue
        if rate >= max(LEVELS):
            return DEARER
        rows = even(run.arrays) & run.arrays["clean_correct"]
        yields = float(run.arrays["success"][rows].mean()) if rows.any() else 0.0
        if yields < min(LEVELS) and (yields < max(known) or yields == 0):
            return BEYOND
    return None


def propose(
    confidences: Sequence[float],
    margins: Sequence[float],
    runs: Sequence[Run],
    wanted: dict[str, Choice],
) -> tuple[dict[str, float] | None, dict[str, list[dict[str, float]]]]:
    """The pair to run next: a neighbour, in the grid of all pairs, of one that would be chosen.

    First those two places away, then those next to it; for the most and the levels first, then for
    the most within each distance.

    Args:
      confidences: logit margins, in order.
      margins: of the score, in order; empty where nothing is scored.
      runs: of one attack, so far.
      wanted: as of `choices`.

    Returns:
      The pair, None where the search has ended; and the pairs left out in it, by why.
    """
    size = len(confidences), max(1, len(margins))
    grid, tried, left_out = pairs(confidences, margins), [run.pair for run in runs], {}
    at = lambda i, j: grid[i * size[1] + j]
    if not runs:
        middle = int(np.argmin(np.abs(np.asarray(confidences) - _FIRST)))
        return at(middle, (size[1] - 1) // 3), left_out
    near = {name: choose for name, choose in wanted.items() if name.startswith(_WITHIN)}
    far = {name: choose for name, choose in wanted.items() if name not in near}
    for choices_, step in ((far, 2), (far, 1), (near, 2), (near, 1)):
        for choose in choices_.values():
            index = choose(runs)
            if index is None:
                continue
            i, j = divmod(grid.index(runs[index].pair), size[1])
            for k, m in ((i, j + step), (i + step, j), (i - step, j), (i, j - step)):
                if not (0 <= k < size[0] and 0 <= m < size[1]) or at(k, m) in tried:
                    continue
                why = needless(at(k, m), runs)
                if why is None:
                    return at(k, m), left_out
                if at(k, m) not in left_out.setdefault(why, []):
                    left_out[why].append(at(k, m))
    return None, left_out


def _on_even(runs: Sequence[Run]) -> list[tuple[int, float, float]]:
    """(index, success on the victim, mean L2, infinite where nothing transfers) of each."""
    told = [(i, *transferred(run.arrays, even(run.arrays))) for i, run in enumerate(runs)]
    return [(i, rate, np.inf if far is None else far) for i, rate, far in told]
