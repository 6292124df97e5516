"""Is a stored record true? Every figure computed again, from the stored images.

A record's images are judged anew, by the defence that it names and with the draws that its seed
gives. Each claim comes out as

    confirmed      it follows from the stored images
    refuted        it does not, and float error (see `rejudge`) cannot explain that
    not decidable  what it needs is not here: the note says what

Controls, indicators and the paper's figures are not looked at, nor whether the attack could have
done better; a verdict is held against the success rate alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from advdet import claimed_figures, provenance, results
from advdet.cells import random_targets
from advdet.claims import (
    CONFIRMED,
    REFUTED,
    Claim,
    Range,
    compare,
    compare_rows,
    undecided,
)
from advdet.defenses import POINTS, classify_images, undefended
from advdet.judge import Judgement
from advdet.metrics import l2
from advdet.rebuild import Evidence, rebuild
from advdet.rejudge import Looks, Seen, logit_error, look_again, score_error
from advdet.types import InputError

_SAME_FIT = 0.5  # of the clean scores agree: what was learned is the record's
_EQUAL = 1e-6
_DISTANCE_ERROR = 1e-4  # the attack sums in float32
# Arrays by kind of number: bool, integer, unsigned, float.
_ARRAYS = {
    "b": ("clean_correct", "flagged", "classified_as_wanted", "success", "missed"),
    "i": ("id", "label", "target_class", "num_gradients"),
    "u": ("image_uint8",),
    "f": ("clean_score", "adversarial_score", "judged_success", "image", "distance",
          "nearest_miss"),
}  # fmt: skip
_BY_DRAW = ("clean_score", "adversarial_score", "flagged")


def verify(path: str | Path, *, progress: bool = True, **given) -> list[Claim]:
    """Verifies one record.

    Args:
      path: its JSON; the npz lies beside it.
      progress: show what takes long on stderr.
      **given: what `rebuild.rebuild` takes: data, classifier and detector in place of those that
        the record names, data_dir, and `kept`, a dict to be handed over again for further records.

    Returns:
      Its claims.

    Raises:
      InputError: there is no such file, or it is not a record.
    """
    path = Path(path)
    record = read_json(path)
    npz = path.with_suffix(".npz")
    if record["schema"] != results.SCHEMA:
        why = f"its schema is {record['schema']}, this version reads {results.SCHEMA}"
        return [undecided("file", why)]
    if not npz.exists():
        return [undecided("file", f"{npz.name}, with the images, is not there")]
    try:
        _, arrays = results.load(path)
    except InputError as error:
        return [Claim("seal", REFUTED, note=str(error))]
    if misshapen := _misshapen(arrays):
        return [Claim("arrays", REFUTED, note=misshapen)]
    kept = given.setdefault("kept", {})
    try:
        built = rebuild(record["run"], progress=progress, **given)
        clean = built.splits and built.splits.test.take(slice(len(arrays["id"])))
        baseline = _baseline_beside(path, record)
        found = _claims(Evidence(record, arrays, built, clean, baseline), kept, progress)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        return [undecided("file", f"not a whole record: {what}")]
    sealed = Claim("seal", CONFIRMED, note="the arrays are those that were sealed")
    return [sealed, *(claim for claim in found if not claim.is_empty())]


def read_json(path: Path) -> dict[str, Any]:
    """A record's JSON.

    Raises:
      InputError: it cannot be read, or is not a record.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {' '.join(str(error).split())}") from None
    if not is_record(record):
        raise InputError(f"{path} is not the record of an attack")
    return record


def is_record(value: Any) -> bool:
    """Whether a JSON value is the record of an attack, not a summary or a manifest."""
    return isinstance(value, dict) and {"schema", "run", "attack"} <= set(value)


def _baseline_beside(path: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of the undefended classifier that a record's own are compared with."""
    run, stored = record["run"], record["attack"]["baseline_mean_l2"]
    if stored is None or len(path.resolve().parents) < 5:
        return None
    folder = path.resolve().parents[3] / "perfect_knowledge" / "none" / f"{run['attack']}.generic"
    for other in sorted(folder.glob(f"{run['targets']}-*.json")):
        try:
            attack = json.loads(other.read_text())["attack"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if attack["mean_l2"] == stored:
            return attack
    return None


def _misshapen(arrays) -> str:
    """What is wrong with the arrays' names, types and shapes; empty where nothing is."""
    for kind, names in _ARRAYS.items():
        for name in names:
            if name not in arrays:
                return f"there is no array {name}"
            array, count = arrays[name], len(np.atleast_1d(arrays.get("id", 0)))
            if array.dtype.kind != kind:
                return f"array {name} is {array.dtype}"
            if name in _BY_DRAW:
                right = array.ndim == 2 and array.shape[1] in (0, count)
            else:
                right = array.ndim in (1, 4) and len(array) == count
            if not right:
                return f"array {name} has the shape {array.shape} for {count} images"
    shapes = {arrays[name].shape for name in ("image", "nearest_miss", "image_uint8")}
    return "" if len(shapes) == 1 else f"images have the shapes {sorted(shapes)}"


def _claims(evidence: Evidence, kept: dict, progress: bool) -> list[Claim]:
    """All claims, in the order in which they are made."""
    found, fits = _image_claims(evidence)
    if not fits:
        return found
    looks = None
    if evidence.built.victim is not None:
        arrays, images = evidence.arrays, evidence.clean.images
        looks = look_again(evidence.built.victim, evidence.run, arrays, images, progress)
        if other := _other_fit(evidence, looks):
            evidence, looks = evidence.without(other), None
    found += [*_hash_claims(evidence), *_target_claims(evidence)]
    clean, adversarial = _stored_judgements(evidence.arrays)
    thresholds = evidence.record["clean"]["thresholds"]
    if looks is not None:
        made, clean, adversarial, thresholds = _verdict_claims(evidence, looks, clean, adversarial)
        found += made
    seen = claimed_figures.Verdicts(clean, adversarial, thresholds)
    found += claimed_figures.of_verdicts(evidence, seen)
    found += claimed_figures.of_looks(evidence, seen, looks)
    return found + claimed_figures.of_many_clean_images(evidence, kept, progress)


# ---- images and targets


def _image_claims(evidence: Evidence) -> tuple[list[Claim], bool]:
    """What can be said of the images without a judge; and whether they are of this data set."""
    arrays, clean, axes = evidence.arrays, evidence.clean, (1, 2, 3)
    image = arrays["image"]
    outside = ~((image >= 0) & (image <= 1)).all(axis=axes)
    inside = np.clip(np.nan_to_num(image), 0.0, 1.0)
    other = (np.round(inside * 255.0).astype(np.uint8) != arrays["image_uint8"]).any(axis=axes)
    found = [
        compare_rows("image", outside, "pixels outside of [0, 1]"),
        compare_rows("image_uint8", other, "not the image in 8 bit"),
    ]
    if clean is None:
        names = ("id, label", "distance")
        return found + [undecided(name, evidence.built.why) for name in names], True
    if clean.images.shape != image.shape:
        note = f"shape {image.shape}, where the data set has {clean.images.shape}"
        return [*found, Claim("image", REFUTED, note=note)], False
    moved = (arrays["id"] != clean.ids) | (arrays["label"] != clean.labels)
    note = "not those of the data set's first test images"
    found.append(compare_rows("id, label", moved, note))
    classes = evidence.built.splits.num_classes
    bad = np.zeros(len(image), bool)
    for name in ("label", "target_class"):
        bad |= (arrays[name] < 0) | (arrays[name] >= classes)
    if bad.any():
        return [*found, compare_rows("label, target_class", bad, "no class of the data set")], False
    stored, distance = arrays["distance"].astype(np.float64), l2(image, clean.images)
    with np.errstate(invalid="ignore"):
        near = np.abs(stored - distance) <= _DISTANCE_ERROR * (distance + 1e-3)
    right = np.where(arrays["success"], near, np.isposinf(stored) & (distance == 0))
    note = "not the L2 from the clean image, or a failure that is not the clean image"
    return [*found, compare_rows("distance", ~right, note)], True


def _hash_claims(evidence: Evidence) -> list[Claim]:
    """The settings are those that the record's hash, and its file's name, was made of."""
    run, kind = evidence.run, evidence.run.get("detector_class")
    if run.get("surrogate") is not None or kind is None:  # the class of a copy is not stored
        return []
    given = None
    if run["targets"] == "given":
        given = [int(target) for target in evidence.arrays["target_class"]]
    found = provenance.settings_hash(run, given, [kind])
    right = CONFIRMED if found == run["settings_hash"] else REFUTED
    return [Claim("run.settings_hash", right, run["settings_hash"], found)]


def _target_claims(evidence: Evidence) -> list[Claim]:
    """Targets that seed, labels or classifier decide are made again."""
    name, clean, built = "target_class", evidence.clean, evidence.built
    regime, goal = evidence.run["targets"], evidence.arrays["target_class"]
    if clean is None:
        return [undecided(name, built.why)]
    labels = np.asarray(clean.labels)
    if regime == "untargeted":
        return [compare_rows(name, goal != labels, "not the true class")]
    classes = built.splits.num_classes
    if (bad := (goal == labels) | (goal < 0) | (goal >= classes)).any():
        return [compare_rows(name, bad, "the true class, or none")]
    if regime == "random":
        again = random_targets(evidence.run["seed"], labels, clean.ids, classes)
        return [compare_rows(name, goal != again, "not what the seed gives")]
    if regime == "least_likely" and built.victim is not None:
        bare = undefended(built.victim.defense.classifier)
        logits = classify_images(jax.random.key(0), bare, clean.images, clean.ids)
        error, rows = logit_error(logits), np.arange(len(labels))
        logits[rows, labels] = np.inf
        other = logits[rows, goal] > logits.min(axis=1) + error
        return [compare_rows(name, other, "not the least likely class")]
    return [undecided(name, f"wrong classes; targets {regime!r} are not made again here")]


# ---- verdicts on images


def _other_fit(evidence: Evidence, looks: Looks) -> str:
    """Why what was learned here is not what the record's detector learned; empty where it is."""
    victim = evidence.built.victim
    here, there = provenance.digest_of(victim.defense.fitted), evidence.run.get("fit")
    if here is not None and here == there:
        return ""
    stored, scores = evidence.arrays["clean_score"], looks.clean.scores
    if scores.shape[1]:  # float error changes every bit, and hardly a score
        near = stored.shape == scores.shape and np.abs(stored - scores) <= looks.clean.error
        same = np.mean(near) >= _SAME_FIT
    else:
        same = there is None and here is not None and not jax.tree.leaves(victim.defense.fitted)
    if same:
        return ""
    if there is None:
        return "what was learned here may not be the record's, which lacks run.fit"
    return f"what the detector learned here ({here}) is not the record's ({there})"


def _stored_judgements(arrays) -> tuple[Judgement, Judgement]:
    """(clean, adversarial) as stored; logits are not."""
    none = np.zeros((0, 0), np.float32)
    return (
        Judgement(none, arrays["clean_correct"], arrays["clean_score"]),
        Judgement(none, arrays["classified_as_wanted"], arrays["adversarial_score"]),
    )


def _verdict_claims(evidence: Evidence, looks: Looks, clean: Judgement, adversarial: Judgement):
    """Stored verdicts where float error explains them, ours elsewhere.

    Returns:
      (claims, clean, adversarial, thresholds).
    """
    arrays = evidence.arrays
    found, thresholds = _threshold_claims(evidence)
    made, clean = _settled(("clean_correct", "clean_score"), looks.clean, clean)
    found += made
    names = ("classified_as_wanted", "adversarial_score")
    made, adversarial = _settled(names, looks.adversarial, adversarial)
    found += made
    threshold = thresholds.get(evidence.run["operating_point"])
    flags, stored = adversarial.flagged(threshold), arrays["flagged"]
    if flags.shape == stored.shape:
        other = (flags != stored).any(axis=0)
        found.append(compare_rows("flagged", other, "not what the judge says"))
    else:
        note = f"shape {stored.shape}, not {flags.shape}"
        found.append(Claim("flagged", REFUTED, note=note))
    wrong = np.abs(arrays["judged_success"] - adversarial.success(threshold)) > _EQUAL
    least, most = looks.adversarial.success(threshold)
    found.append(compare_rows("judged_success", wrong, "not what the judge says", least != most))
    return found, clean, adversarial, thresholds


def _settled(names, seen: Seen, stored: Judgement) -> tuple[list[Claim], Judgement]:
    """Claims on classes and scores, and what counts of them."""
    wrong = (seen.wanted != stored.wanted) & seen.sure
    found = [compare_rows(names[0], wrong, "not what the classifier says", ~seen.sure)]
    wanted, scores = np.where(seen.sure, seen.wanted, stored.wanted), seen.scores
    if stored.scores.shape != scores.shape:
        note = f"shape {stored.scores.shape}, not {scores.shape}"
        found.append(Claim(names[1], REFUTED, note=note))
    elif scores.shape[1]:
        far = ~(np.abs(stored.scores - scores) <= seen.error)
        found.append(compare_rows(names[1], far.any(axis=0), "not what the detector says"))
        scores = np.where(far, scores, stored.scores)
    return found, Judgement(seen.logits, wanted, scores)


def _threshold_claims(evidence: Evidence) -> tuple[list[Claim], dict[str, float | None]]:
    """Claims on the thresholds, and those that count."""
    victim, stored = evidence.built.victim, evidence.record["clean"]["thresholds"]
    found, settled = [], {}
    for name in POINTS:
        ours, theirs, allowed = victim.thresholds.get(name), stored[name], None
        if ours is not None:
            error = float(score_error(victim, ours))
            allowed = Range(ours - error, ours + error)
        found.append(compare(f"clean.thresholds.{name}", theirs, allowed))
        settled[name] = theirs if found[-1].verdict == CONFIRMED else ours
    return found, settled
