"""What was run, and on what: the part of a record that its hash is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from advdet import checkpoints, indicators, nets, results, starts
from advdet.defenses import Defense, classify_images, score_images
from advdet.detectors import DETECTORS
from advdet.detectors.function import Held
from advdet.splits import Splits
from advdet.types import Classifier, PyTree

_UNHASHED = ("command", "data_source", "versions", "device", "settings_hash", "detector_class",
             "fit")  # fmt: skip


def run_part(
    plan,
    splits: Splits,
    *,
    attack: str,
    attack_settings: dict[str, Any],
    objective,
    defense_name: str,
    defense: Defense,
    threat_model: str,
    surrogate: Defense | None,
    command: str | None,
) -> dict[str, Any]:
    """What was run: the record's `run`, with a hash of everything that can change the result.

    Args:
      plan: the `Settings`.
      splits: the data.
      attack: its name, "best" for the headline.
      attack_settings: its settings by name.
      objective: the objective itself.
      defense_name: the judged defence's.
      defense: the judged defence.
      threat_model: what the attacker knew.
      surrogate: the attacker's own copy, if he has one.
      command: how it was called.
    """
    device = jax.devices()[0]
    hashed = {
        "dataset": splits.name,
        "defense": defense_name,
        "detector": dataclasses.asdict(defense.detector),
        "attack": attack,
        "objective": plan.objective,
        "train_attack": plan.train_attack,
        "threat_model": threat_model,
        "targets": plan.regime,
        "operating_point": plan.operating_point,
        "seed": plan.seed,
        "lanes": plan.lanes,
        "splits": splits.hashes,
        "classifier": fingerprint(defense.classifier, splits.test.images),
        "surrogate": surrogate
        and {
            "classifier": fingerprint(surrogate.classifier, splits.test.images),
            "detector": dataclasses.asdict(surrogate.detector),
        },
        "settings": {
            "num_images": plan.num_images,
            "confidence": plan.confidence,
            "detector_margin": plan.detector_margin,
            "objective": {
                name: value
                for name, value in dataclasses.asdict(objective).items()
                if name not in ("confidence", "detector_margin")
            },
            "attack": attack_settings,
        },
    }
    if starts.again(threat_model, objective, indicators.is_minimal(hashed)):
        hashed["settings"]["failures_begin_anew"] = "natural"
    if defense.classifier.bounded_logits:
        hashed["bounded_logits"] = True
    if starts.looks_for_natural(threat_model, objective, indicators.is_minimal(hashed)):
        hashed["settings"]["natural_images"] = starts.HELD_OUT
    shown = [defense] if surrogate is None else [defense, surrogate]
    if any(revisions := [one.detector.revision for one in shown]):
        hashed["revision"] = revisions  # records from before are not taken for finished ones
    if type(defense.detector) not in DETECTORS.values():  # its code may be another by now
        hashed["answers"] = [
            shown and answers(shown, splits.test.images) for shown in (defense, surrogate)
        ]
    given = None if isinstance(plan.targets, str) else [int(t) for t in plan.targets]
    kinds = [f"{type(d.detector).__module__}.{type(d.detector).__qualname__}"
             for d in (defense, surrogate) if d is not None]  # fmt: skip
    unhashed = {
        "data_source": splits.source,
        "versions": checkpoints.versions(),
        "device": {
            "kind": device.device_kind,
            "platform": device.platform,
            "count": jax.device_count(),
        },
        "settings_hash": settings_hash(hashed, given, kinds),
        "detector_class": kinds[0],
        "fit": digest_of(defense.fitted),
    }
    return {"command": command, **hashed, **unhashed}


def settings_hash(run: dict[str, Any], given: list[int] | None, kinds: list[str]) -> str:
    """The hash of everything that can change a result.

    Args:
      run: as `run_part` gives it, or as stored; what is not hashed may be there, too.
      given: targets that were given as an array.
      kinds: the classes of the judged detector and of the attacker's copy, if he has one.
    """
    hashed = {name: value for name, value in run.items() if name not in _UNHASHED}
    return results.settings_hash({**hashed, "given": given, "classes": kinds})


def fingerprint(classifier: Classifier, images: np.ndarray | None = None) -> str:
    """Sixteen hex digits of a classifier: of its weights and, unless its code is advdet's, answers.

    Args:
      classifier: any.
      images: [N, H, W, C] of the data that it is used on; the first few are asked for.
    """
    if images is None or isinstance(classifier.apply, nets.NetApply):
        return digest_of(classifier.variables)
    leaves = _leaves(classifier.variables)
    leaves["answers"] = np.asarray(classifier(_probes(images)).logits)
    return results.digest(leaves)[:16]


def digest_of(tree: PyTree) -> str | None:
    """Sixteen hex digits of a pytree's arrays; None for an object that JAX does not look into."""
    if isinstance(tree, Held):
        return None
    return results.digest(_leaves(tree))[:16]


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}


def answers(defense: Defense, images: np.ndarray) -> str:
    """Sixteen hex digits of what a defence says about a few images, with keys that are fixed.

    Args: as those of `fingerprint`.
    """
    probes = _probes(images)
    ids, key = np.arange(len(probes)), jax.random.key(0)
    said = {"logits": classify_images(key, defense, probes, ids)}
    if defense.detector.kind == "score":
        said["scores"] = score_images(key, defense, probes, ids)
    return results.digest(said)[:16]


def _probes(images: np.ndarray) -> np.ndarray:
    """Some of the images, and as many of noise, where classifiers that agree on data differ."""
    real = np.asarray(images[:16], np.float32)
    noise = np.random.RandomState(0).uniform(0, 1, (16, *real.shape[1:]))
    return np.concatenate([real, noise.astype(np.float32)])
