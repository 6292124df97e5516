"""The whole flow as one function: data, classifier, defence, attack, judge, record.

    evaluation = advdet.evaluate("dropout", data="mnist", num_images=100)
    evaluation.records["best"]["attack"]["success_rate"]["0.05"]

No flags are read here, and nothing is printed but progress on stderr.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from advdet import attacking, budgets, cases, datasets, detectors, paths, results, settings
from advdet.cases import Evaluation
from advdet.detectors import Detector
from advdet.detectors.function import FunctionDetector
from advdet.splits import Splits
from advdet.splits import check as check_splits
from advdet.threat_models import NO_SURROGATE
from advdet.types import Classifier, InputError

__all__ = ["Evaluation", "Series", "evaluate", "series", "sweep"]


def evaluate(
    detector: Detector | str,
    *,
    classifier: Classifier | None = None,
    data: str | Splits = "mnist",
    threat_model: str = "perfect_knowledge",
    attack: str | None = None,
    objective: str | None = None,
    surrogate: tuple[Classifier, Detector] | None = None,
    preset: str = "fast",
    num_images: int | None = None,
    targets: str | np.ndarray | None = None,
    operating_point: str | float | None = None,
    confidence: float | None = None,
    detector_margin: float | None = None,
    margin_rate: float | None = None,
    binary_search_steps: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    initial_const: float | None = None,
    norm: str | None = None,
    epsilon: float | None = None,
    lanes: int | None = None,
    train_attack: str | None = None,
    seed: int = 0,
    data_source: str = "auto",
    data_dir: str | None = None,
    results_dir: str | Path | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: bool = True,
    time_budget: float | str | None = None,
) -> Evaluation:
    """Evaluates a detector under one threat model.

    Args:
      detector: hyperparameters, or their spec such as "dropout:num_samples=50".
      classifier: the one to defend; None takes the data set's own (shipped, cached or trained).
      data: a data set's name, or its `Splits`.
      threat_model: zero_knowledge, perfect_knowledge or limited_knowledge.
      attack: carlini_wagner, ddn or all, which means both (None: all, or what the preset says);
        at a fixed radius pgd, selective_pgd, orthogonal_pgd, square, or fixed_radius, which means
        all of these; the defenders' own weak ones, fast_gradient and jsma, by name; or several
        names with commas. On a detector without gradients all and fixed_radius mean square.
      objective: auto, generic, or another of `attacks.objectives`; settings follow a colon, as in
        "quantile:z=1.5".
      surrogate: the attacker's own (classifier, detector), for limited knowledge; None trains both
        on the attacker's half.
      preset: smoke, fast, thorough or paper; fills every setting that is None.
      num_images: the first so many test images.
      targets: random, untargeted, least_likely, nearest, paper, or an array of classes [N].
      operating_point: native, 0.01, 0.05 or 0.5: the threshold that the attacker aims below.
      confidence: logit margin beyond the decision.
      detector_margin: how far below the threshold the score must come, in its own units.
      margin_rate: the same, given as the false-positive rate of the threshold to come below, on
        the defence that the attacker is shown.
      binary_search_steps, steps, learning_rate, initial_const: the attack's, see `attacks`.
      norm, epsilon: linf or l2, and the radius, of attacks at a fixed radius; None takes linf, and
        what papers take on such data (`attacks.presets.RADII`).
      lanes: images under attack at once on each device.
      train_attack: the attack that made the adversarial images a detector learns from.
      seed: of everything random.
      data_source, data_dir: see `datasets.load`.
      results_dir: where records are kept and looked up; None keeps nothing.
      resume: go on with partial results there.
      command: stored in the record.
      progress: show what is done on stderr.
      time_budget: seconds, or a text such as 20m: images and steps that are left open are chosen
        to fit, by rates measured first; the record stores what was chosen.

    Returns:
      Records, per-image arrays and the undefended baseline.

    Raises:
      InputError: something given cannot be used; nothing has been written then.
    """
    given = dict(locals())
    (evaluation,) = sweep([{}], **given)
    return evaluation


def sweep(
    changes: Sequence[dict[str, Any]],
    detector: Detector | str,
    *,
    skip: Callable[[dict[str, Any], list[tuple[dict, Evaluation | None]]], bool] | None = None,
    **given,
) -> list[Evaluation | None]:
    """Evaluates one defence several times; what does not change is loaded and fitted once.

    Args:
      changes: for each evaluation, arguments of `evaluate` in place of those given: confidence,
        detector_margin, margin_rate, operating_point, attack, objective or an attack's settings.
      detector: as in `evaluate`.
      skip: asked before each, with its changes and what came of those before it; where it says so
        the evaluation is left out, and None stands in its place.
      **given: the other arguments of `evaluate`.

    Raises:
      InputError: as `evaluate`; all settings are looked at before anything is run.
    """
    if not changes:
        return []
    case, plans, _ = _prepared(changes, detector, given)
    done: list[Evaluation | None] = []
    for change, plan in zip(changes, plans):
        left_out = skip is not None and skip(change, list(zip(changes, done)))
        done.append(None if left_out else attacking.attack_case(case, plan))
    return done


class Series(NamedTuple):
    """A defence that is evaluated again and again; made by `series`.

    Attributes:
      case: the defence, ready.
      plan: what is to be run, by the changes to what was given.
    """

    case: cases.Case
    plan: Callable[[dict[str, Any]], settings.Settings]

    def evaluate(self, **changes) -> Evaluation:
        """One evaluation, with arguments of `evaluate` in place of those given, as in `sweep`."""
        return attacking.attack_case(self.case, self.plan(changes))


def series(detector: Detector | str, **given) -> Series:
    """Makes a defence ready to be evaluated as what was found before suggests.

    Where all changes are known beforehand, take `sweep`.

    Args:
      detector: as in `evaluate`.
      **given: the other arguments of `evaluate`.

    Raises:
      InputError: as `evaluate`, for what is given.
    """
    case, _, plan = _prepared([{}], detector, given)
    return Series(case, plan)


def _prepared(changes, detector, given):
    """The case, the plan of each change, and what makes a plan of any change."""
    began = time.perf_counter()
    if isinstance(detector, str):
        detector = detectors.from_spec(detector)
    given = {**_DEFAULTS, **given}
    _check_kinds(detector, given["classifier"])
    name = detectors.name_of(detector)
    data, threat_model = given["data"], given["threat_model"]
    seconds = _budget(given)
    plans = [_plan(name, detector, {**given, **change}) for change in changes]
    if given["surrogate"] is not None and threat_model != "limited_knowledge":
        raise InputError(f"{threat_model} has no use for a surrogate; leave it out")
    if threat_model == "limited_knowledge" and given["surrogate"] is None:
        if isinstance(detector, FunctionDetector) and not detector.learns:
            raise InputError(NO_SURROGATE)
    if given["results_dir"] is not None:
        given["results_dir"] = paths.given(given["results_dir"])
        results.check_writable(given["results_dir"])
    splits = data
    if isinstance(data, Splits):
        check_splits(data)
    else:
        splits = datasets.load(data, given["data_source"], given["data_dir"])
    plans = [settings.for_data(plan, splits) for plan in plans]
    by_hand = given["num_images"]
    if isinstance(given["targets"], np.ndarray):
        by_hand = len(given["targets"])
    kept = ("classifier", "threat_model", "surrogate", "results_dir", "resume", "command",
            "progress")  # fmt: skip
    case = cases.prepare(detector, name, splits, plans[0], **{word: given[word] for word in kept})
    if seconds is not None:
        seconds -= time.perf_counter() - began
        choice = budgets.fit(case, plans, seconds, num_images=by_hand, steps=given["steps"])
        given |= choice.arguments
        plans = [
            settings.for_data(_plan(name, detector, {**given, **change}), splits)
            for change in changes
        ]
        case = budgets.stated(case, plans[0], choice)
    make = lambda change: settings.for_data(_plan(name, detector, {**given, **change}), splits)
    return case, plans, make


def _check_kinds(detector: Any, classifier: Any) -> None:
    """Refuses functions and modules that nobody has wrapped, with what to wrap them in."""
    if not isinstance(detector, Detector):
        raise InputError(
            f"a detector is expected, not {type(detector).__name__}: wrap a function in "
            "advdet.Detector.from_function (JAX) or in torch_detector, keras_detector or "
            "numpy_score of advdet.bridges"
        )
    if classifier is not None and not isinstance(classifier, Classifier):
        raise InputError(
            f"an advdet.Classifier is expected, not {type(classifier).__name__}: wrap it in "
            "advdet.Classifier.from_function (JAX), or in torch_classifier or keras_classifier of "
            "advdet.bridges"
        )


def _budget(given: dict[str, Any]) -> float | None:
    """The seconds of a time budget that can be used; None where there is none."""
    if given["time_budget"] is None:
        return None
    if given["resume"]:
        raise InputError(
            "a time budget chooses anew, and resume goes on with what was chosen; give the command "
            "that the first run printed"
        )
    if given["steps"] is not None and given["num_images"] is not None:
        raise InputError("with num_images and steps by hand a time budget has nothing to choose")
    return budgets.seconds_of(given["time_budget"])


def _plan(name: str, detector: Detector, given: dict[str, Any]) -> settings.Settings:
    words = ("data", "preset", "attack", "objective", "threat_model", "num_images", "targets",
             "operating_point", "confidence", "detector_margin", "margin_rate", "lanes",
             "train_attack", "seed")  # fmt: skip
    own = ("binary_search_steps", "steps", "learning_rate", "initial_const", "norm", "epsilon")
    return settings.fill(
        name, detector, **{word: given[word] for word in words},
        attack_settings={word: given[word] for word in own},
        copied=given["surrogate"] and given["surrogate"][1],
        classifier=given["surrogate"][0] if given["surrogate"] else given["classifier"],
    )  # fmt: skip


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(evaluate).parameters.items()
    if parameter.default is not parameter.empty
}
