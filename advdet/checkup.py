"""`advdet.check`: half a minute with a detector, before any evaluation of it.

It is fitted on a few images, looked at by the checks of `contract`, and shown the images of a cheap
attack. What it says is about the code; how good the detector is, only `evaluate` says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from advdet import (
    cells,
    contract,
    contract_gradients,
    contract_scores,
    datasets,
    detectors,
    training,
)
from advdet.attacks.ddn import DDN
from advdet.attacks.objectives import Generic
from advdet.attacks.square import Square
from advdet.contract import FAULT, OK, WARNING, Finding
from advdet.defenses import Defense, score_images, undefended, with_thresholds
from advdet.detectors import Detector
from advdet.splits import Splits
from advdet.types import Batch, Classifier, FitData, InputError

_TRAIN, _SELECT, _THRESHOLD, _HELD_OUT = 2000, 500, 1000, 500
_CRAFTED, _CRAFTED_SELECT, _ATTACKED = 256, 64, 64
_LOOKED_AT = 12  # images that shapes, keys and gradients are tried on
_ATTACK_STEPS, _TRIES = 30, 200
_GRADIENTS_WANTED = 100 * 2100  # of an evaluation by the preset `fast`: 100 images
_SCORES_WANTED = 2 * 100 * 1000  # of one without gradients, by `square`, label and score
_PATIENCE = 3600.0  # seconds for it, before a warning


def check(
    detector: Detector | str,
    *,
    classifier: Classifier | None = None,
    data: str | Splits = "mnist",
    data_source: str = "auto",
    data_dir: str | None = None,
    seed: int = 0,
    tell: Callable[[Finding], None] | None = None,
    progress: bool = True,
) -> list[Finding]:
    """Checks whether a detector, with its classifier, keeps what the interface promises.

    Args:
      detector: hyperparameters, or their spec such as "package.module:Class:size=3".
      classifier: the one to defend; None takes the data set's own.
      data: a data set's name, or its `Splits`.
      data_source, data_dir: see `datasets.load`.
      seed: of the fit and the attack.
      tell: receives each finding as it is made.
      progress: say on stderr what takes long.

    Returns:
      The findings; any of level "fault" has to be seen to before an evaluation means something.

    Raises:
      InputError: the spec or the data cannot be used.
    """
    if isinstance(detector, str):
        detector = detectors.from_spec(detector)
    splits = data if isinstance(data, Splits) else datasets.load(data, data_source, data_dir)
    findings: list[Finding] = []

    def look(name, function, *arguments, **options):
        """Enters what a check finds, or the exception that it met; gives back what it returned."""
        try:
            found = function(*arguments, **options)
        except Exception as error:  # a foreign detector can raise anything
            said = str(error) if isinstance(error, InputError) else contract.said_by(error)
            found = Finding(name, FAULT, said, "make it run on [B, H, W, C] images")
        if isinstance(found, Finding):
            findings.append(found)
            if tell is not None:
                tell(found)
        return found

    def say(text):
        if progress:
            print(text, file=sys.stderr, flush=True)

    look("splits", contract.splits_disjoint, splits)
    kind = look("detector: kind, flags", contract.kind_and_flags, detector)
    look("detector: hash, equality", contract.equality_by_value, detector)
    if classifier is None:
        classifier = training.classifier_for(splits, progress=progress)
    held_out = splits.test.take(slice(_HELD_OUT))
    look("classifier: range, layout", contract.classifier_images, classifier, held_out)
    logits = look("classifier: logits", contract.classifier_logits, classifier, splits)
    if FAULT in (kind.level, logits.level):
        return findings

    say("a cheap attack on the bare classifier")
    wanted = detector.needs_adversarial
    crafted = look("a cheap attack", _craft, classifier, splits, wanted, seed, progress)
    if isinstance(crafted, Finding):
        return findings
    before = contract.snapshot(detector, classifier)
    fit_key, score_key = jax.random.split(jax.random.key(seed))
    began = time.perf_counter()
    say("fitting")
    fitted = look("fit", _fit, fit_key, detector, classifier, splits, crafted, progress)
    if isinstance(fitted, Finding):
        return findings
    seconds = time.perf_counter() - began
    look("fit: side effects", contract.unchanged_by_fit, before, detector, classifier)
    learned = look("fit: what was learned", _learned, fitted, seconds, splits)
    if learned.level == FAULT:
        return findings
    fitted = jax.tree.map(jnp.asarray, fitted)
    defense = Defense(classifier, fitted, jnp.float32(jnp.inf), jnp.float32(1.0), detector)
    few = splits.test.take(slice(_LOOKED_AT))
    classes = splits.num_classes
    shape = look(
        "logits of the defence", contract_scores.logits_shape, defense, few.images, classes
    )
    if shape.level == OK and detector.kind in ("corrector", "none"):
        look("logits: gradient", contract_gradients.gradient, defense, few.images, few.ids)
    if detector.kind == "set":
        images = held_out.images[: detector.set_size]
        look("p-value of a set", contract_scores.set_p_value, defense, images)
    if detector.kind == "score":
        _look_at_scores(look, score_key, defense, splits, few, held_out, crafted["test"])
    return findings


def _look_at_scores(look, key, defense, splits, few, held_out, adversarial) -> None:
    """What is to be said of a detector that flags images."""
    shape = look("score: shape, finite", contract_scores.score_shape, defense, few.images)
    if shape.level == FAULT:
        return
    look("score: compiled", contract_scores.score_compiled, defense, few.images)
    look("score: randomness", contract_scores.score_randomness, defense, few.images)
    look("score: batch mates", contract_scores.score_batch_mates, defense, few.images, few.ids)
    look("score: gradient", contract_gradients.gradient, defense, few.images, few.ids)
    seen = splits.threshold.take(slice(_THRESHOLD))
    fitted = look(
        "thresholds", with_thresholds, key, defense.detector, defense.classifier, defense.fitted,
        seen,
    )  # fmt: skip
    if isinstance(fitted, Finding):
        return
    look("threshold at 5%", contract_scores.false_positives, fitted, seen, held_out)
    look("native threshold", contract_scores.native_threshold, fitted)
    sources = held_out.take(np.isin(held_out.ids, adversarial.ids))
    look("score: direction", contract_scores.score_direction, fitted.defense, sources, adversarial)
    look("speed", speed, fitted.defense, held_out)


def _craft(classifier, splits, for_training, seed, progress) -> dict[str, Batch]:
    """Adversarial images of test and, where wanted, train and select images: DDN, else Square."""
    wanted = {"test": _ATTACKED}
    if for_training:
        wanted |= {"train": _CRAFTED, "select": _CRAFTED_SELECT}
    parts = [getattr(splits, name).take(slice(count)) for name, count in wanted.items()]
    source = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    name, attack = "ddn", DDN(steps=_ATTACK_STEPS)
    if not classifier.differentiable:
        name, attack = "square", Square(steps=_TRIES)
    found, _ = cells.attack_images(
        name, attack, Generic(targeted=False), undefended(classifier), source, source.labels,
        seed=seed, lanes=cells.default_lanes(len(source.ids)), progress=progress,
    )  # fmt: skip
    made = Batch(found.image, source.labels, source.ids)
    fooled = found.success & (found.distance > 0)  # not those that were wrong as they are
    cuts = np.cumsum([len(part.ids) for part in parts])[:-1]
    rows = np.split(np.arange(len(fooled)), cuts)
    return {name: made.take(part[fooled[part]]) for name, part in zip(wanted, rows)}


def _fit(key, detector, classifier, splits, crafted, progress):
    return detector.fit(key, classifier, FitData(
        splits.train.take(slice(_TRAIN)), splits.select.take(slice(_SELECT)),
        crafted.get("train"), crafted.get("select"), progress=progress,
    ))  # fmt: skip


def _learned(fitted, seconds: float, splits: Splits) -> Finding:
    found = contract.learned_arrays(fitted)
    count = min(_TRAIN, len(splits.train.ids))
    return found._replace(said=f"{found.said}; fit took {seconds:.1f} s on {count:,} images")


def speed(defense: Defense, batch: Batch) -> Finding:
    """Scores and, where it has them, gradients a second, and what an evaluation will take.

    Args:
      defense: with a detector of kind "score".
      batch: [N] images, two hundred or more.
    """
    images, ids = batch.images[:200], batch.ids[:200]
    score = lambda: score_images(jax.random.key(0), defense, images, ids)
    rate, wanted = len(ids) / _seconds(score), _SCORES_WANTED
    said, detector = f"{rate:,.0f} scores", defense.detector
    smooth = detector.differentiable or detector.surrogate_gradient
    if smooth and defense.classifier.differentiable:
        slope = lambda: contract_gradients.slopes(jax.random.key(0), defense, images, ids)
        rate, wanted = len(ids) / _seconds(slope), _GRADIENTS_WANTED
        said += f" and {rate:,.0f} gradients"
    minutes = wanted / rate / 60
    said += f" a second; 100 images by the preset `fast` take about {minutes:.0f} min"
    if 60 * minutes > _PATIENCE:
        change = "vectorise, or begin with --preset=smoke and few images"
        return Finding("speed", WARNING, said, change, rate)
    return Finding("speed", OK, said, value=rate)


def _seconds(run: Callable[[], object]) -> float:
    """Of one call: the best of three, after one that compiles."""
    run()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)
