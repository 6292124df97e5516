"""The undefended classifier's records, where they lie beside a record in a folder of results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from advdet import results
from advdet.types import InputError


class Baseline(NamedTuple):
    """What an attack did to the undefended classifier.

    Attributes:
      attack: the `attack` part of its record.
      arrays: its npz; None where that is not there.
    """

    attack: dict[str, Any]
    arrays: dict[str, np.ndarray] | None


def baseline(path: Path, record: dict[str, Any]) -> Baseline | None:
    """The one that a record's own figures are compared with; None where it is not there.

    Args:
      path: of the record's JSON.
      record: the record.
    """
    if record["run"]["defense"] == "none":
        return None
    stored = record["attack"]["baseline_mean_l2"]
    for other, there in _records(path, record["run"], record["run"]["attack"]):
        confident = there["run"]["settings"]["confidence"]
        if there["attack"]["mean_l2"] == stored and not confident:
            return Baseline(there["attack"], _arrays(other))
    return None


def first_stage(path: Path, run: dict[str, Any], attack: str) -> dict[str, np.ndarray] | None:
    """The arrays of an attack with the same settings on the same images; None where there are none.

    Args:
      path: of the record's JSON.
      run: its `run` part.
      attack: by name.
    """
    settings = run["settings"]["attack"]
    wanted = settings.get(attack, settings), run["settings"]["num_images"]
    for other, there in _records(path, run, attack):
        theirs = there["run"]["settings"]
        if (theirs["attack"], theirs["num_images"]) == wanted and not theirs["confidence"]:
            return _arrays(other)
    return None


def _records(path: Path, run: dict[str, Any], attack: str) -> Iterator[tuple[Path, dict]]:
    parents = path.resolve().parents
    if len(parents) < 5:
        return
    folder = parents[3] / "perfect_knowledge" / "none" / f"{attack}.generic"
    same = ("classifier", "seed", "splits", "targets")
    for other in sorted(folder.glob(f"{run['targets']}-*.json")):
        try:
            there = results.read_json(other)
            if all(there["run"][name] == run[name] for name in same):
                yield other, there
        except (InputError, KeyError, TypeError):
            continue


def _arrays(path: Path) -> dict[str, np.ndarray] | None:
    try:
        return results.load(path)[1]
    except InputError:
        return None
