"""Prepares MNIST or CIFAR-10 as TensorFlow Datasets does, without TensorFlow.

    python -m experiments.prepare_data --dataset=mnist [--from_dir=FOLDER] [--data_dir=OUT]

Without --from_dir the original files are downloaded. Their checksums are verified either way, and
a set that is there already is left alone.
"""

import pathlib

from advdet import originals, prepared
from experiments import common, path_flags

_FROM_DIR = path_flags.define(
    "from_dir",
    None,
    "Folder with the original files: the four idx .gz of MNIST; of CIFAR-10 its python or binary "
    ".tar.gz, or the folder cifar-10-batches-py. Default: download them.",
)


def main() -> None:
    """Prepares the set that the flags name and says where it lies."""
    name = common.DATASET.value
    given = common.DATA_DIR.value
    data_dir = pathlib.Path(given) if given else prepared.default_data_dir()
    from_dir = pathlib.Path(_FROM_DIR.value) if _FROM_DIR.value else None
    if name in originals.NAMES and (folder := prepared.locate(name, data_dir)):
        print(f"{name} is prepared already: {folder}")
        return
    folder = originals.prepare(name, data_dir, from_dir)
    raw = prepared.read(name, folder)  # proves it readable, and fills the cache
    counts = ", ".join(
        f"{len(raw.arrays[f'{split}_labels'])} {split}" for split in ("train", "test")
    )
    print(f"{name} prepared ({counts} images): {folder}")


if __name__ == "__main__":
    common.run(main)
