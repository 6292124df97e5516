"""The networks that ship: as good as their manifests say, in any batch, never changed by use."""

import pathlib

import jax
import numpy as np
import pytest

import advdet
from advdet import checkpoints, datasets, fits, provenance, training, victims
from advdet.attacks import DDN, driver
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended
from advdet.detectors import DETECTORS
from advdet.types import InputError

pytestmark = pytest.mark.slow
WEIGHTS = pathlib.Path(advdet.__file__).parent / "weights"
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
    digest = provenance.fingerprint(classifier)
    batch = splits.test.take(slice(16))
    training.accuracy(classifier, batch)
    driver.run(
        jax.random.key(0), DDN(20), Generic(targeted=False), undefended(classifier), batch.images,
        batch.labels, batch.ids, lanes=8,
    )  # fmt: skip
    assert provenance.fingerprint(classifier) == digest
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(classifier.variables))


FITS = sorted(
    path.relative_to(WEIGHTS)
    for path in WEIGHTS.glob("*/*.json")
    if not path.stem.startswith("classifier-")
)


@pytest.mark.parametrize("name", FITS, ids=lambda name: name.stem)
def test_a_shipped_fit_is_the_one_that_today_s_code_asks_for(name, load):
    facts = checkpoints.load_manifest(WEIGHTS / name.with_suffix(".npz"))["facts"]
    splits, classifier = load(facts["dataset"], facts["half"])
    detector = DETECTORS[facts["defense"]](**facts["detector"])
    wanted = victims.facts_for(
        detector, classifier, splits.half(facts["half"]), facts["half"], facts["seed"],
        facts["train_attack"] or "carlini_wagner",
    )  # fmt: skip
    assert wanted == facts
    assert fits.shipped(wanted) == WEIGHTS / name.with_suffix(".npz")
    assert jax.tree.leaves(fits.load(fits.shipped(wanted)))


def test_there_are_shipped_fits_and_all_weights_are_small():
    assert FITS
    size = sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file())
    print(f"{size / 2**20:.1f} MiB")
    assert size < 30 * 2**20
