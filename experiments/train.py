"""Trains a classifier and stores it with a manifest that says how.

    python -m experiments.train --dataset=mnist --half=full

The state is stored after each epoch; `--resume` goes on from there after a stop of any kind and
ends with the same weights as a run that was not stopped.
"""

from __future__ import annotations

import pathlib
import shutil

from absl import flags

from experiments import common, path_flags

_HALF = flags.DEFINE_enum(
    "half",
    "full",
    ["full", "defender", "attacker"],
    "Training data: all of it, or the half of the defender or of the attacker, as the "
    "limited-knowledge experiments need them.",
)
_SCHEDULE = flags.DEFINE_enum(
    "schedule", "fast", ["fast", "paper"], "fast: short; paper: the paper's epochs and rates."
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", None, "Passes over the training images, in place of the schedule's.", lower_bound=1
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with a training that was stopped.")
_OUT = path_flags.define(
    "out", None, "The .npz to write (default: where the experiments look for it in the cache)."
)


def main() -> int:
    """Loads, trains, stores."""
    from advdet import checkpoints, training

    splits = common.splits()
    half, seed = _HALF.value, common.SEED.value
    settings = {"half": half, "schedule": _SCHEDULE.value, "epochs": _EPOCHS.value, "seed": seed}
    folder = training.checkpoint_folder(splits, **settings, cache=None)
    if not _RESUME.value:
        shutil.rmtree(folder, ignore_errors=True)
    out = pathlib.Path(_OUT.value or training.cached_path(splits, **settings, cache=None))
    print(training.describe(splits, **settings), flush=True)
    print(f"state after each epoch: {folder}", flush=True)
    classifier, manifest = training.train_classifier(splits, **settings, checkpoint=folder)
    checkpoints.save(out, classifier.variables, manifest)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"weights: {out}\nmanifest: {checkpoints.manifest_path(out)}")
    return 0


if __name__ == "__main__":
    common.run(main)
