"""Where a model can be watched: its attentions and layers, found by name, in our models and in fairseq's own.

speech_mt's attention has a place for an observer. fairseq's hands its projections' weights to a fused function, so a
hook projects queries and keys once more; the conformer's (of ESPnet) forms its logits, which may hold relative
positions, and gives them away as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speech_mt.diagnostics.attention_entropy import HIDDEN, AttentionRows, attention_rows, beside_training
from speech_mt.modules.attention import MultiheadAttention, visible
from speech_mt.modules.layers import DecoderLayer, EncoderLayer

KINDS = ("encoder", "decoder", "cross")
LAYER = r"(?:^|\.)(encoder|decoder)\.(?:\w+\.)*?(?!conv)\w*layers\.(\d+)"  # of a module's or parameter's name
_ATTENTIONS = re.compile(LAYER + r"\.(?:\w+\.)*?(self_attn|encoder_attn)$")
_LAYERS = re.compile(LAYER + r"$")
_WEIGHTS = re.compile(LAYER + r"\.(.+)$")


class Site(NamedTuple):
    """An attention, a layer or a weight's module: its kind (encoder, decoder, cross), layer number and module."""

    kind: str
    layer: int
    module: nn.Module


class Seen(NamedTuple):
    """What one attention did in one forward pass."""

    rows: AttentionRows
    key_padding_mask: Tensor | None  # (B, S), True at padding
    causal: bool
    keys: int  # S


Record = Callable[[Seen], None]
Remove = Callable[[], None]


def attention_sites(model: nn.Module) -> list[Site]:
    """Every attention of an encoder or decoder layer, in order."""
    sites = []
    for name, module in model.named_modules():
        if match := _ATTENTIONS.search(name):
            stack, layer, attention = match.groups()
            sites.append(Site("cross" if attention == "encoder_attn" else stack, int(layer), module))
    return sites


def layer_sites(model: nn.Module) -> list[Site]:
    """Every encoder and decoder layer, in order."""
    return [
        Site(match[1], int(match[2]), module)
        for name, module in model.named_modules()
        if (match := _LAYERS.search(name))
    ]


def weight_sites(model: nn.Module) -> list[tuple[str, Site]]:
    """Every Linear in a layer, in order, with the name it has there: ``fc1``, or ``q_proj`` in an attention."""
    sites = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (match := _WEIGHTS.search(name)):
            stack, layer, rest = match.groups()
            attention, _, weight = rest.partition(".")
            kind = "cross" if attention == "encoder_attn" else stack
            name_there = weight if attention in ("self_attn", "encoder_attn") else rest
            sites.append((name_there, Site(kind, int(layer), module)))
    return sites


def stack_depths(sites: list[Site]) -> dict[str, int]:
    """Layers of each kind there is."""
    return {
        kind: 1 + max(s.layer for s in sites if s.kind == kind) for kind in KINDS if any(s.kind == kind for s in sites)
    }


def num_heads(attention: nn.Module) -> int:
    """H of an attention of either make."""
    return attention.h if hasattr(attention, "linear_q") else attention.num_heads


class Projection(NamedTuple):
    """Of queries or keys: weight (H D, C) and bias (H D,) or None."""

    weight: Tensor
    bias: Tensor | None


def query_and_key(attention: nn.Module) -> tuple[Projection, Projection]:
    """The projections of queries and keys of an attention of any make."""
    if hasattr(attention, "qk_proj"):
        weights, bias = attention.qk_proj.weight.chunk(2), attention.qk_proj.bias
        biases = (None, None) if bias is None else bias.chunk(2)
        return Projection(weights[0], biases[0]), Projection(weights[1], biases[1])
    if hasattr(attention, "linear_q"):
        query, key = attention.linear_q, attention.linear_k
    else:
        query, key = attention.q_proj, attention.k_proj
    return Projection(query.weight, query.bias), Projection(key.weight, key.bias)


def watch_attention(site: Site, record: Record) -> Remove:
    """Let ``record`` see every forward pass of an attention, until the function that is returned is called."""
    attention = site.module
    if isinstance(attention, MultiheadAttention):
        attention.observer = partial(_observe, record)
        return lambda: setattr(attention, "observer", None)
    if hasattr(attention, "forward_attention"):
        attention.forward_attention = partial(_see_logits, record, attention.forward_attention)
        return lambda: delattr(attention, "forward_attention")
    hook = partial(_project_again, record, site.kind == "decoder")
    return attention.register_forward_pre_hook(hook, with_kwargs=True).remove


def watch_layer(site: Site, record: Callable[[Tensor, Tensor | None], None]) -> Remove:
    """Let ``record`` see a layer's output (B, T, d) and the encoder's padding mask (B, T) that it was given."""
    ours = isinstance(site.module, EncoderLayer | DecoderLayer)

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        x = (output[0] if isinstance(output, tuple) else output).detach()
        name = "padding_mask" if ours else "encoder_padding_mask"
        mask = kwargs.get(name, args[1] if len(args) > 1 else None)
        record(x if ours else x.transpose(0, 1), mask if site.kind == "encoder" else None)

    return site.module.register_forward_hook(hook, with_kwargs=True).remove


@beside_training
def logit_rows(logits: Tensor, visible: Tensor | None = None) -> AttentionRows:
    """:func:`attention_rows` of scaled logits (B, H, T, S) that exist anyway; ``visible`` broadcasts to their shape."""
    logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    if visible is not None:
        logits = logits.masked_fill(~visible, HIDDEN)
    largest = logits.amax(-1, keepdim=True)
    logits = logits - largest
    p = logits.softmax(-1)
    log_z = -p.amax(-1).log()
    largest = largest.squeeze(-1)
    return AttentionRows((log_z - torch.linalg.vecdot(p, logits)).abs(), log_z + largest, largest)


def _observe(
    record: Record, module: MultiheadAttention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool
) -> None:
    if module.softcap > 0:
        mask = visible(key_padding_mask, causal, q.shape[2], k.shape[2], q.device)
        rows = logit_rows(_capped_logits(q, k, module.scale, module.softcap), mask)
    else:
        rows = attention_rows(q, k, key_padding_mask, causal, module.scale)
    record(Seen(rows, key_padding_mask, causal, k.shape[2]))


@beside_training
def _capped_logits(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    return softcap * torch.tanh(q.float() @ k.float().transpose(-2, -1) * (scale / softcap))


def _see_logits(
    record: Record, forward_attention: Callable[..., Tensor], value: Tensor, scores: Tensor, mask: Tensor | None
) -> Tensor:
    mask_BS = None if mask is None else mask.bool()
    rows = logit_rows(scores, visible(mask_BS, False, scores.shape[2], scores.shape[3]))
    record(Seen(rows, mask_BS, False, scores.shape[3]))
    return forward_attention(value, scores, mask)


@torch.no_grad()
def _project_again(record: Record, decoder: bool, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook of fairseq's MultiheadAttention, whose inputs are (T, B, C)."""
    query = args[0] if args else kwargs["query"]
    key = args[1] if len(args) > 1 else kwargs["key"]
    causal = decoder and kwargs.get("attn_mask") is not None
    if kwargs.get("incremental_state") is not None or (causal and len(key) != len(query)):
        return  # one step of decoding, or a decoder that attends to source and target at once

    def heads(projection: nn.Linear, x_TBC: Tensor) -> Tensor:
        projected = F.linear(x_TBC.detach(), projection.weight, projection.bias)
        return projected.unflatten(-1, (module.num_heads, -1)).permute(1, 2, 0, 3)

    mask = kwargs.get("key_padding_mask")
    mask = None if mask is None else mask.bool()
    q, k = heads(module.q_proj, query), heads(module.k_proj, key)
    record(Seen(attention_rows(q, k, mask, causal, module.head_dim**-0.5), mask, causal, len(key)))
