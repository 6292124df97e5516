"""Fits a detector and writes what it learned, to be shipped or looked at.

python -m experiments.fit --defense=binary --half=full --out=advdet/weights/mnist
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags

from experiments import common, evaluation, path_flags

flags.adopt_module_key_flags(common)
flags.declare_key_flag("defense")
flags.declare_key_flag("train_attack")
HALF = flags.DEFINE_enum(
    "half", "full", ["full", "defender", "attacker"], "Whose training images it learns from."
)
OUT = path_flags.define("out", None, "Folder for the npz and its manifest.", required=True)


def main() -> None:
    """Fits each defence of the flags (`all`: the ten) that learns something."""
    import jax
    import numpy as np

    from advdet import detectors, fits, training, victims

    splits = common.splits()
    classifier = training.classifier_for(splits, half=HALF.value)
    attack = evaluation.TRAIN_ATTACK.value or "carlini_wagner"
    seed = common.SEED.value

    def fit_one(spec):
        detector = detectors.from_spec(spec)
        victim = victims.defend(
            detector, classifier, splits, half=HALF.value, seed=seed, train_attack=attack
        )
        fitted = jax.device_get(victim.defense.fitted)
        if not jax.tree.leaves(fitted):
            print(f"{spec} learns nothing", file=sys.stderr)
            return
        half = splits.half(HALF.value)
        facts = victims.facts_for(detector, classifier, half, HALF.value, seed, attack)
        path = Path(OUT.value, fits.file_name(facts))
        fits.save(path, fitted, facts, evaluation.command("fit"))
        size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(fitted))
        print(f"{spec}: {path} ({size / 2**20:.1f} MiB); thresholds {victim.thresholds}")

    return evaluation.each_defense(fit_one)


if __name__ == "__main__":
    common.run(main)
