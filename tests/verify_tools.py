"""Honest records of small detectors of every kind, and ways to forge them."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import toy_detectors
import toys

import advdet
from advdet import results, verify
from advdet.detectors import from_spec

N = 10
MMD = "mmd:num_reference=40,set_size=4,num_permutations=99"


@dataclasses.dataclass(frozen=True)
class DeadFar(toy_detectors.Far):
    """In steps: the same detector, but for a gradient that is zero everywhere."""

    def score(self, key, fitted, classifier, images):
        return jnp.floor(super().score(key, fitted, classifier, images))


# name -> (detector, threat model, further settings)
HONEST = {
    "score": (toy_detectors.Far(), "perfect_knowledge", {}),
    "random": (
        toy_detectors.ShakyFar(),
        "perfect_knowledge",
        {"operating_point": "0.5", "objective": "generic"},
    ),
    "dead": (DeadFar(), "perfect_knowledge", {"operating_point": "0.5"}),
    "unaware": (toy_detectors.Far(), "zero_knowledge", {"operating_point": "0.5"}),
    "corrector": (toy_detectors.Fade(), "zero_knowledge", {}),
    "set": (from_spec(MMD), "perfect_knowledge", {}),
    "copy": (toy_detectors.Far(), "limited_knowledge", {}),
    "bare": ("none", "perfect_knowledge", {"targets": "untargeted"}),
    "given": ("none", "perfect_knowledge", {"targets": "least_likely"}),
}


@pytest.fixture(scope="session")
def scene():
    """The classifier and the data."""
    return toy_detectors.splits()


@pytest.fixture(scope="session")
def stored(scene, tmp_path_factory):
    """The path of an honest record's JSON, by name; each is made once."""
    network, data = scene
    made = {}

    def get(name, attack="ddn"):
        if name not in made:
            detector, threat_model, settings = HONEST[name]
            copy = None
            if threat_model == "limited_knowledge":
                copy = (toys.network(7), detector)
            given = dict(
                classifier=network, data=data, threat_model=threat_model,
                attack="all" if name == "given" else "ddn",
                preset="smoke", num_images=N, steps=20, binary_search_steps=1, lanes=toys.LANES,
                results_dir=tmp_path_factory.mktemp(name), surrogate=copy, progress=False,
            )  # fmt: skip
            made[name] = advdet.evaluate(detector, **(given | settings))
        return made[name].paths[attack]

    return get


@pytest.fixture(scope="session")
def check(scene):
    """Verifies a record with the scene's classifier and data."""
    network, data = scene
    kept = {}

    def call(path, **changes):
        given = dict(classifier=network, data=data, kept=kept, progress=False)
        return verify.verify(path, **(given | changes))

    return call


@pytest.fixture(scope="session")
def honest(stored, check):
    """The verdicts on an honest record, by name of the claim."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = verdicts(check(stored(name)))
        return made[name]

    return get


def verdicts(found):
    return {claim.name: claim.verdict for claim in found}


def of(found, verdict):
    return {claim.name for claim in found if claim.verdict == verdict}


def forged(path, folder, json_change=None, array_change=None, seal=True):
    """A copy of a record with its JSON and arrays changed, and sealed as if it were honest."""
    record = json.loads(path.read_text())
    with np.load(path.with_suffix(".npz")) as file:
        arrays = {name: file[name] for name in file.files}
    digest = arrays.pop("sha256")
    if json_change:
        json_change(record)
    if array_change:
        array_change(arrays)
    if seal:
        digest = np.array(results.digest(arrays))
        record["arrays_sha256"] = str(digest)
    copy = folder / path.name
    copy.write_text(json.dumps(record))
    np.savez(copy.with_suffix(".npz"), **arrays, sha256=digest)
    return copy


def put(*path, value):
    def change(record):
        *parents, last = path
        place = record
        for name in parents:
            place = place[name]
        place[last] = value(place[last])

    return change
