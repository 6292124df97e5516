"""Trains a network on random images, to be killed: python FILE CHANNELS FOLDER OUT."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np

from advdet import checkpoints, training
from advdet.splits import Splits
from experiments import common

_EPOCHS = 6


def main(channels, folder, out):
    common.configure_process()
    rng = np.random.RandomState(0)
    images = rng.rand(256, 16, 16, channels).astype(np.float32)
    labels = np.arange(256) % 10
    part = images[:64], labels[:64]
    splits = Splits.from_arrays(test=part, clean=part, train=(images, labels), name="random")
    classifier, manifest = training.train_classifier(
        splits, epochs=_EPOCHS, checkpoint=pathlib.Path(folder), progress=False
    )
    checkpoints.save(out, classifier.variables, manifest)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
