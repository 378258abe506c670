"""Attacks of malicious clients, and simple tuning, a defense."""

from .backdoor import Backdoor, SimpleTuning
from .forgery import Attack, GaussianAttack, SameValueAttack
from .poisoning import LabelFlipping, ModelPoisoning, SignFlip

__all__ = [
    "Attack",
    "Backdoor",
    "GaussianAttack",
    "LabelFlipping",
    "ModelPoisoning",
    "SameValueAttack",
    "SignFlip",
    "SimpleTuning",
]
