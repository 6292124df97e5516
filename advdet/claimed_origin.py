"""What a record says of where it comes from: names that must agree, and what no file can show."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from advdet import provenance, results
from advdet.attacks import presets
from advdet.claims import CONFIRMED, LACKING, MISSING, REFUTED, Claim, claimed, undecided
from advdet.detectors import DETECTORS, Detector, name_of
from advdet.rebuild import Evidence, Rebuilt
from advdet.recompute import objective_of
from advdet.threat_models import THREAT_MODELS

_FILE = re.compile(r".*-[0-9a-f]{8}-seed\d+")
_WORD_OF_THE_RUN = {
    "threat_model": "what the attacker knew",
    "surrogate": "the copy that he had",
    "attack": "what made the images",
    "objective": "what it optimised",
    "settings.confidence": "what it asked for",
    "settings.detector_margin": "what it asked for",
    "lanes": "how it was run",
    "command": "how it was called",
    "versions": "what ran",
    "device": "what it ran on",
}


def of_names(path: Path, run: dict[str, Any], built: Rebuilt | None) -> list[Claim]:
    """Names that must agree with one another.

    Args:
      path: of the JSON.
      run: the record's.
      built: what it speaks of; None where its images are missing.
    """
    victim = built and built.victim
    detector = victim and victim.defense.detector
    found = [_defense(run, detector), _attack_settings(run), _place(path, run)]
    return [claim for claim in found if claim is not None]


def _defense(run: dict[str, Any], detector: Detector | None) -> Claim:
    """The defence's name, its class and its hyperparameters belong together."""
    name, stored, kind = run["defense"], run.get("detector_class"), DETECTORS.get(run["defense"])
    own = kind and f"{kind.__module__}.{kind.__qualname__}"
    known = {f"{other.__module__}.{other.__qualname__}": word for word, other in DETECTORS.items()}
    if stored is not None and stored != own and (kind is not None or stored in known):
        ours = known.get(stored, "another name")
        return Claim("run.defense", REFUTED, name, ours, f"its class is {stored}")
    if kind is not None and set(run["detector"]) != {f.name for f in dataclasses.fields(kind)}:
        note = f"hyperparameters {', '.join(run['detector']) or '(none)'} are not those of {name}"
        return Claim("run.defense", REFUTED, name, note=note)
    if stored is None:
        return undecided("run.defense", f"its class: {LACKING}", name)
    if kind is None and detector is None:
        return undecided("run.defense", f"the class {stored} is not here", name)
    ours = name if detector is None else name_of(detector)
    return Claim("run.defense", CONFIRMED if ours == name else REFUTED, name, ours)


def _attack_settings(run: dict[str, Any]) -> Claim:
    """The settings of an attack have the names that this attack's have."""
    where, given = "run.settings.attack", run["settings"]["attack"]
    for name, settings in (given if run["attack"] == "best" else {run["attack"]: given}).items():
        kind = presets.ATTACKS.get(name)
        if kind is None:
            return Claim(where, REFUTED, name, note="there is no attack of that name")
        fields = {field.name for field in dataclasses.fields(kind)}
        if strange := sorted(set(settings) - fields):
            note = f"{name} has no setting {strange[0]}"
            return Claim(where, REFUTED, note=note)
        if lacking := sorted(fields - set(settings)):
            return undecided(where, f"{name} has a setting {lacking[0]} by now")
    try:
        objective_of(run)
    except (KeyError, TypeError) as error:
        return Claim("run.objective", REFUTED, run["objective"], note=f"no such objective: {error}")
    return Claim(where, CONFIRMED, note="names alone")


def _place(path: Path, run: dict[str, Any]) -> Claim | None:
    """Folders and file name, where they are those of a folder of results."""
    wanted = results.record_path("results", run).parts[1:]
    parts = path.resolve().parts[-len(wanted) :]
    in_results = len(parts) == len(wanted) and parts[1] in THREAT_MODELS
    if not in_results and not _FILE.fullmatch(path.stem):
        return None
    there, here = (parts, wanted) if in_results else (parts[-1:], wanted[-1:])
    verdict = CONFIRMED if there == here else REFUTED
    return Claim("place", verdict, "/".join(there), "/".join(here))


def of_hash(evidence: Evidence) -> list[Claim]:
    """The settings are those that the record's hash, and its file's name, was made of."""
    run, kind = evidence.run, evidence.run.get("detector_class")
    where = "run.settings_hash"
    if kind is None:
        return [undecided(where, f"the detector's class: {LACKING}")]
    given = None
    if run["targets"] == "given":
        given = [int(target) for target in evidence.arrays["target_class"]]
    limited = run.get("surrogate") is not None
    found = provenance.settings_hash(run, given, [kind, kind] if limited else [kind])
    if found == run["settings_hash"]:
        return [Claim(where, CONFIRMED, run["settings_hash"], found)]
    if limited:
        return [undecided(where, "the class of the attacker's copy is not stored")]
    return [Claim(where, REFUTED, run["settings_hash"], found)]


def of_radius(evidence: Evidence) -> list[Claim]:
    """Images of an attack at a fixed radius lie within it."""
    run, arrays = evidence.run, evidence.arrays
    given = run["settings"]["attack"]
    if run["attack"] == "best" or "epsilon" not in given or evidence.clean is None:
        return []
    moved = arrays["image"].astype(np.float64) - np.asarray(evidence.clean.images, np.float64)
    flat = moved.reshape(len(moved), -1)
    far = np.abs(flat).max(axis=1) if given.get("norm", "linf") == "linf" else (
        np.sqrt(np.square(flat).sum(axis=1)))  # fmt: skip
    most, limit = float(far.max(initial=0.0)), given["epsilon"] * (1 + 1e-4) + 1e-6
    verdict = CONFIRMED if most <= limit else REFUTED
    return [Claim("run.settings.attack.epsilon", verdict, given["epsilon"], most, "farthest image")]


def of_the_run(record: dict[str, Any]) -> list[Claim]:
    """What the files cannot show: the word of whoever ran the attack."""
    found = []
    for name, what in _WORD_OF_THE_RUN.items():
        value: Any = record["run"]
        for part in name.split("."):
            value = value.get(part, MISSING)
        if value is not MISSING and value is not None:
            found.append(claimed(f"run.{name}", what, None if isinstance(value, dict) else value))
    steps = record["run"]["settings"]["attack"]
    found.append(claimed("run.settings", f"how long it searched: {_numbers(steps)}"))
    total = record.get("seconds")
    if isinstance(total, dict) and total:
        found.append(claimed("seconds", "how long it took", sum(total.values())))
    return found


def _numbers(settings: dict[str, Any]) -> str:
    parts = []
    for name, value in settings.items():
        said = f"({_numbers(value)})" if isinstance(value, dict) else f"{value}"
        parts.append(f"{name} {said}")
    return ", ".join(parts)
