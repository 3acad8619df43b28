"""Reparametrised weights in a state dict, without the model they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from speech_mt.errors import InputError
from speech_mt.reparam.sigma import Matrix, SigmaReparam
from speech_mt.reparam.value_projections import fold_value_spectrum_state

_STATE = "sigma_reparam."
_RAW = ".parametrizations.weight.original"  # weight_norm has two: original0 (g) and original1 (v)
_NORM, _DIRECTION = _RAW + "0", _RAW + "1"

StateDict = dict[str, Tensor]


def _owned_weights(state_dict: StateDict) -> Iterator[tuple[str, list[str]]]:
    """The prefix of every sigmaReparam state ("encoder.layers.0.sigma_reparam.") and its raw weights, in order."""
    for key in state_dict:
        if key.endswith(_STATE + "gamma"):
            prefix = key.removesuffix("gamma")
            owner = prefix.removesuffix(_STATE)
            weights = [name for name in state_dict if name.startswith(owner) and name.endswith(_RAW)]
            if len(weights) != state_dict[key].numel():
                raise InputError(
                    f"{key} is for {state_dict[key].numel()} matrices, {owner or 'the model'} has {len(weights)}: "
                    "fused weights with a sigma a chunk need the model itself"
                )
            yield prefix, weights


def _state_of(state_dict: StateDict, prefix: str, weights: list[str], positive_gamma: bool = False) -> SigmaReparam:
    matrices = [Matrix(SimpleNamespace(original=state_dict[name])) for name in weights]
    state = SigmaReparam(matrices, positive_gamma=positive_gamma)
    names = ("gamma", "u", "v", "sigma")
    try:
        state.load_state_dict({name: state_dict[prefix + name] for name in names})
    except (KeyError, RuntimeError):
        raise InputError(f"{prefix}{{{', '.join(names)}}} are not those of the weights beside them") from None
    return state.eval()


@torch.no_grad()
def gammas_by_weight(state_dict: StateDict, positive_gamma: bool = False) -> dict[str, float]:
    """gamma of every weight under sigmaReparam, by the weight's plain name; arguments as :func:`fold_state_dict`."""
    gammas = {}
    for prefix, weights in _owned_weights(state_dict):
        gamma = state_dict[prefix + "gamma"]
        values = (F.softplus(gamma.float()) if positive_gamma else gamma).tolist()
        gammas |= {name.removesuffix(_RAW) + ".weight": value for name, value in zip(weights, values, strict=True)}
    return gammas


@torch.no_grad()
def reestimate_state_dict(state_dict: StateDict) -> StateDict:
    """A copy whose u, v and sigma are those of its weights, as after averaging: then ||W_hat|| = |gamma| again.

    Raises:
        InputError: a weight has a sigma a chunk.
    """
    result = dict(state_dict)
    for prefix, weights in _owned_weights(state_dict):
        state = _state_of(state_dict, prefix, weights)
        state.reestimate()
        result |= {prefix + name: getattr(state, name) for name in ("u", "v", "sigma")}
    return result


@torch.no_grad()
def fold_state_dict(state_dict: StateDict, positive_gamma: bool = False) -> StateDict:
    """A copy with plain weights W_hat in place of every parametrised one, under the plain name; value spectra too.

    Args:
        positive_gamma: the model had softplus gammas.

    Raises:
        InputError: a weight has a sigma a chunk.
    """
    hats: StateDict = {}
    for prefix, weights in _owned_weights(state_dict):
        state = _state_of(state_dict, prefix, weights, positive_gamma)
        for name, hat in zip(weights, state.weight_hats(), strict=True):
            hats[name] = hat.view_as(state_dict[name])
    folded: StateDict = {}
    for name, value in state_dict.items():
        if name in hats:
            folded[name.removesuffix(_RAW) + ".weight"] = hats[name]
        elif name.endswith(_NORM):
            direction = state_dict[name.removesuffix(_NORM) + _DIRECTION]
            folded[name.removesuffix(_NORM) + ".weight"] = torch._weight_norm(direction, value, 0)
        elif not name.endswith(_DIRECTION) and _STATE not in name:
            folded[name] = value
    return fold_value_spectrum_state(folded)
