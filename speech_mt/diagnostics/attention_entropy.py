"""Exact attention entropy and largest logit per head and query, without forming the attention matrix.

With logits l_ij = scale <q_i, k_j> over the visible keys j, p_i = softmax(l_i) and o_i = sum_j p_ij k_j,

    Ent_i = - sum_j p_ij log p_ij = logsumexp_j l_ij - scale <q_i, o_i>.

Two roads, both in memory that grows with T. :func:`attention_entropy` takes o and the logsumexp from one
fused attention call with the keys as values. :func:`attention_rows` walks over blocks of logits that stay in
cache and finds the largest logit on the way; on a few CPU cores it costs what the fused call costs.

Entropy is that of softmax itself: before dropout and before any rescaling of the attention map. Everything
runs without gradient, in float32 or wider whatever the input type or autocast says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from itertools import product
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# Logit of an invisible key: its probability is exactly 0, and 0 * HIDDEN is 0 where 0 * inf would be NaN.
HIDDEN = -1e30
CPU_BLOCK = 2**17  # logits at a time for each thread: 0.5 MB, so that every pass over them stays in cache
ACCELERATOR_BLOCK = 2**25
NAN, INF = float("nan"), float("inf")
Result = TypeVar("Result")


class AttentionRows(NamedTuple):
    """Per attention row, each (B, H, T); a row that sees no key has entropy NaN and the others -inf."""

    entropy: Tensor  # nats
    logsumexp: Tensor
    max_logit: Tensor


class EntropyStatistics(NamedTuple):
    """Per-head statistics of one batch, each (H,). All but ``minimum`` add up over batches and ranks."""

    entropy_sum: Tensor  # nats, over the counted rows
    rows: Tensor  # counted rows: real queries with a visible key and a finite entropy
    normalised_sum: Tensor  # of H / log(visible keys), over counted rows with at least two visible keys
    normalised_rows: Tensor
    unseen_rows: Tensor  # real queries that see no key: skipped
    nonfinite_rows: Tensor  # real queries that see a key but whose entropy is not finite: skipped
    minimum: Tensor  # smallest entropy of a counted row, inf if there is none


def beside_training(function: Callable[..., Result]) -> Callable[..., Result]:
    """Run ``function(tensor, ...)`` without gradient, and without autocast, which rounds products to half."""

    @wraps(function)
    def run(*args: object, **kwargs: object) -> Result:
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


@beside_training
def attention_entropy(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Entropy of every attention row, from one fused call where the device has one.

    Args:
        q: (B, H, T, d) queries, any strides, not yet multiplied by ``scale``.
        k: (B, H, S, d) keys. Padded keys must be finite, as attention itself needs them to be.
        key_padding_mask: (B, S) bool, True at padding.
        causal: query i sees keys 0..i; self-attention only (T == S).
        scale: factor of the logits, 1/sqrt(d) by default.

    Returns:
        (B, H, T) in nats, float32 (float64 for float64 input), never negative; NaN for a row that sees no
        key. Rounding is about 1e-7 of the row's largest logit.

    Raises:
        ValueError: shapes that do not fit, or ``causal`` with T != S.
    """
    q, k, scale = _prepare(q, k, key_padding_mask, causal, scale)
    # CUDA kernels want rows of whole 16 bytes; the other road takes any head size.
    aligned = q.device.type == "cpu" or q.size(-1) % 8 == 0
    fused = _fused_entropy(q.device, q.dtype) if aligned and q.numel() and k.numel() else None
    if fused is None:
        return attention_rows(q, k, key_padding_mask, causal, scale).entropy
    entropy = fused(q, k, key_padding_mask, causal, scale)
    entropy = entropy.clamp(min=0).abs()  # rounding below zero becomes 0.0, never -0.0; NaN stays NaN
    if key_padding_mask is None:
        return entropy
    return entropy.masked_fill(_unseen(q, k, key_padding_mask, causal), NAN)


@beside_training
def attention_rows(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> AttentionRows:
    """Entropy, logsumexp and largest scaled logit of every row; arguments as :func:`attention_entropy`.

    Entropy is the sum of two non-negative terms, -log(max p) and sum p (max l - l): no large numbers cancel,
    so peaked rows stay exact however large the logits are.
    """
    q, k, scale = _prepare(q, k, key_padding_mask, causal, scale)
    rows = q.new_empty(3, *q.shape[:3])
    for block, logits in _logit_blocks(q, k, key_padding_mask, causal, scale):
        largest = logits.amax(-1, keepdim=True)
        p = logits.sub_(largest).softmax(-1)
        log_z = -p.amax(-1).log()
        largest = largest.squeeze(-1)
        entropy = log_z - torch.linalg.vecdot(p, logits)
        rows[:, *block] = torch.stack([entropy, log_z + largest, largest])
    entropy, logsumexp, largest = rows
    entropy = entropy.abs()  # -0.0 becomes 0.0
    if key_padding_mask is not None or k.size(2) == 0:
        unseen = _unseen(q, k, key_padding_mask, causal)
        entropy = entropy.masked_fill(unseen, NAN)
        logsumexp, largest = logsumexp.masked_fill(unseen, -INF), largest.masked_fill(unseen, -INF)
    return AttentionRows(entropy, logsumexp, largest)


@beside_training
def max_logit(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """Largest scaled logit of each head (H,), over visible keys and real queries; -inf if there is none.

    Arguments as :func:`attention_entropy`, and ``query_padding_mask`` (B, T), True at padding.
    """
    q, k, scale = _prepare(q, k, key_padding_mask, causal, scale)
    largest = q.new_full(q.shape[:3], -INF)
    for block, logits in _logit_blocks(q, k, key_padding_mask, causal, scale):
        largest[block] = logits.amax(-1)
    visible = visible_keys(q.size(2), k.size(2), key_padding_mask, causal, q.device)
    return largest_per_head(largest, visible, query_padding_mask)


def largest_per_head(rows: Tensor, visible: Tensor, query_padding_mask: Tensor | None = None) -> Tensor:
    """Maximum (H,) of ``AttentionRows.max_logit`` (B, H, T) over real queries that see a key, else -inf."""
    counted = _real_queries(visible, query_padding_mask) & (visible.unsqueeze(1) > 0)
    return rows.where(counted, -INF).amax(dim=(0, 2))


def entropy_from_weights(weights: Tensor) -> Tensor:
    """Entropy in nats (..., T) of attention weights (..., T, S); a row of zeros (no key) is NaN."""
    weights = weights.detach().to(_work_dtype(weights))
    return torch.special.entr(weights).sum(-1).masked_fill(weights.sum(-1) == 0, NAN)


def visible_keys(
    queries: int,
    keys: int,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Number of keys that each query sees: int64 (B, T), or (1, T) when there is no mask (B, S)."""
    if key_padding_mask is not None:
        visible = ~key_padding_mask
        return visible.cumsum(1) if causal else visible.sum(1, keepdim=True).expand(-1, queries)
    if causal:
        return torch.arange(1, queries + 1, device=device).unsqueeze(0)
    return torch.full((1, queries), keys, device=device)


@torch.no_grad()
def entropy_statistics(
    entropy: Tensor, visible: Tensor, query_padding_mask: Tensor | None = None
) -> EntropyStatistics:
    """Sum entropies (B, H, T) over real queries, per head.

    ``visible`` is (B or 1, T) from :func:`visible_keys`; ``query_padding_mask`` (B, T) is True at padding.
    Rows that see nothing and rows that are not finite are skipped and counted apart: none is summed as 0. The
    ratio H / log(visible keys) is 1 for uniform attention and undefined for one key: it has its own count.
    """
    real = _real_queries(visible, query_padding_mask)
    visible = visible.unsqueeze(1)
    seen, finite = real & (visible > 0), entropy.isfinite()
    counted = seen & finite
    several = counted & (visible > 1)
    value = entropy.where(counted, 0.0)
    normalised = (value / visible.clamp(min=2).log()).where(several, 0.0)
    unseen = (real & (visible == 0)).expand_as(entropy)
    sums = torch.stack([value, counted, normalised, several, unseen, seen & ~finite]).sum(dim=(1, 3))
    return EntropyStatistics(*sums.unbind(), entropy.where(counted, INF).amin(dim=(0, 2)))


def _real_queries(visible: Tensor, query_padding_mask: Tensor | None) -> Tensor:
    real = torch.ones_like(visible, dtype=torch.bool) if query_padding_mask is None else ~query_padding_mask
    return real.unsqueeze(1)


def _unseen(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool) -> Tensor:
    return (visible_keys(q.size(2), k.size(2), key_padding_mask, causal, q.device) == 0).unsqueeze(1)


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _prepare(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """Check shapes; widen half precision, to which a fused call would round o; keep strided views."""
    batch, heads, queries, size = q.shape
    keys = k.size(2)
    if k.shape != (batch, heads, keys, size):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)}: want (B, H, T, d) and (B, H, S, d)")
    if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
        raise ValueError(f"key_padding_mask {tuple(key_padding_mask.shape)}: want (B, S) = {(batch, keys)}")
    if causal and queries != keys:
        raise ValueError(f"causal attention needs as many queries as keys, found {queries} and {keys}")
    q, k = q.detach().to(_work_dtype(q)), k.detach().to(_work_dtype(k))
    # The fused kernels read wrong numbers when neighbours within a head are not neighbours in memory.
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    return q, k, size**-0.5 if scale is None else float(scale)


def _logit_blocks(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Yield (slices of B, H and T, their scaled logits (b, h, t, S)), in blocks of bounded size.

    Invisible keys have the logit ``HIDDEN``; a causal block ends at its last visible key. Heads lie apart in memory:
    they are brought together a block at a time, so that no copy of all of q or k is ever made.
    """
    batch, num_heads, queries, _ = q.shape
    keys = k.size(2)
    if q.numel() == 0 or k.numel() == 0:
        return
    unread = q.new_empty(())  # what beta = 0 ignores
    block = CPU_BLOCK * torch.get_num_threads() if q.device.type == "cpu" else ACCELERATOR_BLOCK
    rows = max(1, block // keys)
    of_batch = max(1, rows // (num_heads * queries))
    of_heads = min(num_heads, -(-rows // queries))
    of_queries = min(queries, rows)
    for b, h in product(range(0, batch, of_batch), range(0, num_heads, of_heads)):
        some = slice(b, min(b + of_batch, batch)), slice(h, min(h + of_heads, num_heads))
        shape = some[0].stop - b, some[1].stop - h
        q_some, k_some = q[some], k[some]
        if key_padding_mask is not None:  # the mask as one more dimension of q and k: no pass over the logits
            bias = (key_padding_mask[some[0], None, :, None] * HIDDEN).to(q.dtype)
            q_some = F.pad(q_some, (0, 1), value=1.0)
            k_some = torch.cat([k_some, bias.expand(-1, shape[1], -1, -1)], dim=-1)
        q_some, k_some = q_some.flatten(0, 1), k_some.flatten(0, 1).transpose(1, 2)
        for start in range(0, queries, of_queries):
            end = min(start + of_queries, queries)
            visible = k_some[..., : end if causal else keys]
            logits = torch.baddbmm(unread, q_some[:, start:end], visible, beta=0, alpha=scale)
            if causal:
                future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
                logits[..., start:].masked_fill_(future, HIDDEN)
            yield (*some, slice(start, end)), logits.unflatten(0, shape)


@cache
def _fused_entropy(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The fused call for this device and type, or None. Operators internal to torch are tried before use."""
    fused = {"cpu": _fused_cpu, "cuda": _fused_cuda}.get(device.type)
    if fused is None:
        return None
    q = torch.linspace(-2, 2, 48, device=device, dtype=dtype).view(2, 1, 3, 8)
    k = q.flip(0, 2).sin()
    mask = torch.tensor([[False, False, True], [False, False, False]], device=device)
    try:
        for padding in (None, mask):
            for causal in (False, True):
                found, rows = (f(q, k, padding, causal, 0.5) for f in (fused, attention_rows))
                if not torch.allclose(found, rows.entropy, atol=1e-4):
                    return None
    except (AttributeError, RuntimeError, TypeError):
        return None
    return fused


def _fused_cpu(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    bias = None
    if key_padding_mask is not None:  # (B, 1, 1, S) is broadcast by the kernel itself
        bias = torch.zeros_like(key_padding_mask, dtype=q.dtype).masked_fill_(key_padding_mask, -INF)
        bias = bias[:, None, None, :]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, logsumexp = attention(q, k, k, 0.0, causal, attn_mask=bias, scale=scale)
    return logsumexp - scale * torch.linalg.vecdot(q, o)


def _fused_cuda(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The memory-efficient kernel: it takes a mask and float32, and gives the logsumexp."""
    batch, heads, queries, _ = q.shape
    keys = k.size(2)
    bias = None
    if key_padding_mask is not None:  # its rows must start at multiples of 16 bytes; expanding copies nothing
        bias = q.new_zeros(batch, 1, 1, -(-keys // 16) * 16)[..., :keys]
        bias.masked_fill_(key_padding_mask[:, None, None, :], -INF)
        bias = bias.expand(batch, heads, queries, keys)
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    o, logsumexp, *_ = attention(q, k, k, bias, True, 0.0, causal, scale=scale)
    # The kernel pads its rows of logsumexp to a multiple of 32.
    return logsumexp[..., :queries] - scale * torch.linalg.vecdot(q, o)
