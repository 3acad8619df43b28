"""Layer by layer: how alike tokens are, and what the theory of oversmoothing says of the layer's attention and weights.

The simplified model of arXiv 2401.04301, X <- X + sum_h A_h X W_V^h W_O^h, leaves out LayerNorm, feed-forward,
cross-attention and biases. Two things are predicted by it, from each layer's measured A and W: the share of channels
whose dominating eigenvalue smooths or sharpens, and HFC/LFC when the layers' updates alone are applied, one after the
other, to the stack's real input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speech_mt.diagnostics.oversmoothing import (
    condition_number,
    dominating_share,
    high_to_low_frequency,
    rank_collapse_residual,
    token_cosine,
    value_output_eigenvalues,
    value_output_matrix,
)
from speech_mt.diagnostics.sites import attention_sites, layer_sites
from speech_mt.modules.attention import MultiheadAttention, visible
from speech_mt.modules.residual import NORM_FIRST


@dataclass(frozen=True)
class LayerSmoothing:
    """One layer of one stack; means over the sentences of a batch, NaN where there is nothing to measure."""

    stack: str  # encoder or decoder
    layer: int
    cosine: float  # of two different tokens, of the layer's output
    hfc_lfc: float  # over sqrt(n - 1)
    rank_residual: float
    condition_number: float  # of W_V W_O, with the gain of a LayerNorm in front
    predicted_hfc_lfc: float  # of the simplified model, after the same number of layers
    predicted_smoothing: float  # share of channels, mean over heads
    predicted_sharpening: float


@torch.no_grad()
def smoothing_by_layer(
    model: nn.Module, net_input: Mapping[str, Tensor], target_padding_mask: Tensor | None = None
) -> list[LayerSmoothing]:
    """Run one batch through one of our models, in evaluation mode, and look at every layer's self-attention.

    Args:
        net_input: the model's arguments.
        target_padding_mask: (B, T), True where the decoder's input is padding.
    """
    seen: dict[int, tuple[Tensor, Tensor | None, bool]] = {}
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    attentions = {(s.kind, s.layer): s.module for s in attention_sites(model) if s.kind != "cross"}
    layers = layer_sites(model)

    def observe(module: MultiheadAttention, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> None:
        shown = visible(mask, causal, q.shape[2], k.shape[2], q.device)
        seen[id(module)] = module._weights(q, k, shown), mask, causal

    def keep(module: nn.Module, args: tuple, output: object) -> None:
        inputs[id(module)] = args[0]
        outputs[id(module)] = output[0] if isinstance(output, tuple) else output

    handles = [site.module.register_forward_hook(keep) for site in layers]
    training = model.training
    model.eval()
    try:
        for module in attentions.values():
            module.observer = observe
        model(**net_input)
    finally:
        for handle in handles:
            handle.remove()
        for module in attentions.values():
            module.observer = None
        model.train(training)

    rows, predicted = [], {}
    for site in layers:
        attention = attentions[site.kind, site.layer]
        weights, key_padding_mask, causal = seen[id(attention)]
        mask = key_padding_mask if site.kind == "encoder" else target_padding_mask
        x = predicted.get(site.kind, inputs[id(site.module)])
        predicted[site.kind] = x = x + _attention_update(attention, weights, x)
        norm = site.module.self_attn_layer_norm
        gain = norm.weight if norm.placement in NORM_FIRST else None
        value, output_weight = attention.v_proj.weight, attention.out_proj.weight
        eigenvalues = value_output_eigenvalues(value, output_weight, attention.num_heads, gain)
        share = dominating_share(eigenvalues, weights, mask, causal)
        output = outputs[id(site.module)]
        numbers = [
            token_cosine(output, mask),
            high_to_low_frequency(output, mask, length_normalised=True),
            rank_collapse_residual(output, mask),
            condition_number(value_output_matrix(value, output_weight, gain)),
            high_to_low_frequency(x, mask, length_normalised=True),
            share.smoothing,
            share.sharpening,
        ]
        rows.append(LayerSmoothing(site.kind, site.layer, *(n.nanmean().item() for n in numbers)))
    return rows


def _attention_update(attention: MultiheadAttention, weights: Tensor, x: Tensor) -> Tensor:
    """sum_h A_h X W_V^h W_O^h, (B, T, C)."""
    values = attention._heads(x @ attention.v_proj.weight.mT)
    mixed = (weights.to(values.dtype) @ values).transpose(1, 2).flatten(2)
    return mixed @ attention.out_proj.weight.mT
