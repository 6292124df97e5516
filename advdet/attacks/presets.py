"""The presets: one table of attack x data set, and the attacks by name."""

from __future__ import annotations

import dataclasses

from advdet.attacks.balls import NORMS
from advdet.attacks.carlini_wagner import MINIMUM_TRAVEL, CarliniWagner
from advdet.attacks.ddn import DDN
from advdet.attacks.fast_gradient import FastGradient
from advdet.attacks.jsma import Jsma
from advdet.attacks.pgd import PGD, OrthogonalPGD, SelectivePGD
from advdet.attacks.square import Square
from advdet.types import InputError

ATTACKS = {
    "carlini_wagner": CarliniWagner,
    "ddn": DDN,
    "fast_gradient": FastGradient,
    "jsma": Jsma,
    "pgd": PGD,
    "selective_pgd": SelectivePGD,
    "orthogonal_pgd": OrthogonalPGD,
    "square": Square,
}
STRONG = ("carlini_wagner", "ddn")  # these seek the nearest image
FIXED_RADIUS = ("pgd", "selective_pgd", "orthogonal_pgd", "square")
GRADIENT_FREE = ("square",)
GROUPS = {"all": STRONG, "fixed_radius": FIXED_RADIUS}
PRESETS = ("smoke", "fast", "thorough", "paper")
NUM_IMAGES = {"smoke": 16, "fast": 100, "thorough": 1000, "paper": 100}

_DIGITS = {  # black and white: pixels start at the edge of the box and need a large rate
    "smoke": dict(binary_search_steps=3, steps=50, learning_rate=0.1, initial_const=1.0),
    "fast": dict(binary_search_steps=5, steps=300, learning_rate=0.1, initial_const=1.0),
    "thorough": dict(binary_search_steps=9, steps=1000, learning_rate=0.01, initial_const=1e-3),
}
_PHOTO_NOISE = 0.01  # of restarts; 0.05 would be an attack by itself
_PHOTOS = {
    "smoke": dict(
        binary_search_steps=3,
        steps=50,
        learning_rate=0.01,
        initial_const=0.1,
        restart_noise=_PHOTO_NOISE,
    ),
    "fast": dict(
        binary_search_steps=5,
        steps=300,
        learning_rate=0.01,
        initial_const=0.1,
        restart_noise=_PHOTO_NOISE,
    ),
    "thorough": dict(
        binary_search_steps=9,
        steps=1000,
        learning_rate=0.01,
        initial_const=1e-3,
        restart_noise=_PHOTO_NOISE,
    ),
}
_DDN = {"smoke": dict(steps=30), "fast": dict(steps=300), "thorough": dict(steps=1000)}

# The same at every preset; epsilon as the defenders took it (Feinman et al. 2017: 0.3 on MNIST).
_FAST_GRADIENT = {"digits": dict(epsilon=0.3, steps=1), "photos": dict(epsilon=0.03, steps=1)}
# As many pairs as a tenth of the pixels gives, of MNIST and of CIFAR-10.
_JSMA = {
    "digits": dict(theta=1.0, gamma=0.1, steps=39),
    "photos": dict(theta=1.0, gamma=0.1, steps=153),
}

# The radius that papers take, where none is given. linf: Madry et al. 2018 on both sets. l2: Tramer
# & Boneh 2019 (arXiv 1904.13000) on MNIST, Croce et al. 2021 (RobustBench) on CIFAR-10.
RADII = {"digits": {"linf": 0.3, "l2": 2.0}, "photos": {"linf": 8 / 255, "l2": 0.5}}
_PGD = {"smoke": dict(steps=20), "fast": dict(steps=200), "thorough": dict(steps=1000)}
_SQUARE = {"smoke": dict(steps=100), "fast": dict(steps=1000), "thorough": dict(steps=5000)}


def _row(binary_search_steps: int, steps: int, rate: float, const: float, **others) -> dict:
    return dict(
        binary_search_steps=binary_search_steps,
        steps=steps,
        learning_rate=rate,
        initial_const=const,
        **others,
    )


# The row of the paper's own experiment, by defence; for others its attack on MNIST with random
# targets. `binary` has no script of its own and takes that of `outlier_class`, its neighbour in the
# paper; kernel_density's is the second stage.
_PAPER = {
    "outlier_class": _row(3, 2000, 0.01, 10.0),
    "binary": _row(3, 2000, 0.01, 10.0),
    "inner_layer": _row(3, 300, 0.01, 0.1),
    "input_pca": _row(2, 1000, 0.01, 10.0),
    "pca_reduction": _row(6, 3000, 0.01, 1.0),
    "hidden_pca": _row(2, 1000, 0.01, 10.0),
    "mmd": _row(2, 500, 0.01, 1.0),
    "kernel_density": _row(5, 10_000, 0.01, 1.0),
    "dropout": _row(4, 1000, 0.1, 1.0, abort_early=False),
    "mean_blur": _row(4, 3000, 0.01, 10.0),
}
_PAPER_DEFAULT = _row(3, 3000, 0.1, 1.0)
# Made for photographs: on digits it had neither the travel nor the values of c (which of them was
# missing was not looked for). The paper has no figure for this row on digits, so it is given both.
_PAPER_ON_DIGITS = {"inner_layer": _row(6, 1000, 0.1, 0.1)}
# What `paper` fills beside the attack's own settings.
PAPER_RUN = dict(
    objective="paper", targets="paper", operating_point="native", attack="carlini_wagner"
)
PAPER_CONFIDENCE = {"outlier_class": 0.1, "dropout": 1.0}


def settings(
    attack: str, preset: str, channels: int, defense: str, norm: str | None = None
) -> dict:
    """An attack's settings in a preset.

    Args:
      attack: a name in `ATTACKS`.
      preset: a name in `PRESETS`.
      channels: 1 takes the column for digits (MNIST), more the one for photographs (CIFAR-10).
      defense: the defence attacked; `paper` depends on it.
      norm: of the ball, for attacks at a fixed radius, whose default radius depends on it; None for
        "linf".

    Raises:
      InputError: unknown preset.
    """
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    kind = "digits" if channels == 1 else "photos"
    if attack == "fast_gradient":
        return dict(_FAST_GRADIENT[kind])
    if attack == "jsma":
        return dict(_JSMA[kind])
    budget = "fast" if preset == "paper" else preset
    if attack == "ddn":
        return dict(_DDN[budget])
    if attack in FIXED_RADIUS:
        norm = norm or "linf"
        steps = (_SQUARE if attack == "square" else _PGD)[budget]
        return dict(steps, norm=norm, epsilon=RADII[kind].get(norm, 0.0))
    if preset != "paper":
        return dict((_DIGITS if kind == "digits" else _PHOTOS)[preset])
    row = dict(_PAPER.get(defense, _PAPER_DEFAULT))
    if kind == "photos":
        return row | dict(restart_noise=_PHOTO_NOISE)
    return row | _PAPER_ON_DIGITS.get(defense, {})


def make(attack: str, values: dict):
    """The attack with these settings; those of other attacks are left out.

    Raises:
      InputError: a number out of range.
    """
    check_name(attack)
    kind = ATTACKS[attack]
    known = {field.name for field in dataclasses.fields(kind)}
    if "norm" in known and values["norm"] not in NORMS:
        raise InputError(f"unknown norm {values['norm']!r}; known: {', '.join(NORMS)}")
    made = kind(**{name: value for name, value in values.items() if name in known})
    for name in ("steps", "binary_search_steps"):
        if name in known and getattr(made, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(made, name)}")
    for name in ("learning_rate", "initial_const", "epsilon", "theta", "gamma"):
        if name in known and not getattr(made, name) > 0:
            raise InputError(f"{name} must be above 0, not {getattr(made, name)}")
    return made


def check_name(attack: str) -> None:
    """Refuses a name that is no attack's.

    Raises:
      InputError: it is none.
    """
    if attack not in ATTACKS:
        weak = [name for name in ATTACKS if name not in (*STRONG, *FIXED_RADIUS)]
        raise InputError(
            f"unknown attack {attack!r}; known: {', '.join(STRONG)}, all (of these); at a fixed "
            f"radius {', '.join(FIXED_RADIUS)}, fixed_radius (all of these); and the defenders' "
            f"own, {', '.join(weak)}"
        )


def frozen_edge_warning(attack, images) -> str | None:
    """A warning where C&W's rate and steps cannot move a pixel at the edge of the box."""
    if not isinstance(attack, CarliniWagner):
        return None
    travel = attack.learning_rate * attack.steps
    share = float(((images <= 0) | (images >= 1)).mean())
    if travel >= MINIMUM_TRAVEL or share < 0.05:
        return None
    return (
        f"learning_rate x steps = {travel:g} is below {MINIMUM_TRAVEL:g}: the {share:.0%} of "
        "pixels at the edge of the box can hardly move, and C&W will fail or find far images. "
        "Raise --learning_rate or --steps."
    )
