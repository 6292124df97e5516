"""A detector on its data: fitted, or taken from what is kept, with its thresholds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from advdet import crafting, datasets, detectors, fits, provenance
from advdet.defenses import FittedDefense, undefended, with_thresholds
from advdet.detectors import Detector
from advdet.splits import Splits
from advdet.types import Classifier, FitData, InputError

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
      InputError: the attack changed too few labels, a score is not finite, or there is nothing to
        learn from.
    """
    if detector.kind == "none":
        return FittedDefense(undefended(classifier), {})
    if detector.learns and not len(splits.train.labels):
        raise InputError(
            f"{detectors.name_of(detector)} has a `fit`, and the data hold no training images: "
            "give Splits.from_arrays(train=(x, y)), or a detector that is fitted already"
        )
    splits = splits.half(half)
    key = jax.random.fold_in(jax.random.key(seed), _FIT)
    if half == "attacker":  # a copy, not the same random choices
        key = jax.random.fold_in(key, 1)
    key_fit, key_score = jax.random.split(key)
    classifier_id = provenance.fingerprint(classifier, splits.test.images)
    folder = lambda what: datasets.cache_dir() / what / splits.name

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
        data_hash=splits.data_hash, seed=seed,
        classifier=provenance.fingerprint(classifier, splits.test.images),
        train_attack=train_attack if detector.needs_adversarial else None,
    )  # fmt: skip
