"""What the weights of a model's layers say: sigmaReparam's gamma, and spectra, as a number a layer and kind.

Weights are equal on all ranks: nothing here has to be summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from speech_mt.diagnostics.sites import Site, num_heads, query_and_key
from speech_mt.diagnostics.spectra import (
    effective_rank,
    query_key_singular_values,
    spectral_energy_concentration,
    spectral_norm,
)
from speech_mt.reparam.apply import WeightHat

TOP = 4  # singular values whose share of the energy is the concentration
TOLERANCE, MAX_ITERATIONS = 1e-3, 50  # of the power iteration: within a few parts in a thousand of the norm

Layers = dict[int, float]  # layer number -> value
NamedSite = tuple[str, Site]  # a weight's name in its layer, and its module


def learned_gamma(site: Site) -> Tensor | None:
    """gamma (chunks,) of a weight under sigmaReparam; None if it has none, or one that is not learned."""
    if not parametrize.is_parametrized(site.module, "weight"):
        return None
    link = site.module.parametrizations.weight[0]
    if not isinstance(link, WeightHat) or not link.state[0].gamma.requires_grad:
        return None
    return link.state[0].effective_gamma()[link.index : link.index + link.chunks].detach()


def gammas(weights: Iterable[NamedSite]) -> dict[str, dict[str, Layers]]:
    """gamma of every weight: kind -> weight's name -> layers; of a fused weight that of largest modulus."""
    found = [(name, site, gamma) for name, site in weights if (gamma := learned_gamma(site)) is not None]
    result: dict[str, dict[str, Layers]] = defaultdict(lambda: defaultdict(dict))
    if found:
        flat = iter(torch.cat([gamma for *_, gamma in found]).tolist())  # one wait for the device
        for name, site, gamma in found:
            values = [next(flat) for _ in range(len(gamma))]
            result[site.kind][name][site.layer] = max(values, key=abs)
    return result


def largest_gammas(kinds: Mapping[str, Mapping[str, Layers]]) -> dict[str, Layers]:
    """``gamma/<kind>`` -> the gamma of largest modulus of each layer's weights."""
    result: dict[str, Layers] = defaultdict(dict)
    for kind, names in kinds.items():
        for layers in names.values():
            for layer, value in layers.items():
                result[f"gamma/{kind}"][layer] = max(result[f"gamma/{kind}"].get(layer, 0.0), value, key=abs)
    return result


@torch.no_grad()
def spectra(weights: Sequence[NamedSite], attentions: Sequence[Site]) -> dict[str, Layers]:
    """Spectra of every layer. Costly: seconds for a hundred layers on a CPU.

    ``spectral_norm/<kind>`` is the largest of a layer's weights: |gamma| where there is one, else by power iteration,
    a lower bound. Of W_Q W_K^T, without 1/sqrt(d_head): ``query_key_norm`` is the largest head's spectral norm,
    ``effective_rank`` the lowest of the heads and ``energy_concentration`` the highest share of sum sigma^2 in the
    TOP largest singular values (of half of them, if that is fewer).
    """
    numbers: list[tuple[str, int, Tensor]] = []
    for _, site in weights:
        gamma = learned_gamma(site)
        if gamma is not None:
            value = gamma.abs().amax()
        else:
            value = spectral_norm(site.module.weight, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS)
        numbers.append((f"spectral_norm/{site.kind}", site.layer, value))
    for site in attentions:
        query, key = query_and_key(site.module)
        values = query_key_singular_values(query.weight, key.weight, num_heads(site.module), query.bias)  # (H, r)
        top = max(1, min(TOP, values.shape[1] // 2))
        numbers += [
            (f"query_key_norm/{site.kind}", site.layer, values[:, 0].amax()),
            (f"effective_rank/{site.kind}", site.layer, effective_rank(values).amin()),
            (f"energy_concentration/{site.kind}", site.layer, spectral_energy_concentration(values, top).amax()),
        ]
    result: dict[str, Layers] = defaultdict(dict)
    if numbers:
        values = torch.stack([value.float() for *_, value in numbers]).tolist()
        for (name, layer, _), value in zip(numbers, values, strict=True):
            result[name][layer] = max(result[name].get(layer, value), value)
    return result
