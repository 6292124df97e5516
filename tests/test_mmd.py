"""MMD as a detector of sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import statistics
from advdet.detectors.mmd import Mmd
from advdet.types import Batch, FitData, InputError

NET = toys.classifier()
TRAIN = Batch(toys.digits(1, 60), np.zeros(60, np.int32), np.arange(60, dtype=np.int32))
DATA = FitData(TRAIN, TRAIN)
SMALL = Mmd(sigma2=10.0, num_permutations=99, num_reference=40)


def test_fit_keeps_random_training_images():
    fitted = SMALL.fit(jax.random.key(0), NET, DATA)
    reference = fitted["reference"]
    assert reference.shape == (40, toys.PIXELS) and reference.dtype == np.float32
    rows = TRAIN.images.reshape(60, -1)
    found = [np.flatnonzero((rows == row).all(1)).tolist() for row in reference]
    assert {len(f) for f in found} == {1} and len({f[0] for f in found}) == 40
    other = SMALL.fit(jax.random.key(1), NET, DATA)["reference"]
    assert (other != reference).any()


def test_the_p_value_is_that_of_the_permutation_test_compiled_or_not():
    fitted = SMALL.fit(jax.random.key(0), NET, DATA)
    images = jnp.asarray(toys.digits(2, 12))
    plain = SMALL.p_value(jax.random.key(3), fitted, NET, images)
    quick = jax.jit(SMALL.p_value)(jax.random.key(3), fitted, NET, images)
    rows = images.reshape(12, -1)
    large = statistics.mmd_test_in_chunks(jax.random.key(3), rows, fitted["reference"], 10.0, 99, 9)
    assert plain.shape == () and plain.dtype == jnp.float32
    np.testing.assert_allclose([plain, quick], [large.p_value] * 2, rtol=1e-6)
    assert 0.01 < plain < 1


def test_sets_from_elsewhere_are_rejected_and_training_images_are_not():
    fitted = SMALL.fit(jax.random.key(0), NET, DATA)
    p_value = jax.jit(SMALL.p_value)
    grey = jnp.asarray(0.5 * toys.digits(2, 12))
    np.testing.assert_allclose(p_value(jax.random.key(3), fitted, NET, grey), 0.01, rtol=1e-6)
    clean = [
        p_value(jax.random.key(seed), fitted, NET, jnp.asarray(toys.digits(10 + seed, 12)))
        for seed in range(20)
    ]
    assert np.mean(np.array(clean) < 0.05) <= 0.2
    assert np.median(clean) > 0.2


def test_settings_and_sets_without_meaning_are_refused():
    for sigma2 in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="sigma2 must be"):
            Mmd(sigma2=sigma2)
    with pytest.raises(ValueError, match="num_permutations must be at least 1"):
        Mmd(num_permutations=0)
    for wrong in ({"num_reference": 1}, {"set_size": 1}):
        with pytest.raises(ValueError, match="num_reference and set_size must be at least 2"):
            Mmd(**wrong)
    with pytest.raises(InputError, match="num_reference=1000, but there are 60 training images"):
        Mmd().fit(jax.random.key(0), NET, DATA)
    fitted = SMALL.fit(jax.random.key(0), NET, DATA)
    with pytest.raises(InputError, match="at least 2, not 1"):
        SMALL.p_value(jax.random.key(0), fitted, NET, jnp.zeros((1, *toys.SHAPE)))
