"""A detector on its data: fitted, or taken from what is kept, with its thresholds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from advdet import crafting, datasets, detectors, fits, records
from advdet.defenses import FittedDefense, undefended, with_thresholds
from advdet.detectors import Detector
from advdet.splits import Splits
from advdet.types import Classifier, FitData

_FIT = 0x4649


def defend(
    detector: Detector,
    classifier: Classifier,
    splits: Splits,
    *,
    half: str = "full",
    seed: int = 0,
    train_attack: str | None = "carlini_wagner",
    progress: bool = True,
) -> FittedDefense:
    """The defence of a classifier by a detector, with its thresholds.

    Adversarial images to learn from, and what was learned, are kept in the cache folder.

    Args:
      detector: hyperparameters.
      classifier: to be defended.
      splits: the data.
      half: whose images to learn from and set thresholds on: full, defender or attacker.
      seed: of everything random.
      train_attack: what makes the adversarial images, for a detector that needs some.
      progress: show what takes long on stderr.

    Raises:
      InputError: the attack changed too few labels, or a score is not finite.
    """
    if detector.kind == "none":
        return FittedDefense(undefended(classifier), {})
    splits = splits.half(half)
    key = jax.random.fold_in(jax.random.key(seed), _FIT)
    if half == "attacker":  # a copy, not the same random choices
        key = jax.random.fold_in(key, 1)
    key_fit, key_score = jax.random.split(key)
    classifier_id = records.fingerprint(classifier)
    # A foreign classifier without arrays cannot be told from another: nothing of it is kept.
    cache = datasets.cache_dir() if jax.tree.leaves(classifier.variables) else None
    folder = lambda what: cache and cache / what / splits.name

    def fit(work):
        data = FitData(splits.train, splits.select, work=work, progress=progress)
        if detector.needs_adversarial:
            craft = functools.partial(
                crafting.craft, train_attack, classifier, classifier_id,
                num_classes=splits.num_classes, seed=seed, folder=folder("crafted"),
                progress=progress,
            )  # fmt: skip
            data = data._replace(
                adversarial_train=craft(splits.train), adversarial_select=craft(splits.select)
            )
        return detector.fit(key_fit, classifier, data)

    facts = facts_for(detector, classifier, splits, half, seed, train_attack)
    fitted = jax.tree.map(jnp.asarray, fits.fitted_for(fit, detector, facts, folder("fits")))
    return with_thresholds(key_score, detector, classifier, fitted, splits.threshold)


def facts_for(
    detector: Detector,
    classifier: Classifier,
    splits: Splits,
    half: str,
    seed: int,
    train_attack: str | None,
) -> dict[str, Any]:
    """Everything that decides what `defend` fits; `splits` are those of the half."""
    return fits.facts_of(
        detector, detectors.name_of(detector), dataset=splits.name, half=half,
        data_hash=splits.data_hash, classifier=records.fingerprint(classifier), seed=seed,
        train_attack=train_attack if detector.needs_adversarial else None,
    )  # fmt: skip
