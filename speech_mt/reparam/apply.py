"""Which weights are reparametrised, and the way back.

names = sigma_reparam(model)       # every Linear (tied ones excepted); prints nothing, returns what it did
power_step(model)                  # once an update, after optimizer.step(); fairseq's trainer does it by itself
fold(model)                        # W_hat becomes the plain weight, the reparametrisation is gone
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from speech_mt.reparam.sigma import Matrix, SigmaReparam
from speech_mt.reparam.value_projections import SpectralProjection, fold_value_spectrum

LINEAR_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d)
FOLDED_TYPES = (*LINEAR_TYPES, nn.Embedding, nn.MultiheadAttention)
OF_ATTENTION = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
"""Bare parameters of nn.MultiheadAttention, and their chunks: W_q, W_k and W_v above each other are three matrices."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class WeightHat(nn.Module):
    """The torch parametrization on one weight: looks its W_hat up in the owner's :class:`SigmaReparam`."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.state: tuple[SigmaReparam, ...] = ()  # a tuple: the state is the owner's child, not this one's
        self.index = 0

    def forward(self, weight: Tensor) -> Tensor:
        (state,) = self.state
        if self.chunks == 1:
            hat = state.weight_hat(self.index)
        else:
            hat = torch.cat([state.weight_hat(self.index + i) for i in range(self.chunks)])
        return hat if hat.shape == weight.shape else hat.view_as(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def sigma_reparam(
    module: nn.Module,
    *,
    include: str = "",
    exclude: str | None = None,
    embeddings: bool = False,
    chunks: Mapping[str, int] | None = None,
    gamma_init: str = "one",
    learn_gamma: bool = True,
    positive_gamma: bool = False,
    svd: bool = False,
) -> list[str]:
    """Reparametrise the Linear, Conv1d and Conv2d weights in ``module``: W_hat = gamma / sigma(W) * W.

    Also what nn.MultiheadAttention projects with; of its packed ``in_proj_weight``, W_q, W_k and W_v each on its own.

    The state (one gamma a weight) belongs to the nearest element of a ModuleList above a weight, as a Transformer
    layer is, or else to ``module`` itself, under the name ``sigma_reparam``. A weight that two modules share (tied
    embeddings) is left alone, so that it stays tied. Make the optimizer afterwards: gamma is a new parameter.

    Args:
        include, exclude: regular expressions searched in the qualified name of a weight's module.
        embeddings: also take nn.Embedding.
        chunks: regular expression -> number of equal row blocks with a sigma and a gamma each, for fused matrices.
        gamma_init, learn_gamma, positive_gamma, svd: see :class:`SigmaReparam`.

    Returns:
        the qualified names of the weights taken, in order.

    Raises:
        ValueError: a weight is already parametrised, or nothing matches.
    """
    types = (*LINEAR_TYPES, nn.Embedding) if embeddings else LINEAR_TYPES
    taken: dict[str, list[Selected]] = defaultdict(list)
    for selected in select_weights(module, include, exclude, types):
        taken[_owner_name(module, selected.name)].append(selected)
    for owner_name, members in taken.items():
        matrices, links = [], []
        for name, child, parameter in members:
            count = OF_ATTENTION.get(parameter, 1)
            count = next((n for pattern, n in (chunks or {}).items() if re.search(pattern, name)), count)
            rows = getattr(child, parameter).shape[0]
            if rows % count:
                raise ValueError(f"{name}.{parameter} has {rows} rows, not a multiple of {count} chunks")
            link = WeightHat(count)
            link.index = len(matrices)
            parametrize.register_parametrization(child, parameter, link, unsafe=True)
            matrices += [Matrix(child.parametrizations[parameter], i, count) for i in range(count)]
            links.append(link)
        state = SigmaReparam(
            matrices,
            gamma_init=gamma_init,
            learn_gamma=learn_gamma,
            positive_gamma=positive_gamma,
            svd=svd,
        )
        owner = module.get_submodule(owner_name)
        owner.add_module("sigma_reparam", state)
        state.hook(owner)
        for link in links:
            link.state = (state,)
    return [selected.qualified_name for members in taken.values() for selected in members]


class Selected(NamedTuple):
    """A weight: its module's qualified name, the module, and the parameter's name in it."""

    name: str
    module: nn.Module
    parameter: str

    @property
    def qualified_name(self) -> str:
        return f"{self.name}.{self.parameter}".lstrip(".")


def select_weights(
    module: nn.Module, include: str = "", exclude: str | None = None, types: tuple[type, ...] = LINEAR_TYPES
) -> list[Selected]:
    """The weights of the given types of modules, and of attention, whose name matches and that are not shared.

    Raises:
        ValueError: a weight is already parametrised, or nothing matches.
    """
    tied = _shared_parameters(module)
    selected = []
    for name, child in module.named_modules():
        if not re.search(include, name) or (exclude and re.search(exclude, name)):
            continue
        candidates = ["weight"] if isinstance(child, types) else []
        if isinstance(child, nn.MultiheadAttention):
            candidates = [parameter for parameter in OF_ATTENTION if getattr(child, parameter, None) is not None]
        for parameter in candidates:
            if parametrize.is_parametrized(child, parameter) or isinstance(child, SpectralProjection):
                raise ValueError(f"{name}.{parameter} is already parametrised")
            if id(getattr(child, parameter)) not in tied:
                selected.append(Selected(name, child, parameter))
    if not selected:
        raise ValueError(f"no weight of {type(module).__name__} matches include={include!r}, exclude={exclude!r}")
    return selected


def _shared_parameters(module: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _owner_name(module: nn.Module, name: str) -> str:
    """The nearest element of a ModuleList above a weight's module, else the root; a container calls or lists its
    children, so it cannot own a state: the weight's module is then its own owner."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        if isinstance(module.get_submodule(".".join(parts[: depth - 1])), nn.ModuleList):
            owner = ".".join(parts[:depth])
            break
    else:
        owner = ""
    return name if isinstance(module.get_submodule(owner), CONTAINERS) else owner


def states(module: nn.Module) -> Iterator[tuple[str, SigmaReparam]]:
    """The qualified name and state of every owner in ``module``."""
    for name, child in module.named_modules():
        if isinstance(child, SigmaReparam):
            yield name.removesuffix("sigma_reparam").removesuffix("."), child


def power_step(module: nn.Module) -> None:
    """One power-iteration step of every reparametrised weight in ``module``: once an update."""
    for _, state in states(module):
        state.power_step()


@torch.no_grad()
def fold(module: nn.Module) -> list[str]:
    """Replace every parametrised weight by its W_hat, and every controlled value spectrum by its two weights, in place;
    the model computes what it computed in eval mode.

    Returns:
        the qualified names of the folded weights.
    """
    owners = [(module.get_submodule(name), state) for name, state in states(module)]
    for _, state in owners:
        state.eval()
    folded = []
    for name, child in module.named_modules():
        for parameter in ("weight", *OF_ATTENTION):
            if isinstance(child, FOLDED_TYPES) and parametrize.is_parametrized(child, parameter):
                parametrize.remove_parametrizations(child, parameter, leave_parametrized=True)
                folded.append(Selected(name, child, parameter).qualified_name)
    for owner, state in owners:
        state.remove_hooks()
        del owner.sigma_reparam
    return folded + fold_value_spectrum(module)
