"""How each data set's classifier is trained."""

from __future__ import annotations

import dataclasses

import jax

from advdet import nets
from advdet.augment import Affine
from advdet.recipes import Recipe
from advdet.splits import Splits
from advdet.types import InputError

SCHEDULES = ("fast", "paper")
HALVES = ("full", "defender", "attacker")
_GRADIENTS_PER_SECOND = {"MnistNet": 7000, "ResNet32": 200}  # measured on two CPU cores


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train a classifier.

    Attributes:
      recipe: of the loop.
      augment: random changes of training images, or None.
      momentum: of the BatchNorm statistics.
      reestimate: whether BatchNorm statistics are taken anew from clean training images at the
        end; needed where weights are averaged or images augmented (89.4 % -> 90.9 % on CIFAR-10).
    """

    recipe: Recipe
    augment: Affine | None = None
    momentum: float = 0.99
    reestimate: bool = False


_CIFAR_AUGMENT = Affine(degrees=10.0, shift=0.1, flip=True)
# "paper" is its reference code, which reached 99.4 % on MNIST and 91.5 % on CIFAR-10; that penalty,
# 1e-4 |w|^2, has the gradient 2e-4 w.
PLANS = {
    # The paper's plan with a warm-up, a lower top rate and averaged weights: 99.31 %. "paper" gives
    # 99.21 %, and a network on which C&W ends in a local minimum for 0.5 to 1 % of the targets.
    # Augmentation and weight decay gave 99.46 %, but a network that is harder to attack than the
    # one whose distances the paper reports (1.59 untargeted, against 1.32).
    ("mnist", "fast"): Plan(Recipe(epochs=20, learning_rate=0.05, average=0.999)),
    ("mnist", "paper"): Plan(Recipe(epochs=30, schedule="halving")),
    ("mnist_5k", "fast"): Plan(
        Recipe(
            epochs=30,
            batch_size=64,
            learning_rate=0.05,
            nesterov=True,
            weight_decay=5e-4,
            average=0.99,
        ),
        Affine(10.0, 0.07, False),
    ),
    ("mnist_5k", "paper"): Plan(Recipe(epochs=30, schedule="halving")),
    ("cifar10", "fast"): Plan(
        Recipe(epochs=36, batch_size=64, nesterov=True, weight_decay=5e-4, average=0.999),
        _CIFAR_AUGMENT,
        reestimate=True,
    ),
    ("cifar10", "paper"): Plan(
        Recipe(epochs=300, schedule="halving", weight_decay=2e-4, decay_ndim=4), _CIFAR_AUGMENT
    ),
}


def plan_for(splits: Splits, schedule: str = "fast", epochs: int | None = None) -> Plan:
    """The plan for a data set; sets without one of their own take MNIST's or CIFAR-10's.

    Args:
      splits: the data.
      schedule: "fast" or "paper" (the paper's epochs and learning rates).
      epochs: in place of the plan's.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    if (splits.name, schedule) in PLANS:
        plan = PLANS[splits.name, schedule]
    else:
        net = nets.net_for(splits.name, splits.num_classes, splits.image_shape)
        plan = PLANS["cifar10" if isinstance(net, nets.ResNet32) else "mnist", schedule]
    if epochs is not None:
        plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, epochs=epochs))
    return plan


def describe(splits: Splits, half: str, schedule: str, epochs: int | None, seed: int) -> str:
    """One line on what a training with these settings will do and about how long it takes."""
    part = part_of(splits, half)
    plan = plan_for(part, schedule, epochs)
    net = type(nets.net_for(splits.name, splits.num_classes, splits.image_shape)).__name__
    images, recipe = len(part.train.labels), plan.recipe
    line = (
        f"training {net} on {images:,} images of {part.name} ({part.part}), {recipe.epochs} epochs "
        f"of batches of {recipe.batch_size}, seed {seed}"
    )
    if jax.default_backend() != "cpu":
        return line
    minutes = images * recipe.epochs / _GRADIENTS_PER_SECOND[net] / 60
    return f"{line}; about {max(1, round(minutes))} minutes on two cores"


def part_of(splits: Splits, half: str) -> Splits:
    """The half of the data that `half` names; data that are that half already stay as they are."""
    if half not in HALVES:
        raise InputError(f"no half {half!r}; there are {', '.join(HALVES)}")
    if splits.part == "full":
        return splits.half(half)
    if half not in ("full", splits.part):
        raise InputError(f"the data are the {splits.part}'s half, and half={half!r} was asked for")
    return splits
