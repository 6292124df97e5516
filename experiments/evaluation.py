"""Flags and flow of the entry points that evaluate a defence; they differ in the threat model."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable

from absl import flags

from experiments import common, path_flags, subject

flags.adopt_module_key_flags(subject)
flags.mark_flag_as_required("defense")
ATTACK = flags.DEFINE_string(
    "attack",
    None,
    "carlini_wagner (the paper's yardstick), ddn (cheaper, usually nearer), or all (default), both "
    "of them, with the nearest success of each image as the headline, `best`. At a fixed radius: "
    "pgd, selective_pgd, orthogonal_pgd, square (which takes no gradient), or fixed_radius, all of "
    "these. By name also the weak attacks that detectors are often tested with: fast_gradient, "
    "jsma. Several names with commas are run together.",
)
OBJECTIVE = flags.DEFINE_string(
    "objective",
    None,
    "What the attacker optimises. auto (default): the strongest known for the defence; generic: "
    "label and score, for any differentiable detector; paper: the paper's own; for dropout also "
    "quantile, eot, combined. Settings follow a colon: quantile:z=1.5.",
)
PRESET = flags.DEFINE_string(
    "preset",
    "fast",
    "Fills every flag not given: smoke (seconds, proves nothing), fast, thorough, or paper (the "
    "paper's own objective, threshold and targets for this defence, to compare with its figures).",
)
NUM_IMAGES = flags.DEFINE_integer(
    "num_images", None, "The first so many test images; all of them are attacked.", lower_bound=1
)
TARGETS = flags.DEFINE_string(
    "targets",
    None,
    "Where the attacker wants to go: random (default; one wrong class an image), untargeted (any "
    "wrong class), least_likely, nearest (the class an untargeted attack finds), paper (the regime "
    "that the paper reports this defence in). Distances of different regimes cannot be compared.",
)
OPERATING_POINT = flags.DEFINE_string(
    "operating_point",
    None,
    "The threshold the attacker must stay below: native (the paper's), or a false-positive rate on "
    "clean images: 0.01, 0.05 (default) or 0.5. An attack aimed at 0.01 is found out at 0.05.",
)
CONFIDENCE = flags.DEFINE_float(
    "confidence",
    None,
    "Logit margin wanted beyond the decision (kappa). More of it transfers better and costs "
    "distance.",
    lower_bound=0.0,
)
DETECTOR_MARGIN = flags.DEFINE_float(
    "detector_margin",
    None,
    "How far below the threshold the score must come, in the detector's own units.",
    lower_bound=0.0,
)
MARGIN_RATE = flags.DEFINE_float(
    "margin_rate",
    None,
    "In place of --detector_margin: the score must come below the threshold that this share of "
    "clean images exceeds, on the defence that the attacker is shown.",
)
BINARY_SEARCH_STEPS = flags.DEFINE_integer(
    "binary_search_steps", None, "C&W: how many values of c are tried.", lower_bound=1
)
STEPS = flags.DEFINE_integer(
    "steps", None, "Gradient steps: of each value of c in C&W, in all in DDN.", lower_bound=1
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate",
    None,
    "C&W: Adam's rate. Times the steps it must reach about 5, or black and white pixels "
    "cannot move.",
)
INITIAL_CONST = flags.DEFINE_float(
    "initial_const", None, "C&W: the first c, raised tenfold until the first success."
)
NORM = flags.DEFINE_string(
    "norm", None, "Attacks at a fixed radius: linf (default; the largest change of a pixel) or l2."
)
EPSILON = flags.DEFINE_float(
    "epsilon",
    None,
    "Attacks at a fixed radius: the radius, in pixel values from 0 to 1. Default, as papers have "
    "it: linf 0.3 and l2 2 on digits, linf 8/255 and l2 0.5 on photographs.",
)
LANES = flags.DEFINE_integer(
    "lanes", None, "Images under attack at once on each device; changes speed only.", lower_bound=1
)
TRAIN_ATTACK = flags.DEFINE_string(
    "train_attack",
    None,
    "The attack that makes the adversarial images a detector learns from, where it needs some.",
)
RESULTS_DIR = path_flags.define(
    "results_dir", "results", "Folder of all records; a finished one is printed, not run again."
)
RESUME = flags.DEFINE_bool(
    "resume", False, "Go on with the finished images of an interrupted run of the same settings."
)
TIME_BUDGET = flags.DEFINE_string(
    "time_budget",
    None,
    "A time such as 90s, 20m or 1.5h. Images and steps not given are chosen to fit, by rates that "
    "are measured first; what was chosen is printed as a command that repeats it. It is a bound on "
    "the attacks of one defence, not a promise.",
)


def settings(budget: bool = False) -> dict:
    """The arguments of `advdet.evaluate` that the flags give, but for defence and threat model.

    Args:
      budget: whether the caller can keep to a time.

    Raises:
      InputError: it cannot, and one is given.
    """
    if TIME_BUDGET.value is not None and not budget:
        from advdet.types import InputError

        raise InputError(
            "--time_budget is none of this entry point's; give --num_images and --steps"
        )
    kept = {"time_budget": TIME_BUDGET.value} if budget else {}
    return kept | dict(
        data=common.data(),
        classifier=subject.classifier(),
        attack=ATTACK.value,
        objective=OBJECTIVE.value,
        preset=PRESET.value,
        num_images=NUM_IMAGES.value,
        targets=TARGETS.value,
        operating_point=OPERATING_POINT.value,
        confidence=CONFIDENCE.value,
        detector_margin=DETECTOR_MARGIN.value,
        margin_rate=MARGIN_RATE.value,
        binary_search_steps=BINARY_SEARCH_STEPS.value,
        steps=STEPS.value,
        learning_rate=LEARNING_RATE.value,
        initial_const=INITIAL_CONST.value,
        norm=NORM.value,
        epsilon=EPSILON.value,
        lanes=LANES.value,
        train_attack=TRAIN_ATTACK.value,
        seed=common.SEED.value,
        data_source=common.DATA_SOURCE.value,
        data_dir=common.DATA_DIR.value,
        results_dir=RESULTS_DIR.value,
        resume=RESUME.value,
    )


def command(module: str) -> str:
    """How this was called, to be pasted."""
    return shlex.join(["python", "-m", f"experiments.{module}", *sys.argv[1:]])


def numbers(flag: str, values: list[str]) -> list[float]:
    """The values of a list flag as numbers.

    Raises:
      InputError: one is none.
    """
    from advdet.types import InputError

    try:
        return [float(value) for value in values]
    except ValueError:
        raise InputError(f"--{flag} takes numbers with commas between them, not {values}") from None


def each_defense(evaluate_one: Callable[[str], None]) -> int:
    """Calls a function with the defence of the flags, or with each of the ten in turn.

    Of the ten, one that fails is reported and does not stop the rest.

    Args:
      evaluate_one: takes a defence's spec.

    Returns:
      The exit status: 1 if any of the ten failed.
    """
    from advdet.detectors import THE_TEN

    if subject.DEFENSE.value != "all":
        evaluate_one(subject.DEFENSE.value)
        return 0
    failed = {}
    for spec in THE_TEN:
        try:
            evaluate_one(spec)
        except Exception as error:  # whatever it is, the others still run
            failed[spec] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    for spec, said in failed.items():
        print(f"failed: {spec} ({said})", file=sys.stderr)
    print(f"{len(THE_TEN) - len(failed)} of {len(THE_TEN)} defences evaluated")
    return 1 if failed else 0


def main(threat_model: str) -> int:
    """Evaluates the defence of the flags under one threat model, and reports.

    Args:
      threat_model: as in `advdet.evaluate`.

    Returns:
      The exit status.
    """
    import advdet
    from experiments import pictures, report

    def evaluate_one(spec):
        evaluation = advdet.evaluate(
            spec, threat_model=threat_model, command=command(threat_model), **settings(True)
        )
        print(report.table(evaluation))
        name, path = list(evaluation.paths.items())[-1]
        sheet = path.with_suffix(".png")
        pictures.sheet(sheet, evaluation.clean, evaluation.arrays[name])
        print(f"record  {path}\nimages  {path.with_suffix('.npz')}\nsheet   {sheet}")

    return each_defense(evaluate_one)
