"""The objectives by name, and which of them fits which defence.

generic         the wanted label, and the score below the threshold: any differentiable detector
both_sides      generic, begun a second time at natural images (the setting natural=1, below)
quantile        for random scores: an upper quantile of the score as the judge draws it
paper           the objective of the paper for this defence
combined        classifier and detector joined as logits of one network (section 3.1 of the
                paper); combined_code and combined_shift are other forms of it
network         for outlier_class: the network of K + 1 classes itself
density         for kernel_density: the target's density over all centres
eot             for dropout: as `paper`, with new masks at every step
frozen          for input_pca: near-constant pixels are left alone
stages          for hidden_pca: each stage of the cascade a goal of its own
jointly         for mmd: as a set no more suspicious than the clean images

All but the last take the setting `natural=1` (`--objective=generic:natural=1`): attacks then begin
a second time, at the nearest natural image that reaches the goals as it is.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from advdet.attacks.goals import Objective
from advdet.attacks.special_objectives import (
    Combined,
    DropoutNetworks,
    FrozenPixels,
    JointlyOverSet,
    Stages,
    TargetDensity,
    TwoStages,
)
from advdet.types import InputError, pytree

Generic = Objective


@pytree
@dataclasses.dataclass(frozen=True)
class Quantile(Objective):
    """For a random score: an upper quantile of it, as the judge will draw it.

    Among many noisy looks at a detector that draws random numbers the nearest accepted image is
    one with lucky draws. So the goal is the mean over groups of draws plus z standard deviations;
    each group is as large as the judge's own, and all are fresh at each step. A few groups give the
    gradient, many more decide whether the image is a success.

    Attributes:
      z: standard deviations added to the mean.
      num_groups: groups that decide.
      gradient_groups: groups that the gradient is taken through.
    """

    z: float = 3.0
    num_groups: int = dataclasses.field(default=60, metadata={"static": True})
    gradient_groups: int = dataclasses.field(default=5, metadata={"static": True})

    def __post_init__(self):
        if min(self.num_groups, self.gradient_groups) < 2:
            raise InputError(
                "num_groups and gradient_groups must be at least 2: a spread needs two"
            )

    def excess(self, key, defense, image, target):
        del target
        return self._upper(key, defense, image, self.gradient_groups)

    def accept(self, key, defense, image, target, goals):
        del target
        excess = self._upper(key, defense, image, self.num_groups)[None] + self.detector_margin
        decisive = goals._replace(detector=excess)
        return decisive, decisive.met()

    def _upper(self, key, defense, image, num_groups):
        keys = jax.random.split(key, num_groups)
        scores = jax.vmap(lambda k: defense.score(k, image[None])[0])(keys)
        mean = jnp.mean(scores)
        variance = jnp.sum(jnp.square(scores - mean)) / (num_groups - 1)
        # The square root has no slope at 0, where all groups agree and nothing needs to be done.
        spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
        return mean + self.z * spread - defense.threshold


OBJECTIVES: dict[str, type[Objective]] = {
    "generic": Generic,
    "both_sides": Generic,
    "quantile": Quantile,
    "networks": DropoutNetworks,
    "eot": DropoutNetworks,
    "combined": Combined,
    "combined_code": Combined,
    "combined_shift": Combined,
    "network": Combined,
    "density": TargetDensity,
    "two_stages": TwoStages,
    "frozen": FrozenPixels,
    "stages": Stages,
    "jointly": JointlyOverSet,
}
_FIXED = {  # what a name says beyond the class
    "both_sides": {"natural": 1},
    "eot": {"fresh": True},
    "combined_code": {"form": "code"},
    "combined_shift": {"form": "shift"},
    "network": {"form": "network"},
}
# By the detector's name in `detectors.DETECTORS`; every other detector gets `generic`.
STRONGEST = {
    # Of 196 images three are not reached from the clean image alone.
    "outlier_class": "both_sides",
    "input_pca": "frozen",
    "hidden_pca": "stages",
    "mmd": "jointly",
    "kernel_density": "density",
    "dropout": "quantile",
}
PAPER = {
    "none": "generic",
    "outlier_class": "network",
    "binary": "combined",
    "inner_layer": "combined",
    "input_pca": "frozen",
    "pca_reduction": "generic",
    "hidden_pca": "generic",
    "mmd": "generic",
    "kernel_density": "two_stages",
    "dropout": "networks",
    "mean_blur": "generic",
}
_MADE_FOR = {
    "outlier_class": ("network",),
    "input_pca": ("frozen",),
    "hidden_pca": ("stages",),
    "mmd": ("jointly",),
    "kernel_density": ("density",),
    "dropout": ("eot",),
}


def resolve(name: str, defense_name: str, detector) -> str:
    """The objective meant by `auto` for a defence; checks that any other one fits it.

    Args:
      name: a name in `OBJECTIVES`, "paper" or "auto".
      defense_name: the defence's name in `detectors.DETECTORS`, or a foreign one.
      detector: its hyperparameters.

    Returns:
      A name in `OBJECTIVES`, or "paper".

    Raises:
      InputError: unknown, or made for another kind of defence.
    """
    if name == "auto":
        default = "quantile" if detector.random else "generic"
        return STRONGEST.get(defense_name, default)
    fitting = ["generic", "both_sides"]
    if detector.random:
        fitting.append("quantile")
    if detector.kind == "score":
        fitting += ["combined", "combined_code", "combined_shift"]
    fitting += _MADE_FOR.get(defense_name, ())
    if defense_name in PAPER:
        fitting.append("paper")
    if name not in fitting:
        raise InputError(
            f"objective {name!r} is none for defence {defense_name}; for it there are: "
            f"auto, {', '.join(fitting)}"
        )
    return name


def kind_of(name: str, defense_name: str) -> type[Objective]:
    """The class of the objective of that name (already resolved)."""
    return OBJECTIVES[_plain(name, defense_name)]


def _plain(name: str, defense_name: str) -> str:
    return PAPER[defense_name] if name == "paper" else name


def make(name: str, defense_name: str, *, seed: int, targeted: bool, **settings) -> Objective:
    """The objective of that name (already resolved), with its settings.

    Args:
      name: from `resolve`.
      defense_name: as there.
      seed: of fixed masks.
      targeted: towards the target class, or away from the true one.
      **settings: `confidence`, `detector_margin`, and fields of the objective.

    Raises:
      InputError: a setting that this objective does not have.
    """
    plain, kind = _plain(name, defense_name), kind_of(name, defense_name)
    known = {field.name for field in dataclasses.fields(kind)}
    known -= set(_FIXED.get(plain, {})) | {"form"}
    if "mask_seed" in known:
        settings.setdefault("mask_seed", seed)
    if strange := sorted(set(settings) - known):
        raise InputError(f"objective {name} has no setting {strange[0]!r}; it has: {sorted(known)}")
    for setting, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{setting} must be a finite number, not {value}")
    if (natural := settings.get("natural", 0)) not in (0, 1, 2):
        raise InputError(f"natural must be 0, 1 or 2, not {natural}")
    return kind(targeted=targeted, **_FIXED.get(plain, {}), **settings)
