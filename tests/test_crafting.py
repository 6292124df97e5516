"""Adversarial images to learn from: right, kept, taken up after a stop."""

import numpy as np
import pytest
import toys

from advdet import cells, crafting
from advdet.attacks import driver
from advdet.types import Batch, InputError


def source(count=24):
    images = toys.digits(3, count)
    labels = toys.predicted(toys.network(), images)
    return Batch(images, labels, np.arange(100, 100 + count, dtype=np.int32))


def craft(attack="ddn", **changes):
    given = dict(num_classes=toys.CLASSES, seed=0, folder=None, progress=False)
    return crafting.craft(attack, toys.network(), "toy", source(), **(given | changes))


def test_labels_change_at_a_distance_and_rows_keep_their_source():
    made, clean = craft(), source()
    rows = made.ids - 100
    assert len(made.ids) >= 20
    np.testing.assert_array_equal(made.labels, clean.labels[rows])
    assert (toys.predicted(toys.network(), made.images) != made.labels).all()
    assert (np.abs(made.images - clean.images[rows]).max((1, 2, 3)) > 0).all()


def test_a_set_that_is_kept_is_not_made_again(tmp_path, monkeypatch):
    first = craft(folder=tmp_path)

    def refuse(*_, **__):
        raise AssertionError("attacked again")

    monkeypatch.setattr(driver, "run", refuse)
    again = craft(folder=tmp_path)
    for one, other in zip(first, again):
        np.testing.assert_array_equal(one, other)
    for change in ({"seed": 1}, {"attack": "fast_gradient"}):
        with pytest.raises(AssertionError, match="attacked again"):
            craft(folder=tmp_path, **change)


def test_a_stopped_set_goes_on_with_what_is_finished(tmp_path, monkeypatch):
    whole = craft()
    run, counts = driver.run, []

    def stopped(*arguments, todo, on_slice, **options):
        counts.append(len(todo))
        if len(counts) == 1:
            done = run(*arguments, todo=todo[:10], on_slice=on_slice, **options)
            on_slice(done)
            raise KeyboardInterrupt
        return run(*arguments, todo=todo, on_slice=on_slice, **options)

    monkeypatch.setattr(cells.driver, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        craft(folder=tmp_path)
    resumed = craft(folder=tmp_path)
    assert counts == [24, 14]
    np.testing.assert_array_equal(resumed.images, whole.images)


def test_a_weak_attack_is_excused_and_its_failures_left_out(monkeypatch):
    made = craft("fast_gradient")
    assert 0 < len(made.ids) <= 24
    assert (toys.predicted(toys.network(), made.images) != made.labels).all()


@pytest.mark.parametrize("attack", ["ddn", "fast_gradient"])
def test_an_attack_that_changes_too_few_labels_is_refused(attack, monkeypatch):
    attack_images = cells.attack_images

    def fails(*arguments, **options):
        found, seconds = attack_images(*arguments, **options)
        return found._replace(success=np.zeros_like(found.success)), seconds

    monkeypatch.setattr(cells, "attack_images", fails)
    with pytest.raises(InputError, match=f"{attack} changed the label of only"):
        craft(attack)
