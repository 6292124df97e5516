"""Attacks, their goals and the engine that runs them."""

from advdet.attacks.base import AttackResult
from advdet.attacks.carlini_wagner import CarliniWagner
from advdet.attacks.ddn import DDN
from advdet.attacks.fast_gradient import FastGradient
from advdet.attacks.jsma import Jsma
from advdet.attacks.presets import ATTACKS, STRONG

__all__ = ["ATTACKS", "STRONG", "AttackResult", "CarliniWagner", "DDN", "FastGradient", "Jsma"]
