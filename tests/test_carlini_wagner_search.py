"""The C&W attack's search over c, from any start, on linear problems whose optimum is known."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from advdet.attacks import CarliniWagner, driver, presets
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended
from advdet.types import Classifier, Outputs

_BIAS = 64.0  # the image's frozen part lies in the box, too


@dataclasses.dataclass(frozen=True)
class OwnPlane:
    """Two classes on either side of a plane that each image carries in its second channel.

    So many problems run as one batch. The last row of the first channel holds the plane's place.
    """

    def __call__(self, variables, images, key=None):
        flat = images[:, :, 0, :]
        normal = jax.lax.stop_gradient(flat[:, :-1, 1] - 0.5) * variables["norm"]
        place = jax.lax.stop_gradient(flat[:, -1, 0] - 0.5) * _BIAS * variables["norm"]
        margin = jnp.sum((flat[:, :-1, 0] - 0.5) * normal, axis=1) - place
        return Outputs(jnp.stack([jnp.zeros_like(margin), margin], axis=1), {})


def problem(size, optimum, seed, start):
    """An image [size + 1, 1, 2] with its plane at this distance, and a start of this kind."""
    random = np.random.RandomState(seed)
    normal = 0.3 * random.choice([-1.0, 1.0], size) * random.uniform(0.7, 1.3, size)
    normal = normal.astype(np.float32).astype(np.float64)
    clean = random.uniform(0.3, 0.7, size).astype(np.float32).astype(np.float64)
    unit = normal / np.linalg.norm(normal)
    assert np.ptp(np.clip(clean + optimum * unit, 0, 1) - clean - optimum * unit) < 1e-6
    image = np.full((size + 1, 1, 2), 0.5)
    image[:-1, 0, 0], image[:-1, 0, 1] = clean, normal + 0.5
    image[-1, 0, 0] = (clean + optimum * unit - 0.5) @ normal / _BIAS + 0.5
    begin = image.copy()
    if start == "natural":
        far = clean + 2.0 * optimum * unit + 0.05 * random.randn(size)
        begin[:-1, 0, 0] = np.clip(far + max(0.0, 0.1 - (far - clean) @ unit) * unit, 0.02, 0.98)
    return image.astype(np.float32), begin.astype(np.float32)


def ratios(attack, cases, norm=3.0):
    """C&W's distances over the optima of cases (size, optimum, seed, start) of one size."""
    images, starts = (np.stack(part) for part in zip(*(problem(*case) for case in cases)))
    free = np.zeros(images.shape, bool)
    free[:, :-1, 0, 0] = True
    scale = norm / np.array([np.linalg.norm(i[:-1, 0, 1] - 0.5) for i in images])
    net = Classifier({"norm": jnp.float32(scale.mean())}, OwnPlane())
    result = driver.run(
        jax.random.key(0), attack, Generic(), undefended(net), images,
        np.ones(len(images), np.int32), np.arange(len(images), dtype=np.int32),
        lanes=len(images), start=starts, free=free,
    ).results  # fmt: skip
    assert result.success.all()
    assert (result.num_gradients <= attack.max_steps()).all()
    return result.distance / np.array([optimum for _, optimum, _, _ in cases])


def preset(name):
    return presets.make("carlini_wagner", presets.settings("carlini_wagner", name, 1, "none"))


def test_a_start_that_noise_made_adversarial_does_not_close_the_bracket():
    cases = [(8, 0.05, seed, "clean") for seed in range(12)]
    assert ratios(CarliniWagner(), cases).max() < 1.02


@pytest.mark.parametrize("name, most", [("fast", 1.05), ("thorough", 1.02)])
@pytest.mark.parametrize("size, optima", [(8, (0.01, 0.03, 0.3)), (784, (0.01, 0.5, 3.0))])
def test_the_optimum_is_found_from_clean_and_from_natural_starts(name, most, size, optima):
    seeds = range(3 if size == 8 else 1)  # large problems cost time
    cases = itertools.product([size], optima, seeds, ["clean", "natural"])
    found = ratios(preset(name), list(cases))
    assert 0.999 < found.min() and found.max() < most


def test_the_optimum_is_found_among_as_many_pixels_as_a_photograph_has():
    cases = itertools.product([3072], (0.01, 5.0), range(2), ["clean", "natural"])
    found = ratios(preset("fast"), list(cases))
    assert 0.999 < found.min() and found.max() < 1.05


def test_without_noise_the_last_step_refines_nothing():
    published = dataclasses.replace(preset("fast"), restart_noise=0.0)
    assert ratios(published, [(784, 0.01, 0, "clean")]).max() > 1.5
