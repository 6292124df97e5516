"""From a record back to the data and the defence that it speaks of, as far as they are here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from advdet import datasets, named, provenance, training, victims
from advdet.beside import Baseline
from advdet.defenses import FittedDefense
from advdet.detectors import DETECTORS, Detector, name_of
from advdet.detectors.function import FunctionDetector
from advdet.splits import Splits
from advdet.types import Batch, Classifier, InputError


class Rebuilt(NamedTuple):
    """What a record speaks of.

    Attributes:
      splits: the data; None where they are not here.
      victim: the judged defence with its thresholds; None where it cannot be had.
      why: what is missing, in words; empty where nothing is.
    """

    splits: Splits | None
    victim: FittedDefense | None
    why: str = ""


class Evidence(NamedTuple):
    """A record, and what it speaks of.

    Attributes:
      record: its JSON.
      arrays: its npz.
      built: the data and the defence, as far as they are here.
      clean: [N] the attacked images of the data set; None where it is not here.
      path: of the JSON.
      baseline: what the same attack did to the undefended classifier, where that lies beside it.
    """

    record: dict[str, Any]
    arrays: dict[str, np.ndarray]
    built: Rebuilt
    clean: Batch | None
    path: Path
    baseline: Baseline | None = None

    @property
    def run(self) -> dict[str, Any]:
        """What was run."""
        return self.record["run"]

    def without(self, why: str) -> Evidence:
        """The same without a defence, for a reason."""
        return self._replace(built=self.built._replace(victim=None, why=why))


def rebuild(
    run: dict[str, Any],
    *,
    data: Splits | None = None,
    classifier: Classifier | None = None,
    detector: Detector | None = None,
    data_dir: str | None = None,
    kept: dict | None = None,
    progress: bool = True,
) -> Rebuilt:
    """Loads the data, the classifier and the detector of a record, and fits it where it must.

    Args:
      run: the record's `run` part.
      data, classifier, detector: in place of those that the record names; the detector, where it
        is of that name (a baseline has none).
      data_dir: see `datasets.load`.
      kept: receives what was loaded, for further records.
      progress: show what takes long on stderr.
    """
    kept = {} if kept is None else kept
    splits = None
    try:
        splits = _data(run, data, data_dir, kept)
        half = "defender" if run["threat_model"] == "limited_knowledge" else "full"
        classifier = _classifier(run, classifier, splits, half, kept, progress)
        if detector is None or name_of(detector) != run["defense"]:
            detector = _detector(run)
        if json.loads(json.dumps(dataclasses.asdict(detector))) != run["detector"]:
            raise InputError(
                f"the detector here, {detector}, has other hyperparameters than the record's, "
                f"{run['detector']}"
            )
        if (made_by := run.get("revision", [0])[0]) != detector.revision:
            raise InputError(
                f"the record is of revision {made_by} of the detector, here is {detector.revision}"
            )
        names = ("dataset", "splits", "classifier", "defense", "detector", "train_attack", "seed")
        facts = json.dumps([half, run.get("detector_class"), *(run[name] for name in names)])
        if facts not in kept:
            kept[facts] = victims.defend(
                detector, classifier, splits, half=half, seed=run["seed"],
                train_attack=run["train_attack"], progress=progress,
            )  # fmt: skip
    except KeyError as error:
        return Rebuilt(splits, None, f"the record lacks run.{error.args[0]}")
    except Exception as error:  # a foreign detector can raise anything
        said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return Rebuilt(splits, None, " ".join(said.split()))
    return Rebuilt(splits, kept[facts])


def _data(run, data, data_dir, kept) -> Splits:
    name, source = run["dataset"], run["data_source"]
    if data is None:
        if source not in datasets.SOURCES:
            raise InputError(
                f"the data set {name!r} was handed over as arrays; hand it over again "
                "(--dataset=module:name, or verify.verify(path, data=...))"
            )
        if (name, source) not in kept:
            kept[name, source] = datasets.load(name, source, data_dir)
        data = kept[name, source]
    if other := [split for split, digest in run["splits"].items() if data.hashes[split] != digest]:
        raise InputError(f"the {other[0]} images of {data.name} here are not the record's")
    return data


def _classifier(run, classifier, splits, half, kept, progress) -> Classifier:
    if classifier is None:
        if (splits, half) not in kept:
            kept[splits, half] = training.classifier_for(splits, half=half, progress=progress)
        classifier = kept[splits, half]
    here = provenance.fingerprint(classifier, splits.test.images)
    if here != run["classifier"]:
        raise InputError(
            f"the classifier here ({here}) is not the record's ({run['classifier']}); hand it "
            "over (--classifier=module:name, or verify.verify(path, classifier=...))"
        )
    return classifier


def _detector(run) -> Detector:
    """The detector that a record names; only classes below `Detector` are made."""
    kind, name = DETECTORS.get(run["defense"]), run.get("detector_class")
    own = kind and f"{kind.__module__}.{kind.__qualname__}"
    if name not in (None, own):
        kind = _foreign(name)
    if kind is None:
        raise KeyError("detector_class")
    if kind is FunctionDetector:
        raise InputError(
            "the detector was made from a function; hand it over (--defense=module:name, or "
            "verify.verify(path, detector=...))"
        )
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in run["detector"].items()
    }
    return kind(**values)


def _foreign(name: str) -> type[Detector]:
    kind = named.imported(":".join(name.rsplit(".", 1)), "the detector")
    if not (isinstance(kind, type) and issubclass(kind, Detector)):
        raise InputError(f"{name} is not a subclass of advdet.Detector")
    return kind
