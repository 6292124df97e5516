"""Forgeries that follow from no array alone: names, signs, fits, luck, files, missing fields."""

import json
import shutil

import numpy as np
import pytest
import toy_detectors
import toys
from verify_tools import forged, of, put, verdicts

import advdet
from advdet import (
    claimed_signs,
    claims,
    fresh_draws,
    indicators,
    judge,
    metrics,
    provenance,
    results,
    verify,
    victims,
)
from experiments import verify as command

pytest_plugins = ["verify_tools"]


def relabelled(path, folder, *changes):
    """A record with its JSON changed, hashed again, sealed again, and laid where it belongs."""
    record, arrays = results.load(path)
    for change in changes:
        change(record)
    run = record["run"]
    run["settings_hash"] = provenance.settings_hash(run, None, [run["detector_class"]])
    place = results.record_path(folder, run)
    results.save(place, results.sealed(record, arrays), arrays)
    return place


def unraised(name):
    return put("indicators", name, value=lambda v: v | {"raised": False, "advice": None})


NOT_BROKEN = put("verdict", value=lambda v: "not broken by these attacks at this budget")
RELABELLED = {
    "the defence": ("score", "run.defense", [put("run", "defense", value=lambda v: "dropout")]),
    "the class": (
        "score", "run.defense",
        [put("run", "detector_class", value=lambda v: "advdet.detectors.dropout.Dropout")],
    ),
    "the attack": (
        "score", "run.settings.attack", [put("run", "attack", value=lambda v: "carlini_wagner")]
    ),
    "the verdict": ("dead", "verdict", [put("verdict", value=lambda v: "broken")]),
    "an indicator": ("dead", "indicators.zero_gradient", [unraised("zero_gradient"), NOT_BROKEN]),
    "the verdict that an indicator decides": (
        "dead", "verdict", [unraised("zero_gradient"), NOT_BROKEN]
    ),
    "a figure of an indicator": (
        "score", "indicators.noise_success_rate",
        [put("indicators", "noise_success_rate", "value", value=lambda v: 0.5)],
    ),
    "a control": (
        "score", "controls.tanh_round_trip.0.5",
        [put("controls", "tanh_round_trip", "0.5", value=lambda v: v + 0.2)],
    ),
    "the band": (
        "score", "paper.in_band", [put("paper", "in_band", value=lambda v: True)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RELABELLED)
def test_a_relabelled_record_is_refuted_though_hashed_again(what, stored, honest, check, tmp_path):
    name, claim, changes = RELABELLED[what]
    assert honest(name)[claim] == claims.CONFIRMED
    found = check(relabelled(stored(name), tmp_path, *changes))
    assert verdicts(found)[claim] == claims.REFUTED, found
    assert claims.status(found) == 1
    assert {"seal", "place"} <= of(found, claims.CONFIRMED)
    assert verdicts(found)["run.settings_hash"] == claims.CONFIRMED


def test_a_record_in_the_folder_of_another_is_refuted(stored, check, tmp_path):
    path = stored("score")
    place = tmp_path.joinpath(*path.parts[-5:])
    other = place.parents[2] / "dropout" / place.parent.name
    other.mkdir(parents=True)
    for suffix in (".json", ".npz"):
        shutil.copy(path.with_suffix(suffix), other / f"{path.stem}{suffix}")
    assert verdicts(check(other / path.name))["place"] == claims.REFUTED
    shutil.copy(path, tmp_path / path.name.replace("-k0", "-k9"))
    shutil.copy(
        path.with_suffix(".npz"), tmp_path / path.with_suffix(".npz").name.replace("-k0", "-k9")
    )
    assert verdicts(check(tmp_path / path.name.replace("-k0", "-k9")))["place"] == claims.REFUTED


def test_what_no_file_can_show_is_never_confirmed(stored, check):
    found = check(stored("given", "best"))
    claimed = of(found, claims.CLAIMED)
    assert {"run.threat_model", "run.attack", "run.objective", "run.settings", "seconds",
            "attack.gradients_per_image", "indicators.nearer_again"} <= claimed  # fmt: skip
    assert not claimed & of([c for c in found if c.is_core], claims.CONFIRMED)
    assert claims.status(found) == 0


def test_every_indicator_is_computed_or_listed(stored, check):
    names = set(indicators.RULES)
    record = json.loads(stored("score").read_text())
    computed = {
        name.removeprefix("indicators.")
        for name in of(check(stored("score")), claims.CONFIRMED)
        if name.startswith("indicators.")
    }
    assert computed | set(claimed_signs.NOT_COMPUTABLE) == names >= set(record["indicators"])
    assert not computed & set(claimed_signs.NOT_COMPUTABLE)


def test_an_indicator_that_is_raised_here_and_lacking_there_is_told(stored, check, tmp_path):
    lacking = lambda record: record["indicators"].pop("zero_gradient")
    found = check(relabelled(stored("dead"), tmp_path, lacking, NOT_BROKEN))
    assert "it would be raised" in {c.name: c.note for c in found}["indicators.zero_gradient"]
    assert verdicts(found)["verdict"] == claims.REFUTED


# ---- what was learned


def test_a_forged_fit_is_never_silent(stored, check, tmp_path):
    other = put("run", "fit", value=lambda v: "0" * 16)

    def part_of_the_scores(share):
        def change(arrays):
            score = arrays["clean_score"].copy()
            score[:, : round(share * score.shape[1])] -= 0.05  # flips no flag
            arrays["clean_score"] = score

        return change

    for share, fit in {0.4: claims.CONFIRMED, 0.6: claims.UNDECIDED}.items():
        for change in (other, lambda record: record["run"].pop("fit")):
            found = check(forged(stored("score"), tmp_path, change, part_of_the_scores(share)))
            assert verdicts(found)["run.fit"] == fit
            assert claims.status(found) == (1 if share < 0.5 else 3), of(found, claims.REFUTED)
    # With the right fit the scores alone are looked at.
    found = check(forged(stored("score"), tmp_path, None, part_of_the_scores(0.6)))
    assert "clean_score" in of(found, claims.REFUTED)


def test_what_learns_nothing_has_one_fit(stored, check, tmp_path):
    found = check(forged(stored("bare"), tmp_path, put("run", "fit", value=lambda v: "0" * 16)))
    assert verdicts(found)["run.fit"] == claims.REFUTED


# ---- files


def test_files_of_two_records_are_not_one(stored, check, tmp_path):
    path = stored("score")
    add_one = lambda arrays: arrays.update(num_gradients=arrays["num_gradients"] + 1)
    resealed = forged(path, tmp_path, None, add_one)
    shutil.copy(path, resealed)  # the honest JSON
    found = check(resealed)
    assert of(found, claims.REFUTED) == {"seal"} and claims.status(found) == 1
    # A record from before is taken at its npz's word, and says so.
    old = forged(path, tmp_path, lambda record: record.pop("arrays_sha256"))
    record = json.loads(old.read_text())
    record.pop("arrays_sha256")
    old.write_text(json.dumps(record))
    found = check(old)
    assert "by their own word" in found[0].note and claims.status(found) == 0


def test_images_that_are_elsewhere_leave_a_record_open(stored, check, tmp_path):
    path = stored("score")
    shutil.copy(path, tmp_path / path.name)
    found = check(tmp_path / path.name)
    digest = json.loads(path.read_text())["arrays_sha256"]
    assert f"images not here (digest {digest})" in found[0].note
    assert claims.status(found) == 3 and not of(found, claims.REFUTED)
    edited = relabelled(path, tmp_path, put("run", "defense", value=lambda v: "dropout"))
    edited.with_suffix(".npz").unlink()
    assert verdicts(check(edited))["run.defense"] == claims.REFUTED


def test_what_an_older_version_did_not_write_is_told_field_by_field(
    stored, honest, check, tmp_path
):
    whole = honest("score")

    def older(record):
        del record["attack"]["median_l2"], record["counts"]["succeeded"], record["paper"]
        del record["indicators"]["coarse_score"], record["controls"], record["detection"]["auc"]
        del record["attack"]["baseline_median_l2"], record["intervals"]["mean_l2"]
        del record["clean"]["thresholds"]["0.01"]

    found = check(relabelled(stored("score"), tmp_path, older))
    lacking = {c.name for c in found if claims.LACKING in c.note and c.verdict == claims.UNDECIDED}
    assert lacking == {
        "attack.median_l2", "counts.succeeded", "paper", "indicators.coarse_score", "controls",
        "detection.auc", "attack.baseline_median_l2", "intervals.mean_l2", "clean.thresholds.0.01",
    }  # fmt: skip
    assert not of(found, claims.REFUTED) and claims.status(found) == 3
    sure = {name for name, verdict in whole.items() if verdict == claims.CONFIRMED}
    # And what rests on it; nor does a baseline lie beside this copy.
    of_them = (*lacking, "attack.baseline", "attack.median_ratio", "attack.paired_baseline",
               "intervals.paired_baseline", "indicators.score_reversed")  # fmt: skip
    gone = {name for name in sure if name.startswith(of_them)}
    assert sure - gone == of(found, claims.CONFIRMED)


# ---- luck


def test_the_judges_draws_may_be_lucky_as_often_as_the_level_says():
    random = np.random.RandomState(0)
    count, images = 1500, 30
    p = []
    for _ in range(count):
        chances = random.beta(0.5, 0.5, images)  # each image has its own, some are nearly sure
        rounds = random.binomial(judge.NUM_DRAWS, chances, (1 + fresh_draws.ROUNDS, images))
        p.append(fresh_draws.p_value(rounds[0], rounds[1:]))
    for level in (0.001, 0.01, 0.05, 0.2):
        slack = 3 * np.sqrt(level * (1 - level) / count)
        assert np.mean(np.array(p) <= level) <= level + slack
    assert np.mean(np.array(p) <= 0.2) > 0.1  # and is no test that never speaks


def test_chosen_draws_are_told_from_fresh_ones():
    fresh = np.random.RandomState(0).binomial(judge.NUM_DRAWS, 0.78, (fresh_draws.ROUNDS, 100))
    assert fresh_draws.p_value(np.full(100, judge.NUM_DRAWS), fresh) < 1e-6
    sure = np.full((fresh_draws.ROUNDS, 100), judge.NUM_DRAWS)
    assert fresh_draws.p_value(sure[0], sure) == 1.0  # where draws change nothing
    # By hand: one image, passed by the judge's round alone of two.
    assert fresh_draws.p_value(np.array([5]), np.array([[0]])) == 0.5
    assert fresh_draws.p_value(np.array([5, 5]), np.array([[0, 0]])) == 0.25
    assert fresh_draws.p_value(np.array([0, 5]), np.array([[5, 0]])) == 0.75


def test_images_made_with_the_judges_draws_in_the_loop_are_refuted(scene, check, tmp_path):
    """Each passes all draws that the record's seed gives, by as little as it takes."""
    network, data = scene
    detector, point = toy_detectors.ShakyFar(noise=2.0), "0.5"
    made = advdet.evaluate(
        detector, classifier=network, data=data, attack="ddn", preset="smoke", num_images=60,
        operating_point=point, objective="generic", steps=20, results_dir=tmp_path / "honest",
        progress=False, lanes=toys.LANES,
    )  # fmt: skip
    path, seed = made.paths["ddn"], 5
    honest = check(path, seed=seed)
    assert verdicts(honest)["fresh draws"] == claims.CONFIRMED and claims.status(honest) == 0

    victim = victims.defend(detector, network, data, progress=False)
    mean, limit = np.asarray(victim.defense.fitted["mean"])[None], victim.thresholds[point]
    flat = lambda images: np.square(images - mean).sum(axis=(1, 2, 3)).reshape(-1, 1, 1, 1)

    def lucky(arrays):
        see = lambda images: judge.judge(
            victim.defense, images, arrays["id"], arrays["target_class"], targeted=True, seed=0
        )
        noise = see(arrays["image"]).scores.max(axis=0).reshape(-1, 1, 1, 1) - flat(arrays["image"])
        share = np.sqrt((limit - noise - 1e-3) / flat(arrays["image"]))
        images = np.clip(mean + share * (arrays["image"] - mean), 0.0, 1.0).astype(np.float32)
        said = see(images)
        arrays |= {
            "image": images, "image_uint8": np.round(images * 255).astype(np.uint8),
            "nearest_miss": images, "success": np.ones(60, bool), "missed": np.ones(60, bool),
            "distance": metrics.l2(images, made.clean.images).astype(np.float32),
            "adversarial_score": said.scores, "classified_as_wanted": said.wanted,
            "flagged": said.flagged(limit),
            "judged_success": said.success(limit).astype(np.float32),
        }  # fmt: skip
        assert (~said.flagged(limit)[:, said.wanted]).all() and said.wanted.sum() > 20

    forgery = forged(path, tmp_path, array_change=lucky)
    found = {claim.name: claim for claim in check(forgery, seed=seed)}
    names = ("image", "distance", "adversarial_score", "flagged", "judged_success")
    assert all(found[name].verdict == claims.CONFIRMED for name in names)
    assert found["fresh draws"].verdict == claims.REFUTED
    assert (
        found["fresh draws"].found < found["fresh draws"].stored
        and "seed 5" in found["fresh draws"].note
    )
    # The seed is one's own; another one says the same, and the same one the same figure.
    again = {claim.name: claim for claim in check(forgery, seed=seed)}["fresh draws"]
    assert again == found["fresh draws"]
    assert verdicts(check(forgery))["fresh draws"] == claims.REFUTED


def test_the_command_divides_the_level_and_counts_core_claims(
    stored, scene, tmp_path, monkeypatch, capsys
):
    network, data = scene
    plain, levels = verify.verify, []

    def ours(path, **given):
        levels.append(given["level"])
        return plain(path, **(given | dict(data=data, classifier=network, progress=False)))

    monkeypatch.setattr(verify, "verify", ours)
    monkeypatch.setattr(command.common, "DATA_DIR", type("Flag", (), {"value": None}))
    monkeypatch.setattr(command.common, "SEED", type("Flag", (), {"value": 7, "present": True}))
    monkeypatch.setattr(command, "_ALL", type("Flag", (), {"value": True}))
    monkeypatch.setattr(command, "_given", dict)
    forged(stored("score"), tmp_path)
    other = forged(stored("random"), tmp_path)
    assert command.main(str(tmp_path)) == 0
    said = capsys.readouterr().out.splitlines()
    assert levels == [fresh_draws.LEVEL / 2] * 2
    assert said[-2] == "seed of fresh draws: 7" and "0 undecided (100.0 % confirmed)" in said[-1]
    other.with_suffix(".npz").unlink()
    assert command.main(str(tmp_path)) == 3
    assert "2 undecided" in capsys.readouterr().out.splitlines()[-1]
