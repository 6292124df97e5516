"""The networks that ship: as good as their manifests say, in any batch, never changed by use."""

import jax
import numpy as np
import pytest

from advdet import checkpoints, datasets, records, training
from advdet.attacks import DDN, driver
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended
from advdet.types import InputError

pytestmark = pytest.mark.slow
SHIPPED = [
    (dataset, half)
    for dataset in ("mnist", "cifar10")
    for half in ("full", "defender", "attacker")
    if checkpoints.shipped(dataset, half)
]


@pytest.fixture(scope="module")
def load():
    """The data set and a shipped network."""

    def both(dataset, half):
        try:
            splits = datasets.load(dataset, "tfds")
        except InputError as error:
            pytest.skip(str(error))
        return splits, training.load_classifier(checkpoints.shipped(dataset, half), splits)

    return both


@pytest.mark.parametrize("dataset, half", SHIPPED)
def test_accuracy_over_all_test_images_is_the_manifest_s(dataset, half, load):
    splits, classifier = load(dataset, half)
    manifest = checkpoints.load_manifest(checkpoints.shipped(dataset, half))
    found = training.accuracy(classifier, splits.test)
    print(f"{dataset} {half}: {found:.2%}")
    assert abs(found - manifest["test_accuracy"]) <= 0.001  # other machines round otherwise


@pytest.mark.parametrize("dataset", sorted({dataset for dataset, _ in SHIPPED}))
def test_an_image_alone_and_in_a_batch_get_the_same_logits(dataset, load):
    splits, classifier = load(dataset, "full")
    batch = splits.test.take(slice(512))
    alone = jax.jit(lambda image: classifier(image[None]).logits[0])
    one = np.stack([alone(image) for image in batch.images])
    many = training.logits(classifier, batch.images, 256)
    np.testing.assert_allclose(one, many, atol=1e-3)
    right = [(logits.argmax(1) == batch.labels).mean() for logits in (one, many)]
    print(f"{dataset}: {right[0]:.2%} alone, {right[1]:.2%} in batches of 256")
    assert right[0] == right[1]


@pytest.mark.parametrize("dataset", sorted({dataset for dataset, _ in SHIPPED}))
def test_evaluating_and_attacking_change_no_bit_of_the_network(dataset, load):
    splits, classifier = load(dataset, "full")
    before = jax.device_get(classifier.variables)
    digest = records.fingerprint(classifier)
    batch = splits.test.take(slice(16))
    training.accuracy(classifier, batch)
    driver.run(
        jax.random.key(0), DDN(20), Generic(targeted=False), undefended(classifier), batch.images,
        batch.labels, batch.ids, lanes=8,
    )  # fmt: skip
    assert records.fingerprint(classifier) == digest
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(classifier.variables))
