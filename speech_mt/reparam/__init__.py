"""What a weight is: reparametrisations that control its spectrum, in pure torch."""

from speech_mt.reparam.apply import fold, power_step, sigma_reparam, states
from speech_mt.reparam.sigma import SigmaReparam

__all__ = ["SigmaReparam", "fold", "power_step", "sigma_reparam", "states"]
