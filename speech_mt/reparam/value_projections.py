"""Value spectra in a model: which attentions get one, and the way back to plain weights."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from speech_mt.reparam.value_spectrum import BASES, SPECTRA, ValueSpectrum

_SELF_ATTENTION = re.compile(r"^((?:.*\.)?layers)\.(\d+)\.self_attn$")
_STATE = "value_spectrum."


class SpectralProjection(nn.Linear):
    """A Linear whose weight is one of the two that a :class:`ValueSpectrum` makes; the bias is its own."""

    def __init__(self, linear: nn.Linear, spectrum: ValueSpectrum, index: int) -> None:
        nn.Module.__init__(self)  # without a weight of its own
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._spectrum = (spectrum,)  # a tuple: it is the attention's child, not this one's
        self._index = index

    @property
    def weight(self) -> Tensor:
        return self._spectrum[0].weights()[self._index]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """The Linear that computes the same."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = self.weight.detach().to(dtype, copy=True).contiguous()
        linear.weight, linear.bias = nn.Parameter(weight), self.bias
        return linear


def value_spectrum(module: nn.Module, spectrum: str, basis: str = "orthogonal", scale: float = 1.0) -> list[str]:
    """Control the eigenvalues of W_V W_O in every self-attention ``[...]layers.N.self_attn`` of ``module``.

    The attention gets a child ``value_spectrum``, whose parameters replace both weights: make the optimizer
    afterwards, and do not decay them (the scale of Theta means nothing, that of psi is what is learned).

    Args:
        spectrum: one of :data:`SPECTRA`; ``sharpen-first-half`` takes the first floor(L / 2) layers of each stack and
            leaves the others free; ``free`` takes none.
        basis: a key of :data:`BASES`.
        scale: see :class:`ValueSpectrum`.

    Returns:
        the qualified names of the attentions taken.

    Raises:
        ValueError: a weight is reparametrised already or not square, or there is no such attention.
    """
    if spectrum not in SPECTRA or basis not in BASES:
        raise ValueError(f"value spectrum {spectrum!r}, basis {basis!r}: choose of {SPECTRA} and {tuple(BASES)}")
    stacks: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name, _ in module.named_modules():
        if match := _SELF_ATTENTION.match(name):
            stacks[match[1]].append((int(match[2]), name))
    if not stacks:
        raise ValueError(f"no layers.N.self_attn in {type(module).__name__}")
    if spectrum == "free":
        return []
    taken = []
    for layers in stacks.values():
        layers.sort()
        count = len(layers) // 2 if spectrum == "sharpen-first-half" else len(layers)
        taken += [name for _, name in layers[:count]]
    sign = 1 if spectrum == "smooth" else -1
    for name in taken:
        _replace_weights(name, module.get_submodule(name), sign, basis, scale)
    return taken


def _replace_weights(name: str, attention: nn.Module, sign: int, basis: str, scale: float) -> None:
    projections = {"v_proj": attention.v_proj, "out_proj": attention.out_proj}
    for projection, linear in projections.items():
        if parametrize.is_parametrized(linear) or isinstance(linear, SpectralProjection):
            raise ValueError(f"{name}.{projection}.weight is already parametrised")
        if linear.in_features != linear.out_features:
            raise ValueError(f"{name}.{projection}.weight is {tuple(linear.weight.shape)}, not square")
    state = ValueSpectrum(attention.v_proj.in_features, sign, basis, scale, like=attention.v_proj.weight)
    attention.add_module("value_spectrum", state)
    for index, (projection, linear) in enumerate(projections.items()):
        setattr(attention, projection, SpectralProjection(linear, state, index))
    state.hook(attention)


@torch.no_grad()
def fold_value_spectrum(module: nn.Module) -> list[str]:
    """Plain Linears in place of every controlled pair, in place; returns the names of the weights."""
    folded = []
    for name, attention in module.named_modules():
        state = getattr(attention, "value_spectrum", None)
        if isinstance(state, ValueSpectrum):
            others = (p.dtype for key, p in attention.named_parameters() if not key.startswith(_STATE))
            dtype = next(others, state.psi.dtype)
            for projection in ("v_proj", "out_proj"):
                setattr(attention, projection, getattr(attention, projection).plain(dtype))
                folded.append(f"{name}.{projection}.weight".lstrip("."))
            state.remove_hooks()
            del attention.value_spectrum
    return folded


@torch.no_grad()
def fold_value_spectrum_state(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a state dict with plain weights in place of every Theta, V and psi."""
    folded = {name: value for name, value in state_dict.items() if _STATE not in name}
    for name, psi in state_dict.items():
        if name.endswith(_STATE + "psi"):
            prefix = name.removesuffix("psi")
            state = {key: state_dict[prefix + key] for key in ("theta", "v", "sign") if prefix + key in state_dict}
            basis = "orthogonal" if "theta" in state else "general"
            spectrum = ValueSpectrum(len(psi), int(state["sign"]), basis, like=psi)
            spectrum.load_state_dict({**state, "psi": psi})
            attention = prefix.removesuffix(_STATE)
            others = (
                w.dtype for key, w in state_dict.items() if re.fullmatch(rf"{attention}\w+_proj\.(weight|bias)", key)
            )
            dtype = next(others, psi.dtype)
            for projection, weight in zip(("v_proj", "out_proj"), spectrum.weights(), strict=True):
                folded[f"{attention}{projection}.weight"] = weight.to(dtype).contiguous()
    return folded
