"""Detectors of strangers, in four frameworks, through all three threat models by the API."""

import functools
import importlib
import os

import numpy as np
import own_data
import pytest

import advdet

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
FRAMEWORKS = ("jax", "torch", "keras", "sklearn")
MODELS = ("zero_knowledge", "perfect_knowledge", "limited_knowledge")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@functools.cache
def own(framework):
    """The user's module, his classifier, and the attacker's own."""
    pytest.importorskip(framework)
    module = importlib.import_module(f"own_{framework}")
    return module, module.classifier(), module.classifier("attacker")


@pytest.mark.parametrize("threat_model", MODELS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_stranger_s_detector_under_each_threat_model(framework, threat_model, folder):
    module, classifier, other = own(framework)
    surrogate = (other, module.detector) if threat_model == "limited_knowledge" else None
    done = advdet.evaluate(
        module.detector, classifier=classifier, data=own_data.splits(), threat_model=threat_model,
        surrogate=surrogate, attack="ddn", steps=40, num_images=16, operating_point=0.05,
        results_dir=folder, progress=False,
    )  # fmt: skip
    record = done.records["ddn"]
    assert record["run"]["threat_model"] == threat_model
    assert record["run"]["dataset"] == "digits8" and record["run"]["defense"] != "none"
    assert record["clean"]["accuracy"] > 0.85
    assert 0.0 <= record["clean"]["false_positive_rate"]["0.05"] < 0.2
    assert done.baseline.records["ddn"]["attack"]["success_rate"]["misclassified"] == 1.0
    print(framework, threat_model, record["attack"]["success_rate"], record["attack"]["mean_l2"])
    assert record["attack"]["own_success_rate"] > 0.5  # gradients reach the attacker
    if threat_model == "perfect_knowledge":
        scores = done.arrays["ddn"]["adversarial_score"][0]
        threshold = np.float32(record["clean"]["thresholds"]["0.05"])
        assert (scores[done.arrays["ddn"]["success"]] <= threshold + 1e-4).all()
