"""What detectors learned, kept: shipped with advdet, or in the cache folder.

A fit is taken up again only where detector, classifier, data, adversarial images and seed are the
same. Detectors from elsewhere are always fitted anew, since their code may have changed.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from advdet import checkpoints, results
from advdet.detectors import DETECTORS, Detector
from advdet.types import InputError, PyTree


def facts_of(detector: Detector, name: str, **others: Any) -> dict[str, Any]:
    """Everything that decides what a detector learns, JSON-able.

    Args:
      detector: its hyperparameters.
      name: its name in `DETECTORS`.
      **others: data, classifier, adversarial images, seed.
    """
    revised = {"revision": detector.revision} if detector.revision else {}
    return {"defense": name, "detector": dataclasses.asdict(detector), **revised, **others}


def file_name(facts: dict[str, Any]) -> str:
    """The npz's name: defence, half of the data, and a hash of all facts."""
    return f"{facts['defense']}-{facts['half']}-{results.settings_hash(facts)}.npz"


def shipped(facts: dict[str, Any]) -> Path | None:
    """The fit with these facts that comes with advdet, or None."""
    path = Path(__file__).parent / "weights" / facts["dataset"] / file_name(facts)
    return path if path.exists() else None


def fitted_for(
    fit: Callable[[Path | None], PyTree],
    detector: Detector,
    facts: dict[str, Any],
    folder: Path | None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> PyTree:
    """What the detector learned: shipped, cached, or fitted now (and cached).

    Args:
      fit: fits it, given a folder for unfinished trainings (or None).
      detector: its hyperparameters.
      facts: of `facts_of`.
      folder: of cached fits; None keeps nothing.
      say: receives a line where a cached fit cannot be used.

    Returns:
      The pytree that `Detector.fit` gives.
    """
    if type(detector) is not DETECTORS.get(facts["defense"]):
        return fit(None)
    cached = folder and Path(folder, file_name(facts))
    for path in (shipped(facts), cached):
        if path is not None and path.exists():
            try:
                return load(path)
            except InputError as error:
                say(f"fitting again: {error}")
    work = folder and Path(folder, "unfinished", Path(file_name(facts)).stem)
    fitted = jax.device_get(fit(work))
    if cached is not None and jax.tree.leaves(fitted):
        save(cached, fitted, facts)
        shutil.rmtree(work, ignore_errors=True)
    return fitted


def save(path: Path, fitted: PyTree, facts: dict[str, Any], command: str | None = None) -> Path:
    """Writes a fit, nested dicts of arrays, with its facts, and what made it, as manifest."""
    return checkpoints.save(path, fitted, {"facts": facts, "command": command})


def load(path: Path) -> dict[str, Any]:
    """A fit as nested dicts of NumPy arrays.

    Raises:
      InputError: missing or damaged.
    """
    tree: dict[str, Any] = {}
    for name, array in checkpoints.load_arrays(path).items():
        *groups, leaf = name.split("/")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = np.asarray(array)
    return tree
