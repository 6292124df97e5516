"""Pictures that occur more than once in a data set, as they were stored: at 8 bits.

Two files of one picture differ in their last bits where they were divided by 255 in another way;
compared bit by bit they would pass as two pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_CHUNK = 1000  # images turned to bytes at a time, to need little memory


class Copies(NamedTuple):
    """How many images of one part are among those of another.

    Attributes:
      among: the part that they are copies of.
      part: the part that they are counted in.
      count: how many at 8 bits.
      exact: how many of these to the last bit.
      total: images of `part`.
    """

    among: str
    part: str
    count: int
    exact: int
    total: int

    def __str__(self) -> str:
        how = "" if self.exact == self.count else f" at 8 bits ({self.exact} to the last bit)"
        return f"{self.count} of the {self.total} {self.part} images are among the {self.among} " \
               f"images, too{how}"  # fmt: skip


def between(parts: dict[str, Sequence[np.ndarray]]) -> list[Copies]:
    """What the parts of a data set share, and what is in one of them more than once.

    Args:
      parts: name -> arrays of images [N, H, W, C] in [0, 1].

    Returns:
      One for each two parts that share images, the later one's images among the earlier one's, and
      for each part that holds copies of its own.
    """
    top = brightest(*(images for arrays in parts.values() for images in arrays))
    rough, fine = {}, {}
    for name, arrays in parts.items():
        rough[name] = [key for images in arrays for key in _at_8_bits(images, top)]
        fine[name] = [key for images in arrays for key in _exactly(images)]
    names, found = list(parts), []
    for place, name in enumerate(names):
        own = _count_later(rough[name]), _count_later(fine[name])
        pairs = [(other, *(_count_among(keys[name], keys[other]) for keys in (rough, fine)))
                 for other in names[:place]]  # fmt: skip
        for among, count, exact in (*pairs, (name, *own)):
            if count:
                found.append(Copies(among, name, count, exact, len(rough[name])))
    return found


def first_of_each(images: np.ndarray) -> np.ndarray:
    """The rows [M] of images [N, H, W, C] that are no copies of earlier ones, at 8 bits."""
    seen: dict[bytes, int] = {}
    for row, key in enumerate(_at_8_bits(images, brightest(images))):
        seen.setdefault(key, row)
    return np.array(list(seen.values()), np.intp)


def brightest(*arrays: np.ndarray) -> float:
    """What stands for 255: 1, or less where the images use a small part of [0, 1]."""
    return max((float(images.max()) for images in arrays if len(images)), default=1.0) or 1.0


def _at_8_bits(images: np.ndarray, top: float) -> Iterator[bytes]:
    for start in range(0, len(images), _CHUNK):
        part = np.ascontiguousarray(images[start : start + _CHUNK], np.float32)
        yield from _digests(np.rint(part * np.float32(255 / top)).astype(np.uint8))


def _exactly(images: np.ndarray) -> Iterator[bytes]:
    return _digests(np.ascontiguousarray(images))


def _digests(images: np.ndarray) -> Iterator[bytes]:
    for image in images:
        yield hashlib.blake2b(image, digest_size=16).digest()


def _count_among(keys: list[bytes], others: list[bytes]) -> int:
    known = set(others)
    return sum(key in known for key in keys)


def _count_later(keys: list[bytes]) -> int:
    return len(keys) - len(set(keys))
