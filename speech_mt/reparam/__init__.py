"""What a weight is: reparametrisations that control its spectrum, in pure torch."""

from speech_mt.reparam.apply import fold, power_step, sigma_reparam, states
from speech_mt.reparam.baselines import spectral_norm, weight_norm
from speech_mt.reparam.sigma import SigmaReparam
from speech_mt.reparam.state_dict import fold_state_dict, gammas_by_weight, reestimate_state_dict
from speech_mt.reparam.value_projections import value_spectrum
from speech_mt.reparam.value_spectrum import BASES, SPECTRA, ValueSpectrum

REPARAMS = {"sigma": sigma_reparam, "spectral_norm": spectral_norm, "weight_norm": weight_norm}

__all__ = [
    "BASES",
    "REPARAMS",
    "SPECTRA",
    "SigmaReparam",
    "ValueSpectrum",
    "fold",
    "fold_state_dict",
    "gammas_by_weight",
    "power_step",
    "reestimate_state_dict",
    "sigma_reparam",
    "spectral_norm",
    "states",
    "value_spectrum",
    "weight_norm",
]
