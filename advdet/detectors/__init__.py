"""The detectors by name, in the paper's order, and how one is named on a command line."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re

from advdet import named
from advdet.detectors.base import Detector, NoDetector
from advdet.detectors.binary import Binary
from advdet.detectors.dropout import Dropout
from advdet.detectors.function import FunctionDetector
from advdet.detectors.hidden_pca import HiddenPca
from advdet.detectors.inner_layer import InnerLayer
from advdet.detectors.input_pca import InputPca
from advdet.detectors.kernel_density import KernelDensity
from advdet.detectors.mean_blur import MeanBlur, MeanBlurDetector
from advdet.detectors.mmd import Mmd
from advdet.detectors.outlier_class import OutlierClass
from advdet.detectors.pca_reduction import PcaReduction
from advdet.types import InputError

DETECTORS: dict[str, type[Detector]] = {
    "none": NoDetector,
    "outlier_class": OutlierClass,
    "binary": Binary,
    "inner_layer": InnerLayer,
    "input_pca": InputPca,
    "pca_reduction": PcaReduction,
    "hidden_pca": HiddenPca,
    "mmd": Mmd,
    "kernel_density": KernelDensity,
    "dropout": Dropout,
    "mean_blur": MeanBlur,
    "mean_blur_detector": MeanBlurDetector,
}

# The paper's ten; whatever else stands in DETECTORS is there by name alone.
THE_TEN = tuple(name for name in DETECTORS if name not in ("none", "mean_blur_detector"))


def from_spec(spec: str) -> Detector:
    """The detector that a word names.

    Args:
      spec: a name in `DETECTORS`, or `package.module:name` of a class or of a detector that is made
        already; hyperparameters follow a colon, as in `dropout:num_samples=50,tau=0.02`.

    Raises:
      InputError: unknown name, class or hyperparameter, or a value that does not fit.
    """
    name, *rest = spec.split(":")
    made = DETECTORS.get(name)
    if made is None and rest and "=" not in rest[0]:
        made = _foreign(f"{name}:{rest.pop(0)}")
    if made is None:
        close = difflib.get_close_matches(name, DETECTORS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(
            f"unknown defence {name!r}; known: {', '.join(DETECTORS)}, or package.module:name{hint}"
        )
    known = {field.name: field.default for field in dataclasses.fields(made)}
    values = {}
    for part in filter(None, ",".join(rest).split(",")):
        option, equals, text = part.partition("=")
        if not equals or option not in known:
            raise InputError(
                f"defence {name} has no hyperparameter {option!r}; it has: "
                f"{', '.join(known) or 'none'} (written name=value)"
            )
        values[option] = _value(name, option, text, known[option])
    try:
        if isinstance(made, Detector):
            return dataclasses.replace(made, **values) if values else made
        return made(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"defence {spec}: {error}") from None


def name_of(detector: Detector) -> str:
    """The name in `DETECTORS`, a function's, or a foreign class's name in snake case."""
    for name, kind in DETECTORS.items():
        if type(detector) is kind:
            return name
    if isinstance(detector, FunctionDetector):
        return f"own_{detector.name}" if detector.name in DETECTORS else detector.name
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(detector).__name__).lower()
    if name in DETECTORS:  # another class of that name; the paper's figures are not its own
        name = f"{type(detector).__module__.rpartition('.')[2]}_{name}"
    return name


def _foreign(spec: str) -> Detector | type[Detector]:
    found = named.imported(spec, "defence")
    if isinstance(found, Detector) or (isinstance(found, type) and issubclass(found, Detector)):
        return found
    hint = "; wrap it by advdet.Detector.from_function" if callable(found) else ""
    raise InputError(f"{spec} is no subclass of advdet.Detector, nor an object of one{hint}")


def _value(name: str, option: str, text: str, default):
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    wanted = type(default)
    if default is dataclasses.MISSING or default is None or type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    raise InputError(
        f"{option} of defence {name} is a {wanted.__name__} such as {default!r}, not {text!r}"
    )


__all__ = ["DETECTORS", "THE_TEN", "Detector", "Dropout", "NoDetector", "from_spec", "name_of"]
