"""Every layer of a checkpoint in numbers, from its state dict alone: without the model, the task or fairseq.

Any fairseq Transformer will do, ours or stock, reparametrised, folded or plain: weights under a reparametrisation count
as the W_hat that the model computes with. :func:`add_data` joins what a :class:`Monitor` saw of the model on data.
:mod:`speech_mt.diagnostics.worries` reads the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speech_mt.diagnostics.monitor import Measured
from speech_mt.diagnostics.oversmoothing import (
    asymmetry,
    condition_number,
    value_output_eigenvalues,
    value_output_matrix,
)
from speech_mt.diagnostics.sites import KINDS, LAYER
from speech_mt.diagnostics.spectra import (
    effective_rank,
    query_key_singular_values,
    spectral_energy_concentration,
    spectral_norm,
)
from speech_mt.diagnostics.weights import TOP
from speech_mt.errors import InputError
from speech_mt.modules.residual import NORM_FIRST
from speech_mt.reparam import fold_state_dict, gammas_by_weight

TOLERANCE, MAX_ITERATIONS = 1e-4, 100  # of the power iteration: norms are low by less than 1 %

_WEIGHT = re.compile(LAYER + r"\.(?:(?P<attention>self_attn|encoder_attn)\.)?(?P<name>.+)\.weight$")
_CONFORMER = {"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj", "linear_out": "out_proj"}

StateDict = Mapping[str, Tensor]


@dataclass
class LayerNumbers:
    """What is known of one layer, or of its cross-attention, which is a row of its own.

    Attributes:
        kind: encoder, decoder or cross.
        layer: its number, from 0.
        name: where the state dict has it: ``encoder.layers.3``, ``decoder.layers.3.encoder_attn``.
        spectral_norms: weight's name (``q_proj``, ``fc1``) -> ||W_hat||_2; NaN if the weight is not finite.
        gammas: weight's name -> sigmaReparam's gamma, with its sign.
        per_head: quantity -> a number a head. From weights: ``query_key_norm`` ||W_Q W_K^T||_2, ``effective_rank`` and
            ``energy_concentration`` of W_Q W_K^T, ``typical_logit`` ||W_Q W_K^T||_F / sqrt(d_head), the standard
            deviation of logits between unrelated tokens of unit variance. On data: ``entropy_normalised`` and
            ``max_logit``.
        numbers: quantity -> number. Of H = W_V W_O in self-attention: ``positive_share`` of its heads' eigenvalues
            with a positive real part, ``lowest_real`` and ``highest_real`` part, ``largest_modulus``,
            ``condition_number``, ``asymmetry``. On data: ``cosine``, ``hfc_lfc``, ``rank_residual``.
        qk_norm: queries and keys are normalised at run time, so that the scale of W_Q and W_K means nothing.
    """

    kind: str
    layer: int
    name: str
    spectral_norms: dict[str, float] = field(default_factory=dict)
    gammas: dict[str, float] = field(default_factory=dict)
    per_head: dict[str, list[float]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    qk_norm: bool = False


def model_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's options in a loaded checkpoint, flat: those of a nested ``encoder`` become ``encoder_...``."""
    found = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    options = dict(found if isinstance(found, Mapping) else vars(found))
    for stack in ("encoder", "decoder"):
        nested = options.get(stack)
        if isinstance(nested, Mapping):
            options |= {f"{stack}_{name}": value for name, value in nested.items()}
    return options


@torch.no_grad()
def inspect_weights(state_dict: StateDict, options: Mapping[str, Any]) -> list[LayerNumbers]:
    """Measure every layer of a model: encoder, decoder, then the decoder's cross-attention, each by layer.

    About 20 seconds for 100 + 100 layers of width 512 on one core. Quantities of heads are missing where the options do
    not say how many there are, and quantities of an attention where one of its weights is not finite.

    Args:
        state_dict: of the whole model.
        options: see :func:`model_options`; the numbers of heads, where LayerNorm stands, and how gamma is kept.

    Raises:
        InputError: no layers; or heads that do not divide an attention's width.
    """
    positive_gamma = bool(options.get("reparam_positive_gamma"))
    folded = _split_fused(fold_state_dict(dict(state_dict), positive_gamma))
    gammas = gammas_by_weight(state_dict, positive_gamma) if options.get("reparam", "sigma") == "sigma" else {}
    rows: dict[str, LayerNumbers] = {}
    for key, weight in folded.items():
        match = _WEIGHT.search(key)
        if match is None or weight.ndim != 2:
            continue
        cross = match["attention"] == "encoder_attn"
        stack, layer = match.group(1, 2)
        where = key[: match.end(2)] + ".encoder_attn" * cross
        row = rows.setdefault(where, LayerNumbers("cross" if cross else stack, int(layer), where))
        name = _CONFORMER.get(match["name"], match["name"])
        row.spectral_norms[name] = _spectral_norm(weight)
        if key in gammas:
            row.gammas[name] = gammas[key]
    if not rows:
        raise InputError(
            "no Transformer: looked for weights such as encoder.layers.0.fc1.weight, found "
            f"{', '.join(list(folded)[:3]) or 'none'}"
        )
    for row in rows.values():
        _measure_attention(row, folded, options)
    return sorted(rows.values(), key=lambda row: (KINDS.index(row.kind), row.layer))


def add_data(rows: list[LayerNumbers], measured: Measured) -> None:
    """Add what a monitor of entropy, logits and smoothing saw to the rows."""
    for row in rows:
        for quantity in ("entropy_normalised", "max_logit"):
            heads = measured.heads.get(f"{quantity}/{row.kind}")
            if heads is not None and row.layer < len(heads):
                row.per_head[quantity] = heads[row.layer].tolist()
        for quantity in ("cosine", "hfc_lfc", "rank_residual"):
            layers = measured.layers.get(f"{quantity}/{row.kind}", {})
            if row.layer in layers:
                row.numbers[quantity] = layers[row.layer]


def _spectral_norm(weight: Tensor) -> float:
    if not weight.isfinite().all():
        return float("nan")
    return spectral_norm(weight, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS).item()


def _measure_attention(row: LayerNumbers, weights: StateDict, options: Mapping[str, Any]) -> None:
    prefix = row.name if row.kind == "cross" else f"{row.name}.self_attn"
    conformer = f"{prefix}.linear_q.weight" in weights
    names = list(_CONFORMER if conformer else _CONFORMER.values())
    query, key, value, output = (weights.get(f"{prefix}.{name}.weight") for name in names)
    heads = _num_heads(options, "encoder" if row.kind == "encoder" else "decoder")
    if query is None or key is None or heads is None:
        return
    if query.shape[0] % heads:
        raise InputError(f"{prefix}: {query.shape[0]} rows of queries do not divide into {heads} heads")
    row.qk_norm = f"{prefix}.q_norm.weight" in weights
    bias = weights.get(f"{prefix}.{names[0]}.bias")
    if _finite(query, key, bias):
        values = query_key_singular_values(query, key, heads, bias)
        top = max(1, min(TOP, values.shape[1] // 2))
        row.per_head = {
            "query_key_norm": values[:, 0].tolist(),
            "effective_rank": effective_rank(values).tolist(),
            "energy_concentration": spectral_energy_concentration(values, top).tolist(),
            "typical_logit": (values.norm(dim=1) * (query.shape[0] // heads) ** -0.5).tolist(),
        }
    if row.kind != "cross" and value is not None and output is not None and value.shape == output.T.shape:
        gain = weights.get(f"{prefix}_layer_norm.weight") if conformer or _norm_first(options, row.kind) else None
        if _finite(value, output, gain):
            eigenvalues = value_output_eigenvalues(value, output, heads, gain)
            matrix = value_output_matrix(value, output, gain)
            row.numbers |= {
                "positive_share": (eigenvalues.real > 0).double().mean().item(),
                "lowest_real": eigenvalues.real.min().item(),
                "highest_real": eigenvalues.real.max().item(),
                "largest_modulus": eigenvalues.abs().max().item(),
                "condition_number": condition_number(matrix).item(),
                "asymmetry": asymmetry(matrix).item(),
            }


def _finite(*tensors: Tensor | None) -> bool:
    return all(tensor is None or bool(tensor.isfinite().all()) for tensor in tensors)


def _num_heads(options: Mapping[str, Any], stack: str) -> int | None:
    own = options.get(f"{stack}_attention_heads")
    return own or options.get("encoder_attention_heads")  # a decoder that says nothing is like the encoder


def _norm_first(options: Mapping[str, Any], stack: str) -> bool:
    return options.get("norm_placement") in NORM_FIRST or bool(options.get(f"{stack}_normalize_before"))


def _split_fused(state_dict: StateDict) -> dict[str, Tensor]:
    """Queries, keys and values apart: fairseq before 0.9 has them in one matrix, our --fuse-qk queries and keys."""
    split = {}
    for key, value in state_dict.items():
        if fused := re.fullmatch(r"(.*\.)(in_proj_|qk_proj\.)(weight|bias)", key):
            letters = "qkv" if fused[2] == "in_proj_" else "qk"
            parts = zip(letters, value.chunk(len(letters)), strict=True)
            split |= {f"{fused[1]}{letter}_proj.{fused[3]}": part for letter, part in parts}
        else:
            split[key] = value
    return split
