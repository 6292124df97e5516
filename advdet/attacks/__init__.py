"""Attacks, their goals and the engine that runs them."""

from advdet.attacks.base import AttackResult
from advdet.attacks.carlini_wagner import CarliniWagner
from advdet.attacks.ddn import DDN
from advdet.attacks.presets import ATTACKS

__all__ = ["ATTACKS", "AttackResult", "CarliniWagner", "DDN"]
