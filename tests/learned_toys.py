"""Small data for the tests of learned detectors: digits of a kind, and marked copies of them."""

import numpy as np

from advdet.types import Batch, FitData

SHAPE = (16, 16, 1)  # the least that the MNIST network, with all its features, takes
CLASSES = 10


def clean(seed, count, first_id, shape=SHAPE):
    """Noise with one bright quarter, which is the class (0 to 3)."""
    random = np.random.RandomState(seed)
    images = 0.4 * random.rand(count, *shape).astype(np.float32)
    labels = random.randint(0, 4, count).astype(np.int32)
    height, width = shape[0] // 2, shape[1] // 2
    for image, label in zip(images, labels):
        top, left = divmod(int(label), 2)
        image[top * height : (top + 1) * height, left * width : (left + 1) * width] += 0.6
    return Batch(images, labels, np.arange(first_id, first_id + count, dtype=np.int32))


def marked(batch):
    """The same images under a faint checkerboard, with the ids of their sources."""
    rows, columns = np.indices(batch.images.shape[1:3])
    board = (((rows + columns) % 2) - 0.5).astype(np.float32)[None, :, :, None]
    images = np.clip(batch.images + 0.3 * board, 0.0, 1.0)
    return batch._replace(images=images)


def data(train=32, select=16, shape=SHAPE, **options):
    """`FitData` of clean and marked images."""
    first, second = clean(1, train, 0, shape), clean(2, select, 1000, shape)
    return FitData(first, second, marked(first), marked(second), **options)
