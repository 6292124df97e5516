"""Adversarial images for detectors to learn from: made once, kept, checked."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np

from advdet import cells, results
from advdet.attacks import objectives, presets
from advdet.defenses import undefended
from advdet.types import Batch, Classifier, InputError

NUM_IMAGES = 10_000
_LEAST_SHARE = 0.99  # of the images, by a strong attack
_LEAST_ROWS = 100


def craft(
    attack_name: str,
    classifier: Classifier,
    classifier_id: str,
    source: Batch,
    *,
    num_classes: int,
    seed: int,
    folder: Path | None,
    progress: bool,
) -> Batch:
    """Adversarial versions of the first clean images, made against the bare classifier.

    Finished images are kept in `folder` as the work goes on, and a set that is there is not made
    again. Strong attacks aim at random wrong classes, weak ones at any.

    Args:
      attack_name: by its settings in the preset `fast`.
      classifier: to be fooled.
      classifier_id: names its weights in the file's name.
      source: [N] clean images; at most `NUM_IMAGES` of them are taken.
      num_classes: of the classifier.
      seed: of the random targets and the attack.
      folder: where sets are kept; None keeps nothing.
      progress: show a line on stderr.

    Returns:
      The images whose label changed, at a distance above 0, with their true labels and source ids.

    Raises:
      InputError: the attack changed too few labels.
    """
    batch = source.take(slice(NUM_IMAGES))
    strong = attack_name in presets.STRONG
    targets = np.asarray(batch.labels)
    if strong:
        targets = cells.random_targets(seed, batch.labels, batch.ids, num_classes)
    values = presets.settings(attack_name, "fast", batch.images.shape[-1], "none")
    attack = presets.make(attack_name, values)
    path = None
    if folder is not None:
        facts = {
            "attack": attack_name,
            "settings": dataclasses.asdict(attack),
            "classifier": classifier_id,
            "images": results.digest({"ids": batch.ids, "images": batch.images}),
            "seed": seed,
        }
        path = Path(folder, f"{attack_name}-{results.settings_hash(facts)}.json")
    found, _ = cells.attack_images(
        f"training images by {attack_name}", attack, objectives.Generic(targeted=strong),
        undefended(classifier), batch, targets, seed=seed, lanes=cells.default_lanes(len(targets)),
        path=path, resume=True, progress=progress,
    )  # fmt: skip
    already = found.success & (found.distance == 0)  # taken for the target as they are
    changed = found.success & ~already
    share = changed.sum() / max(1, (~already).sum())
    if strong and share < _LEAST_SHARE:
        raise InputError(
            f"{attack_name} changed the label of only {share:.1%} of the images that the "
            "detector should learn from; choose another --train_attack"
        )
    if not strong and changed.sum() < min(_LEAST_ROWS, len(changed) // 10):
        raise InputError(
            f"{attack_name} changed the label of only {changed.sum()} images of {len(changed)}: "
            "too few for a detector to learn from; choose another --train_attack"
        )
    if progress and not strong:
        print(
            f"{attack_name} changed the label of {share:.1%} of the images; the detector learns "
            "from these alone",
            file=sys.stderr,
        )
    return Batch(found.image, batch.labels, batch.ids).take(changed)
