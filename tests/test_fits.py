"""Fits that are kept: taken up again where everything is the same, and only there."""

import dataclasses

import numpy as np
import pytest
import toys

from advdet import checkpoints, fits
from advdet.detectors import Dropout
from advdet.types import InputError


def tree(seed=0):
    rng = np.random.RandomState(seed)
    return {
        "params": {"dense": {"kernel": rng.randn(3, 2).astype(np.float32)}},
        "mean": rng.randn(4).astype(np.float32),
        "labels": np.arange(4, dtype=np.int32),
    }


def facts(detector=None, **changes):
    given = dict(dataset="mnist", half="full", data_hash="d", classifier="c", seed=0)
    return fits.facts_of(detector or Dropout(), "dropout", **(given | changes))


class Counted:
    """A fit that counts its calls."""

    def __init__(self, found):
        self.found, self.folders = found, []

    def __call__(self, work):
        self.folders.append(work)
        return self.found


def flat(fitted):
    return checkpoints._flatten(fitted)


def test_a_fit_of_an_earlier_revision_is_not_taken_up(monkeypatch):
    before = fits.file_name(facts())
    monkeypatch.setattr(Dropout, "revision", Dropout.revision + 1)
    assert fits.file_name(facts()) != before
    assert facts()["revision"] == Dropout.revision


def test_a_fit_comes_back_as_it_was(tmp_path):
    path = fits.save(tmp_path / "a.npz", tree(), facts())
    back = fits.load(path)
    assert flat(back).keys() == flat(tree()).keys()
    for name, value in flat(tree()).items():
        np.testing.assert_array_equal(flat(back)[name], value)
        assert flat(back)[name].dtype == value.dtype
    assert checkpoints.load_manifest(path)["facts"] == facts()


def test_a_kept_fit_is_taken_up_and_not_made_again(tmp_path):
    fit = Counted(tree())
    for _ in range(2):
        found = fits.fitted_for(fit, Dropout(), facts(), tmp_path)
        np.testing.assert_array_equal(found["mean"], tree()["mean"])
    assert len(fit.folders) == 1
    assert fit.folders[0].parent == tmp_path / "unfinished"


@pytest.mark.parametrize(
    "change",
    [
        {"data_hash": "e"}, {"classifier": "x"}, {"seed": 1}, {"half": "attacker"},
        {"train_attack": "ddn"}, {"detector": Dropout(num_samples=7)},
    ],
)  # fmt: skip
def test_another_detector_classifier_set_or_seed_is_fitted_anew(change, tmp_path):
    fit = Counted(tree())
    fits.fitted_for(fit, Dropout(), facts(), tmp_path)
    fits.fitted_for(fit, Dropout(), facts(**change), tmp_path)
    assert len(fit.folders) == 2


def test_a_damaged_fit_is_named_and_made_again(tmp_path):
    fit, said = Counted(tree()), []
    fits.fitted_for(fit, Dropout(), facts(), tmp_path)
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-10])
    found = fits.fitted_for(fit, Dropout(), facts(), tmp_path, said.append)
    assert len(fit.folders) == 2 and path.name in said[0]
    np.testing.assert_array_equal(found["mean"], tree()["mean"])
    fits.fitted_for(fit, Dropout(), facts(), tmp_path)
    assert len(fit.folders) == 2


def test_a_foreign_detector_is_fitted_each_time_and_nothing_is_kept(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Dropout(toys.LinearScore):
        """Of the same name."""

    fit = Counted(tree())
    for _ in range(2):
        fits.fitted_for(fit, Dropout(), facts(), tmp_path)
    assert fit.folders == [None, None] and not list(tmp_path.iterdir())


def test_nothing_learned_keeps_nothing(tmp_path):
    assert fits.fitted_for(Counted(()), Dropout(), facts(), tmp_path) == ()
    assert not list(tmp_path.glob("*.npz"))


def test_a_missing_fit_is_an_error_in_words(tmp_path):
    with pytest.raises(InputError, match="no checkpoint at"):
        fits.load(tmp_path / "b.npz")
