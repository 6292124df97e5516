"""Records on disk: layout, content, hash, damage; and figures that follow from the arrays."""

import dataclasses
import json
import os
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import files_in, read_record

import advdet
from advdet import datasets, detectors, metrics, provenance, results, settings
from advdet.defenses import POINTS, Defense
from advdet.types import InputError

pytest_plugins = ["cli_tools"]

_KEYS = {
    "schema", "run", "counts", "clean", "attack", "detection", "controls",
    "correction", "sets", "verdict",
    "intervals", "indicators", "paper", "seconds", "arrays_sha256",
}  # fmt: skip
_JUDGE, _DRAWS = 0x4A55, 5


@dataclasses.dataclass(frozen=True)
class NoisyInk(advdet.Detector):
    """Suspects much ink, and draws random numbers."""

    random: ClassVar[bool] = True

    noise: float = 0.01

    def score(self, key, fitted, classifier, images):
        del fitted, classifier
        noise = self.noise * jax.random.normal(key, images.shape[:1])
        return jnp.mean(images, axis=(1, 2, 3)) + noise


@pytest.fixture(scope="module")
def evaluated(classifier, splits, tmp_path_factory):
    """A small evaluation of a random detector, and the folder of its records."""
    folder = tmp_path_factory.mktemp("results")
    evaluation = advdet.evaluate(
        NoisyInk(), classifier=classifier, data=splits, objective="generic", preset="smoke",
        num_images=12, steps=20, binary_search_steps=2, seed=3, results_dir=folder,
        progress=False, command="by hand",
    )  # fmt: skip
    return evaluation, folder


def test_records_lie_where_their_settings_say(evaluated):
    evaluation, folder = evaluated
    for name, path in evaluation.paths.items():
        relative = path.relative_to(folder).as_posix()
        assert re.fullmatch(
            rf"mnist_5k/perfect_knowledge/noisy_ink/{name}\.generic/"
            r"random-0\.05-k0-[0-9a-f]{8}-seed3\.json",
            relative,
        )
        assert path.exists() and path.with_suffix(".npz").exists()
    assert set(evaluation.paths) == {"carlini_wagner", "ddn", "best"}
    for path in evaluation.baseline.paths.values():
        assert path.relative_to(folder).parts[:3] == ("mnist_5k", "perfect_knowledge", "none")
    assert not [name for name in files_in(folder) if "partial" in name or "/." in name]


def test_a_record_has_the_schemas_keys_and_nothing_undefined(evaluated):
    evaluation, _ = evaluated
    for name, path in evaluation.paths.items():
        record, arrays = read_record(path)
        assert set(record) == _KEYS
        assert record["arrays_sha256"] == str(arrays["sha256"])
        assert record == json.loads(json.dumps(evaluation.records[name]))
        for field, value in evaluation.arrays[name].items():
            np.testing.assert_array_equal(arrays[field], value)
        assert set(record["attack"]["success_rate"]) == {"misclassified", *POINTS}
        assert record["attack"]["success_rate"]["0.01"] is None
        assert record["correction"] is None and record["sets"] is None
        assert record["run"]["command"] == "by hand"
    record, _ = read_record(evaluation.baseline.paths["ddn"])
    assert record["attack"]["baseline_ratio"] is None
    assert record["detection"]["auc"] is None
    assert record["detection"]["reason"] == "this defence flags nothing"


def _draw_by_hand(classifier, images, ids, seed):
    """The judge's scores [D, N], one image at a time, as its docstring says."""
    detector = NoisyInk()
    score = jax.jit(lambda key, image: detector.score(key, (), classifier, image[None])[0])
    root = jax.random.fold_in(jax.random.key(seed), _JUDGE)
    rows = []
    for draw in range(_DRAWS):
        draw_key = jax.random.fold_in(root, draw)
        keys = [jax.random.fold_in(draw_key, int(i)) for i in ids]
        rows.append([float(score(key, image)) for key, image in zip(keys, images)])
    return np.array(rows)


def test_stored_verdicts_are_what_anyone_draws_again_from_the_stored_images(evaluated, classifier):
    evaluation, _ = evaluated
    for name, path in evaluation.paths.items():
        record, arrays = read_record(path)
        threshold = np.float32(record["clean"]["thresholds"]["0.05"])
        as_file = arrays["image_uint8"].astype(np.float32) / np.float32(255)
        judged = {}
        for kind, images in (("exact", arrays["image"]), ("8 bit", as_file)):
            scores = _draw_by_hand(classifier, images, arrays["id"], record["run"]["seed"])
            logits = np.asarray(classifier(images).logits)
            wanted = logits.argmax(axis=1) == arrays["target_class"]
            judged[kind] = np.mean(wanted & (scores <= threshold), axis=0)
            if kind == "exact":
                np.testing.assert_allclose(arrays["adversarial_score"], scores, atol=1e-5)
                np.testing.assert_array_equal(arrays["classified_as_wanted"], wanted)
        np.testing.assert_allclose(arrays["judged_success"], judged["exact"], atol=1e-6)
        attacked = arrays["clean_correct"]
        rates = record["attack"]["success_rate"]
        assert rates["0.05"] == pytest.approx(judged["exact"][attacked].mean()), name
        assert record["attack"]["success_rate_8bit"] == pytest.approx(
            judged["8 bit"][attacked].mean()
        )


def test_figures_follow_from_the_arrays(evaluated, splits):
    evaluation, _ = evaluated
    clean = splits.test.images[:12]
    for evaluation in (evaluation, evaluation.baseline):
        for name, path in evaluation.paths.items():
            record, arrays = read_record(path)
            attacked, success = arrays["clean_correct"], arrays["judged_success"]
            won = attacked & (success > 0.5)
            attack, counts = record["attack"], record["counts"]
            assert counts["requested"] == 12
            assert counts["attacked"] == counts["clean_correct"] == attacked.sum()
            assert counts["succeeded"] == won.sum()
            distance = metrics.l2(arrays["image"], clean)
            np.testing.assert_allclose(
                distance[arrays["success"]], arrays["distance"][arrays["success"]], rtol=1e-4
            )
            if won.any():
                assert attack["mean_l2"] == pytest.approx(distance[won].mean())
            else:
                assert attack["mean_l2"] is None
            everyone = np.where(won, distance, np.inf)[attacked]
            middle = np.median(everyone)
            if np.isfinite(middle):
                assert attack["median_l2"] == pytest.approx(middle)
            else:
                assert attack["median_l2"] is None
            assert attack["gradients_per_image"] == pytest.approx(arrays["num_gradients"].mean())
            point = record["run"]["operating_point"]
            rate = attack["success_rate"]["misclassified" if point == "none" else point]
            assert rate == pytest.approx(success[attacked].mean())
            low, high = record["intervals"]["success_rate"]
            assert low <= rate <= high


def test_failures_are_clean_images_at_no_distance(evaluated, splits):
    evaluation, _ = evaluated
    for name, arrays in evaluation.arrays.items():
        failed = ~arrays["success"]
        np.testing.assert_array_equal(
            arrays["image"][failed], splits.test.images[:12][failed], err_msg=name
        )
        assert np.isposinf(arrays["distance"][failed]).all()
        assert np.isfinite(arrays["distance"][~failed]).all()


def test_best_takes_each_image_from_the_attack_it_names(evaluated):
    evaluation, _ = evaluated
    best = evaluation.arrays["best"]
    assert set(best["attack"]) <= {"carlini_wagner", "ddn"}
    for row, name in enumerate(best["attack"]):
        for field in ("image", "success", "distance", "const", "nearest_miss", "missed"):
            np.testing.assert_array_equal(best[field][row], evaluation.arrays[name][field][row])
    parts = [evaluation.arrays[name] for name in ("carlini_wagner", "ddn")]
    np.testing.assert_array_equal(
        best["num_gradients"], sum(part["num_gradients"] for part in parts)
    )
    for row in range(12):  # nothing is lost where one of them survives every draw
        sure = [part for part in parts if part["judged_success"][row] == 1 and part["success"][row]]
        assert not sure or best["success"][row]


def _hash(
    splits, classifier, spec="dropout", attack_name="ddn", threat_model="perfect_knowledge",
    command=None, **changes,
):  # fmt: skip
    given = dict(
        data=splits, preset="smoke", attack=None, objective=None, threat_model=threat_model,
        num_images=None, targets=None, operating_point=None, confidence=None,
        detector_margin=None, margin_rate=None, lanes=None, train_attack=None, seed=0,
        attack_settings={},
    )  # fmt: skip
    detector = detectors.from_spec(spec)
    name = detectors.name_of(detector)
    plan = settings.for_data(settings.fill(name, detector, **(given | changes)), splits)
    attack = settings.make_attack(plan, attack_name, splits, name)
    part = provenance.run_part(
        plan, splits, attack=attack_name, attack_settings=dataclasses.asdict(attack),
        objective=settings.make_objective(plan, name), defense_name=name,
        defense=Defense(classifier, (), 0.0, 1.0, detector), threat_model=threat_model,
        surrogate=None, command=command,
    )  # fmt: skip
    return part["settings_hash"]


def test_each_setting_that_can_change_a_result_changes_the_hash(splits, classifier):
    labels = splits.test.labels[:16]
    changed = {
        "nothing": {},
        "defence": dict(spec="none"),
        "hyperparameter": dict(spec="dropout:num_samples=31"),
        "attack": dict(attack_name="carlini_wagner"),
        "objective": dict(objective="generic"),
        "objective's setting": dict(objective="quantile:z=1"),
        "threat model": dict(threat_model="limited_knowledge"),
        "images": dict(num_images=15),
        "targets": dict(targets="least_likely"),
        "untargeted": dict(targets="untargeted"),
        "an array": dict(targets=(labels + 1) % 10),
        "another array": dict(targets=(labels + 2) % 10),
        "operating point": dict(operating_point="0.01"),
        "confidence": dict(confidence=0.1),
        "margin": dict(detector_margin=0.1),
        "lanes": dict(lanes=3),
        "seed": dict(seed=1),
        "steps": dict(attack_settings=dict(steps=7)),
        "C&W's rate": dict(attack_name="carlini_wagner", attack_settings=dict(learning_rate=0.2)),
        "C&W's c": dict(attack_name="carlini_wagner", attack_settings=dict(initial_const=0.2)),
        "C&W's search": dict(
            attack_name="carlini_wagner", attack_settings=dict(binary_search_steps=2)
        ),
        "train_attack": dict(train_attack="ddn"),
    }
    found = {what: _hash(splits, classifier, **change) for what, change in changed.items()}
    found["weights"] = _hash(splits, jax.tree.map(lambda x: x * 1.001, classifier))
    other = datasets.Splits.from_arrays(
        test=(splits.test.images[:20], splits.test.labels[:20]),
        clean=(splits.select.images[:20], splits.select.labels[:20]),
        class_names=splits.class_names,
    )
    found["data"] = _hash(other, classifier)
    assert len(set(found.values())) == len(found), found
    # As does nothing else; results_dir, data_dir and resume never reach the hash.
    assert found["nothing"] == _hash(splits, classifier, command="another")
    assert found["nothing"] == _hash(splits, classifier, operating_point=0.05, confidence=0)


def test_a_record_of_an_earlier_revision_is_not_taken_for_finished(splits, classifier, monkeypatch):
    before = _hash(splits, classifier)
    monkeypatch.setattr(detectors.Dropout, "revision", detectors.Dropout.revision + 1)
    assert _hash(splits, classifier) != before


_ARRAYS = {"id": np.arange(3, dtype=np.int32), "image": np.zeros((3, 2, 2, 1), np.float32)}


def test_a_crash_while_writing_leaves_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "cell" / "record.json"

    def crash(source, target):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="disk full"):
            results.save(path, {"schema": 1}, _ARRAYS)
        with pytest.raises(OSError, match="disk full"):
            results.save_partial(path, np.ones(3, bool), _ARRAYS)
    assert files_in(tmp_path) == {}
    assert results.load(path) is None
    with pytest.raises(ValueError, match="JSON"):  # no NaN in a record, and no record then
        results.save(path, {"schema": 1, "value": float("nan")}, _ARRAYS)
    assert results.load(path) is None
    assert [name for name in files_in(tmp_path) if name.endswith("json")] == []


def test_ctrl_c_just_after_a_file_took_its_place_stays_ctrl_c(tmp_path, monkeypatch):
    replace = os.replace

    def interrupted(source, target):
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.save_partial(tmp_path / "record.json", np.ones(3, bool), _ARRAYS)


def test_equal_arrays_give_equal_bytes(tmp_path):
    for name in ("one", "two"):
        results.save(tmp_path / f"{name}.json", {"schema": 1}, _ARRAYS)
    files = files_in(tmp_path)
    assert files["one.npz"] == files["two.npz"] and files["one.json"] == files["two.json"]


def test_any_flipped_or_missing_byte_is_refused_or_harmless(tmp_path):
    path = tmp_path / "record.json"
    results.save(path, {"schema": 1}, _ARRAYS)
    npz = path.with_suffix(".npz")
    good = npz.read_bytes()
    damaged = [good[:length] for length in range(0, len(good), 7)]
    for at in range(0, len(good), 3):
        content = bytearray(good)
        content[at] ^= 0x81
        damaged.append(bytes(content))
    refused = 0
    for content in damaged:
        npz.write_bytes(content)
        try:
            _, arrays = results.load(path)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and "move it and its .npz away" in str(error)
        else:  # names, dates and the like: nothing that is read
            assert results.digest(arrays) == results.digest(_ARRAYS)
    assert refused > len(damaged) / 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "cannot be read"),
        ("[1, 2]", "cannot be read"),
        ("{}", "it lacks 'schema'"),
        ('{"schema": 99}', "its schema is 99, this version reads 1"),
        ('{"schema": 1', "cannot be read"),
    ],
)
def test_a_damaged_json_is_refused(tmp_path, content, said):
    path = tmp_path / "record.json"
    results.save(path, {"schema": 1}, _ARRAYS)
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        results.load(path)


def test_arrays_of_another_record_or_none_are_refused(tmp_path):
    path = tmp_path / "record.json"
    results.save(path, {"schema": 1}, _ARRAYS)
    np.savez(path.with_suffix(".npz"), **_ARRAYS)
    with pytest.raises(InputError, match="do not match its sha256"):
        results.load(path)
    path.with_suffix(".npz").unlink()
    with pytest.raises(InputError, match="No such file"):
        results.load(path)


def test_a_partial_result_comes_back_or_is_refused(tmp_path):
    path = tmp_path / "record.json"
    finished = np.array([True, False, True])
    like = {"finished": finished, **_ARRAYS}
    assert results.load_partial(path, like) is None
    results.save_partial(path, finished, _ARRAYS)
    found = results.load_partial(path, like)
    assert set(found) == set(like)
    for name, value in like.items():
        np.testing.assert_array_equal(found[name], value)
    with pytest.raises(InputError, match="id has shape"):
        results.load_partial(path, like | {"id": np.zeros(4, np.int32)})
    with pytest.raises(InputError, match="it lacks 'more'"):
        results.load_partial(path, like | {"more": np.zeros(4)})
    partial = results.partial_path(path)
    good = partial.read_bytes()
    for content in (b"", b"not an npz", good[: len(good) // 2], good[:-1]):
        partial.write_bytes(content)
        with pytest.raises(InputError, match="damaged .*delete it, or run without --resume"):
            results.load_partial(path, like)
        assert partial.read_bytes() == content
    results.drop_partial(path)
    results.drop_partial(path)
    assert files_in(tmp_path) == {}
