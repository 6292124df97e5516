"""The paper's attack on kernel density by the threshold of its released script.

Section 5.2 takes a density for low where it is below the median of the training images. The script
takes the density of the very image under attack, under its own class. A threshold that differs from
image to image is no detector's, so this is an experiment of its own: the attack of the preset
`paper`, with one threshold for each image; successes are judged by all centres, at the image's own
threshold and at the median.

python -m experiments.own_density --num_images=32
python -m experiments.own_density --defense=kernel_density:sigma=20 --num_centres=500
"""

from __future__ import annotations

import dataclasses

import numpy as np
from absl import flags

from advdet.attacks.special_objectives import TwoStages
from advdet.types import pytree
from experiments import ablation, common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
flags.FLAGS.set_default("defense", "kernel_density")
NUM_CENTRES = flags.DEFINE_integer(
    "num_centres", 100, "Training images of each class that the attacker uses.", lower_bound=1
)


@pytree
@dataclasses.dataclass(frozen=True)
class OwnThreshold(TwoStages):
    """`TwoStages` with one threshold for each image, `fitted["levels"]` of the defence shown.

    An objective is told of no image's identity, so the row is told with the target: its `target` is
    the wanted class plus `num_classes` times the row.

    Attributes:
      num_classes: of the classifier.
    """

    num_classes: int = dataclasses.field(default=10, metadata={"static": True})

    def __call__(self, key, defense, image, target):
        level = defense.fitted["levels"][target // self.num_classes]
        own = dataclasses.replace(defense, threshold=level)
        return super().__call__(key, own, image, target % self.num_classes)


def own_levels(defense, clean) -> np.ndarray:
    """[N] -log density of clean images under their own classes."""
    import jax

    score = jax.jit(jax.vmap(lambda image, label: defense.detector.class_score(
        defense.fitted, defense.classifier, image[None], label)[0]))  # fmt: skip
    return np.asarray(score(clean.images, np.asarray(clean.labels, np.int32)))


def main() -> None:
    """Attacks, judges, prints, and saves the figures as JSON."""
    from advdet import victims
    from advdet.attacks.objectives import Generic
    from advdet.defenses import undefended

    seed, whose = common.SEED.value, "densities are kernel_density's"
    detector, classifier, splits = ablation.prepared("KernelDensity", whose)
    clean, targets = ablation.paper_images(splits, seed)
    defense = victims.defend(detector, classifier, splits, seed=seed).at("native")
    attack = ablation.paper_attack("kernel_density", clean.images.shape[-1])

    first = ablation.attacked(
        "undefended", attack, Generic(), undefended(classifier), clean, targets, seed=seed
    )
    start = np.where(first.success[:, None, None, None], first.image, clean.images)
    objective = OwnThreshold(
        mask_seed=seed, num_centres=NUM_CENTRES.value, num_classes=splits.num_classes
    )
    shown = objective.view(defense, start, clean.images)
    shown = dataclasses.replace(shown, fitted={**shown.fitted, "levels": own_levels(shown, clean)})
    coded = targets + splits.num_classes * np.arange(len(targets), dtype=np.int32)
    found = ablation.attacked(
        "own thresholds", attack, objective, shown, clean, coded, seed=seed, start=start
    )

    predicted, scores = ablation.verdicts(defense, found.image, clean.ids, seed=seed)
    reached = predicted == targets
    rows = {
        "what the attack believes": found.success,
        "own threshold, all centres": reached & (scores <= own_levels(defense, clean)),
        "median, all centres": reached & (scores <= float(defense.threshold)),
    }
    rows = {name: ablation.figures(won, found.distance, first) for name, won in rows.items()}
    ablation.keep(
        "own_density", f"{splits.name}-own_density.json", attack, rows,
        sigma=float(defense.fitted["sigma"]), num_centres=NUM_CENTRES.value,
    )  # fmt: skip


if __name__ == "__main__":
    common.run(main)
