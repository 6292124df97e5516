"""Pictures that are there twice: across parts and within the test split, by what they show."""

import dataclasses

import numpy as np
import pytest

from advdet import copies, inputs, splits
from advdet.splits import Splits
from advdet.types import InputError

BYTES = np.random.RandomState(0).randint(0, 256, (300, 4, 4, 1)).astype(np.uint8)
BYTES[:, 0, 0, 0] = 255
LABELS = np.arange(300) % 3
ONE_WAY = BYTES.astype(np.float32) / np.float32(255)
OTHER_WAY = BYTES.astype(np.float32) * np.float32(1 / 255)


def part(images, rows):
    return images[rows], LABELS[rows]


def test_the_two_ways_to_scale_differ_in_most_images():
    """What makes the case: no comparison of bits finds them."""
    assert (ONE_WAY != OTHER_WAY).any(axis=(1, 2, 3)).mean() > 0.9


def test_pictures_scaled_in_another_way_are_copies_all_the_same():
    train, clean = part(ONE_WAY, slice(100, 300)), part(ONE_WAY, slice(0, 60))
    data = Splits.from_arrays(train=train, clean=clean, test=part(OTHER_WAY, slice(200, 240)))
    (found,) = data.copies
    assert (found.among, found.part, found.count, found.total) == ("train", "test", 40, 40)
    assert found.exact < 10
    said = rf"40 of the 40 test images are among the train images, too at 8 bits \({found.exact} to"
    with pytest.raises(InputError, match=said):
        splits.check(data)


def test_a_few_copies_are_told_and_not_refused():
    clean = part(ONE_WAY, slice(0, 150))
    data = Splits.from_arrays(clean=clean, test=part(OTHER_WAY, slice(149, 299)))
    splits.check(data)
    assert inputs.copies_warning(data).startswith("1 of the 150 test images are among the clean")
    apart = Splits.from_arrays(clean=clean, test=part(ONE_WAY, slice(150, 299)))
    assert inputs.copies_warning(apart) is None


def test_an_image_that_occurs_five_times_counts_once(capsys):
    rows = np.array([3, 7, 3, 9, 3, 3, 3, 8])
    images = np.where((np.arange(8) % 2 == 0)[:, None, None, None], ONE_WAY[rows], OTHER_WAY[rows])
    data = Splits.from_arrays(clean=part(ONE_WAY, slice(50, 90)), test=(images, LABELS[rows]))
    np.testing.assert_array_equal(data.test.images, images[[0, 1, 3, 7]])
    np.testing.assert_array_equal(data.test.labels, LABELS[rows][[0, 1, 3, 7]])
    np.testing.assert_array_equal(data.test.ids - 40, [0, 1, 3, 7])  # those of the rows given
    said = capsys.readouterr().err
    assert "4 of the 8 test images are copies" in said and "row 2" in said
    splits.check(data)
    again = dataclasses.replace(data, test=splits.Batch(
        images, LABELS[rows].astype(np.int32), np.arange(40, 48)))  # fmt: skip
    with pytest.raises(InputError, match="4 of the 8 test images are copies of earlier ones"):
        splits.check(again)


def test_images_that_use_a_small_part_of_the_range_are_not_taken_for_one():
    dark = ONE_WAY / np.float32(600)
    assert not np.rint(255 * dark).any()  # what makes the case
    data = Splits.from_arrays(clean=part(dark, slice(0, 100)), test=part(dark, slice(100, 300)))
    assert len(data.test.labels) == 200 and data.copies == []
    assert copies.brightest(np.zeros((2, 1, 1, 1))) == 1.0


def test_rounding_beyond_the_box_is_clipped_once_and_more_is_told_by_its_digits():
    near = ONE_WAY.copy()
    near[0, 1, 1, 0], near[1, 1, 1, 0] = np.float32(1.0000002), -2e-7
    clean, test = part(ONE_WAY, slice(100, 200)), part(near, slice(0, 50))
    data = Splits.from_arrays(clean=clean, test=test)
    assert data.test.images.min() == 0 and data.test.images.max() == 1
    splits.check(data)
    by_hand = dataclasses.replace(data, test=data.test._replace(images=near[:50]))
    with pytest.raises(InputError, match=r"to 1\.00000024, beyond .*\(Splits.from_arrays does"):
        splits.check(by_hand)
    near[0, 1, 1, 0] = np.float32(1.00002)
    with pytest.raises(InputError, match=r"range from -2\.0\d*e-07 to 1\.0000200\d*;"):
        Splits.from_arrays(clean=clean, test=part(near, slice(0, 50)))
