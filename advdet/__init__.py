"""advdet: tells whether a detector of adversarial examples really works."""

from advdet import bridges
from advdet.benchmark import Evaluation, evaluate, series, sweep
from advdet.checkup import check
from advdet.defenses import Defense
from advdet.detectors import DETECTORS, Detector
from advdet.splits import Splits
from advdet.types import Batch, Classifier, FitData, InputError, Outputs

__all__ = [
    "DETECTORS",
    "Batch",
    "Classifier",
    "Defense",
    "Detector",
    "Evaluation",
    "FitData",
    "InputError",
    "Outputs",
    "Splits",
    "bridges",
    "check",
    "evaluate",
    "series",
    "sweep",
]
