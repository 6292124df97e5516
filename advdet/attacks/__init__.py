"""Attacks, their goals and the engine that runs them."""

from advdet.attacks.base import AttackResult
from advdet.attacks.carlini_wagner import CarliniWagner
from advdet.attacks.ddn import DDN
from advdet.attacks.fast_gradient import FastGradient
from advdet.attacks.jsma import Jsma
from advdet.attacks.pgd import PGD, OrthogonalPGD, SelectivePGD
from advdet.attacks.presets import ATTACKS, FIXED_RADIUS, STRONG
from advdet.attacks.square import Square

__all__ = [
    "ATTACKS", "FIXED_RADIUS", "STRONG", "AttackResult", "CarliniWagner", "DDN", "FastGradient",
    "Jsma", "OrthogonalPGD", "PGD", "SelectivePGD", "Square",
]  # fmt: skip
